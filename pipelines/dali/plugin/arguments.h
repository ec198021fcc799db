// What the CPU and the GPU operator share: their arguments, and the matrix of a saturation.
#pragma once

#include <vector>

#include "dali/core/geom/mat.h"
#include "dali/pipeline/operator/arg_helper.h"
#include "dali/pipeline/operator/checkpointing/stateless_operator.h"
#include "dali/pipeline/operator/operator.h"
#include "pixel.h"

namespace fastsuncet {

// RGB to YIQ, and back by DALI's own inverse of it. Saturation scales I and Q.
const dali::mat3 kYiq = {{{.299f, .587f, .114f}, {.596f, -.274f, -.321f}, {.211f, -.523f, .311f}}};
const dali::mat3 kRgb = dali::inverse(kYiq);

inline void saturation_matrix(float saturation, float *out) {
  dali::mat3 scaled = dali::mat3::eye();
  scaled(1, 1) = scaled(2, 2) = saturation;
  const dali::mat3 m = kRgb * scaled * kYiq;
  for (int i = 0; i < 9; i++) out[i] = m(i / 3, i % 3);
}

template <typename Backend>
class Jitter : public dali::StatelessOperator<Backend> {
 public:
  explicit Jitter(const dali::OpSpec &spec)
      : dali::StatelessOperator<Backend>(spec),
        brightness_("brightness", spec),
        contrast_("contrast", spec),
        saturation_("saturation", spec),
        hue_("hue", spec),
        gray_("gray", spec) {}

 protected:
  bool SetupImpl(std::vector<dali::OutputDesc> &outputs, const dali::Workspace &ws) override {
    const auto &images = ws.Input<Backend>(0);
    const auto &shape = images.shape();
    DALI_ENFORCE(images.type() == DALI_UINT8, "ColorJitter takes uint8 images");
    for (int i = 0; i < shape.num_samples(); i++)
      DALI_ENFORCE(shape.tensor_shape_span(i)[2] == 3, "ColorJitter takes images of three channels, RGB");
    for (auto *argument : {&brightness_, &contrast_, &saturation_, &hue_})
      argument->Acquire(this->spec_, ws, shape.num_samples());
    gray_.Acquire(this->spec_, ws, shape.num_samples());
    outputs.resize(1);
    outputs[0] = {shape, DALI_UINT8};
    return true;
  }

  color_jitter::Factors factors(int i) {
    return {brightness_[i].data[0], contrast_[i].data[0], saturation_[i].data[0], hue_[i].data[0], gray_[i].data[0]};
  }

 private:
  dali::ArgValue<float> brightness_, contrast_, saturation_, hue_;
  dali::ArgValue<int> gray_;
};

}  // namespace fastsuncet

#define COLOR_JITTER_SCHEMA(name)                                                                              \
  DALI_SCHEMA(name)                                                                                            \
      .DocStr("Brightness, contrast about the image's mean gray, saturation, hue in HSV and gray, in this order.") \
      .NumInput(1)                                                                                             \
      .NumOutput(1)                                                                                            \
      .InputLayout(0, "HWC")                                                                                   \
      .AddOptionalArg("brightness", "Factor; 1 is neutral.", 1.f, true)                                        \
      .AddOptionalArg("contrast", "Factor; 1 is neutral.", 1.f, true)                                          \
      .AddOptionalArg("saturation", "Factor; 1 is neutral.", 1.f, true)                                        \
      .AddOptionalArg("hue", "Turns of the color circle; 0 is neutral.", 0.f, true)                           \
      .AddOptionalArg("gray", "1: the image ends in three equal channels of luma; 0 is neutral.", 0, true)
