// Views on a GPU in two launches a batch: the sums of the gray levels for contrast, then color, blur, flip and table.
//
// The last bit of the mean gray of an image of more than 65,536 pixels can differ from the CPU's, whose sum is rounded on
// the way; nothing else differs.
#include "pixel.h"

// The tests compile this source for a CPU and define these words themselves.
#ifndef KERNEL
#define KERNEL(name) extern "C" __global__ void name
#define SHARED(type, name, size) __shared__ type name[size]
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

using namespace view;

__device__ inline Pixel scaled(Pixel p, Affine by) { return {scaled(p.r, by), scaled(p.g, by), scaled(p.b, by)}; }

// A pixel of the input after the factors before `last`. `contrast` is that factor about the mean gray.
__device__ inline Pixel colored(const View &v, long long at, int last, Affine contrast) {
  const unsigned char *in = v.in + 3 * at;
  Pixel p{static_cast<float>(in[0]), static_cast<float>(in[1]), static_cast<float>(in[2])};
  for (int i = 0; i < last; i++) {
    const int factor = v.by.factor(i);
    if (factor == kBrightness && v.by.brightness != 1) p = scaled(p, about(v.by.brightness, 0));
    if (factor == kContrast && v.by.contrast != 1) p = scaled(p, contrast);
    if (factor == kSaturation && v.by.saturation != 1) p = saturated(p, v.saturation);
    if (factor == kHue && v.by.hue != 0) p = rotated(p, v.by.hue);
  }
  return p;
}

// Grid (any, images): adds the gray levels that the contrast of image blockIdx.y meets to sums[blockIdx.y], which starts
// at 0. The sums are whole numbers, so their order does not matter and two runs give the same bits.
KERNEL(gray_sums)(const View *views, unsigned long long *sums) {
  const View &v = views[blockIdx.y];
  SHARED(unsigned, total, 1);
  if (threadIdx.x == 0) total[0] = 0;
  __syncthreads();
  if (v.by.contrast != 1) {
    int last = 0;
    while (v.by.factor(last) != kContrast) last++;
    unsigned sum = 0;  // one block's share: up to 16 million pixels
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < v.pixels(); i += step)
      sum += luma(colored(v, i, last, {1, 0}));
    atomicAdd(total, sum);
  }
  __syncthreads();
  if (threadIdx.x == 0 && total[0]) atomicAdd(sums + blockIdx.y, static_cast<unsigned long long>(total[0]));
}

// One block makes a square of kSide pixels. It colors the square and as much around it as the blur reaches into shared
// memory as bytes, which are what DALI's blur reads, and replaces the square by its blurred bytes, channel by channel.
//
// Grid (squares of the largest image, images), with shared_bytes(most) of dynamic shared memory, where `most` is the
// largest radius of the batch.
KERNEL(make_views)(const View *views, const unsigned long long *sums, const float *table, long long most) {
  const View &v = views[blockIdx.y];
  const int r = v.radius, across = (v.width + kSide - 1) / kSide, down = (v.height + kSide - 1) / kSide;
  if (blockIdx.x >= static_cast<unsigned>(across * down)) return;  // another image of the batch is larger
  const int left = static_cast<int>(blockIdx.x) % across * kSide, top = static_cast<int>(blockIdx.x) / across * kSide;
  const int columns = left + kSide < v.width ? kSide : v.width - left;
  const int rows = top + kSide < v.height ? kSide : v.height - top;
  const int wide = columns + 2 * r, high = rows + 2 * r, threads = static_cast<int>(blockDim.x);
  DYNAMIC_SHARED(float, sum);  // (high, columns) of one channel, blurred in x
  unsigned char *levels = reinterpret_cast<unsigned char *>(sum + (kSide + 2 * most) * kSide);  // (high, wide, 3)

  Affine contrast{1, 0};
  if (v.by.contrast != 1)
    contrast = about(v.by.contrast, static_cast<float>(sums[blockIdx.y]) * static_cast<float>(1.0 / v.pixels()));
  for (int i = threadIdx.x; i < high * wide; i += threads) {
    const int y = reflected(top - r + i / wide, v.height), x = reflected(left - r + i % wide, v.width);
    Pixel p = colored(v, static_cast<long long>(y) * v.width + x, kFactors, contrast);
    if (v.by.gray) p = grayed(p);
    levels[3 * i] = static_cast<unsigned char>(static_cast<int>(p.r));
    levels[3 * i + 1] = static_cast<unsigned char>(static_cast<int>(p.g));
    levels[3 * i + 2] = static_cast<unsigned char>(static_cast<int>(p.b));
  }
  __syncthreads();
  for (int c = 0; r && c < 3; c++) {
    for (int i = threadIdx.x; i < high * columns; i += threads) {
      const unsigned char *from = levels + 3 * (i / columns * wide + i % columns) + c;
      float x = 0;
      for (int k = 0; k <= 2 * r; k++) x += static_cast<float>(from[3 * k]) * v.weights[k];
      sum[i] = x;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * columns; i += threads) {
      float x = 0;
      for (int k = 0; k <= 2 * r; k++) x += sum[i + k * columns] * v.weights[k];
      levels[3 * ((i / columns + r) * wide + i % columns + r) + c] = static_cast<unsigned char>(static_cast<int>(level(x)));
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < 3 * rows * columns; i += threads) {
    const int y = i / (3 * columns), x = i / 3 % columns, c = i % 3;
    const int to = v.flip ? v.width - 1 - left - x : left + x;
    v.out[3 * (static_cast<long long>(top + y) * v.width + to) + c] =
        table[3 * levels[3 * ((y + r) * wide + x + r) + c] + c];
  }
}
