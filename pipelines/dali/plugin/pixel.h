// The arithmetic of pipelines/dali/color.py's exact colour, on one pixel: for g++, for NVRTC, and no library.
//
// Every value is rounded where DALI's CPU operators round it, halves away from zero, and no product is contracted with a
// sum (-ffp-contract=off, --fmad=false). Between two factors levels are whole numbers from 0 to 255, held as float.
#pragma once

#ifdef __CUDACC__
#define EVERYWHERE __host__ __device__ inline
#else
#define EVERYWHERE inline
#endif

namespace color_jitter {

struct Factors {
  float brightness = 1, contrast = 1, saturation = 1;
  float hue = 0;  // turns
  int grey = 0;
};

struct Pixel {
  float r, g, b;
};

struct Affine {
  float multiplier, addend;
};

// What a factor about a centre makes of every level, summed up as DALI's operator does.
EVERYWHERE Affine about(float factor, float centre) { return {factor, centre - factor * centre}; }

EVERYWHERE float level(float x) {
  x = x > 0.f ? x : 0.f;
  x = x < 255.f ? x : 255.f;
  // Not floor(x + .5f): the float just below a half would be carried up by the rounding of the sum.
  const float whole = static_cast<float>(static_cast<int>(x));
  return whole + (x - whole >= .5f ? 1.f : 0.f);
}

EVERYWHERE float scaled(float x, Affine by) { return level(x * by.multiplier + by.addend); }

// In fixed point of 15 bits, as DALI's operator does it on a CPU (by OpenCV): .299, .587 and .114.
EVERYWHERE int luma(Pixel p) {
  return (9798 * static_cast<int>(p.r) + 19235 * static_cast<int>(p.g) + 3735 * static_cast<int>(p.b) + 16384) >> 15;
}

EVERYWHERE Pixel saturated(Pixel p, const float *m) {
  return {level(m[0] * p.r + m[1] * p.g + m[2] * p.b), level(m[3] * p.r + m[4] * p.g + m[5] * p.b),
          level(m[6] * p.r + m[7] * p.g + m[8] * p.b)};
}

EVERYWHERE float floor_of(float x) {
  const float whole = static_cast<float>(static_cast<int>(x));
  return whole - (x < whole ? 1.f : 0.f);
}

// HSV to RGB without a case for each sextant; see `hue` in color.py.
EVERYWHERE float channel_of(float value, float chroma, float sixths, float n) {
  float k = sixths + n;
  k = k - 6.f * floor_of(k / 6.f);
  float share = k < 4.f - k ? k : 4.f - k;
  share = share > 0.f ? share : 0.f;
  share = share < 1.f ? share : 1.f;
  return level(value - chroma * share);
}

EVERYWHERE Pixel rotated(Pixel p, float turns) {
  const float gb_max = p.g > p.b ? p.g : p.b, gb_min = p.g < p.b ? p.g : p.b;
  const float value = p.r > gb_max ? p.r : gb_max, chroma = value - (p.r < gb_min ? p.r : gb_min);
  // The first of equal channels counts as the largest.
  const bool red = p.r == value, green = p.g == value;
  const float difference = red ? p.g - p.b : green ? p.b - p.r : p.r - p.g;
  const float base = red ? 0.f : green ? 2.f : 4.f;
  const float sixths = difference / (chroma > 1.f ? chroma : 1.f) + base + 6.f * turns;
  return {channel_of(value, chroma, sixths, 5.f), channel_of(value, chroma, sixths, 3.f),
          channel_of(value, chroma, sixths, 1.f)};
}

EVERYWHERE Pixel greyed(Pixel p) {
  const float grey = static_cast<float>(luma(p));
  return {grey, grey, grey};
}

}  // namespace color_jitter
