// Views on a CPU: color in pieces that stay in the first cache, blur in rows, and loops that a compiler vectorizes.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "pixel.h"

namespace view {

// The vector width is chosen when the library is loaded, so that one build serves a cluster of different processors that
// share a home directory. -ffp-contract=off keeps fused multiply-adds, which give other bits, out of all of them.
#if defined(WIDEST)  // by a test, to be nothing
#elif defined(__x86_64__) && defined(__GNUC__)
#define CLONED
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

constexpr int64_t kTile = 256;  // pixels; three rows of floats
constexpr int64_t kExact = 65536;  // levels whose sum is below 2^24, which a float holds exactly

struct Tile {
  float r[kTile], g[kTile], b[kTile];
  Pixel at(int64_t i) const { return {r[i], g[i], b[i]}; }
  void set(int64_t i, Pixel p) { r[i] = p.r, g[i] = p.g, b[i] = p.b; }
};

WIDEST void split(const uint8_t *in, Tile &t, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    t.r[i] = in[3 * i];
    t.g[i] = in[3 * i + 1];
    t.b[i] = in[3 * i + 2];
  }
}

WIDEST void join(const Tile &t, uint8_t *out, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    out[3 * i] = static_cast<uint8_t>(static_cast<int>(t.r[i]));
    out[3 * i + 1] = static_cast<uint8_t>(static_cast<int>(t.g[i]));
    out[3 * i + 2] = static_cast<uint8_t>(static_cast<int>(t.b[i]));
  }
}

WIDEST void scale(Tile &t, Affine by, int64_t n) {
  for (float *channel : {t.r, t.g, t.b})
    for (int64_t i = 0; i < n; i++) channel[i] = scaled(channel[i], by);
}

WIDEST int64_t gray_sum(const Tile &t, int64_t n) {
  int sum = 0;
  for (int64_t i = 0; i < n; i++) sum += luma(t.at(i));
  return sum;
}

WIDEST void saturate(Tile &t, const float *matrix, int64_t n) {
  for (int64_t i = 0; i < n; i++) t.set(i, saturated(t.at(i), matrix));
}

WIDEST void rotate(Tile &t, float turns, int64_t n) {
  for (int64_t i = 0; i < n; i++) t.set(i, rotated(t.at(i), turns));
}

WIDEST void to_gray(Tile &t, int64_t n) {
  for (int64_t i = 0; i < n; i++) t.set(i, grayed(t.at(i)));
}

// Applies the factors `first` to `last` - 1 of the order. A neutral factor changes no level, in DALI's operators too.
inline void apply(const View &v, int first, int last, Affine contrast, Tile &t, int64_t n) {
  for (int i = first; i < last; i++) {
    const int factor = v.by.factor(i);
    if (factor == kBrightness && v.by.brightness != 1) scale(t, about(v.by.brightness, 0), n);
    if (factor == kContrast && v.by.contrast != 1) scale(t, contrast, n);
    if (factor == kSaturation && v.by.saturation != 1) saturate(t, v.saturation, n);
    if (factor == kHue && v.by.hue != 0) rotate(t, v.by.hue, n);
  }
}

// Applies the factors before `last` to pixels `at` to `at + pixels`, keeps them in `out` and returns the sum of their gray
// levels: exact up to kExact pixels, and beyond that summed in halves as DALI's reduction does.
inline float gray_total(const View &v, int last, uint8_t *out, int64_t at, int64_t pixels) {
  if (pixels > kExact) {
    const int64_t half = pixels / 2;
    return gray_total(v, last, out, at, half) + gray_total(v, last, out, at + half, pixels - half);
  }
  int64_t sum = 0;
  Tile tile;
  for (const int64_t end = at + pixels; at < end; at += kTile) {
    const int64_t n = end - at < kTile ? end - at : kTile;
    split(v.in + 3 * at, tile, n);
    apply(v, 0, last, {1, 0}, tile, n);
    sum += gray_sum(tile, n);
    join(tile, out + 3 * at, n);
  }
  return static_cast<float>(sum);
}

// Returns the colors of the view: `v.in` if nothing changes them, else `out`, which has room for them.
inline const uint8_t *colored(const View &v, uint8_t *out) {
  const Color &by = v.by;
  const uint8_t *from = v.in;
  const int64_t pixels = v.pixels();
  Affine contrast{1, 0};
  int first = 0;
  if (by.contrast != 1) {
    while (by.factor(first) != kContrast) first++;
    const float inverse = static_cast<float>(1.0 / pixels);
    contrast = about(by.contrast, gray_total(v, first, out, 0, pixels) * inverse);
    from = out;
  } else if (by.brightness == 1 && by.saturation == 1 && by.hue == 0 && !by.gray) {
    return from;
  }
  Tile tile;
  for (int64_t at = 0; at < pixels; at += kTile) {
    const int64_t n = pixels - at < kTile ? pixels - at : kTile;
    split(from + 3 * at, tile, n);
    apply(v, first, kFactors, contrast, tile, n);
    if (by.gray) to_gray(tile, n);
    join(tile, out + 3 * at, n);
  }
  return out;
}

