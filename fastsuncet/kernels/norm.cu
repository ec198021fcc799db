// BatchNorm with its neighbors, a residual added before and a ReLU after, for training in channels-last memory.
//
//   norm_moments         x -> mean and variance of each block's rows                       reads 2 bytes an element*
//   norm_join            joins those of blocks: into statistics, or into sums that are added over ranks
//   norm_join_ranks      statistics from the sums of all ranks
//   norm_apply           relu((x - mean) inverse weight + bias + residual)                6 with a residual, else 4
//   norm_gradient_sums   sum of g and of g xhat over each block's rows, g = dy behind the ReLU                    4
//   norm_gradient_join   joins those of blocks; ranks are summed outside
//   norm_gradient_apply  (g - mean g - xhat mean(g xhat)) inverse weight, and g itself    8 with a residual, else 6
//
// * in 16 bits: 6 forward and 10 backward, with a residual 8 and 12. With a residual the signs of the ReLU's input are
// kept as bits, an eighth of a byte written once and read twice. One by one PyTorch's BatchNorm, + and ReLU move 6, 6
// and 4 forward and 10, 0 and 6 backward. No atomics: the same bits in every run.
//
// n rows of C channels: x[row * C + channel]. A thread has V neighboring channels, 16 bytes, and goes down the rows;
// `width` threads lie side by side, a power of two that divides both THREADS and C / V. gridDim.x: groups of rows,
// gridDim.y: C / V / width.
//
// fastsuncet/models/norm_kernel.py is the caller; the twin is in sync_batchnorm.py of that folder.
#include "device.cuh"

// The caller defines THREADS (of a block) and ELEMENT: f32, bf16 or f16, the type of activations.

struct f32 {
    static constexpr int V = 4;
    static __device__ void read(const uint4& bits, float* x) {
        x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
        x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
    }
    static __device__ uint4 write(const float* x) {
        return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    }
};

template <class Half>
struct Halves {
    static constexpr int V = 8;
    static __device__ void read(const uint4& bits, float* x) {
        const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = Half::read(words[i] & 0xffff);
            x[2 * i + 1] = Half::read(words[i] >> 16);
        }
    }
    static __device__ uint4 write(const float* x) {
        unsigned words[4];
        for (int i = 0; i < 4; ++i) words[i] = Half::write(x[2 * i]) | Half::write(x[2 * i + 1]) << 16;
        return {words[0], words[1], words[2], words[3]};
    }
};

