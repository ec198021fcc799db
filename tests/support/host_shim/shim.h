// CUDA's keywords and built-ins on a CPU, to run a kernel's source and test its barriers without a GPU.
//
// The threads of a block are real threads, __syncthreads is a barrier, shared memory an arena of the block, and a
// warp's shuffle an exchange through an array between two barriers of the warp. Several blocks run at once and share
// only global memory, as on a GPU. WARP is small, so that a warp is cheap and a block has two.
#pragma once

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define KERNEL(name) void name
#define __grid_constant__

#ifndef WARP_SIZE
#define WARP_SIZE 4
#endif
constexpr int WARP = WARP_SIZE;

struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };

namespace shim {

constexpr size_t ARENA = 1 << 16, DYNAMIC = 1 << 16;
constexpr int ANY = -1;  // the number of arguments is not checked

// Skips the one __syncthreads at this place ("norm.cu:41"): the thread sanitizer must report a race.
inline std::string skipped;

struct Barrier {
    explicit Barrier(int threads) : threads(threads) {}
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const long now = generation;
        if (++arrived == threads) {
            arrived = 0;
            ++generation;
            everyone.notify_all();
        } else if (!everyone.wait_for(lock, std::chrono::seconds(60), [&] { return generation != now; })) {
            std::fprintf(stderr, "shim: a thread waited 60 s at a barrier that not all threads reach\n");
            std::abort();
        }
    }
    std::mutex mutex;
    std::condition_variable everyone;
    int threads, arrived = 0;
    long generation = 0;
};

struct Block {
    Block(int threads) : all(threads), end(threads), exchange(threads) {
        for (int warp = 0; warp < threads / WARP; ++warp) warps.emplace_back(new Barrier(WARP));
    }
    Barrier all, end;
    std::vector<std::unique_ptr<Barrier>> warps;
    std::vector<float> exchange;
    alignas(16) char arena[ARENA];
    alignas(16) char dynamic[DYNAMIC];
};

struct Index { unsigned x = 0, y = 0, z = 0; };
inline thread_local Block* block = nullptr;

// A place in every block's arena for one __shared__ array of the source, the same at every call as on a GPU.
inline size_t reserve(size_t bytes) {
    static std::mutex mutex;
    static size_t used = 0;
    std::lock_guard<std::mutex> lock(mutex);
    const size_t at = used;
    used += (bytes + 15) / 16 * 16;
    if (used > ARENA) std::abort();
    return at;
}

}  // namespace shim

inline thread_local shim::Index threadIdx, blockIdx, blockDim, gridDim;

#define SHARED(type, name, size)                                       \
    static const size_t name##_at = shim::reserve(sizeof(type) * (size)); \
    type* const name = reinterpret_cast<type*>(shim::block->arena + name##_at)
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(shim::block->dynamic)

namespace shim {
inline void sync(const char* file, int line) {
    if (!skipped.empty()) {
        const char* base = std::strrchr(file, '/');
        if (skipped == std::string(base ? base + 1 : file) + ":" + std::to_string(line)) return;
    }
    block->all.wait();
}
}  // namespace shim
#define __syncthreads() shim::sync(__FILE__, __LINE__)

inline float __shfl_xor_sync(unsigned mask, float value, int step) {
    if (mask != 0xffffffffu) std::abort();
    shim::Barrier& warp = *shim::block->warps[threadIdx.x / WARP];
    shim::block->exchange[threadIdx.x] = value;
    warp.wait();
    const float theirs = shim::block->exchange[threadIdx.x ^ step];
    warp.wait();
    return theirs;
}

inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float half_to_float(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return float(x); }
inline unsigned short float_to_half(float value) {
    const _Float16 x = _Float16(value);
    unsigned short bits;
    std::memcpy(&bits, &x, 2);
    return bits;
}

namespace shim {

// The one convention of fastsuncet/kernels/launcher.py, which packs Python's values without knowing a signature.
template <class A>
constexpr bool conventional =
    std::is_pointer_v<A> || std::is_same_v<A, long long> || std::is_same_v<A, float> || std::is_class_v<A>;

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<A>*>(values[I])...);
}

// Runs the whole grid, `at_once` blocks at a time. Returns how many arguments the kernel takes if not `count`, else 0.
template <class... A>
int launch(void (*kernel)(A...), void** values, int count, unsigned grid_x, unsigned grid_y, int threads, int shared,
           int at_once) {
    static_assert((conventional<std::decay_t<A>> && ...), "a parameter is not a pointer, long long, float or struct");
    if (count != ANY && count != int(sizeof...(A))) return sizeof...(A);
    if (shared > int(DYNAMIC) || threads % WARP) std::abort();
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::thread> running;
    for (int group = 0; group < at_once; ++group) {
        blocks.emplace_back(new Block(threads));
        for (int thread = 0; thread < threads; ++thread)
            running.emplace_back([=, own = blocks.back().get()] {
                block = own;
                threadIdx = {unsigned(thread)};
                blockDim = {unsigned(threads), 1, 1};
                gridDim = {grid_x, grid_y, 1};
                // The last block first: a GPU does not guarantee an order either.
                for (long b = long(grid_x) * grid_y - 1 - group; b >= 0; b -= at_once) {
                    blockIdx = {unsigned(b % grid_x), unsigned(b / grid_x)};
                    if (thread == 0) {
                        std::memset(own->arena, 0xff, ARENA);  // NaN for a read before a write
                        std::memset(own->dynamic, 0xff, DYNAMIC);
                    }
                    own->end.wait();
                    call(kernel, values, std::index_sequence_for<A...>{});
                    own->end.wait();
                }
            });
    }
    for (auto& thread : running) thread.join();
    return 0;
}

}  // namespace shim
