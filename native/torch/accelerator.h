// native/torch/accelerator.h: one GPU as programs need it: torch's memory, torch's current stream.
//
// Built without CUDA headers: what torch's CUDA library offers is found when a program first asks.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "core/cuda.h"

namespace plait {

class Accelerator {
 public:
  explicit Accelerator(c10::Device device);  // throws LoadError where torch has no such device

  c10::Device device() const { return device_; }
  // Whether it is torch's current device. To ask takes less than a guard, which asks the driver for
  // the state of a context at its end.
  bool is_current() const { return guard_->getDevice() == device_; }
  // The stream that torch's operators would be put on by this thread. Makes sure of a context.
  cuda::Stream stream() const;
  // From torch's caching allocator, for use on the current stream of the current device.
  c10::DataPtr allocate(int64_t nbytes) const {
    return allocator_->allocate(static_cast<size_t>(nbytes));
  }
  // One of torch's pool of streams with priority, which hardly anyone else takes.
  c10::Stream pooled_stream() const { return guard_->getStreamFromGlobalPool(device_, true); }
  c10::Allocator* allocator() const { return allocator_; }

 private:
  c10::Device device_;
  c10::Allocator* allocator_;
  const c10::impl::DeviceGuardImplInterface* guard_;
};

}  // namespace plait
