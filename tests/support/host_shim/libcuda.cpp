// A driver without a GPU: the calls that fastsuncet/kernels/launcher.py needs, on the kernels' host build. NVIDIA's
// Python bindings load it as libcuda.so.1, so it receives what a driver would receive.
#include "kernels.cpp"

#include <dlfcn.h>

#include <map>

using Launcher = int (*)(void**, int, unsigned, unsigned, int, int);

static int init(unsigned) { return 0; }

// As on a GPU, a thread has no context until one is set.
static thread_local void* context = nullptr;
static int get_context(void** current) { return *current = context, 0; }
static int set_context(void* wanted) { return context = wanted, 0; }

// A module is only checked to be an ELF file, as a cubin is.
static int load(void** module, const void* image) {
    *module = const_cast<void*>(image);
    return std::memcmp(image, "\177ELF", 4) == 0 ? 0 : 200;
}

// FASTSUNCET_SPACE names the source; the names of a host build's launchers begin with it.
static int function_of(void** function, void*, const char* name) {
    const std::string full = std::string("launch_") + std::getenv("FASTSUNCET_SPACE") + "_" + name;
    *function = dlsym(RTLD_DEFAULT, full.c_str());
    if (!*function) *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), full.c_str());
    return *function ? 0 : 500;
}

static int launch(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** values, void** extra) {
    if (!context) return 201;
    if (gz != 1 || by != 1 || bz != 1 || extra != nullptr || stream != reinterpret_cast<void*>(0x1234)) return 1;
    reinterpret_cast<Launcher>(function)(values, shim::ANY, gx, gy, bx, shared);
    return 0;
}

extern "C" int cuGetProcAddress_v2(const char* name, void** address, int, uint64_t, int* status) {
    static const std::map<std::string, void*> calls = {
        {"cuGetProcAddress", reinterpret_cast<void*>(cuGetProcAddress_v2)},
        {"cuInit", reinterpret_cast<void*>(init)},
        {"cuCtxGetCurrent", reinterpret_cast<void*>(get_context)},
        {"cuCtxSetCurrent", reinterpret_cast<void*>(set_context)},
        {"cuModuleLoadData", reinterpret_cast<void*>(load)},
        {"cuModuleGetFunction", reinterpret_cast<void*>(function_of)},
        {"cuLaunchKernel", reinterpret_cast<void*>(launch)},
    };
    const auto found = calls.find(name);
    *address = found == calls.end() ? nullptr : found->second;
    if (status) *status = *address ? 0 : 1;
    return *address ? 0 : 500;
}
