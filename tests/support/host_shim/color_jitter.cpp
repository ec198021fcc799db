// The CPU loops and the GPU kernels of pipelines/dali/plugin side by side on a CPU.
// Built by tests/pipelines/dali/plugin/test_color_jitter_gpu.py with -include shim.h.
#include <atomic>

template <class T>
T atomicAdd(T* to, T value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

#include "color_jitter.cu"
#include "color_jitter.h"

extern "C" void by_kernels(const Job* jobs, unsigned long long* sums, int images, int blocks, int threads) {
    void* values[] = {&jobs, &sums};
    if (shim::launch(gray_sums, values, 2, blocks, images, threads, 0, 2)) std::abort();
    if (shim::launch(jitter_pixels, values, 2, blocks, images, threads, 0, 2)) std::abort();
}

extern "C" void by_loops(const Job* jobs, int images) {
    for (int i = 0; i < images; ++i)
        jitter(jobs[i].in, jobs[i].out, jobs[i].pixels, jobs[i].by, jobs[i].saturation);
}
