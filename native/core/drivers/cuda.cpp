// native/core/drivers/cuda.cpp: the CUDA driver, for NVIDIA's GPUs.
#include <cstdlib>

#include "core/cuda.h"

namespace plait::cuda {
namespace {
constexpr int kConditionalNodes = 12040;  // the first driver that has them whole

int architecture_of(const Driver& driver, std::string* name, int device) {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
  int major = 0, minor = 0;
  int code = driver.device_attribute(&major, kMajor, device);
  if (code == 0) code = driver.device_attribute(&minor, kMinor, device);
  *name = "sm_" + std::to_string(10 * major + minor);
  return code;
}

// Code for sm_90 runs on that very architecture (from sm_90 on kernels use what is special to one),
// for sm_80 on later ones of its generation too; for ptx_80 on it and all later ones.
bool runs(const std::string& made_for, const std::string& gpu) {
  if (!gpu.starts_with("sm_")) return false;
  const int needed = std::atoi(made_for.c_str() + made_for.find('_') + 1);
  const int capability = std::atoi(gpu.c_str() + 3);
  if (made_for.starts_with("ptx_")) return capability >= needed;
  return needed < 90 && capability > needed && capability / 10 == needed / 10;
}

void find_entries(Driver& d) {
  d.need(d.init, "cuInit");
  d.need(d.error_string, "cuGetErrorString");
  d.need(d.current_device, "cuCtxGetDevice");
  d.need(d.current_context, "cuCtxGetCurrent");
  d.need(d.retain_context, "cuDevicePrimaryCtxRetain");
  d.need(d.set_context, "cuCtxSetCurrent");
  d.need(d.device_attribute, "cuDeviceGetAttribute");
  d.architecture = architecture_of;
  d.lanes_of_warp = [](int* lanes) {
    *lanes = 32;
    return 0;
  };
  d.need(d.load_module, "cuModuleLoadData");
  d.need(d.unload_module, "cuModuleUnload");
  d.need(d.function, "cuModuleGetFunction");
  d.need(d.function_attribute, "cuFuncGetAttribute");
  d.need(d.set_function_attribute, "cuFuncSetAttribute");
  d.need(d.launch, "cuLaunchKernelEx");
  d.find(d.parameter, "cuFuncGetParamInfo");
  d.need(d.is_capturing, "cuStreamIsCapturing");
  d.need(d.capture_info, "cuStreamGetCaptureInfo_v2");
  void* early = nullptr;
  d.find(early, "cuStreamGetCaptureInfo_v3");
  d.records_early = early;
  int version = 0;
  int (*find_version)(int*) = nullptr;
  d.find(find_version, "cuDriverGetVersion");
  if (find_version && find_version(&version) == 0 && version >= kConditionalNodes) {
    d.find(d.make_condition, "cuGraphConditionalHandleCreate");
    d.find(d.add_node, "cuGraphAddNode_v2");
    d.find(d.after, "cuStreamUpdateCaptureDependencies");
    d.find(d.record_to, "cuStreamBeginCaptureToGraph");
    d.find(d.end_recording, "cuStreamEndCapture");
    d.find(d.node_type, "cuGraphNodeGetType");
    d.find(d.kernel_node, "cuGraphKernelNodeGetParams_v2");
    d.find(d.nodes_before, "cuGraphNodeGetDependencies_v2");
    d.find(d.parameter_of_kernel, "cuKernelGetParamInfo");
    d.find(d.destroy_node, "cuGraphDestroyNode");
    d.find(d.pointer_attribute, "cuPointerGetAttribute");
    d.find(d.fill_node, "cuGraphMemsetNodeGetParams");
    d.find(d.set_fill_node, "cuGraphExecMemsetNodeSetParams");
  }
  d.need(d.set_node, "cuGraphExecKernelNodeSetParams_v2");
  d.need(d.copy_node, "cuGraphMemcpyNodeGetParams");
  d.need(d.set_copy_node, "cuGraphExecMemcpyNodeSetParams");
  d.need(d.launch_graph, "cuGraphLaunch");
  d.need(d.copy, "cuMemcpyDtoDAsync_v2");
  d.need(d.make_event, "cuEventCreate");
  d.need(d.record_event, "cuEventRecord");
  d.need(d.wait_event, "cuStreamWaitEvent");
  d.need(d.synchronize, "cuCtxSynchronize");
  d.find(d.allocate, "cuMemAllocAsync");
  d.find(d.free, "cuMemFreeAsync");
}
}  // namespace

const Maker kNvidia = {
    .libraries = {"libcuda.so.1"},
    .mark = "cuInit",
    .find_entries = find_entries,
    .gpus = {"sm_", "ptx_"},
    .runs = runs,
};

}  // namespace plait::cuda
