// The arithmetic of pipelines/color.py's exact colour, on one image: no DALI in here, so that it stands alone in tests.
//
// Each factor gives, bit for bit, what the operators of DALI's graph give: every value is rounded where theirs is,
// halves away from zero, no product is contracted with a sum (-ffp-contract=off), and the grey mean is added up in the
// order of DALI's reduction. Values between two factors are whole numbers from 0 to 255, held as float.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace color_jitter {

// The widest vectors of the machine that runs this, chosen as the library is loaded: one build serves a cluster of
// unlike processors that share a home. AVX2 alone brings no fused multiply-add, which would give other bits.
#if defined(__x86_64__) && defined(__GNUC__)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#else
#define WIDEST
#endif

constexpr int64_t kTile = 256;  // pixels; three rows of floats that stay in the first cache
constexpr int64_t kExact = 65536;  // so many levels add up to less than 2^24, which a float holds exactly

struct Factors {
  float brightness = 1, contrast = 1, saturation = 1;
  float hue = 0;  // turns
  bool grey = false;
};

struct Affine {
  float multiplier, addend;
};

// Where a factor and its centre make every level m * level + a. DALI's operator sums up in this order.
inline Affine about(float factor, float centre) { return {factor, centre - factor * centre}; }

inline float level(float x) {
  x = x > 0.f ? x : 0.f;
  x = x < 255.f ? x : 255.f;
  // Not floor(x + .5f): the float just below a half would be carried up by the rounding of the sum.
  const float whole = static_cast<float>(static_cast<int32_t>(x));
  return whole + (x - whole >= .5f ? 1.f : 0.f);
}

// In fixed point of 15 bits, as DALI's operator does it on a CPU (by OpenCV): .299, .587 and .114.
inline int32_t luma(float r, float g, float b) {
  return (9798 * static_cast<int32_t>(r) + 19235 * static_cast<int32_t>(g) + 3735 * static_cast<int32_t>(b) + 16384) >>
         15;
}

struct Tile {
  float r[kTile], g[kTile], b[kTile];
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
    out[3 * i] = static_cast<uint8_t>(static_cast<int32_t>(t.r[i]));
    out[3 * i + 1] = static_cast<uint8_t>(static_cast<int32_t>(t.g[i]));
    out[3 * i + 2] = static_cast<uint8_t>(static_cast<int32_t>(t.b[i]));
  }
}

WIDEST void scale(Tile &t, Affine by, int64_t n) {
  for (float *channel : {t.r, t.g, t.b})
    for (int64_t i = 0; i < n; i++) channel[i] = level(channel[i] * by.multiplier + by.addend);
}

WIDEST int64_t grey_sum(const Tile &t, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; i++) sum += luma(t.r[i], t.g[i], t.b[i]);
  return sum;
}

WIDEST void saturate(Tile &t, const float (&m)[9], int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float r = t.r[i], g = t.g[i], b = t.b[i];
    t.r[i] = level(m[0] * r + m[1] * g + m[2] * b);
    t.g[i] = level(m[3] * r + m[4] * g + m[5] * b);
    t.b[i] = level(m[6] * r + m[7] * g + m[8] * b);
  }
}

inline float floor_of(float x) {
  const float whole = static_cast<float>(static_cast<int32_t>(x));
  return whole - (x < whole ? 1.f : 0.f);
}

inline float channel_of(float value, float chroma, float sixths, float n) {
  float k = sixths + n;
  k = k - 6.f * floor_of(k / 6.f);
  float share = k < 4.f - k ? k : 4.f - k;
  share = share > 0.f ? share : 0.f;
  share = share < 1.f ? share : 1.f;
  return level(value - chroma * share);
}

WIDEST void rotate(Tile &t, float turns, int64_t n) {
  const float offset = 6.f * turns;
  for (int64_t i = 0; i < n; i++) {
    const float r = t.r[i], g = t.g[i], b = t.b[i];
    const float gb_max = g > b ? g : b, gb_min = g < b ? g : b;
    const float value = r > gb_max ? r : gb_max, chroma = value - (r < gb_min ? r : gb_min);
    // The first of equal channels counts as the largest.
    const bool red = r == value, green = g == value;
    const float difference = red ? g - b : green ? b - r : r - g;
    const float base = red ? 0.f : green ? 2.f : 4.f;
    const float sixths = difference / (chroma > 1.f ? chroma : 1.f) + base + offset;
    t.r[i] = channel_of(value, chroma, sixths, 5.f);
    t.g[i] = channel_of(value, chroma, sixths, 3.f);
    t.b[i] = channel_of(value, chroma, sixths, 1.f);
  }
}

WIDEST void to_grey(Tile &t, int64_t n) {
  for (int64_t i = 0; i < n; i++) t.r[i] = t.g[i] = t.b[i] = static_cast<float>(luma(t.r[i], t.g[i], t.b[i]));
}

// The sum of the grey levels of `pixels` pixels after brightness: exact as far as a float is, and beyond that in the
// halves that DALI's reduction makes.
inline float grey_total(const uint8_t *in, int64_t pixels, float brightness) {
  if (pixels > kExact) {
    const int64_t half = pixels / 2;
    return grey_total(in, half, brightness) + grey_total(in + 3 * half, pixels - half, brightness);
  }
  int64_t sum = 0;
  Tile tile;
  for (int64_t at = 0; at < pixels; at += kTile) {
    const int64_t n = pixels - at < kTile ? pixels - at : kTile;
    split(in + 3 * at, tile, n);
    if (brightness != 1) scale(tile, about(brightness, 0), n);
    sum += grey_sum(tile, n);
  }
  return static_cast<float>(sum);
}

// `in` and `out` hold `pixels` RGB pixels and may be the same; `saturation` is the row-major 3x3 matrix of that factor.
// A neutral factor leaves every level as it is, in DALI's operators too: it is not computed.
inline void jitter(const uint8_t *in, uint8_t *out, int64_t pixels, const Factors &by, const float (&saturation)[9]) {
  if (pixels == 0) return;
  Affine contrast{1, 0};
  if (by.contrast != 1) {
    const float inverse = static_cast<float>(1.0 / pixels);
    contrast = about(by.contrast, grey_total(in, pixels, by.brightness) * inverse);
  }
  if (by.brightness == 1 && by.contrast == 1 && by.saturation == 1 && by.hue == 0 && !by.grey) {
    if (in != out) std::memcpy(out, in, 3 * pixels);
    return;
  }
  Tile tile;
  for (int64_t at = 0; at < pixels; at += kTile) {
    const int64_t n = pixels - at < kTile ? pixels - at : kTile;
    split(in + 3 * at, tile, n);
    if (by.brightness != 1) scale(tile, about(by.brightness, 0), n);
    if (by.contrast != 1) scale(tile, contrast, n);
    if (by.saturation != 1) saturate(tile, saturation, n);
    if (by.hue != 0) rotate(tile, by.hue, n);
    if (by.grey) to_grey(tile, n);
    join(tile, out + 3 * at, n);
  }
}

}  // namespace color_jitter
