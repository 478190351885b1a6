// plait/ops.h: operators of plait for C++ programs with libtorch; torch.ops.plait has the same.
//
// They behave as PyTorch's: autograd, autocast and every device included. On CUDA they run Triton
// kernels (plait/triton.h), which come from a Python process that compiles them unless use_pack was
// called. triton_launch/ops/README.md has the details.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "plait/errors.h"

namespace plait::ops {

// self + alpha * other.
PLAIT_API at::Tensor add(const at::Tensor& self, const at::Tensor& other,
                         const at::Scalar& alpha = 1);

// As torch.nn.functional.rms_norm.
PLAIT_API at::Tensor rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                              const std::optional<at::Tensor>& weight = {},
                              std::optional<double> eps = {});

// (rms_norm(input + residual), input + residual), in one kernel.
PLAIT_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& input, const at::Tensor& residual, at::IntArrayRef normalized_shape,
    const std::optional<at::Tensor>& weight = {}, std::optional<double> eps = {});

PLAIT_API at::Tensor softmax(const at::Tensor& self, int64_t dim,
                             std::optional<at::ScalarType> dtype = {});

// Rotary position embedding of x, (batch, length, heads, dim). cos and sin: (positions, half), for
// pairs of the first 2 * half elements; the others stay. Element l of batch b is at position offset
// + offsets[b] + l. A pair is (k, k + half), or if interleaved (2k, 2k + 1). inverse: by the
// negative angles.
PLAIT_API at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            const std::optional<at::Tensor>& offsets = {}, int64_t offset = 0,
                            bool interleaved = false, bool inverse = false);

// As torch.nn.functional.cross_entropy.
PLAIT_API at::Tensor cross_entropy(const at::Tensor& self, const at::Tensor& target,
                                   const std::optional<at::Tensor>& weight = {},
                                   int64_t reduction = at::Reduction::Mean,
                                   int64_t ignore_index = -100, double label_smoothing = 0);

PLAIT_API at::Tensor matmul(const at::Tensor& self, const at::Tensor& other);

// Where kernels come from from now on: a file that `python -m plait.tools.pack` wrote, or a Python
// with plait and Triton on its path.
PLAIT_API void use_pack(const std::string& path);
PLAIT_API void use_python(const std::string& python);

// What happens to a product of a size that was not met before: its tiles are timed and kept on disk
// ("tune"), the first ones are taken ("first"), or it is an error ("error"). For all kernels with
// @triton.autotune in the process.
PLAIT_API void use_tiles(const std::string& how);

}  // namespace plait::ops
