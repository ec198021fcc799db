// What one view of an image is, and the arithmetic of its colors (pipelines/dali/graphs.py) on one pixel. For g++ and
// NVRTC, without any library.
//
// Every value is rounded where DALI's CPU operators round it, halves away from zero, and no product is contracted with a
// sum (-ffp-contract=off, --fmad=false). Between two factors levels are whole numbers from 0 to 255, held as float.
#pragma once

#ifdef __CUDACC__
#define EVERYWHERE __host__ __device__ inline
#else
#define EVERYWHERE inline
#endif

namespace view {

// The four color factors, by the digits of `order`.
enum { kBrightness, kContrast, kSaturation, kHue, kFactors };

struct Color {
  float brightness = 1, contrast = 1, saturation = 1;
  float hue = 0;  // turns
  int gray = 0;
  int order = 0xE4;  // factor i to apply is (order >> 2 i) & 3: here 0, 1, 2, 3

  EVERYWHERE int factor(int i) const { return order >> 2 * i & 3; }
};

// One image of a batch. Color is followed by blur, flip and a table of 256 levels of each channel: the normalization.
struct View {
  const unsigned char *in;  // (height, width, 3)
  float *out;               // the same shape
  const float *weights;     // 2 radius + 1 of the blur, which reflects the image about its border pixels
  int height, width, radius, flip;
  Color by;
  float saturation[9];  // the matrix of that factor, row by row

  EVERYWHERE long long pixels() const { return static_cast<long long>(height) * width; }
};

// The kernels' square of pixels, and the widest blur that its surroundings fit into a GPU's shared memory with.
constexpr int kSide = 32, kWidest = 32;

EVERYWHERE constexpr unsigned shared_bytes(int radius) {
  return (kSide + 2 * radius) * (4 * kSide + 3 * (kSide + 2 * radius));
}

struct Pixel {
  float r, g, b;
};

struct Affine {
  float multiplier, addend;
};

// A factor about a center as one multiplication and one addition, as DALI's operator computes it.
EVERYWHERE Affine about(float factor, float center) { return {factor, center - factor * center}; }

EVERYWHERE float level(float x) {
  x = x > 0.f ? x : 0.f;
  x = x < 255.f ? x : 255.f;
  // Not floor(x + .5f): the sum would round the float just below a half up to 1.
  const float whole = static_cast<float>(static_cast<int>(x));
  return whole + (x - whole >= .5f ? 1.f : 0.f);
}

EVERYWHERE float scaled(float x, Affine by) { return level(x * by.multiplier + by.addend); }

// .299, .587 and .114 in fixed point of 15 bits, as DALI's CPU operator computes it (through OpenCV).
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

// HSV to RGB without a case for each sextant; see `hue` in graphs.py.
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

EVERYWHERE Pixel grayed(Pixel p) {
  const float gray = static_cast<float>(luma(p));
  return {gray, gray, gray};
}

// An index that is outside of [0, size) by less than size, reflected about the first or the last one.
EVERYWHERE int reflected(int i, int size) {
  i = i < 0 ? -i : i;
  return i < size ? i : 2 * (size - 1) - i;
}

}  // namespace view
