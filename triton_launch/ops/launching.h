// triton_launch/ops/launching.h: what launches of the operators' kernels have in common.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <plait/triton_torch.h>

#include <algorithm>
#include <bit>
#include <functional>

#include "ops.h"
#include "torch/accelerator.h"

namespace plait::ops {
using triton::DType;
using triton::Kernel;
using triton::Launch;

// get: of a name.
struct Kernels {
  const std::function<Kernel(const char*)> get;
  const Kernel add = get("add_kernel"), softmax = get("softmax_kernel"),
               softmax_backward = get("softmax_backward_kernel"), rms_norm = get("rms_norm_kernel"),
               rms_norm_backward = get("rms_norm_backward_kernel"), rotary = get("rotary_kernel"),
               cross_entropy = get("cross_entropy_kernel"),
               cross_entropy_total = get("cross_entropy_total_kernel"),
               cross_entropy_backward = get("cross_entropy_backward_kernel"),
               bmm = get("bmm_kernel"), bmm_tma = get("bmm_tma_kernel"),
               total = get("total_kernel"), matvec = get("matvec_kernel");
};
// The set that is used now: it stays what it is for who has it.
const Kernels& kernels();

// Makes a tensor's device the current one, as its stream's launches want.
struct Here {
  explicit Here(const Tensor& t) : guard(t.device()), stream(Accelerator(t.device()).stream()) {}
  Launch on(int64_t grid, int16_t num_warps) const {
    return {grid, reinterpret_cast<triton::Stream>(stream), {.num_warps = num_warps}};
  }
  const c10::DeviceGuard guard;
  const plait::cuda::Stream stream;
};

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t pow2(int64_t n) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(n, 1))));
}
inline DType sums_of(const Tensor& t) { return wide(t) == at::kDouble ? DType::fp64 : DType::fp32; }

inline int64_t attribute_of_device(int attribute) {
  const auto& driver = plait::cuda::Driver::machine();
  int device = 0, n = 0;
  driver.check(driver.current_device(&device), "cuCtxGetDevice");
  driver.check(driver.device_attribute(&n, attribute, device), "cuDeviceGetAttribute");
  return n;
}
inline int64_t multiprocessors() { return std::max<int64_t>(attribute_of_device(16), 1); }
inline bool has_tensor_maps() { return attribute_of_device(75) >= 9; }  // by compute capability

}  // namespace plait::ops
