// native/core/drivers/hip.cpp: HIP's driver in the place of CUDA's: the same entry points, for
// AMD's GPUs.
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

void find_entries(Driver& d) {
  d.need(hip.get_device, "hipGetDevice");
  d.need(hip.set_device, "hipSetDevice");
  d.need(hip.attribute, "hipDeviceGetAttribute");
  d.need(hip.properties, "hipGetDevicePropertiesR0600");
  d.need(hip.launch, "hipModuleLaunchKernel");
  d.need(hip.launch_cooperative, "hipModuleLaunchCooperativeKernel");
  d.need(hip.set_node, "hipGraphExecKernelNodeSetParams");
  d.need(d.init, "hipInit");
  d.need(d.error_string, "hipDrvGetErrorString");
  d.current_device = hip.get_device;
  d.current_context = current_context;
  d.retain_context = retain_context;
  d.set_context = set_context;
  d.device_attribute = device_attribute;
  d.lanes_of_warp = lanes_of_warp;
  d.architecture = architecture_of;
  d.need(d.load_module, "hipModuleLoadData");
  d.need(d.unload_module, "hipModuleUnload");
  d.need(d.function, "hipModuleGetFunction");
  d.need(d.function_attribute, "hipFuncGetAttribute");
  // A kernel may have all shared memory of a block without asking.
  d.set_function_attribute = [](Function, int, int) { return 0; };
  d.launch = launch;
  d.parameter = nullptr;
  d.need(d.is_capturing, "hipStreamIsCapturing");
  d.need(d.capture_info, "hipStreamGetCaptureInfo_v2");
  d.set_node = set_node;
  d.copy_node = [](GraphNode, CopyParams*) { return kNotSupported; };
  d.set_copy_node = [](GraphExec, GraphNode, const CopyParams*, void*) { return kNotSupported; };
  d.need(d.launch_graph, "hipGraphLaunch");
  d.need(d.copy, "hipMemcpyDtoDAsync");
  d.need(d.make_event, "hipEventCreateWithFlags");
  d.need(d.record_event, "hipEventRecord");
  d.need(d.wait_event, "hipStreamWaitEvent");
  d.need(d.synchronize, "hipDeviceSynchronize");
  d.records_early = false;
  d.need(d.allocate, "hipMallocAsync");
  d.need(d.free, "hipFreeAsync");
}
}  // namespace

const Maker kAmd = {
    .libraries = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"},
    .mark = "hipInit",
    .find_entries = find_entries,
    .gpus = {"gfx"},
    .runs = [](const std::string&, const std::string&) { return false; },
};

}  // namespace plait::cuda
