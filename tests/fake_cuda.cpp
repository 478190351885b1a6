// tests/fake_cuda.cpp: a CUDA driver that launches nothing and writes down what it was told.
//
// Lines go to the file that $FAKE_CUDA_LOG names; without one it is silent, and a launch needs no
// memory. An image is text: "symbol parameters static", and the bytes of each parameter where they
// are not 8; or a real cubin, which says the same in its own way. With $FAKE_CUDA_WORDS a launch's
// parameters are all written down. A kernel that the library $FAKE_CUDA_HOST has is called: memory
// is the host's. Its clock runs while kernels do: best of all with 256 threads and 8 programs.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "core/cuda.h"

namespace {
struct Image {
  std::string symbol;
  size_t parameters;
  int fixed;
  std::vector<size_t> nbytes;
  void* context = nullptr;
};

thread_local void* current = nullptr;
size_t n_allocated = 0;
std::atomic<int> now_us = 0;

// A cubin's records of parameters are 04 17 0c 00, 4 bytes, u16 ordinal, u16 offset, u32 with the
// bytes of the parameter from bit 18 on. How long the file is follows from where its table of
// sections ends.
void read_cubin(const char* data, Image& image) {
  uint64_t sections;
  uint16_t size, n;
  std::memcpy(&sections, data + 40, 8);
  std::memcpy(&size, data + 58, 2);
  std::memcpy(&n, data + 60, 2);
  for (const char* at = data; at + 16 < data + sections + size * n; at += 4) {
    uint32_t words[4];
    std::memcpy(words, at, sizeof words);
    if (words[0] != 0x000c1704 || words[1] != 0) continue;
    image.nbytes.resize(std::max<size_t>(image.nbytes.size(), (words[2] & 0xffff) + 1));
    image.nbytes[words[2] & 0xffff] = words[3] >> 18;
  }
  image.parameters = image.nbytes.size();
}

template <class... Args>
void note(const char* format, Args... args) {
  if (!std::getenv("FAKE_CUDA_LOG")) return;
  static FILE* out = std::fopen(std::getenv("FAKE_CUDA_LOG"), "a");
  std::fprintf(out, format, args...);
  std::fflush(out);
}

// void kernel(const uint32_t grid[3], void** parameters)
using HostKernel = void (*)(const uint32_t*, void**);
HostKernel host_kernel(const std::string& symbol) {
  static void* library =
      std::getenv("FAKE_CUDA_HOST") ? dlopen(std::getenv("FAKE_CUDA_HOST"), RTLD_NOW) : nullptr;
  return library ? reinterpret_cast<HostKernel>(dlsym(library, symbol.c_str())) : nullptr;
}

Image& of(void* handle) { return *static_cast<Image*>(handle); }
}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuGetErrorString(int code, const char** text) {
  *text = code == 500 ? "named symbol not found" : "out of luck";
  return 0;
}
int cuCtxGetDevice(int* device) {
  *device = 3;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  static char contexts[8];
  note("retain %d\n", device);
  *context = &contexts[device];
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  static const char* capability = std::getenv("FAKE_CUDA_CAPABILITY");
  *value = attribute == 75                  ? (capability ? std::atoi(capability) : 9)
           : attribute == 76                ? 0
           : attribute == 97 && device == 3 ? 232448
                                            : -1;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  auto* made = new Image;
  made->context = current;
  *module = made;
  if (std::memcmp(image, "\177ELF", 4) == 0) {
    read_cubin(static_cast<const char*>(image), *made);
    return 0;
  }
  std::istringstream text(static_cast<const char*>(image));
  if (!(text >> made->symbol >> made->parameters >> made->fixed) || made->parameters > 4096) {
    delete made;
    return 200;
  }
  for (size_t n; text >> n;) made->nbytes.push_back(n);
  made->nbytes.resize(made->parameters, 8);
  return 0;
}
int cuModuleUnload(void* module) {
  note("unload %s\n", of(module).symbol.c_str());
  delete static_cast<Image*>(module);
  return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (of(module).symbol.empty()) of(module).symbol = name;  // a cubin
  if (of(module).symbol != name) return 500;
  *function = module;
  return 0;
}
int cuFuncGetAttribute(int* value, int, void* function) {
  *value = of(function).fixed;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  note("set %s %d %d\n", of(function).symbol.c_str(), attribute, value);
  return 0;
}
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  if (index >= of(function).parameters) return 1;
  *offset = 8 * index;
  *size = of(function).nbytes[index];
  return 0;
}
int cuLaunchKernelEx(const plait::cuda::Config* c, void* function, void** parameters,
                     void** extra) {
  if (of(function).context != current) return 400;
  if (c->block_x > 1024) return 701;
  if (const HostKernel kernel = host_kernel(of(function).symbol)) kernel(&c->grid_x, parameters);
  now_us += 1 + std::abs(static_cast<int>(c->block_x) - 256) +
            10 * std::abs(static_cast<int>(c->grid_x) - 8);
  if (!std::getenv("FAKE_CUDA_LOG")) return 0;
  char text[256];
  std::snprintf(text, sizeof text,
                "launch %s grid %u %u %u block %u %u %u shared %u stream %zu extra %d first %lld",
                of(function).symbol.c_str(), c->grid_x, c->grid_y, c->grid_z, c->block_x,
                c->block_y, c->block_z, c->shared, reinterpret_cast<size_t>(c->stream),
                extra != nullptr, static_cast<long long>(*static_cast<int64_t*>(parameters[0])));
  std::ostringstream line;  // written at once: threads launch together
  line << text;
  for (uint32_t k = 0; k < c->n_attributes; ++k) {
    const auto& [id, pad, value] = c->attributes[k];
    line << " attribute " << id << ' ' << value[0] << ' ' << value[1] << ' ' << value[2];
  }
  for (size_t k = 0; std::getenv("FAKE_CUDA_WORDS") && k < of(function).parameters; ++k) {
    uint64_t word = 0;
    std::memcpy(&word, parameters[k], std::min<size_t>(of(function).nbytes[k], sizeof word));
    line << ' ' << std::hex << word;
  }
  note("%s\n", line.str().c_str());
  return reinterpret_cast<size_t>(c->stream) == 13 ? 719 : 0;
}
// A map's first word is its number.
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* base,
                           const uint64_t* shape, const uint64_t* strides, const uint32_t* block,
                           const uint32_t* steps, int interleave, int swizzle, int promotion,
                           int fill) {
  static uint64_t n = 0;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) return 1;
  std::fill(map, map + 16, ++n);
  std::ostringstream line;
  line << "map " << n << " type " << type << " base " << base << " swizzle " << swizzle << " fill "
       << fill << ' ' << interleave << promotion;
  for (uint32_t k = 0; k < rank; ++k)
    line << " (" << shape[k] << ' ' << strides[k] << ' ' << block[k] << ' ' << steps[k] << ')';
  note("%s\n", line.str().c_str());
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuStreamIsCapturing(void* stream, int* status) {
  *status = reinterpret_cast<size_t>(stream) == 17;
  return 0;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph,
                              const void*** nodes, size_t* n) {
  static const void* node[1] = {stream};
  *status = 1;
  *id = 1;
  *graph = nullptr;
  *nodes = node;
  *n = 1;
  return 0;
}
int cuStreamGetCaptureInfo_v3() { return 801; }
int cuGraphAddKernelNode_v2(void** node, void* graph, void* const* dependencies, size_t n,
                            const plait::cuda::NodeParams* p) {
  note("add to %zu behind %zu %zu: %s grid %u %u %u block %u first %lld\n",
       reinterpret_cast<size_t>(graph), n, n ? reinterpret_cast<size_t>(dependencies[0]) : 0,
       of(p->function).symbol.c_str(), p->grid_x, p->grid_y, p->grid_z, p->block_x,
       static_cast<long long>(*static_cast<int64_t*>(p->parameters[0])));
  *node = reinterpret_cast<void*>(77);
  return 0;
}
int cuGraphKernelNodeSetAttribute(void* node, int id, const uint32_t* value) {
  note("node %zu has attribute %d %u\n", reinterpret_cast<size_t>(node), id, value[0]);
  return 0;
}
int cuGraphExecKernelNodeSetParams_v2(void* graph, void* node, const plait::cuda::NodeParams* p) {
  note(
      "node %zu of %zu: %s grid %u %u %u block %u %u %u shared %u extra %d kernel %d context %d "
      "first %lld\n",
      reinterpret_cast<size_t>(node), reinterpret_cast<size_t>(graph),
      of(p->function).symbol.c_str(), p->grid_x, p->grid_y, p->grid_z, p->block_x, p->block_y,
      p->block_z, p->shared, p->extra != nullptr, p->kernel != nullptr, p->context != nullptr,
      static_cast<long long>(*static_cast<int64_t*>(p->parameters[0])));
  return 0;
}
int cuGraphMemcpyNodeGetParams(void*, plait::cuda::CopyParams* p) {
  *p = {};
  return 0;
}
int cuGraphExecMemcpyNodeSetParams(void*, void*, const plait::cuda::CopyParams*, void*) {
  return 0;
}
int cuGraphLaunch(void* graph, void* stream) {
  note("graph %zu on %zu\n", reinterpret_cast<size_t>(graph), reinterpret_cast<size_t>(stream));
  return 0;
}
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t nbytes, void*) {
  std::memcpy(to, from, nbytes);
  return 0;
}
int cuMemAlloc_v2(uint64_t* memory, size_t nbytes) {
  void* made = nullptr;
  const int error = posix_memalign(&made, 256, nbytes);
  *memory = reinterpret_cast<uintptr_t>(made);
  return error;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t nbytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, nbytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t nbytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), nbytes);
  return 0;
}
int cuMemAllocAsync(void** memory, size_t nbytes, void* stream) {
  note("allocate %zu on %zu\n", nbytes, reinterpret_cast<size_t>(stream));
  *memory = reinterpret_cast<void*>(0x1000 * ++n_allocated);
  return 0;
}
int cuMemFreeAsync(void* memory, void* stream) {
  note("free %zx on %zu\n", reinterpret_cast<size_t>(memory), reinterpret_cast<size_t>(stream));
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  *event = new int;
  return 0;
}
int cuEventRecord(void* event, void* stream) {
  *static_cast<int*>(event) = now_us;
  note("record on %zu\n", reinterpret_cast<size_t>(stream));
  return 0;
}
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void* start, void* end) {
  *ms = static_cast<float>(*static_cast<int*>(end) - *static_cast<int*>(start)) / 1000;
  return 0;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<int*>(event);
  return 0;
}
int cuMemsetD8Async(void* memory, unsigned char value, size_t n, void* stream) {
  note("fill %d %zu on %zu\n", value, n, reinterpret_cast<size_t>(stream));
  (void)memory;
  return 0;
}
int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, static_cast<size_t>(size), "Fake GPU");
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuStreamWaitEvent(void* stream, void*, unsigned) {
  note("%zu waits\n", reinterpret_cast<size_t>(stream));
  return 0;
}
}
