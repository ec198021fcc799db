// Shared by the kernels. Compiled by NVRTC, which has no headers, and by the tests' host shim.
#pragma once

#ifdef __CUDACC__  // the shim defines these for the host: an arena per block, names in namespaces
#define SHARED(type, name, size) __shared__ type name[size]
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) name
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
constexpr int WARP = 32;

// In PTX, because NVRTC has no cuda_fp16.h.
__device__ inline float half_to_float(unsigned bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}
__device__ inline unsigned float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

constexpr unsigned ALL = 0xffffffffu;  // every lane of a warp takes part

__device__ inline bool aligned(const void* x) { return (reinterpret_cast<unsigned long long>(x) & 15) == 0; }

// A pair that is reduced together: two sums for the barriers of one.
struct Two {
    float a, b;
};

struct Sum {
    static __device__ Two join(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }
};

struct Max {
    // Not fmaxf, which drops a NaN: a diverged row must show in its loss.
    static __device__ float of(float x, float y) { return x > y || x != x ? x : y; }
    static __device__ Two join(Two x, Two y) { return {of(x.a, y.a), of(x.b, y.b)}; }
};

// Joins `mine` of the block's N threads, with the same bits in every thread and run: no atomics, a fixed tree.
// All threads of the block must call it. Two barriers.
template <class Op, int N>
__device__ Two block_reduce(Two mine) {
    static_assert(N % WARP == 0, "a shuffle needs whole warps");
    SHARED(Two, warps, N / WARP);
    for (int step = WARP / 2; step > 0; step /= 2)
        mine = Op::join(mine, {__shfl_xor_sync(ALL, mine.a, step), __shfl_xor_sync(ALL, mine.b, step)});
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = mine;
    __syncthreads();
    Two all = warps[0];
    for (int warp = 1; warp < N / WARP; ++warp) all = Op::join(all, warps[warp]);
    __syncthreads();  // only now can `warps` be written again
    return all;
}
