// triton_launch/ops/autograd.cpp: gradients of the primitives. A composition of ATen operators runs
// instead where a gradient is differentiated, and in forward mode.
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include "calls.h"

namespace plait::ops {
namespace {
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Type = std::optional<at::ScalarType>;

bool holds(const Maybe& t, bool (*fact)(const Tensor&)) { return is_given(t) && fact(*t); }
template <class... T>
bool wants_gradient(const T&... tensors) {
  return at::GradMode::is_enabled() &&
         (holds(tensors, [](const Tensor& t) { return t.requires_grad(); }) || ...);
}
// Forward mode: the compositions have its rules.
template <class... T>
bool has_tangent(const T&... tensors) {
  return (holds(tensors, [](const Tensor& t) { return t._fw_grad(0).defined(); }) || ...);
}
using Below = at::AutoDispatchBelowADInplaceOrView;

void save(AutogradContext* ctx, std::initializer_list<Maybe> tensors) {
  variable_list saved;
  for (const Maybe& t : tensors) saved.push_back(is_given(t) ? *t : Tensor());
  ctx->save_for_backward(std::move(saved));
}

struct Add : Function<Add> {
  static Tensor forward(AutogradContext* ctx, const Tensor& self, const Tensor& other,
                        const at::Scalar& alpha) {
    const Below below;
    ctx->saved_data["alpha"] = alpha;
    return call::add(self, other, alpha);
  }
  // The engine sums over what was broadcast.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& g = grads[0];
    const at::Scalar alpha = ctx->saved_data["alpha"].toScalar();
    return {g, ctx->needs_input_grad(1) ? (alpha.equal(1) ? g : g * alpha) : Tensor(), Tensor()};
  }
};
Tensor add_autograd(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  if (has_tangent(self, other) || self.is_complex() || other.is_complex())
    return reference::add(self, other, alpha);
  if (wants_gradient(self, other)) return Add::apply(self, other, alpha);
  const Below below;
  return call::add(self, other, alpha);
}

struct Softmax : Function<Softmax> {
  static Tensor forward(AutogradContext* ctx, const Tensor& self, int64_t dim, Type dtype) {
    const Below below;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["dtype"] = self.scalar_type();
    Tensor y = call::softmax(self, dim, dtype);
    save(ctx, {y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {call::softmax_backward(grads[0], saved[0], ctx->saved_data["dim"].toInt(),
                                   ctx->saved_data["dtype"].toScalarType()),
            Tensor(), Tensor()};
  }
};
Tensor softmax_autograd(const Tensor& self, int64_t dim, Type dtype) {
  if (has_tangent(self)) return reference::softmax(self, dim, dtype);
  if (wants_gradient(self)) return Softmax::apply(self, dim, dtype);
  const Below below;
  return call::softmax(self, dim, dtype);
}
Tensor softmax_backward_autograd(const Tensor& grad, const Tensor& output, int64_t dim,
                                 at::ScalarType dtype) {
  if (wants_gradient(grad, output) || has_tangent(grad, output))
    return reference::softmax_backward(grad, output, dim, dtype);
  const Below below;
  return call::softmax_backward(grad, output, dim, dtype);
}

struct RmsNorm : Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Maybe& residual,
                               const Maybe& weight, int64_t n_dims, double eps) {
    const Below below;
    auto [norm, sum, rstd] = call::rms_norm(x, residual, weight, n_dims, eps);
    ctx->saved_data["n_dims"] = n_dims;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["summed"] = is_given(residual);
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable(is_given(residual) ? variable_list{rstd}
                                                    : variable_list{sum, rstd});
    save(ctx, {is_given(residual) ? sum : x, weight, rstd});
    return {norm, sum, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    Tensor dx = grads[1], dw;
    if (grads[0].defined()) {
      const auto saved = ctx->get_saved_variables();
      std::tie(dx, dw) = call::rms_norm_backward(
          grads[0], Maybe(grads[1]), saved[0], Maybe(saved[1]), saved[2],
          ctx->saved_data["n_dims"].toInt(), ctx->saved_data["eps"].toDouble());
      if (!saved[1].defined()) dw = Tensor();
    }
    return {dx, ctx->saved_data["summed"].toBool() ? dx : Tensor(), dw, Tensor(), Tensor()};
  }
};
Three rms_norm_autograd(const Tensor& x, const Maybe& residual, const Maybe& weight, int64_t n_dims,
                        double eps) {
  if (has_tangent(x, residual, weight))
    return reference::rms_norm(x, residual, weight, n_dims, eps);
  if (wants_gradient(x, residual, weight)) {
    const auto made = RmsNorm::apply(x, residual, weight, n_dims, eps);
    return {made[0], made[1], made[2]};
  }
  const Below below;
  return call::rms_norm(x, residual, weight, n_dims, eps);
}
Two rms_norm_backward_autograd(const Tensor& grad, const Maybe& grad_sum, const Tensor& sum,
                               const Maybe& weight, const Tensor& rstd, int64_t n_dims,
                               double eps) {
  if (wants_gradient(grad, grad_sum, sum, weight) || has_tangent(grad, grad_sum, sum, weight))
    return reference::rms_norm_backward(grad, grad_sum, sum, weight, rstd, n_dims, eps);
  const Below below;
  return call::rms_norm_backward(grad, grad_sum, sum, weight, rstd, n_dims, eps);
}

struct Rotary : Function<Rotary> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        const Maybe& offsets, const SymInt& offset, bool interleaved,
                        bool inverse) {
    const Below below;
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["inverse"] = inverse;
    save(ctx, {cos, sin, offsets});
    return call::rotary(x, cos, sin, offsets, offset, interleaved, inverse);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    Tensor dx = call::rotary(
        grads[0], saved[0], saved[1], Maybe(saved[2]), ctx->saved_data["offset"].toSymInt(),
        ctx->saved_data["interleaved"].toBool(), !ctx->saved_data["inverse"].toBool());
    return {dx, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};
Tensor rotary_autograd(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,
                       SymInt offset, bool interleaved, bool inverse) {
  if (has_tangent(x, cos, sin) || wants_gradient(cos, sin))
    return reference::rotary(x, cos, sin, offsets, offset, interleaved, inverse);
  if (wants_gradient(x)) return Rotary::apply(x, cos, sin, offsets, offset, interleaved, inverse);
  const Below below;
  return call::rotary(x, cos, sin, offsets, offset, interleaved, inverse);
}

struct CrossEntropy : Function<CrossEntropy> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& target,
                               const Maybe& weight, int64_t reduction, const SymInt& ignore_index,
                               double label_smoothing) {
    const Below below;
    auto [loss, lse, total] =
        call::cross_entropy(x, target, weight, reduction, ignore_index, label_smoothing);
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->mark_non_differentiable({lse, total});
    save(ctx, {x, target, weight, lse, total});
    return {loss, lse, total};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    Tensor dx = call::cross_entropy_backward(
        grads[0], saved[0], saved[1], Maybe(saved[2]), saved[3], saved[4],
        ctx->saved_data["reduction"].toInt(), ctx->saved_data["ignore_index"].toSymInt(),
        ctx->saved_data["label_smoothing"].toDouble());
    return {dx, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};
Three cross_entropy_autograd(const Tensor& x, const Tensor& target, const Maybe& weight,
                             int64_t reduction, SymInt ignore_index, double label_smoothing) {
  TORCH_CHECK(!wants_gradient(weight), "plait::cross_entropy has no gradient for weight");
  if (has_tangent(x, weight))
    return reference::cross_entropy(x, target, weight, reduction, ignore_index, label_smoothing);
  if (wants_gradient(x)) {
    const auto made =
        CrossEntropy::apply(x, target, weight, reduction, ignore_index, label_smoothing);
    return {made[0], made[1], made[2]};
  }
  const Below below;
  return call::cross_entropy(x, target, weight, reduction, ignore_index, label_smoothing);
}
Tensor cross_entropy_backward_autograd(const Tensor& grad, const Tensor& x, const Tensor& target,
                                       const Maybe& weight, const Tensor& lse, const Tensor& total,
                                       int64_t reduction, SymInt ignore_index,
                                       double label_smoothing) {
  if (wants_gradient(grad, x) || has_tangent(grad, x))
    return reference::cross_entropy_backward(grad, x, target, weight, lse, total, reduction,
                                             ignore_index, label_smoothing);
  const Below below;
  return call::cross_entropy_backward(grad, x, target, weight, lse, total, reduction, ignore_index,
                                      label_smoothing);
}

struct Bmm : Function<Bmm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    const Below below;
    save(ctx, {a, b});
    return call::bmm(a, b);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {ctx->needs_input_grad(0) ? call::bmm(grads[0], saved[1].transpose(1, 2)) : Tensor(),
            ctx->needs_input_grad(1) ? call::bmm(saved[0].transpose(1, 2), grads[0]) : Tensor()};
  }
};
Tensor bmm_autograd(const Tensor& a, const Tensor& b) {
  if (has_tangent(a, b)) return reference::bmm(a, b);
  if (wants_gradient(a, b)) return Bmm::apply(a, b);
  const Below below;
  return call::bmm(a, b);
}

TORCH_LIBRARY_IMPL(plait, Autograd, m) {
#define PLAIT_IMPL(FUNCTION, OPERATOR) m.impl(OPERATOR, FUNCTION##_autograd);
  PLAIT_EACH(PLAIT_IMPL)
#undef PLAIT_IMPL
}

}  // namespace
}  // namespace plait::ops
