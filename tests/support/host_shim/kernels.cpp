// All sources in one library, a launcher for each kernel. Built by tests/support/host_kernels.py with -include shim.h.
#include "device.cuh"

namespace lars {
#include "lars.cu"
}
namespace contrast {
#include "contrast.cu"
}

// norm.cu is included once for each type of activations.
namespace in_f32 {
#define ELEMENT f32
#include "norm.cu"
#undef ELEMENT
}
namespace in_bf16 {
#define ELEMENT bf16
#include "norm.cu"
#undef ELEMENT
}
namespace in_f16 {
#define ELEMENT f16
#include "norm.cu"
#undef ELEMENT
}

#define LAUNCHER(name, kernel)                                                                              \
    extern "C" int launch_##name(void** values, int count, unsigned grid_x, unsigned grid_y, int threads,  \
                                 int shared) {                                                             \
        return shim::launch(kernel, values, count, grid_x, grid_y, threads, shared, 2);                     \
    }
#define NORM(element, kernel) LAUNCHER(element##_##kernel, in_##element::kernel)
#define NORMS(element)                 \
    NORM(element, norm_moments)        \
    NORM(element, norm_join)           \
    NORM(element, norm_join_ranks)     \
    NORM(element, norm_apply)          \
    NORM(element, norm_gradient_sums)  \
    NORM(element, norm_gradient_join)  \
    NORM(element, norm_gradient_apply)

LAUNCHER(lars_lars_norms, lars::lars_norms)
LAUNCHER(lars_lars_update, lars::lars_update)
LAUNCHER(contrast_contrast_rows, contrast::contrast_rows)
NORMS(f32)
NORMS(bf16)
NORMS(f16)
