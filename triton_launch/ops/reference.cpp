// triton_launch/ops/reference.cpp: what the operators compute, by ATen's; and what their results
// look like.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/slice.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ops.h"

namespace plait::ops {

void check_floating(const Tensor& t, const char* op, const char* name) {
  const auto type = t.scalar_type();
  TORCH_CHECK(
      type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble,
      "plait::", op, ": ", name, " must be of half, bfloat16, float or double, not ", type);
}

void check_device(const Tensor& t, const Maybe& other, const char* op, const char* name) {
  if (is_given(other))
    TORCH_CHECK(other->device() == t.device(), "plait::", op, ": ", name, " is on ",
                other->device(), ", and the first argument on ", t.device());
}

namespace {
std::vector<int64_t> last_dims(int64_t n) {
  std::vector<int64_t> dims;
  for (int64_t d = -n; d < 0; ++d) dims.push_back(d);
  return dims;
}

Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like, at::ScalarType type) {
  return at::empty_symint(sizes, like.options().dtype(type));
}
Tensor contiguous_like(const Tensor& t, at::ScalarType type) {
  return empty(t.sym_sizes(), t, type);
}
}  // namespace

namespace {
void check_softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  c10::maybe_wrap_dim(dim, self.dim());
  check_floating(dtype ? at::empty({0}, self.options().dtype(*dtype)) : self, "softmax",
                 dtype ? "dtype" : "self");
}

void check_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,
                  const c10::SymInt& offset) {
  check_floating(x, "rotary", "x");
  check_floating(cos, "rotary", "cos");
  TORCH_CHECK(x.dim() == 4, "plait::rotary: x must be (batch, length, heads, dim), it has ",
              x.dim(), " dimensions");
  TORCH_CHECK(cos.dim() == 2 && sin.dim() == 2 && cos.sym_sizes() == sin.sym_sizes(),
              "plait::rotary: cos and sin must both be (positions, half), they are ",
              cos.sym_sizes(), " and ", sin.sym_sizes());
  TORCH_CHECK(cos.scalar_type() == sin.scalar_type(), "plait::rotary: cos is of ",
              cos.scalar_type(), ", sin of ", sin.scalar_type());
  TORCH_CHECK(cos.sym_size(1) * 2 <= x.sym_size(3), "plait::rotary: cos has ", cos.sym_size(1),
              " pairs, and x only ", x.sym_size(3), " elements");
  check_device(x, cos, "rotary", "cos");
  check_device(x, sin, "rotary", "sin");
  check_device(x, offsets, "rotary", "offsets");
  if (is_given(offsets)) {
    TORCH_CHECK(offsets->dim() == 1 && offsets->sym_size(0) == x.sym_size(0) &&
                    (offsets->scalar_type() == at::kInt || offsets->scalar_type() == at::kLong),
                "plait::rotary: offsets must be an int32 or int64 for each of ", x.sym_size(0),
                " batches");
  } else {
    TORCH_CHECK(offset >= 0 && offset + x.sym_size(1) <= cos.sym_size(0),
                "plait::rotary: positions ", offset, " to ", offset + x.sym_size(1) - 1,
                " of x, and cos has ", cos.sym_size(0));
  }
}
}  // namespace

namespace reference {

Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return at::add(self, other, alpha);
}

Tensor softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  check_softmax(self, dim, dtype);
  return at::softmax(self, dim, dtype).contiguous();
}

Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                        at::ScalarType dtype) {
  const Tensor g = grad.to(wide(output)), y = output.to(wide(output));
  return (y * (g - at::sum(g * y, dim, true))).to(dtype).contiguous();
}

Three rms_norm(const Tensor& x, const Maybe& residual, const Maybe& weight, int64_t n_dims,
               double eps) {
  Tensor sum = is_given(residual) ? (x + *residual).contiguous() : at::empty({0}, x.options());
  const Tensor s = (is_given(residual) ? sum : x).to(wide(is_given(residual) ? sum : x));
  const Tensor rstd = at::rsqrt(at::mean(s * s, last_dims(n_dims), true) + eps);
  Tensor y = s * rstd;
  if (is_given(weight)) y = y * *weight;
  return {y.to(is_given(residual) ? sum.scalar_type() : x.scalar_type()).contiguous(), sum, rstd};
}

