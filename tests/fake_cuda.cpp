// tests/fake_cuda.cpp: a CUDA driver that launches nothing and writes down what it was told.
//
// Lines go to the file that $FAKE_CUDA_LOG names. An image is text: "symbol parameters static".
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/cuda.h"

namespace {
struct Image {
  std::string symbol;
  size_t parameters;
  int fixed;
};

template <class... Args>
void note(const char* format, Args... args) {
  static FILE* out = std::fopen(std::getenv("FAKE_CUDA_LOG"), "a");
  std::fprintf(out, format, args...);
  std::fflush(out);
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
  *context = nullptr;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  note("retain %d\n", device);
  *context = context;
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 97 && device == 3 ? 232448 : -1;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  auto* made = new Image;
  char symbol[64];
  if (std::sscanf(static_cast<const char*>(image), "%63s %zu %d", symbol, &made->parameters,
                  &made->fixed) != 3) {
    delete made;
    return 200;
  }
  made->symbol = symbol;
  *module = made;
  return 0;
}
int cuModuleUnload(void* module) {
  note("unload %s\n", of(module).symbol.c_str());
  delete static_cast<Image*>(module);
  return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
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
  *size = 8;
  return 0;
}
int cuLaunchKernelEx(const plait::cuda::Config* c, void* function, void** parameters, void** extra) {
  note("launch %s grid %u %u %u block %u %u %u shared %u stream %zu extra %d first %lld",
       of(function).symbol.c_str(), c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y,
       c->block_z, c->shared, reinterpret_cast<size_t>(c->stream), extra != nullptr,
       static_cast<long long>(*static_cast<int64_t*>(parameters[0])));
  for (uint32_t k = 0; k < c->n_attributes; ++k)
    note(" attribute %d %u %u %u", static_cast<int>(c->attributes[k].id), c->attributes[k].value[0],
         c->attributes[k].value[1], c->attributes[k].value[2]);
  note("%s", "\n");
  return reinterpret_cast<size_t>(c->stream) == 13 ? 719 : 0;
}
int cuCtxSynchronize() { return 0; }
int cuStreamIsCapturing(void* stream, int* status) {
  *status = reinterpret_cast<size_t>(stream) == 17;
  return 0;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, const void*** nodes,
                              size_t* n) {
  static const void* node[1] = {stream};
  *status = 1;
  *id = 1;
  *graph = nullptr;
  *nodes = node;
  *n = 1;
  return 0;
}
int cuGraphExecKernelNodeSetParams_v2(void* graph, void* node, const plait::cuda::NodeParams* p) {
  note("node %zu of %zu: %s grid %u %u %u block %u %u %u shared %u extra %d kernel %d context %d first %lld\n",
       reinterpret_cast<size_t>(node), reinterpret_cast<size_t>(graph), of(p->function).symbol.c_str(),
       p->grid_x, p->grid_y, p->grid_z, p->block_x, p->block_y, p->block_z, p->shared, p->extra != nullptr,
       p->kernel != nullptr, p->context != nullptr,
       static_cast<long long>(*static_cast<int64_t*>(p->parameters[0])));
  return 0;
}
int cuGraphMemcpyNodeGetParams(void*, plait::cuda::CopyParams* p) {
  *p = {};
  return 0;
}
int cuGraphExecMemcpyNodeSetParams(void*, void*, const plait::cuda::CopyParams*, void*) { return 0; }
int cuGraphLaunch(void* graph, void* stream) {
  note("graph %zu on %zu\n", reinterpret_cast<size_t>(graph), reinterpret_cast<size_t>(stream));
  return 0;
}
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t nbytes, void*) {
  std::memcpy(to, from, nbytes);
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  *event = event;
  return 0;
}
int cuEventRecord(void*, void* stream) {
  note("record on %zu\n", reinterpret_cast<size_t>(stream));
  return 0;
}
int cuStreamWaitEvent(void* stream, void*, unsigned) {
  note("%zu waits\n", reinterpret_cast<size_t>(stream));
  return 0;
}
}
