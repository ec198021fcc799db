// pixel.h over an image on a CPU, in pieces that stay in the first cache and in loops that a compiler vectorizes.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "pixel.h"

namespace color_jitter {

// The vector width is chosen when the library is loaded, so that one build serves a cluster of different processors that
// share a home directory. AVX2 by itself has no fused multiply-add, which would give other bits.
#if defined(__x86_64__) && defined(__GNUC__)
#define WIDEST __attribute__((target_clones("avx2", "default")))
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

// The sum of the gray levels of `pixels` pixels after brightness: exact up to kExact pixels, and beyond that summed in
// halves as DALI's reduction does.
inline float gray_total(const uint8_t *in, int64_t pixels, float brightness) {
  if (pixels > kExact) {
    const int64_t half = pixels / 2;
    return gray_total(in, half, brightness) + gray_total(in + 3 * half, pixels - half, brightness);
  }
  int64_t sum = 0;
  Tile tile;
  for (int64_t at = 0; at < pixels; at += kTile) {
    const int64_t n = pixels - at < kTile ? pixels - at : kTile;
    split(in + 3 * at, tile, n);
    if (brightness != 1) scale(tile, about(brightness, 0), n);
    sum += gray_sum(tile, n);
  }
  return static_cast<float>(sum);
}

// `in` and `out` hold `pixels` RGB pixels and can be the same; `saturation` is the row-major 3x3 matrix of that factor.
// A neutral factor changes no level, in DALI's operators too, so it is skipped.
inline void jitter(const uint8_t *in, uint8_t *out, int64_t pixels, const Factors &by, const float *saturation) {
  if (pixels == 0) return;
  Affine contrast{1, 0};
  if (by.contrast != 1) {
    const float inverse = static_cast<float>(1.0 / pixels);
    contrast = about(by.contrast, gray_total(in, pixels, by.brightness) * inverse);
  }
  if (by.brightness == 1 && by.contrast == 1 && by.saturation == 1 && by.hue == 0 && !by.gray) {
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
    if (by.gray) to_gray(tile, n);
    join(tile, out + 3 * at, n);
  }
}

}  // namespace color_jitter
