// All sources in one library, a launcher for each kernel. Built by tests/host_kernels.py with -include shim.h.
#include "device.cuh"

namespace lars {
#include "lars.cu"
}

namespace contrast {
#include "contrast.cu"
}

#define LAUNCHER(space, kernel)                                                                              \
    extern "C" int launch_##kernel(void** values, int count, unsigned grid_x, unsigned grid_y, int threads, \
                                   int shared) {                                                            \
        return shim::launch(space::kernel, values, count, grid_x, grid_y, threads, shared, 2);              \
    }

LAUNCHER(lars, lars_norms)
LAUNCHER(lars, lars_update)
LAUNCHER(contrast, contrast_rows)
