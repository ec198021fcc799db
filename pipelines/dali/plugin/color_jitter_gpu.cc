// The GPU operator: color_jitter.cu in two launches a batch, through the driver that DALI has loaded.
//
// It needs no CUDA toolkit and no library at link time: NVRTC compiles the kernels to PTX (a string literal in ptx.inc),
// and the driver's functions are found by name. Not run on a GPU yet; the build command compares it there first.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "arguments.h"

namespace fastsuncet {

const char kPtx[] =
#include "ptx.inc"
    ;

// The driver's functions, looked up once. Linking against the driver would fail on a machine without a GPU.
struct Driver {
  decltype(&cuGetErrorName) error_name;
  decltype(&cuCtxGetCurrent) context;
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleGetFunction) function;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuMemAllocAsync) allocate;
  decltype(&cuMemFreeAsync) free;
  decltype(&cuMemcpyHtoDAsync) copy;

  Driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    DALI_ENFORCE(library != nullptr, "ColorJitter: no NVIDIA driver (libcuda.so.1) was found");
    find(library, "cuGetErrorName", error_name);
    find(library, "cuCtxGetCurrent", context);
    find(library, "cuModuleLoadData", load);
    find(library, "cuModuleGetFunction", function);
    find(library, "cuLaunchKernel", launch);
    find(library, "cuMemAllocAsync", allocate);
    find(library, "cuMemFreeAsync", free);
    find(library, "cuMemcpyHtoDAsync_v2", copy);  // the name without a number is an older signature
  }

  template <typename F>
  static void find(void *library, const char *name, F &function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    DALI_ENFORCE(function != nullptr, std::string("ColorJitter: the driver has no ") + name);
  }

  void check(CUresult result, const char *what) const {
    if (result == CUDA_SUCCESS) return;
    const char *name = nullptr;
    error_name(result, &name);
    DALI_FAIL(std::string("ColorJitter: ") + what + ": " + (name ? name : "an error without a name"));
  }
};

const Driver &driver() {
  static const Driver found;
  return found;
}

class ColorJitterGpu : public Jitter<dali::GPUBackend> {
 public:
  using Jitter<dali::GPUBackend>::Jitter;

 protected:
  void RunImpl(dali::Workspace &ws) override {
    const auto &images = ws.Input<dali::GPUBackend>(0);
    auto &jittered = ws.Output<dali::GPUBackend>(0);
    jittered.SetLayout(images.GetLayout());
    const int count = images.num_samples();
    DALI_ENFORCE(count <= 65535, "ColorJitter takes up to 65,535 images a batch: a row of its grid each");
    // The jobs, then a zero sum for each, in one copy. The driver copies pageable memory before the call returns.
    std::vector<char> staged(count * (sizeof(color_jitter::Job) + sizeof(unsigned long long)));
    auto *jobs = reinterpret_cast<color_jitter::Job *>(staged.data());
    long long most = 0;
    bool contrasts = false;
    for (int i = 0; i < count; i++) {
      const long long pixels = images.shape().tensor_size(i) / 3;
      jobs[i] = {static_cast<const unsigned char *>(images.raw_tensor(i)),
                 static_cast<unsigned char *>(jittered.raw_mutable_tensor(i)), pixels, factors(i), {}};
      saturation_matrix(jobs[i].by.saturation, jobs[i].saturation);
      most = std::max(most, pixels);
      contrasts = contrasts || jobs[i].by.contrast != 1;
    }
    if (most == 0) return;
    load();
    const Driver &cuda = driver();
    const CUstream stream = ws.stream();
    CUdeviceptr at;
    cuda.check(cuda.allocate(&at, staged.size(), stream), "allocating memory for the factors");
    cuda.check(cuda.copy(at, staged.data(), staged.size(), stream), "copying the factors");
    CUdeviceptr sums = at + count * sizeof(color_jitter::Job);
    void *arguments[] = {&at, &sums};
    constexpr unsigned kThreads = 256, kEach = 4;  // pixels a thread, where images are that large
    const unsigned blocks = std::clamp<long long>(most / (kThreads * kEach), 1, 1024);
    if (contrasts)
      cuda.check(cuda.launch(gray_sums_, blocks, count, 1, kThreads, 1, 1, 0, stream, arguments, nullptr), "gray_sums");
    cuda.check(cuda.launch(jitter_pixels_, blocks, count, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
               "jitter_pixels");
    cuda.check(cuda.free(at, stream), "freeing the memory of the factors");
  }

 private:
  // At the first batch, when the context that DALI uses is known. Never unloaded.
  void load() {
    if (jitter_pixels_ != nullptr) return;
    const Driver &cuda = driver();
    CUmodule module;
    cuda.check(cuda.load(&module, kPtx), "loading the kernels");
    cuda.check(cuda.function(&gray_sums_, module, "gray_sums"), "gray_sums");
    cuda.check(cuda.function(&jitter_pixels_, module, "jitter_pixels"), "jitter_pixels");
  }

  CUfunction gray_sums_ = nullptr, jitter_pixels_ = nullptr;
};

}  // namespace fastsuncet

COLOR_JITTER_SCHEMA(fastsuncet__ColorJitterGpu);
DALI_REGISTER_OPERATOR(fastsuncet__ColorJitterGpu, fastsuncet::ColorJitterGpu, dali::GPU);