// 1 / rms is computed once more: its gradient must flow.
Two rms_norm_backward(const Tensor& grad, const Maybe& grad_sum, const Tensor& sum,
                      const Maybe& weight, const Tensor&, int64_t n_dims, double eps) {
  const Tensor s = sum.to(wide(sum)), g = grad.to(wide(sum));
  const auto dims = last_dims(n_dims);
  const Tensor rstd = at::rsqrt(at::mean(s * s, dims, true) + eps), xhat = s * rstd;
  const Tensor wg = is_given(weight) ? g * *weight : g;
  Tensor dx = rstd * (wg - xhat * at::mean(wg * xhat, dims, true));
  if (is_given(grad_sum)) dx = dx + *grad_sum;
  Tensor dw;
  if (is_given(weight))
    dw = at::sum_to(g * xhat, weight->sym_sizes()).to(weight->scalar_type()).contiguous();
  else
    dw = at::empty({0}, sum.options());
  return {dx.to(sum.scalar_type()).contiguous(), dw};
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,
              c10::SymInt offset, bool interleaved, bool inverse) {
  check_rotary(x, cos, sin, offsets, offset);
  const auto length = x.sym_size(1), half = cos.sym_size(1);
  Tensor c, s;
  if (is_given(offsets)) {
    const Tensor k = at::arange(0, length, offsets->options()) + offsets->unsqueeze(1) +
                     at::scalar_tensor(offset, offsets->options());
    const auto of = [&](const Tensor& table) {
      return at::index_select(table, 0, k.reshape({-1}))
          .view_symint({x.sym_size(0), length, 1, half});
    };
    c = of(cos), s = of(sin);
  } else {
    const auto of = [&](const Tensor& table) {
      return at::slice_symint(table, 0, offset, offset + length).unsqueeze(1);
    };
    c = of(cos), s = of(sin);
  }
  if (inverse) s = -s;
  const auto type = wide(x);
  const Tensor turned = at::slice_symint(x, 3, 0, half * 2).to(type),
               rest = at::slice_symint(x, 3, half * 2);
  const Tensor one =
      interleaved ? at::slice(turned, 3, 0, std::nullopt, 2) : at::slice_symint(turned, 3, 0, half);
  const Tensor two =
      interleaved ? at::slice(turned, 3, 1, std::nullopt, 2) : at::slice_symint(turned, 3, half);
  c = c.to(type), s = s.to(type);
  const Tensor a = one * c - two * s, b = two * c + one * s;
  const Tensor both = interleaved ? at::stack({a, b}, 4).flatten(3) : at::cat({a, b}, 3);
  return at::cat({both.to(x.scalar_type()), rest}, 3).contiguous();
}

namespace {
// Of each row, in the type that sums are made in: whether it counts, a class, and that class'
// weight (else 0).
Three chosen(const Tensor& x, const Tensor& target, const Maybe& weight,
             const c10::SymInt& ignore_index) {
  const Tensor valid = target != at::scalar_tensor(ignore_index, target.options());
  const Tensor t = at::where(valid, target, at::zeros_like(target));
  Tensor w = valid.to(wide(x));
  if (is_given(weight)) w = w * at::index_select(*weight, 0, t);
  return {valid, t, w};
}
}  // namespace