constexpr int64_t kBlock = 64;  // floats; `convolve` computes them together, or a half and then the other

// out[i] = sum over k of rows[k][i] * weights[k], in the order of k as in DALI's operator. `count` is rounded up to kBlock,
// so every row and `out` must have room for it. The sums stay in registers, which takes lanes as wide as one register of
// the processor: of wider lanes the compiler keeps the sums in memory, and the blur takes 20 times as long.
#define CONVOLVE(processor, bytes)                                                                                     \
  processor void convolve(const float *const *rows, const float *weights, int window, float *out, int64_t count) {     \
    typedef float Lanes __attribute__((vector_size(bytes), aligned(4), may_alias));                                    \
    constexpr int kSums = bytes > 32 ? 4 : 8;                                                                          \
    for (int64_t i = 0; i < count; i += kSums * sizeof(Lanes) / 4) {                                                   \
      Lanes sums[kSums] = {};                                                                                          \
      for (int k = 0; k < window; k++)                                                                                 \
        for (int j = 0; j < kSums; j++) sums[j] += reinterpret_cast<const Lanes *>(rows[k] + i)[j] * weights[k];       \
      for (int j = 0; j < kSums; j++) reinterpret_cast<Lanes *>(out + i)[j] = sums[j];                                 \
    }                                                                                                                  \
  }

#ifdef CLONED
CONVOLVE(__attribute__((target("avx512f"))), 64)
CONVOLVE(__attribute__((target("avx2"))), 32)
CONVOLVE(__attribute__((target("default"))), 16)
#else
CONVOLVE(, 16)
#endif

WIDEST void widen(const uint8_t *in, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = in[i];
}

WIDEST void round_levels(const float *in, uint8_t *out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<uint8_t>(static_cast<int>(level(in[i])));
}

// What a thread needs for a view. It grows to the largest one.
struct Scratch {
  std::vector<uint8_t> colors, row;
  std::vector<float> padded, ring, sums;
  std::vector<const float *> rows;
};

// Calls finish(y, levels) with each blurred row. The rows that a window needs are kept in a ring.
template <typename Finish>
void blurred(const View &v, const uint8_t *in, Scratch &s, Finish finish) {
  const int window = 2 * v.radius + 1, r = v.radius;
  const int64_t width = 3 * int64_t(v.width), room = (width + kBlock - 1) / kBlock * kBlock;
  s.padded.resize(room + 6 * r);
  s.ring.resize(window * room);
  s.sums.resize(room);
  s.row.resize(width);
  s.rows.resize(window);
  int next = 0;  // the first row that is not in the ring yet
  for (int y = 0; y < v.height; y++) {
    for (; next < v.height && next <= y + r; next++) {
      widen(in + next * width, s.padded.data() + 3 * r, width);
      for (int x = -r; x < v.width + r; x += x == -1 ? v.width + 1 : 1)
        std::memcpy(&s.padded[3 * (x + r)], &s.padded[3 * (reflected(x, v.width) + r)], 3 * sizeof(float));
      for (int k = 0; k < window; k++) s.rows[k] = s.padded.data() + 3 * k;
      convolve(s.rows.data(), v.weights, window, s.ring.data() + next % window * room, width);
    }
    for (int k = 0; k < window; k++) s.rows[k] = s.ring.data() + reflected(y - r + k, v.height) % window * room;
    convolve(s.rows.data(), v.weights, window, s.sums.data(), width);
    round_levels(s.sums.data(), s.row.data(), width);
    finish(y, s.row.data());
  }
}

// Computes one view. `table` has 256 rows of three elements: what each level of each channel becomes.
inline void make(const View &v, const float *table, Scratch &s) {
  s.colors.resize(3 * v.pixels());
  const uint8_t *in = colored(v, s.colors.data());
  const auto finish = [&](int y, const uint8_t *row) {
    float *out = v.out + int64_t(y) * 3 * v.width;
    for (int x = 0; x < v.width; x++) {
      const uint8_t *at = row + 3 * (v.flip ? v.width - 1 - x : x);
      for (int c = 0; c < 3; c++) out[3 * x + c] = table[3 * at[c] + c];
    }
  };
  if (v.radius)
    blurred(v, in, s, finish);
  else
    for (int y = 0; y < v.height; y++) finish(y, in + int64_t(y) * 3 * v.width);
}

}  // namespace view
