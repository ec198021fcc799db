// One operator of DALI for a whole view: color, gray, blur, flip and normalization of uint8 HWC images.
//
// The GPU's needs no CUDA toolkit and no library at link time: it is given its compiled kernels, and it finds the
// functions of the driver that DALI has loaded by name.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "dali/core/geom/mat.h"
#include "dali/kernels/dynamic_scratchpad.h"
#include "dali/pipeline/operator/arg_helper.h"
#include "dali/pipeline/operator/checkpointing/stateless_operator.h"
#include "dali/pipeline/operator/operator.h"
#include "view.h"

namespace fastsuncet {

using dali::CPUBackend, dali::GPUBackend;

// RGB to YIQ, and back by DALI's own inverse of it. Saturation scales I and Q.
const dali::mat3 kYiq = {{{.299f, .587f, .114f}, {.596f, -.274f, -.321f}, {.211f, -.523f, .311f}}};
const dali::mat3 kRgb = dali::inverse(kYiq);

void saturation_matrix(float saturation, float *out) {
  dali::mat3 scaled = dali::mat3::eye();
  scaled(1, 1) = scaled(2, 2) = saturation;
  const dali::mat3 m = kRgb * scaled * kYiq;
  for (int i = 0; i < 9; i++) out[i] = m(i / 3, i % 3);
}

// The weights of DALI's Gaussian blur, in its order of operations.
std::vector<float> gaussian(float sigma, int radius) {
  std::vector<float> weights(2 * radius + 1);
  const float scale = .5f / (sigma * sigma);
  float sum = 0;
  for (int x = -radius; x < 0; x++) sum += weights[x + radius] = std::exp(-(x * x * scale));
  const float inverse = 1.f / (sum * 2.f + 1.f);
  weights[radius] = inverse;
  for (int x = 0; x < radius; x++) weights[2 * radius - x] = weights[x] *= inverse;
  return weights;
}

// What each level of each channel becomes: (256, 3).
std::vector<float> normalized(const std::vector<float> &mean, const std::vector<float> &std) {
  std::vector<float> table(256 * 3);
  for (int i = 0; i < 256 * 3; i++) {
    const float inverse = 1.f / static_cast<double>(std[i % 3]);
    table[i] = (static_cast<float>(i / 3) - mean[i % 3]) * inverse;
  }
  return table;
}

template <typename Backend>
class Views : public dali::StatelessOperator<Backend> {
 public:
  explicit Views(const dali::OpSpec &spec)
      : dali::StatelessOperator<Backend>(spec),
        window_(spec.GetArgument<int>("window")),
        brightness_("brightness", spec),
        contrast_("contrast", spec),
        saturation_("saturation", spec),
        hue_("hue", spec),
        sigma_("sigma", spec),
        gray_("gray", spec),
        flip_("flip", spec),
        order_("order", spec) {
    const auto mean = spec.GetRepeatedArgument<float>("mean"), std = spec.GetRepeatedArgument<float>("std");
    DALI_ENFORCE(mean.size() == 3 && std.size() == 3, "View takes a mean and an std of three channels");
    table_ = normalized(mean, std);
  }

 protected:
  bool SetupImpl(std::vector<dali::OutputDesc> &outputs, const dali::Workspace &ws) override {
    const auto &images = ws.Input<Backend>(0);
    const auto &shape = images.shape();
    DALI_ENFORCE(images.type() == DALI_UINT8, "View takes uint8 images");
    for (int i = 0; i < shape.num_samples(); i++)
      DALI_ENFORCE(shape.tensor_shape_span(i)[2] == 3, "View takes images of three channels, RGB");
    for (auto *argument : {&brightness_, &contrast_, &saturation_, &hue_, &sigma_})
      argument->Acquire(this->spec_, ws, shape.num_samples());
    for (auto *argument : {&gray_, &flip_, &order_}) argument->Acquire(this->spec_, ws, shape.num_samples());
    outputs.resize(1);
    outputs[0] = {shape, DALI_FLOAT};
    return true;
  }

