// The CPU operator: a batch of uint8 HWC images in and out, one job of DALI's threads for each image.
#include "color_jitter.h"

#include "arguments.h"

namespace fastsuncet {

class ColorJitter : public Jitter<dali::CPUBackend> {
 public:
  using Jitter<dali::CPUBackend>::Jitter;

 protected:
  void RunImpl(dali::Workspace &ws) override {
    const auto &images = ws.Input<dali::CPUBackend>(0);
    auto &jittered = ws.Output<dali::CPUBackend>(0);
    jittered.SetLayout(images.GetLayout());
    auto &threads = ws.GetThreadPool();
    for (int i = 0; i < images.num_samples(); i++) {
      const auto bytes = images.shape().tensor_size(i);
      threads.AddWork(
          [&, i, bytes](int) {
            const color_jitter::Factors by = factors(i);
            float saturation[9];
            saturation_matrix(by.saturation, saturation);
            color_jitter::jitter(images.tensor<uint8_t>(i), jittered.mutable_tensor<uint8_t>(i), bytes / 3, by,
                                 saturation);
          },
          bytes);
    }
    threads.RunAll();
  }
};

}  // namespace fastsuncet

COLOR_JITTER_SCHEMA(fastsuncet__ColorJitter);
DALI_REGISTER_OPERATOR(fastsuncet__ColorJitter, fastsuncet::ColorJitter, dali::CPU);