struct Bf16 {
    static __device__ float read(unsigned bits) { return __uint_as_float(bits << 16); }
    static __device__ unsigned write(float x) {  // to the nearest, ties to even
        const unsigned bits = __float_as_uint(x);
        if (x != x) return 0x7fc0;  // rounded up, some NaNs would become zero
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

struct F16 {
    static __device__ float read(unsigned bits) { return half_to_float(bits); }
    static __device__ unsigned write(float x) { return float_to_half(x); }
};

using bf16 = Halves<Bf16>;
using f16 = Halves<F16>;

constexpr int V = ELEMENT::V;

// A thread's part: V channels from `channel` on, and every `step`-th row from `row` on.
struct Place {
    long long row, step;
    int lane, lanes;  // among the block's threads with the same channels
    int channel, across;  // the first channel, and the first among those of this block
    __device__ explicit Place(long long width) {
        lane = threadIdx.x / int(width), lanes = THREADS / int(width);
        row = (long long)(blockIdx.x) * lanes + lane, step = (long long)(gridDim.x) * lanes;
        across = threadIdx.x % int(width) * V, channel = blockIdx.y * int(width) * V + across;
    }
};

// What one thread reads of a row: activations, the second tensor of the kernel, and a byte of signs.
struct Read {
    uint4 x, y;
    unsigned signs;
};

// Calls fetch(element) for N rows of this thread, then use(element, fetched) for each, and so on down the rows. A
// multiprocessor has 2 or 4 of these blocks: with one row at a time, 16 bytes per thread in flight do not keep the
// memory busy, and the compiler does not move a load over a branch or a store.
template <int N, class Fetch, class Use>
__device__ void walk(const Place& at, long long n, long long channels, Fetch fetch, Use use) {
    const long long step = at.step * channels, end = n * channels;
    long long element = at.row * channels + at.channel;
    for (; element + (N - 1) * step < end; element += N * step) {
        Read rows[N];
#pragma unroll
        for (int i = 0; i < N; ++i) rows[i] = fetch(element + i * step);
#pragma unroll
        for (int i = 0; i < N; ++i) use(element + i * step, rows[i]);
    }
    for (; element < end; element += step) use(element, fetch(element));
}

__device__ void load(const uint4* x, long long element, float* values) { ELEMENT::read(x[element / V], values); }
__device__ void store(uint4* x, long long element, const float* values) { x[element / V] = ELEMENT::write(values); }

// How many values, their mean, and the sum of their squared deviations from it.
struct Moments {
    float n, mean, squares;
    // By Chan's method: sums of squares would cancel where |mean| >> deviation.
    __device__ void join(const Moments& other) {
        const float total = n + other.n;
        if (total == 0.0f) return;
        const float away = other.mean - mean, share = other.n / total;
        mean += away * share;
        squares += other.squares + away * away * n * share;
        n = total;
    }
};

// moments (groups, 1 + 2 C): a count, means, variances. Every group has a row.
KERNEL(norm_moments)(const uint4* x, float* moments, long long n, long long channels, long long width) {
    SHARED(float, means, THREADS * V);
    SHARED(float, squares, THREADS * V);
    SHARED(float, counts, THREADS);
    const Place at(width);
    float count = 0.0f, origin[V] = {}, sum[V] = {}, square[V] = {}, values[V];
    // Relative to this thread's first row the values have the size of a deviation, so sums of squares are precise.
    if (at.row < n) load(x, at.row * channels + at.channel, origin);
    walk<4>(
        at, n, channels, [&](long long element) { return Read{x[element / V], {}, 0}; },
        [&](long long, const Read& row) {
            ELEMENT::read(row.x, values);
            count += 1.0f;
            for (int v = 0; v < V; ++v) {
                const float away = values[v] - origin[v];
                sum[v] += away, square[v] += away * away;
            }
        });
    const int tile = int(width) * V;
    for (int v = 0; v < V; ++v) {
        const float mean = count > 0.0f ? sum[v] / count : 0.0f;
        means[at.lane * tile + at.across + v] = origin[v] + mean;
        squares[at.lane * tile + at.across + v] = square[v] - sum[v] * mean;
    }
    if (at.across == 0) counts[at.lane] = count;
    __syncthreads();
    float* out = moments + blockIdx.x * (1 + 2 * channels);
    for (int c = threadIdx.x; c < tile; c += THREADS) {
        Moments all = {counts[0], means[c], squares[c]};
        for (int lane = 1; lane < at.lanes; ++lane)
            all.join({counts[lane], means[lane * tile + c], squares[lane * tile + c]});
        const long long channel = blockIdx.y * tile + c;
        if (channel == 0) out[0] = all.n;
        out[1 + channel] = all.mean, out[1 + channels + channel] = all.squares / all.n;
    }
}

constexpr int ACROSS = THREADS / 8;  // channels of a joining block, 8 threads each

// Into `out` (1 + 2 C), `inverse`, 1 / sqrt(variance + eps), and the running statistics.
__device__ void keep(float* out, float* inverse, float* running_mean, float* running_variance, long long channels,
                     long long channel, float n, float mean, float variance, float eps, float momentum) {
    if (channel == 0) out[0] = n;
    out[1 + channel] = mean, out[1 + channels + channel] = variance;
    inverse[channel] = 1.0f / sqrtf(variance + eps);
    running_mean[channel] += momentum * (mean - running_mean[channel]);
    running_variance[channel] += momentum * (variance * (n / (n - 1.0f)) - running_variance[channel]);
}

// (groups, 1 + 2 C) -> `out`, or -> `sums` (1 + 2 C) that ranks add up: n, n mean, n (variance + mean^2), in float64,
// where squares do not cancel. The same as `sums_of`, which another rank can run.
KERNEL(norm_join)(const float* moments, float* out, double* sums, float* inverse, float* running_mean,
                  float* running_variance, long long groups, long long channels, float eps, float momentum) {
    SHARED(Moments, parts, THREADS);
    const int lane = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    const long long channel = (long long)(blockIdx.x) * ACROSS + across;
    Moments all = {0.0f, 0.0f, 0.0f};
    if (channel < channels) {
#pragma unroll 4
        for (long long group = lane; group < groups; group += 8) {
            const float* in = moments + group * (1 + 2 * channels);
            all.join({in[0], in[1 + channel], in[1 + channels + channel] * in[0]});
        }
    }
    parts[threadIdx.x] = all;
    __syncthreads();
    if (lane > 0 || channel >= channels) return;
    for (int other = 1; other < 8; ++other) all.join(parts[other * ACROSS + across]);
    if (sums) {
        const double n = all.n, mean = all.mean;
        if (channel == 0) sums[0] = n;
        sums[1 + channel] = n * mean, sums[1 + channels + channel] = all.squares + n * (mean * mean);
        return;
    }
    keep(out, inverse, running_mean, running_variance, channels, channel, all.n, all.mean, all.squares / all.n, eps,
         momentum);
}

// A thread per channel.
KERNEL(norm_join_ranks)(const double* sums, float* out, float* inverse, float* running_mean, float* running_variance,
                        long long channels, float eps, float momentum) {
    const long long channel = (long long)(blockIdx.x) * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const double n = sums[0], mean = sums[1 + channel] / n;
    double variance = sums[1 + channels + channel] / n - mean * mean;
    if (variance < 0.0) variance = 0.0;  // rounding of equal rows; a NaN stays a NaN
    keep(out, inverse, running_mean, running_variance, channels, channel, float(n), float(mean), float(variance), eps,
         momentum);
}

// Reads V neighboring floats, four at a time. A thread's are 32 bytes from the next one's: one by one, each load of a
// warp would touch as much of the cache, and the kernels below would wait for these constants, not for activations.
__device__ void constants(const float* from, float* values) {
    if (!aligned(from)) {
        for (int v = 0; v < V; ++v) values[v] = from[v];
        return;
    }
    for (int v = 0; v < V; v += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + v);
        values[v] = four.x, values[v + 1] = four.y, values[v + 2] = four.z, values[v + 3] = four.w;
    }
}

// The constants of a thread's channels. Forward and backward compute the same bits of the ReLU's input.
struct Norm {
    float mean[V], inverse[V], scale[V], bias[V];
    __device__ Norm(const float* mean_, const float* inverse_, const float* weight_, const float* bias_, int channel) {
        constants(mean_ + channel, mean);
        constants(inverse_ + channel, inverse);
        constants(weight_ + channel, scale);
        constants(bias_ + channel, bias);
        for (int v = 0; v < V; ++v) scale[v] *= inverse[v];
    }
    __device__ float of(float x, int v) const { return fmaf(x - mean[v], scale[v], bias[v]); }
};

// `signs`: a byte for V elements, a bit for each that passes the ReLU; kept where a residual was added, because then it
// does not follow from x.
KERNEL(norm_apply)(const uint4* x, const uint4* residual, const float* mean, const float* inverse, const float* weight,
                   const float* bias, uint4* y, unsigned char* signs, long long n, long long channels, long long width,
                   long long relu) {
    const Place at(width);
    const Norm norm(mean, inverse, weight, bias, at.channel);
    float values[V], other[V] = {};
    walk<2>(
        at, n, channels,
        [&](long long element) { return Read{x[element / V], residual ? residual[element / V] : uint4{}, 0}; },
        [&](long long element, const Read& row) {
            ELEMENT::read(row.x, values);
            if (residual) ELEMENT::read(row.y, other);
            unsigned positive = 0;
            for (int v = 0; v < V; ++v) {
                values[v] = norm.of(values[v], v) + other[v];
                if (!relu) continue;
                if (values[v] <= 0.0f)  // not "> 0": NaN must stay
                    values[v] = 0.0f;
                else
                    positive |= 1u << v;
            }
            store(y, element, values);
            if (signs) signs[element / V] = (unsigned char)positive;
        });
}

// x and dy, and which of them passed the ReLU, where that was kept.
__device__ Read before(const uint4* dy, const uint4* x, const unsigned char* signs, long long element) {
    return {x[element / V], dy[element / V], signs ? signs[element / V] : 0u};
}

// x, and dy behind the ReLU.
__device__ void gradient(const Read& row, bool kept, const Norm& norm, long long relu, float* x, float* g) {
    ELEMENT::read(row.x, x);
    ELEMENT::read(row.y, g);
    if (!relu) return;
    for (int v = 0; v < V; ++v)
        if (kept ? !(row.signs >> v & 1) : norm.of(x[v], v) <= 0.0f) g[v] = 0.0f;
}

// sums (groups, 2 C): of g, and of g xhat.
KERNEL(norm_gradient_sums)(const uint4* dy, const uint4* x, const unsigned char* signs, const float* mean,
                           const float* inverse, const float* weight, const float* bias, float* sums, long long n,
                           long long channels, long long width, long long relu) {
    SHARED(float, shifts, THREADS * V);
    SHARED(float, slopes, THREADS * V);
    const Place at(width);
    const Norm norm(mean, inverse, weight, bias, at.channel);
    float shift[V] = {}, slope[V] = {}, values[V], g[V];
    walk<2>(
        at, n, channels, [&](long long element) { return before(dy, x, signs, element); },
        [&](long long, const Read& row) {
            gradient(row, signs != nullptr, norm, relu, values, g);
            for (int v = 0; v < V; ++v)
                shift[v] += g[v], slope[v] += g[v] * ((values[v] - norm.mean[v]) * norm.inverse[v]);
        });
    const int tile = int(width) * V;
    for (int v = 0; v < V; ++v) {
        shifts[at.lane * tile + at.across + v] = shift[v];
        slopes[at.lane * tile + at.across + v] = slope[v];
    }
    __syncthreads();
    float* out = sums + blockIdx.x * 2 * channels;
    for (int c = threadIdx.x; c < tile; c += THREADS) {
        Two all = {0.0f, 0.0f};
        for (int lane = 0; lane < at.lanes; ++lane)
            all = Sum::join(all, {shifts[lane * tile + c], slopes[lane * tile + c]});
        const long long channel = blockIdx.y * tile + c;
        out[channel] = all.a, out[channels + channel] = all.b;
    }
}

// (groups, 2 C) -> (2 C)
KERNEL(norm_gradient_join)(const float* sums, float* out, long long groups, long long columns) {
    SHARED(float, parts, THREADS);
    const int lane = threadIdx.x / ACROSS, across = threadIdx.x % ACROSS;
    const long long column = (long long)(blockIdx.x) * ACROSS + across;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (long long group = lane; group < groups; group += 8) sum += sums[group * columns + column];
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0 || column >= columns) return;
    for (int other = 1; other < 8; ++other) sum += parts[other * ACROSS + across];
    out[column] = sum;
}

// dx, and with `d_residual` also g. `sums` (2 C) and `count` (1) are those of all ranks.
KERNEL(norm_gradient_apply)(const uint4* dy, const uint4* x, const unsigned char* signs, const float* mean,
                            const float* inverse, const float* weight, const float* bias, const float* sums,
                            const float* count, uint4* dx, uint4* d_residual, long long n, long long channels,
                            long long width, long long relu) {
    const Place at(width);
    const Norm norm(mean, inverse, weight, bias, at.channel);
    float shift[V], slope[V], values[V], g[V];
    constants(sums + at.channel, shift);
    constants(sums + channels + at.channel, slope);
    for (int v = 0; v < V; ++v) shift[v] /= *count, slope[v] /= *count;
    walk<2>(
        at, n, channels, [&](long long element) { return before(dy, x, signs, element); },
        [&](long long element, const Read& row) {
            gradient(row, signs != nullptr, norm, relu, values, g);
            if (d_residual) store(d_residual, element, g);
            for (int v = 0; v < V; ++v) {
                const float standard = (values[v] - norm.mean[v]) * norm.inverse[v];
                values[v] = (g[v] - shift[v] - standard * slope[v]) * norm.scale[v];
            }
            store(dx, element, values);
        });
}
