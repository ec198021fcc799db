// The CPU loops and the GPU kernels of pipelines/dali/view_operator side by side on a CPU.
// Built by tests/pipelines/dali/view_operator/test_view_gpu.py with -include shim.h.
#include <atomic>

template <class T>
T atomicAdd(T* to, T value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

#include "view.cu"
#include "view.h"

extern "C" void by_kernels(const View* views, unsigned long long* sums, int images, const float* table, int blocks,
                           int threads) {
    long long most = 0;
    int squares = 0;
    for (int i = 0; i < images; ++i) {
        const auto sides = [](int n) { return (n + kSide - 1) / kSide; };
        most = views[i].radius > most ? views[i].radius : most;
        squares = std::max(squares, sides(views[i].height) * sides(views[i].width));
    }
    void* of_sums[] = {&views, &sums};
    if (shim::launch(gray_sums, of_sums, 2, blocks, images, threads, 0, 2)) std::abort();
    void* of_make[] = {&views, &sums, &table, &most};
    if (shim::launch(make_views, of_make, 4, squares, images, threads, shared_bytes(most), 2)) std::abort();
}

extern "C" void by_loops(const View* views, int images, const float* table) {
    Scratch scratch;
    for (int i = 0; i < images; ++i) make(views[i], table, scratch);
}

// sizeof and constants that the caller repeats.
extern "C" int size_of_view() { return sizeof(View); }
extern "C" int widest_blur() { return 2 * kWidest + 1; }