  // The weights of its blur are left to the caller.
  view::View view_of(dali::Workspace &ws, int i) {
    const auto &images = ws.Input<Backend>(0);
    const auto shape = images.shape().tensor_shape_span(i);
    const float sigma = sigma_[i].data[0];
    view::View v{};
    v.in = static_cast<const uint8_t *>(images.raw_tensor(i));
    v.out = static_cast<float *>(ws.Output<Backend>(0).raw_mutable_tensor(i));
    v.height = shape[0], v.width = shape[1];
    v.radius = sigma > 0 ? (window_ ? window_ / 2 : static_cast<int>(std::ceil(sigma * 3))) : 0;
    DALI_ENFORCE(!v.radius || v.radius < std::min(v.height, v.width), "View: the blur is wider than the image");
    v.flip = flip_[i].data[0];
    v.by = {brightness_[i].data[0], contrast_[i].data[0], saturation_[i].data[0],
            hue_[i].data[0],        gray_[i].data[0],     order_[i].data[0]};
    saturation_matrix(v.by.saturation, v.saturation);
    return v;
  }

  const int window_;
  std::vector<float> table_;
  dali::ArgValue<float> brightness_, contrast_, saturation_, hue_, sigma_;
  dali::ArgValue<int> gray_, flip_, order_;
};

// One job of DALI's threads for each image.
class ViewsCpu : public Views<CPUBackend> {
 public:
  using Views<CPUBackend>::Views;

 protected:
  void RunImpl(dali::Workspace &ws) override {
    const auto &images = ws.Input<CPUBackend>(0);
    ws.Output<CPUBackend>(0).SetLayout(images.GetLayout());
    auto &threads = ws.GetThreadPool();
    scratch_.resize(threads.NumThreads());
    for (int i = 0; i < images.num_samples(); i++) {
      threads.AddWork(
          [&, i](int thread) {
            view::View v = view_of(ws, i);
            const std::vector<float> weights = gaussian(sigma_[i].data[0], v.radius);
            v.weights = weights.data();
            view::make(v, table_.data(), scratch_[thread]);
          },
          images.shape().tensor_size(i));
    }
    threads.RunAll();
  }

 private:
  std::vector<view::Scratch> scratch_;
};

// The driver's functions, looked up once. Linking against the driver would fail on a machine without a GPU.
struct Driver {
  decltype(&cuGetErrorName) error_name;
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleGetFunction) function;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuMemcpyHtoDAsync) copy;

  Driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    DALI_ENFORCE(library != nullptr, "View: no NVIDIA driver (libcuda.so.1) was found");
    find(library, "cuGetErrorName", error_name);
    find(library, "cuModuleLoadData", load);
    find(library, "cuModuleGetFunction", function);
    find(library, "cuLaunchKernel", launch);
    find(library, "cuMemcpyHtoDAsync_v2", copy);  // the name without a number is an older signature
  }

  template <typename F>
  static void find(void *library, const char *name, F &function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    DALI_ENFORCE(function != nullptr, std::string("View: the driver has no ") + name);
  }

  void check(CUresult result, const char *what) const {
    if (result == CUDA_SUCCESS) return;
    const char *name = nullptr;
    error_name(result, &name);
    DALI_FAIL(std::string("View: ") + what + ": " + (name ? name : "an error without a name"));
  }
};

const Driver &driver() {
  static const Driver found;
  return found;
}

class ViewsGpu : public Views<GPUBackend> {
 public:
  explicit ViewsGpu(const dali::OpSpec &spec) : Views<GPUBackend>(spec) {
    const auto digits = spec.GetArgument<std::string>("kernels");
    DALI_ENFORCE(!digits.empty(), "View on a GPU takes its compiled kernels, in hexadecimal digits");
    for (size_t i = 0; i < digits.size(); i += 2) kernels_ += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }

