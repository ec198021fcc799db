// Run every kernel once on sizes that do not divide, for the thread sanitizer. Other tests check the results.
//   races [FILE:LINE]   skips the __syncthreads of that line
#include "device.cuh"
#include "kernels.cpp"

using Floats = std::vector<float>;

static Floats wave(size_t size, float step) {
    Floats x(size);
    for (size_t i = 0; i < size; ++i) x[i] = std::sin(step * float(i));
    return x;
}

// Packs arguments as fastsuncet/kernels/launcher.py does, and runs.
template <class... A>
static void run(int (*launcher)(void**, int, unsigned, unsigned, int, int), unsigned grid_x, unsigned grid_y,
                int shared, A... arguments) {
    void* values[] = {&arguments...};
    if (launcher(values, sizeof...(A), grid_x, grid_y, THREADS, shared) != 0) std::abort();
}

static void run_lars() {
    const long long sizes[] = {1, CHUNK, 2 * CHUNK + 5, THREADS * CHUNK + 1};
    std::vector<Floats> w, b, g;
    std::vector<lars::Tensor> tensors;
    std::vector<int> chunks;
    lars::Gradients gradients;
    for (int t = 0; t < 4; ++t) {
        w.push_back(wave(sizes[t], 0.3f)), g.push_back(wave(sizes[t], 0.7f)), b.emplace_back(sizes[t]);
        tensors.push_back({w[t].data(), b[t].data(), sizes[t], (long long)chunks.size()});
        gradients.of[t] = g[t].data();
        chunks.insert(chunks.end(), (sizes[t] + CHUNK - 1) / CHUNK, t);
    }
    std::vector<Two> slots(chunks.size());
    const float none = 0, scale = 8;
    run(launch_lars_lars_norms, chunks.size(), 1, 0, tensors.data(), chunks.data(), gradients, &scale, slots.data());
    run(launch_lars_lars_update, chunks.size(), 1, 0, tensors.data(), chunks.data(), gradients, &scale, &none,
        slots.data(), &scale, 0.0f, 0.9f, 1e-2f, 1e-3f, 1e-8f, 1LL, 1LL, 1LL);
}

static void run_contrast() {
    const long long keys = 29, anchors = 5;
    std::vector<long long> ids;
    std::vector<int> low;
    for (int j = 0; j < keys; ++j) ids.push_back(j % 7), low.push_back(j % 7);
    for (long long every : {0, 1}) {
        Floats logits = wave(anchors * keys, 0.9f), weights(anchors, 0.5f), losses(anchors);
        weights[1] = 0;
        run(launch_contrast_contrast_rows, anchors, 1, 20 * sizeof(float), logits.data(), low.data(), ids.data(),
            weights.data(), losses.data(), 3LL, keys, 20LL, every);
    }
}

#define RUN(kernel, ...) run(launch_f32_##kernel, __VA_ARGS__)

static void run_norm() {
    const long long n = 2 * THREADS + 3, channels = 24, width = 2, groups = 3, tiles = channels / 4 / width;
    Floats x = wave(n * channels, 0.3f), dy = wave(n * channels, 0.9f), y(n * channels), d_residual(n * channels);
    Floats moments(groups * (1 + 2 * channels)), joined(1 + 2 * channels), inverse(channels), running(2 * channels);
    Floats weight = wave(channels, 0.5f), parts(groups * 2 * channels), sums(2 * channels);
    std::vector<unsigned char> signs(n * channels / 4);
    std::vector<double> added(1 + 2 * channels);
    const float *mean = &joined[1], *bias = weight.data(), *count = joined.data();
    auto in = [](const Floats& v) { return reinterpret_cast<const uint4*>(v.data()); };
    auto out = [](Floats& v) { return reinterpret_cast<uint4*>(v.data()); };
    const unsigned joining = (2 * channels + THREADS / 8 - 1) / (THREADS / 8);

    RUN(norm_moments, groups, tiles, 0, in(x), moments.data(), n, channels, width);
    float* const none = nullptr;
    double* const unwanted = nullptr;
    RUN(norm_join, joining, 1, 0, moments.data(), none, added.data(), none, none, none, groups, channels, 0.0f, 0.0f);
    RUN(norm_join_ranks, (channels + THREADS - 1) / THREADS, 1, 0, added.data(), joined.data(), inverse.data(),
        &running[0], &running[channels], channels, 1e-5f, 0.1f);
    RUN(norm_join, joining, 1, 0, moments.data(), joined.data(), unwanted, inverse.data(), &running[0],
        &running[channels], groups, channels, 1e-5f, 0.1f);
    RUN(norm_apply, groups, tiles, 0, in(x), in(dy), mean, inverse.data(), weight.data(), bias, out(y), signs.data(), n,
        channels, width, 1LL);
    RUN(norm_gradient_sums, groups, tiles, 0, in(dy), in(x), signs.data(), mean, inverse.data(), weight.data(), bias,
        parts.data(), n, channels, width, 1LL);
    RUN(norm_gradient_join, joining, 1, 0, parts.data(), sums.data(), groups, 2 * channels);
    RUN(norm_gradient_apply, groups, tiles, 0, in(dy), in(x), signs.data(), mean, inverse.data(), weight.data(), bias,
        sums.data(), count, out(y), out(d_residual), n, channels, width, 1LL);
}

int main(int count, char** words) {
    if (count > 1) shim::skipped = words[1];
    run_lars();
    run_contrast();
    run_norm();
}