Three cross_entropy(const Tensor& x, const Tensor& target, const Maybe& weight, int64_t reduction,
                    c10::SymInt ignore_index, double label_smoothing) {
  const auto type = wide(x);
  Maybe w = weight;
  if (is_given(weight)) w = weight->to(type);
  const auto [valid, t, each] = chosen(x, target, w, ignore_index);
  const Tensor loss =
      at::cross_entropy_loss_symint(x.to(type), target, w, reduction, ignore_index, label_smoothing)
          .to(x.scalar_type());
  const Tensor none = at::full_like(each, -std::numeric_limits<double>::infinity());
  const Tensor lse = at::where(valid, at::logsumexp(x.to(type), 1), none);
  return {loss, lse,
          reduction == at::Reduction::None ? at::empty({0}, each.options()) : at::sum(each)};
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& x, const Tensor& target,
                              const Maybe& weight, const Tensor&, const Tensor& total,
                              int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
  const auto type = wide(x);
  Maybe given = weight;
  if (is_given(weight)) given = weight->to(type);
  const auto [valid, t, w] = chosen(x, target, given, ignore_index);
  Tensor scale = grad.to(type);
  if (reduction == at::Reduction::Mean) scale = scale / total;
  const Tensor hard = (w * (1 - label_smoothing)).unsqueeze(1), p = at::softmax(x, 1, type);
  Tensor factor = hard, each;
  if (label_smoothing > 0) {
    each = label_smoothing *
           (is_given(given) ? *given : at::ones_symint({x.sym_size(1)}, x.options().dtype(type)));
    factor = factor + at::mean(each);
    each = each / at::scalar_tensor(x.sym_size(1), x.options().dtype(type));
  }
  Tensor d = p * factor - at::scatter(at::zeros_like(p), 1, t.unsqueeze(1), hard);
  if (label_smoothing > 0) d = d - each;
  scale = at::where(valid, scale, at::zeros_like(scale)).unsqueeze(1);
  return at::where(valid.unsqueeze(1), d * scale, at::zeros_like(d))
      .to(x.scalar_type())
      .contiguous();
}

Tensor bmm(const Tensor& a, const Tensor& b) { return at::bmm(a, b).contiguous(); }

}  // namespace reference

namespace shape {

Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return at::add(self, other, alpha);
}

Tensor softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  check_softmax(self, dim, dtype);
  return contiguous_like(self, dtype.value_or(self.scalar_type()));
}

Tensor softmax_backward(const Tensor& grad, const Tensor&, int64_t, at::ScalarType dtype) {
  return contiguous_like(grad, dtype);
}

Three rms_norm(const Tensor& x, const Maybe& residual, const Maybe&, int64_t n_dims, double) {
  const auto type = is_given(residual) ? c10::promoteTypes(x.scalar_type(), residual->scalar_type())
                                       : x.scalar_type();
  Tensor norm = contiguous_like(x, type);
  auto rows = x.sym_sizes().vec();
  for (int64_t d = 0; d < n_dims; ++d) rows[rows.size() - 1 - static_cast<size_t>(d)] = 1;
  Tensor sum = is_given(residual) ? contiguous_like(x, type) : at::empty({0}, x.options());
  Tensor rstd = empty(rows, x, wide(norm));
  return {norm, sum, rstd};
}

Two rms_norm_backward(const Tensor&, const Maybe&, const Tensor& sum, const Maybe& weight,
                      const Tensor&, int64_t, double) {
  return {contiguous_like(sum, sum.scalar_type()),
          is_given(weight) ? contiguous_like(*weight, weight->scalar_type())
                           : at::empty({0}, sum.options())};
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,
              c10::SymInt offset, bool, bool) {
  check_rotary(x, cos, sin, offsets, offset);
  return contiguous_like(x, x.scalar_type());
}

Three cross_entropy(const Tensor& x, const Tensor& target, const Maybe&, int64_t reduction,
                    c10::SymInt, double) {
  const bool each = reduction == at::Reduction::None;
  const auto type = wide(x);
  return {each ? contiguous_like(target, x.scalar_type()) : at::empty({}, x.options()),
          contiguous_like(target, type),
          each ? at::empty({0}, x.options().dtype(type)) : at::empty({}, x.options().dtype(type))};
}

Tensor cross_entropy_backward(const Tensor&, const Tensor& x, const Tensor&, const Maybe&,
                              const Tensor&, const Tensor&, int64_t, c10::SymInt, double) {
  return contiguous_like(x, x.scalar_type());
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  return empty({a.sym_size(0), a.sym_size(1), b.sym_size(2)}, a, a.scalar_type());
}

}  // namespace shape
}  // namespace plait::ops
