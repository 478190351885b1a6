// native/core/hip.cpp: HIP's driver in the place of CUDA's: the same entry points, for AMD's GPUs.
//
// HIP's functions mostly are CUDA's under other names. Those that differ are called through the
// functions here. A device stands for its context: HIP has no others. What HIP cannot do yet says
// so by its code: copies inside recorded graphs.
#include <cstring>
#include <string>

#include "core/cuda.h"

namespace plait::cuda {
namespace {
constexpr int kInvalidValue = 1, kNotSupported = 801;

// As hipKernelNodeParams; a test compares.
struct HipNodeParams {
  uint32_t block_x, block_y, block_z;
  void** extra;
  void* function;
  uint32_t grid_x, grid_y, grid_z;
  void** parameters;
  uint32_t shared;
};
// hipDeviceProp_t, of which one field is read.
constexpr size_t kPropertiesNbytes = 1472, kArchitectureAt = 1160, kArchitectureNbytes = 256;
// Numbers of hipDeviceAttribute_t.
enum HipAttribute : int { kMultiprocessors = 63, kSharedOfBlock = 74, kWarpSize = 87 };

using Launch = int (*)(Function, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                       uint32_t, Stream, void**, void**);
using LaunchCooperative = int (*)(Function, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                                  uint32_t, uint32_t, Stream, void**);

// Of the library that was opened: a process has one.
struct {
  int (*get_device)(int*);
  int (*set_device)(int);
  int (*attribute)(int*, int, int);
  int (*properties)(void*, int);
  Launch launch;
  LaunchCooperative launch_cooperative;
  int (*set_node)(GraphExec, GraphNode, const HipNodeParams*);
} hip;

void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }

int current_context(void** context) {
  int device = 0;
  const int code = hip.get_device(&device);
  *context = code == 0 ? context_of(device) : nullptr;
  return code;
}

int retain_context(void** context, int device) {
  *context = context_of(device);
  return 0;
}

int set_context(void* context) {
  return hip.set_device(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
}

// By the numbers that CUDA has for them.
int device_attribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 16: return hip.attribute(value, kMultiprocessors, device);
    case 97: return hip.attribute(value, kSharedOfBlock, device);
    default: return kInvalidValue;
  }
}

int lanes_of_warp(int* lanes) {
  int device = 0;
  const int code = hip.get_device(&device);
  return code == 0 ? hip.attribute(lanes, kWarpSize, device) : code;
}

// "gfx942:sramecc+:xnack-" -> "gfx942"
int architecture_of(const Driver&, std::string* name, int device) {
  alignas(16) char properties[2 * kPropertiesNbytes];  // a newer HIP may have more of them
  const int code = hip.properties(properties, device);
  const char* text = properties + kArchitectureAt;
  if (code == 0) name->assign(text, strnlen(text, kArchitectureNbytes));
  *name = name->substr(0, name->find(':'));
  return code;
}

int launch(const Config* c, Function f, void** parameters, void**) {
  bool cooperative = false;
  for (uint32_t k = 0; k < c->n_attributes; ++k) {
    if (c->attributes[k].id != Attribute::cooperative) return kNotSupported;
    cooperative = true;
  }
  if (cooperative)
    return hip.launch_cooperative(f, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y,
                                  c->block_z, c->shared, c->stream, parameters);
  return hip.launch(f, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z,
                    c->shared, c->stream, parameters, nullptr);
}

int set_node(GraphExec graph, GraphNode node, const NodeParams* p) {
  const HipNodeParams params = {.block_x = p->block_x,
                                .block_y = p->block_y,
                                .block_z = p->block_z,
                                .extra = nullptr,
                                .function = p->function,
                                .grid_x = p->grid_x,
                                .grid_y = p->grid_y,
                                .grid_z = p->grid_z,
                                .parameters = p->parameters,
                                .shared = p->shared};
  return hip.set_node(graph, node, &params);
}
}  // namespace

void Driver::find_hip() {
  need(hip.get_device, "hipGetDevice");
  need(hip.set_device, "hipSetDevice");
  need(hip.attribute, "hipDeviceGetAttribute");
  need(hip.properties, "hipGetDevicePropertiesR0600");
  need(hip.launch, "hipModuleLaunchKernel");
  need(hip.launch_cooperative, "hipModuleLaunchCooperativeKernel");
  need(hip.set_node, "hipGraphExecKernelNodeSetParams");
  need(init, "hipInit");
  need(error_string, "hipDrvGetErrorString");
  current_device = hip.get_device;
  this->current_context = cuda::current_context;
  this->retain_context = cuda::retain_context;
  this->set_context = cuda::set_context;
  this->device_attribute = cuda::device_attribute;
  this->lanes_of_warp = cuda::lanes_of_warp;
  architecture = architecture_of;
  need(load_module, "hipModuleLoadData");
  need(unload_module, "hipModuleUnload");
  need(function, "hipModuleGetFunction");
  need(function_attribute, "hipFuncGetAttribute");
  // A kernel may have all shared memory of a block without asking.
  set_function_attribute = [](Function, int, int) { return 0; };
  this->launch = cuda::launch;
  parameter = nullptr;
  need(is_capturing, "hipStreamIsCapturing");
  need(capture_info, "hipStreamGetCaptureInfo_v2");
  this->set_node = cuda::set_node;
  copy_node = [](GraphNode, CopyParams*) { return kNotSupported; };
  set_copy_node = [](GraphExec, GraphNode, const CopyParams*, void*) { return kNotSupported; };
  need(launch_graph, "hipGraphLaunch");
  need(copy, "hipMemcpyDtoDAsync");
  need(make_event, "hipEventCreateWithFlags");
  need(record_event, "hipEventRecord");
  need(wait_event, "hipStreamWaitEvent");
  need(synchronize, "hipDeviceSynchronize");
  records_early = false;
  need(allocate, "hipMallocAsync");
  need(free, "hipFreeAsync");
}

}  // namespace plait::cuda
