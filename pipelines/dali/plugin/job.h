// What a kernel is told of one image.
#pragma once

#include "pixel.h"

namespace color_jitter {

struct Job {
  const unsigned char *in;
  unsigned char *out;  // may be `in`
  long long pixels;
  Factors by;
  float saturation[9];  // the matrix of that factor, row by row
};

}  // namespace color_jitter
