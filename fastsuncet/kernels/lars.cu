// LARS (arXiv 1708.03888) in float32 for all tensors of a model at once: two launches.
//
//   lars_norms   reads w and g                     8 bytes per parameter
//   lars_update  reads w, g, b and writes w, b    20 bytes
//
// Every tensor is cut into chunks of CHUNK elements, one block per chunk. A block writes its chunk's two sums of
// squares to its own slot; each block of the update adds up its tensor's slots in a fixed order: no atomics, so the
// same bits in every run, and no third launch. The largest tensor of a ResNet-50 has 512 slots, 4 KB from L2.
//
// fastsuncet/optim/lars.py has the formula; the caller is fastsuncet/optim/lars_kernel.py.
#include "device.cuh"

// The caller defines THREADS (of a block), CHUNK (elements) and TENSORS (most in one launch).

// Constant over all steps, in device memory.
struct Tensor {
    float* w;
    float* b;
    long long size;
    long long first_chunk;
};

// Gradients have new addresses at every step (`zero_grad` frees them). Passed by value they need no extra copy, and a
// captured graph keeps those of its capture.
struct Gradients {
    const float* of[TENSORS];
};

// Calls f(i) for this thread's elements of a chunk, and f4(i) for the four elements from i on where four fit.
template <class F4, class F>
__device__ void each(long long begin, long long end, bool by_four, F4 f4, F f) {
    long long rest = by_four ? begin + (end - begin) / 4 * 4 : begin;
    for (long long i = begin + 4 * threadIdx.x; i < rest; i += 4 * THREADS) f4(i);
    for (long long i = rest + threadIdx.x; i < end; i += THREADS) f(i);
}

__device__ float4 load4(const float* x) { return *reinterpret_cast<const float4*>(x); }

KERNEL(lars_norms)(const Tensor* tensors, const int* tensor_of_chunk, const __grid_constant__ Gradients gradients,
                   const float* grad_scale, Two* slots) {
    const int number = tensor_of_chunk[blockIdx.x];
    const Tensor t = tensors[number];
    const float* g = gradients.of[number];
    const float unscale = grad_scale ? 1.0f / *grad_scale : 1.0f;
    const long long begin = (blockIdx.x - t.first_chunk) * CHUNK;
    const long long end = begin + CHUNK < t.size ? begin + CHUNK : t.size;

    Two squares = {0.0f, 0.0f};
    auto add = [&](float w, float g) {
        g *= unscale;  // before it is squared: the square of a scaled gradient can overflow
        squares.a += w * w;
        squares.b += g * g;
    };
    each(begin, end, aligned(t.w) && aligned(g),
         [&](long long i) {
             const float4 w4 = load4(t.w + i), g4 = load4(g + i);
             add(w4.x, g4.x), add(w4.y, g4.y), add(w4.z, g4.z), add(w4.w, g4.w);
         },
         [&](long long i) { add(t.w[i], g[i]); });
    squares = block_reduce<Sum, THREADS>(squares);
    if (threadIdx.x == 0) slots[blockIdx.x] = squares;
}

KERNEL(lars_update)(const Tensor* tensors, const int* tensor_of_chunk, const __grid_constant__ Gradients gradients,
                    const float* grad_scale, const float* found_inf, const Two* slots, const float* lr_on_device,
                    float lr, float momentum, float weight_decay, float trust_coefficient, float eps,
                    long long nesterov, long long lr_in_momentum, long long lars) {
    if (found_inf && *found_inf != 0.0f) return;  // the same for all threads: none waits at a barrier
    const int number = tensor_of_chunk[blockIdx.x];
    const Tensor t = tensors[number];
    const float* g = gradients.of[number];
    const float unscale = grad_scale ? 1.0f / *grad_scale : 1.0f;
    const long long begin = (blockIdx.x - t.first_chunk) * CHUNK;
    const long long end = begin + CHUNK < t.size ? begin + CHUNK : t.size;
    if (lr_on_device) lr = *lr_on_device;

    float ratio = 1.0f, decay = weight_decay;
    if (lars) {
        const long long chunks = (t.size + CHUNK - 1) / CHUNK;
        Two squares = {0.0f, 0.0f};
        for (long long i = threadIdx.x; i < chunks; i += THREADS)
            squares = Sum::join(squares, slots[t.first_chunk + i]);
        squares = block_reduce<Sum, THREADS>(squares);
        const float w_norm = sqrtf(squares.a), g_norm = sqrtf(squares.b);
        if (w_norm == 0.0f || g_norm == 0.0f)
            decay = 0.0f;  // the raw gradient
        else
            ratio = trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps);
    }
    const float into_momentum = lr_in_momentum ? lr : 1.0f, step = lr_in_momentum ? 1.0f : lr;
    auto update = [&](float& w, float& b, float g) {
        const float d = (g * unscale + decay * w) * ratio * into_momentum;
        b = momentum * b + d;
        w -= step * (nesterov ? d + momentum * b : b);
    };
    each(begin, end, aligned(t.w) && aligned(t.b) && aligned(g),
         [&](long long i) {
             float4 w4 = load4(t.w + i), b4 = load4(t.b + i);
             const float4 g4 = load4(g + i);
             update(w4.x, b4.x, g4.x), update(w4.y, b4.y, g4.y);
             update(w4.z, b4.z, g4.z), update(w4.w, b4.w, g4.w);
             *reinterpret_cast<float4*>(t.w + i) = w4;
             *reinterpret_cast<float4*>(t.b + i) = b4;
         },
         [&](long long i) { update(t.w[i], t.b[i], g[i]); });
}
