// native/torch/accelerator.cpp: torch's CUDA entry points, found at run time; torch for ROCm has
// them under the same names.
#include "accelerator.h"

#include <dlfcn.h>

#include "core/plan.h"

namespace plait {
namespace {
using CurrentStream = int (*)(int32_t device, void** stream);

CurrentStream current_stream() {
  static const CurrentStream found = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = dlopen("libtorch_hip.so", RTLD_NOW | RTLD_NOLOAD);
    return library ? reinterpret_cast<CurrentStream>(
                         dlsym(library, "aoti_torch_get_current_cuda_stream"))
                   : nullptr;
  }();
  return found;
}
}  // namespace

Accelerator::Accelerator(c10::Device device)
    : device_(device), allocator_(nullptr), guard_(nullptr) {
  if (!current_stream())
    throw LoadError("a program for " + device.str() + ", and this torch is built without CUDA");
  allocator_ = c10::GetAllocator(c10::DeviceType::CUDA);
  guard_ = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
}

cuda::Stream Accelerator::stream() const {
  cuda::Driver::machine().need_context(device_.index());
  void* stream = nullptr;
  if (current_stream()(device_.index(), &stream) != 0)
    throw std::runtime_error("torch gives no stream of " + device_.str());
  return static_cast<cuda::Stream>(stream);
}

}  // namespace plait
