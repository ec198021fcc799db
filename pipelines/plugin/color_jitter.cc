// DALI's operator around color_jitter.h: a batch of uint8 HWC images in, the same out, one image a job of DALI's threads.
#include <vector>

#include "color_jitter.h"
#include "dali/core/geom/mat.h"
#include "dali/pipeline/operator/arg_helper.h"
#include "dali/pipeline/operator/checkpointing/stateless_operator.h"
#include "dali/pipeline/operator/operator.h"

namespace fastsuncet {

using dali::mat3;

// RGB to YIQ, and back by the inverse that DALI takes of it: saturation scales I and Q.
const mat3 kYiq = {{{.299f, .587f, .114f}, {.596f, -.274f, -.321f}, {.211f, -.523f, .311f}}};
const mat3 kRgb = dali::inverse(kYiq);

void saturation_matrix(float saturation, float (&out)[9]) {
  mat3 scaled = mat3::eye();
  scaled(1, 1) = scaled(2, 2) = saturation;
  const mat3 m = kRgb * scaled * kYiq;
  for (int i = 0; i < 9; i++) out[i] = m(i / 3, i % 3);
}

class ColorJitter : public dali::StatelessOperator<dali::CPUBackend> {
 public:
  explicit ColorJitter(const dali::OpSpec &spec)
      : dali::StatelessOperator<dali::CPUBackend>(spec),
        brightness_("brightness", spec),
        contrast_("contrast", spec),
        saturation_("saturation", spec),
        hue_("hue", spec),
        grey_("grey", spec) {}

 protected:
  bool SetupImpl(std::vector<dali::OutputDesc> &outputs, const dali::Workspace &ws) override {
    const auto &images = ws.Input<dali::CPUBackend>(0);
    const auto &shape = images.shape();
    DALI_ENFORCE(images.type() == DALI_UINT8, "ColorJitter takes uint8 images");
    for (int i = 0; i < shape.num_samples(); i++)
      DALI_ENFORCE(shape.tensor_shape_span(i)[2] == 3, "ColorJitter takes images of three channels, RGB");
    for (auto *argument : {&brightness_, &contrast_, &saturation_, &hue_})
      argument->Acquire(spec_, ws, shape.num_samples());
    grey_.Acquire(spec_, ws, shape.num_samples());
    outputs.resize(1);
    outputs[0] = {shape, DALI_UINT8};
    return true;
  }

  void RunImpl(dali::Workspace &ws) override {
    const auto &images = ws.Input<dali::CPUBackend>(0);
    auto &jittered = ws.Output<dali::CPUBackend>(0);
    jittered.SetLayout(images.GetLayout());
    auto &threads = ws.GetThreadPool();
    for (int i = 0; i < images.num_samples(); i++) {
      const auto bytes = images.shape().tensor_size(i);
      threads.AddWork(
          [&, i, bytes](int) {
            const color_jitter::Factors by{brightness_[i].data[0], contrast_[i].data[0], saturation_[i].data[0],
                                           hue_[i].data[0], grey_[i].data[0] != 0};
            float saturation[9];
            saturation_matrix(by.saturation, saturation);
            color_jitter::jitter(images.tensor<uint8_t>(i), jittered.mutable_tensor<uint8_t>(i), bytes / 3, by,
                                 saturation);
          },
          bytes);
    }
    threads.RunAll();
  }

 private:
  dali::ArgValue<float> brightness_, contrast_, saturation_, hue_;
  dali::ArgValue<int> grey_;
};

}  // namespace fastsuncet

DALI_SCHEMA(fastsuncet__ColorJitter)
    .DocStr("Brightness, contrast about the image's mean grey, saturation, hue in HSV and grey, in this order.")
    .NumInput(1)
    .NumOutput(1)
    .InputLayout(0, "HWC")
    .AddOptionalArg("brightness", "Factor; 1 is neutral.", 1.f, true)
    .AddOptionalArg("contrast", "Factor; 1 is neutral.", 1.f, true)
    .AddOptionalArg("saturation", "Factor; 1 is neutral.", 1.f, true)
    .AddOptionalArg("hue", "Turns of the colour circle; 0 is neutral.", 0.f, true)
    .AddOptionalArg("grey", "1: the image ends in three equal channels of luma; 0 is neutral.", 0, true);

DALI_REGISTER_OPERATOR(fastsuncet__ColorJitter, fastsuncet::ColorJitter, dali::CPU);
