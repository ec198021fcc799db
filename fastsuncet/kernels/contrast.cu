// The row-wise middle of a contrastive loss, between matrix products: logits (R, M) in, their gradient out in place.
//
//   L_i = log sum_{j != i} exp l_ij - level_i          d_ij = w_i (softmax_{j != i} l_ij - d level_i / d l_ij)
//
// One launch for R anchors, a block for each. PyTorch's operators pass over the logits about 14 times; this reads them
// once and writes them once, 8 bytes per logit, if a row of M keys fits the shared memory (STAGED floats). Longer rows
// are read three times, usually from L2. Each logit also needs 4 bytes of id, from L1 or L2.
//
// The formula and the twin are in fastsuncet/losses/contrast.py; the caller is contrast_kernel.py of that folder.
#include "device.cuh"

// The caller defines THREADS (of a block), and FLAGS: of how many keys a thread remembers the kind, up to 64. It reads
// the ids of the others again.

constexpr float LOWEST = -3.402823466e+38f;  // no logit is as low: a maximum with this value has seen none

// Writes d_ij over l_ij, and L_i. `low` holds the low halves of `ids`: few are equal, and only then is the id compared.
// every = 0: level_i = log sum_{j in P(i)} exp l_ij; 1: the mean over P(i). A row of weight zero, or without a
// positive, gets zeros.
KERNEL(contrast_rows)(float* logits, const int* low, const long long* ids, const float* weights, float* losses,
                      long long first, long long keys, long long staged, long long every) {
    DYNAMIC_SHARED(float, kept);  // each thread reads what it wrote itself: no barrier
    const long long self = first + blockIdx.x;
    float* row = logits + blockIdx.x * keys;
    const float weight = weights[blockIdx.x];
    const long long own = ids[self];
    const int own_low = int(own);
    unsigned long long flags = 0;
    auto is_positive = [&](long long j) { return low[j] == own_low && j != self && ids[j] == own; };
    auto remembered = [&](long long j, int k) { return k < FLAGS ? bool(flags >> k & 1) : is_positive(j); };

    Two top = {LOWEST, LOWEST}, mean = {0.0f, 0.0f};
    if (weight != 0.0f) {
        int k = 0;
        for (long long j = threadIdx.x; j < keys; j += THREADS, ++k) {
            const float l = row[j];
            const bool positive = is_positive(j);
            if (j < staged) kept[j] = l;
            if (k < FLAGS) flags |= (unsigned long long)(positive) << k;
            if (j != self) top.a = Max::of(top.a, l);
            if (positive) top.b = Max::of(top.b, l), mean.a += l, mean.b += 1.0f;
        }
        top = block_reduce<Max, THREADS>(top);
    }
    if (top.b == LOWEST) {  // the same in all threads
        for (long long j = threadIdx.x; j < keys; j += THREADS) row[j] = 0.0f;
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }
    if (every) mean = block_reduce<Sum, THREADS>(mean);

    Two sums = {0.0f, 0.0f};
    int k = 0;
    for (long long j = threadIdx.x; j < keys; j += THREADS, ++k) {
        const float l = j < staged ? kept[j] : row[j];
        const float x = j == self ? 0.0f : expf(l - top.a);
        sums.a += x;
        if (remembered(j, k))
            sums.b += expf(l - top.b);  // its own maximum: all positives can be far below the rest
        else if (j < staged)
            kept[j] = x;  // one exponential per logit, not two
    }
    sums = block_reduce<Sum, THREADS>(sums);
    const float level = every ? mean.a / mean.b : top.b + logf(sums.b);
    const float push = weight / sums.a, pull = weight / (every ? mean.b : sums.b);
    k = 0;
    for (long long j = threadIdx.x; j < keys; j += THREADS, ++k) {
        float l = j < staged ? kept[j] : row[j];
        if (remembered(j, k))
            row[j] = expf(l - top.a) * push - (every ? 1.0f : expf(l - top.b)) * pull;
        else if (j < staged)
            row[j] = l * push;
        else
            row[j] = j == self ? 0.0f : expf(l - top.a) * push;
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = top.a + logf(sums.a) - level;
}