 protected:
  void RunImpl(dali::Workspace &ws) override {
    const auto &images = ws.Input<GPUBackend>(0);
    ws.Output<GPUBackend>(0).SetLayout(images.GetLayout());
    const int count = images.num_samples();
    DALI_ENFORCE(count <= 65535, "View takes up to 65,535 images a batch: a row of its grid each");
    std::vector<view::View> views(count);
    std::vector<std::vector<float>> weights(count);
    long long pixels = 0, squares = 0, most = 0;
    bool contrasts = false;
    size_t floats = 0;
    for (int i = 0; i < count; i++) {
      const view::View &v = views[i] = view_of(ws, i);
      DALI_ENFORCE(v.radius <= view::kWidest, "View on a GPU: the blur is wider than 65 pixels");
      weights[i] = gaussian(sigma_[i].data[0], v.radius);
      floats += weights[i].size();
      const auto sides = [](long long n) { return (n + view::kSide - 1) / view::kSide; };
      pixels = std::max(pixels, v.pixels());
      squares = std::max(squares, sides(v.height) * sides(v.width));
      most = std::max<long long>(most, v.radius);
      contrasts = contrasts || v.by.contrast != 1;
    }
    if (pixels == 0) return;

    // One block of memory and one copy: a zero sum for each image, the views, the weights, the table. DALI's pools own
    // it and reuse it in the order of the stream, the pinned side too.
    const size_t of_sums = count * sizeof(unsigned long long), of_views = count * sizeof(view::View);
    const size_t bytes = of_sums + of_views + (floats + table_.size()) * sizeof(float);
    dali::kernels::DynamicScratchpad scratch(ws.stream());
    char *host = scratch.AllocatePinned<char>(bytes, 16), *gpu = scratch.AllocateGPU<char>(bytes, 16);
    std::fill_n(host, of_sums, 0);
    size_t at = of_sums + of_views;
    for (int i = 0; i < count; i++) {
      views[i].weights = reinterpret_cast<const float *>(gpu + at);
      std::copy(weights[i].begin(), weights[i].end(), reinterpret_cast<float *>(host + at));
      at += weights[i].size() * sizeof(float);
    }
    std::copy(views.begin(), views.end(), reinterpret_cast<view::View *>(host + of_sums));
    std::copy(table_.begin(), table_.end(), reinterpret_cast<float *>(host + at));

    load();
    const Driver &cuda = driver();
    const CUstream stream = ws.stream();
    cuda.check(cuda.copy(reinterpret_cast<CUdeviceptr>(gpu), host, bytes, stream), "copying the factors");
    void *sums = gpu, *of_gpu = gpu + of_sums, *table = gpu + at;
    void *arguments[] = {&of_gpu, &sums, &table, &most};
    constexpr unsigned kThreads = 256, kEach = 4;  // pixels a thread, where images are that large
    const unsigned blocks = std::clamp<long long>(pixels / (kThreads * kEach), 1, 1024);
    if (contrasts)
      cuda.check(cuda.launch(gray_sums_, blocks, count, 1, kThreads, 1, 1, 0, stream, arguments, nullptr), "gray_sums");
    cuda.check(cuda.launch(make_, squares, count, 1, kThreads, 1, 1, view::shared_bytes(most), stream, arguments, nullptr),
               "make_views");
  }

 private:
  // At the first batch, when the context that DALI uses is known. Never unloaded.
  void load() {
    if (make_ != nullptr) return;
    const Driver &cuda = driver();
    CUmodule module;
    cuda.check(cuda.load(&module, kernels_.data()), "loading the kernels");
    cuda.check(cuda.function(&gray_sums_, module, "gray_sums"), "gray_sums");
    cuda.check(cuda.function(&make_, module, "make_views"), "make_views");
  }

  std::string kernels_;
  CUfunction gray_sums_ = nullptr, make_ = nullptr;
};

}  // namespace fastsuncet

DALI_SCHEMA(fastsuncet__View)
    .DocStr("Brightness, contrast about the mean gray, saturation, hue in HSV, gray, blur, flip and normalization.")
    .NumInput(1)
    .NumOutput(1)
    .InputLayout(0, "HWC")
    .AddOptionalArg("brightness", "Factor; 1 is neutral.", 1.f, true)
    .AddOptionalArg("contrast", "Factor; 1 is neutral.", 1.f, true)
    .AddOptionalArg("saturation", "Factor; 1 is neutral.", 1.f, true)
    .AddOptionalArg("hue", "Turns of the color circle; 0 is neutral.", 0.f, true)
    .AddOptionalArg("order", "Factors in the order of two bits each, lowest first: 0 brightness ... 3 hue.", 0xE4, true)
    .AddOptionalArg("gray", "1: the image gets three equal channels of luma; 0 is neutral.", 0, true)
    .AddOptionalArg("sigma", "Standard deviation of the blur, in pixels; 0 is neutral.", 0.f, true)
    .AddOptionalArg("window", "Width of the blur's kernel, in pixels; 0: 2 ceil(3 sigma) + 1.", 0)
    .AddOptionalArg("flip", "1: mirrored left to right.", 0, true)
    .AddArg("mean", "Subtracted from each channel's levels.", DALI_FLOAT_VEC)
    .AddArg("std", "Divides each channel's levels after that.", DALI_FLOAT_VEC)
    .AddOptionalArg("kernels", "The compiled view.cu of a GPU, in hexadecimal digits.", std::string());

DALI_REGISTER_OPERATOR(fastsuncet__View, fastsuncet::ViewsCpu, dali::CPU);
DALI_REGISTER_OPERATOR(fastsuncet__View, fastsuncet::ViewsGpu, dali::GPU);
