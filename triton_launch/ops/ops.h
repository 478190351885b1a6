// triton_launch/ops/ops.h: the primitive operators, of which plait/ops.h is made.
//
// Each has a kernel for CUDA that launches Triton (cuda.cpp), a composition of ATen operators for
// every other device (reference.cpp), and Autograd kernels (register.cpp) that call the primitives
// of backward passes. The compositions are differentiable: where a gradient is differentiated, or
// in forward mode, they run instead of kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>

namespace plait::ops {
using at::Tensor;
using Maybe = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// The type that sums are made in.
inline at::ScalarType wide(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline bool is_given(const Maybe& t) { return t && t->defined(); }

// Throws unless t can be computed with: half, bfloat16, float or double.
void check_floating(const Tensor& t, const char* op, const char* name);
void check_device(const Tensor& t, const Maybe& other, const char* op, const char* name);

// One list of functions for each place where they are defined.
#define PLAIT_PRIMITIVES                                                                      \
  Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha);               \
  Tensor softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype);       \
  Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,              \
                          at::ScalarType dtype);                                              \
  /* (norm, sum, 1 / rms) over the last n_dims; the sum is empty without a residual */        \
  Three rms_norm(const Tensor& x, const Maybe& residual, const Maybe& weight, int64_t n_dims, \
                 double eps);                                                                 \
  /* (of the sum, of the weight), the latter empty without a weight */                        \
  Two rms_norm_backward(const Tensor& grad, const Maybe& grad_sum, const Tensor& sum,         \
                        const Maybe& weight, const Tensor& rstd, int64_t n_dims, double eps); \
  Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,  \
                c10::SymInt offset, bool interleaved, bool inverse);                          \
  /* of rows: (loss, log-sum-exp, what a mean is divided by) */                               \
  Three cross_entropy(const Tensor& x, const Tensor& target, const Maybe& weight,             \
                      int64_t reduction, c10::SymInt ignore_index, double label_smoothing);   \
  Tensor cross_entropy_backward(const Tensor& grad, const Tensor& x, const Tensor& target,    \
                                const Maybe& weight, const Tensor& lse, const Tensor& total,  \
                                int64_t reduction, c10::SymInt ignore_index,                  \
                                double label_smoothing);                                      \
  Tensor bmm(const Tensor& a, const Tensor& b);

namespace reference {
PLAIT_PRIMITIVES
}
// Results without values.
namespace shape {
PLAIT_PRIMITIVES
}
namespace cuda {
PLAIT_PRIMITIVES
}

}  // namespace plait::ops
