// pixel.h over a batch on a GPU: one launch sums the gray levels for contrast, one computes the pixels.
//
// Not run on a GPU yet, and not timed. The last bit of the mean gray of an image of more than 65,536 pixels can differ
// from the CPU's, whose sum is rounded on the way; nothing else differs.
#include "pixel.h"

// The tests compile this source for a CPU and define these words themselves.
#ifndef KERNEL
#define KERNEL(name) extern "C" __global__ void name
#define SHARED(type, name, size) __shared__ type name[size]
#endif

using namespace color_jitter;

__device__ inline Pixel load(const unsigned char *at) {
  return {static_cast<float>(at[0]), static_cast<float>(at[1]), static_cast<float>(at[2])};
}

__device__ inline Pixel scaled(Pixel p, Affine by) { return {scaled(p.r, by), scaled(p.g, by), scaled(p.b, by)}; }

__device__ inline Pixel brightened(const Job &job, Pixel p) {
  return job.by.brightness != 1 ? scaled(p, about(job.by.brightness, 0)) : p;
}

// Grid (any, images): adds the gray levels of image blockIdx.y to sums[blockIdx.y], which starts at 0. The sums are whole
// numbers, so their order does not matter and two runs give the same bits.
KERNEL(gray_sums)(const Job *jobs, unsigned long long *sums) {
  const Job &job = jobs[blockIdx.y];
  SHARED(unsigned, total, 1);
  if (threadIdx.x == 0) total[0] = 0;
  __syncthreads();
  if (job.by.contrast != 1) {
    unsigned sum = 0;  // one thread's share: up to 16 million pixels
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < job.pixels; i += step)
      sum += luma(brightened(job, load(job.in + 3 * i)));
    atomicAdd(total, sum);
  }
  __syncthreads();
  if (threadIdx.x == 0 && total[0]) atomicAdd(sums + blockIdx.y, static_cast<unsigned long long>(total[0]));
}

// Grid (any, images): applies all factors of the image's job in order.
KERNEL(jitter_pixels)(const Job *jobs, const unsigned long long *sums) {
  const Job &job = jobs[blockIdx.y];
  const Factors by = job.by;
  Affine contrast{1, 0};
  if (by.contrast != 1)
    contrast = about(by.contrast, static_cast<float>(sums[blockIdx.y]) * static_cast<float>(1.0 / job.pixels));
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < job.pixels; i += step) {
    Pixel p = brightened(job, load(job.in + 3 * i));
    if (by.contrast != 1) p = scaled(p, contrast);
    if (by.saturation != 1) p = saturated(p, job.saturation);
    if (by.hue != 0) p = rotated(p, by.hue);
    if (by.gray) p = grayed(p);
    unsigned char *out = job.out + 3 * i;
    out[0] = static_cast<unsigned char>(static_cast<int>(p.r));
    out[1] = static_cast<unsigned char>(static_cast<int>(p.g));
    out[2] = static_cast<unsigned char>(static_cast<int>(p.b));
  }
}
