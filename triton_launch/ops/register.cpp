// triton_launch/ops/register.cpp: the operators' schemas, and what of them is the same on every
// device: those that are made of primitives, autocast, and the functions of plait/ops.h.
#include <ATen/autocast_mode.h>
#include <plait/ops.h>
#include <plait/triton.h>

#include "calls.h"

namespace plait::ops {
namespace {
using c10::SymInt;
using Type = std::optional<at::ScalarType>;

// ---- operators made of primitives
// No number among tensors: tracing would make one of it again, which only ATen's own operators
// take.
Tensor add_number(const Tensor& self, const at::Scalar& other, const at::Scalar& alpha) {
  const auto type = at::result_type(self, other);
  const bool is_real = self.dim() > 0 && at::isFloatingType(type);  // it is not rounded
  return call::add(self.to(type), at::scalar_tensor(other, at::dtype(is_real ? at::kDouble : type)),
                   alpha);
}

Three norm_of(const Tensor& input, const Maybe& residual, c10::SymIntArrayRef normalized_shape,
              const Maybe& weight, std::optional<double> eps, const char* op) {
  check_floating(input, op, "input");
  const auto sizes = input.sym_sizes();
  TORCH_CHECK(!normalized_shape.empty() && normalized_shape.size() <= sizes.size() &&
                  sizes.slice(sizes.size() - normalized_shape.size()) == normalized_shape,
              "plait::", op, ": the last dimensions of input, ", sizes,
              ", must be normalized_shape, ", normalized_shape);
  if (is_given(residual)) {
    check_floating(*residual, op, "residual");
    TORCH_CHECK(residual->sym_sizes() == sizes, "plait::", op, ": residual is of shape ",
                residual->sym_sizes(), ", and input ", sizes);
  }
  if (is_given(weight)) {
    check_floating(*weight, op, "weight");
    TORCH_CHECK(weight->sym_sizes() == normalized_shape, "plait::", op, ": weight is of shape ",
                weight->sym_sizes(), ", and normalized_shape ", normalized_shape);
  }
  check_device(input, residual, op, "residual");
  check_device(input, weight, op, "weight");
  const double least = wide(input) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                  : std::numeric_limits<float>::epsilon();
  return call::rms_norm(input, residual, weight, static_cast<int64_t>(normalized_shape.size()),
                        eps.value_or(least));
}

Tensor rms_norm_composite(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                          const Maybe& weight, std::optional<double> eps) {
  return std::get<0>(norm_of(input, {}, normalized_shape, weight, eps, "rms_norm"));
}
Two add_rms_norm_composite(const Tensor& input, const Tensor& residual,
                           c10::SymIntArrayRef normalized_shape, const Maybe& weight,
                           std::optional<double> eps) {
  auto [norm, sum, rstd] =
      norm_of(input, Maybe(residual), normalized_shape, weight, eps, "add_rms_norm");
  return {norm, sum};
}

Tensor cross_entropy_composite(const Tensor& self, const Tensor& target, const Maybe& weight,
                               int64_t reduction, SymInt ignore_index, double label_smoothing) {
  if (self.sym_sizes() == target.sym_sizes())  // probabilities
    return at::cross_entropy_loss_symint(self, target, weight, reduction, ignore_index,
                                         label_smoothing);
  check_floating(self, "cross_entropy", "self");
  TORCH_CHECK(self.dim() > 0 && !target.is_floating_point() && !target.is_complex(),
              "plait::cross_entropy: targets are classes, or probabilities of self's shape, ",
              self.sym_sizes(), "; they are of shape ", target.sym_sizes(), " and ",
              target.scalar_type());
  const int64_t dim = self.dim() == 1 ? 0 : 1;
  auto sizes = self.sym_sizes().vec();
  const SymInt n = sizes[static_cast<size_t>(dim)];
  sizes.erase(sizes.begin() + dim);
  TORCH_CHECK(target.sym_sizes() == c10::SymIntArrayRef(sizes),
              "plait::cross_entropy: self is of shape ", self.sym_sizes(),
              ", so classes must be of shape ", c10::SymIntArrayRef(sizes), ", not ",
              target.sym_sizes());
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing <= 1,
              "plait::cross_entropy: label_smoothing must be between 0 "
              "and 1, it is ",
              label_smoothing);
  TORCH_CHECK(reduction >= at::Reduction::None && reduction <= at::Reduction::Sum,
              "plait::cross_entropy: reduction is ", "0, 1 or 2 (none, mean, sum), not ",
              reduction);
  if (is_given(weight))
    TORCH_CHECK(weight->dim() == 1 && weight->sym_size(0) == n,
                "plait::cross_entropy: weight must have one for each of ", n,
                " classes, it is of shape ", weight->sym_sizes());
  check_device(self, target, "cross_entropy", "target");
  check_device(self, weight, "cross_entropy", "weight");
  const Tensor x =
      self.dim() == 2 ? self : self.movedim(dim, -1).reshape_symint({target.sym_numel(), n});
  const Tensor loss =
      std::get<0>(call::cross_entropy(x, target.to(at::kLong).reshape_symint({target.sym_numel()}),
                                      weight, reduction, ignore_index, label_smoothing));
  return reduction == at::Reduction::None ? loss.view_symint(target.sym_sizes()) : loss;
}

Tensor matmul_composite(const Tensor& self, const Tensor& other) {
  if (!self.is_floating_point() || !other.is_floating_point()) return at::matmul(self, other);
  check_floating(self, "matmul", "self");
  TORCH_CHECK(self.scalar_type() == other.scalar_type(), "plait::matmul: self is of ",
              self.scalar_type(), ", other of ", other.scalar_type());
  TORCH_CHECK(self.dim() > 0 && other.dim() > 0,
              "plait::matmul: both must have a dimension at least, they have ", self.dim(), " and ",
              other.dim());
  check_device(self, other, "matmul", "other");
  Tensor a = self.dim() == 1 ? self.unsqueeze(0) : self,
         b = other.dim() == 1 ? other.unsqueeze(1) : other;
  const SymInt m = a.sym_size(-2), n = b.sym_size(-1), k = a.sym_size(-1);
  TORCH_CHECK(k == b.sym_size(-2), "plait::matmul: shapes ", self.sym_sizes(), " and ",
              other.sym_sizes(), " do not fit: ", k, " against ", b.sym_size(-2));
  const auto batch_of = [](const Tensor& t) {
    return t.sym_sizes().slice(0, static_cast<size_t>(t.dim()) - 2);
  };
  auto batch = at::infer_size_symint(batch_of(a), batch_of(b));
  SymInt n_batches = 1;
  for (const SymInt& size : batch) n_batches = n_batches * size;
  const auto sizes = [&](SymInt rows, SymInt cols) {
    std::vector<SymInt> all(batch.begin(), batch.end());
    all.insert(all.end(), {std::move(rows), std::move(cols)});
    return all;
  };
  Tensor out;
  if (b.dim() == 2)  // one matrix for all rows
    out = call::bmm(a.reshape_symint({1, n_batches * m, k}), b.unsqueeze(0));
  else
    out = call::bmm(a.expand_symint(sizes(m, k)).reshape_symint({n_batches, m, k}),
                    b.expand_symint(sizes(k, n)).reshape_symint({n_batches, k, n}));
  out = out.view_symint(sizes(m, n));
  if (other.dim() == 1) out = out.squeeze(-1);
  return self.dim() == 1 ? out.squeeze(other.dim() == 1 ? -1 : -2) : out;
}

}  // namespace

namespace call {
PLAIT_CALL(rms_norm_op, "rms_norm", &rms_norm_composite)
PLAIT_CALL(add_rms_norm_op, "add_rms_norm", &add_rms_norm_composite)
PLAIT_CALL(cross_entropy_op, "cross_entropy", &cross_entropy_composite)
PLAIT_CALL(matmul_op, "matmul", &matmul_composite)
}  // namespace call

namespace {
// ---- autocast, of what PyTorch casts
template <c10::DeviceType D>
struct Autocast {
  const c10::impl::ExcludeDispatchKeyGuard guard{
      at::autocast::get_autocast_dispatch_key_from_device_type(D)};
  template <class T>
  static T cast(at::ScalarType type, const T& t) {
    return at::autocast::cached_cast(type, t, D);
  }

  static Tensor softmax(const Tensor& self, int64_t dim, Type dtype) {
    const Autocast off;
    if (!dtype && at::autocast::is_eligible(self, D)) dtype = at::kFloat;
    return call::softmax(self, dim, dtype);
  }
  static Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                         const Maybe& weight, std::optional<double> eps) {
    const Autocast off;
    return call::rms_norm_op(cast(at::kFloat, input), normalized_shape, cast(at::kFloat, weight),
                             eps);
  }
  static Two add_rms_norm(const Tensor& input, const Tensor& residual,
                          c10::SymIntArrayRef normalized_shape, const Maybe& weight,
                          std::optional<double> eps) {
    const Autocast off;
    return call::add_rms_norm_op(cast(at::kFloat, input), cast(at::kFloat, residual),
                                 normalized_shape, cast(at::kFloat, weight), eps);
  }
  static Tensor cross_entropy(const Tensor& self, const Tensor& target, const Maybe& weight,
                              int64_t reduction, SymInt ignore_index, double label_smoothing) {
    const Autocast off;
    return call::cross_entropy_op(cast(at::kFloat, self), cast(at::kFloat, target),
                                  cast(at::kFloat, weight), reduction, ignore_index,
                                  label_smoothing);
  }
  static Tensor matmul(const Tensor& self, const Tensor& other) {
    const Autocast off;
    const auto type = at::autocast::get_autocast_dtype(D);
    return call::matmul_op(cast(type, self), cast(type, other));
  }
};

TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("add(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("add.Scalar(Tensor self, Scalar other, *, Scalar alpha=1) -> Tensor", add_number);
  m.def("softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> "
      "Tensor",
      rms_norm_composite);
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None) -> (Tensor norm, Tensor sum)",
      add_rms_norm_composite);
  m.def(
      "rotary(Tensor x, Tensor cos, Tensor sin, *, Tensor? offsets=None, SymInt offset=0, bool "
      "interleaved=False, bool inverse=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt "
      "ignore_index=-100, float label_smoothing=0.0) -> Tensor",
      cross_entropy_composite);
  m.def("matmul(Tensor self, Tensor other) -> Tensor", matmul_composite);

  m.def("_softmax_backward(Tensor grad, Tensor output, int dim, ScalarType dtype) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "_rms_norm(Tensor x, Tensor? residual, Tensor? weight, int n_dims, float eps) -> (Tensor, "
      "Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor sum, Tensor? weight, Tensor rstd, "
      "int n_dims, float eps) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_cross_entropy(Tensor x, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, "
      "float label_smoothing) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_cross_entropy_backward(Tensor grad, Tensor x, Tensor target, Tensor? weight, Tensor lse, "
      "Tensor total, int reduction, SymInt ignore_index, float label_smoothing) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("_bmm(Tensor a, Tensor b) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("_use_pack(str path) -> ()", [](std::string path) { use_pack(path); });
  m.def("_use_tiles(str how) -> ()", [](std::string how) { use_tiles(how); });
  m.def("_signatures() -> str[]", [] { return triton::signatures(); });
  m.def("_use_python(str python) -> ()", [](std::string python) { use_python(python); });
}

TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, m) {
#define PLAIT_IMPL(FUNCTION, OPERATOR) m.impl(OPERATOR, reference::FUNCTION);
  PLAIT_EACH(PLAIT_IMPL)
#undef PLAIT_IMPL
}
TORCH_LIBRARY_IMPL(plait, Meta, m) {
#define PLAIT_IMPL(FUNCTION, OPERATOR) m.impl(OPERATOR, shape::FUNCTION);
  PLAIT_EACH(PLAIT_IMPL)
#undef PLAIT_IMPL
}
TORCH_LIBRARY_IMPL(plait, CUDA, m) {
#define PLAIT_IMPL(FUNCTION, OPERATOR) m.impl(OPERATOR, cuda::FUNCTION);
  PLAIT_EACH(PLAIT_IMPL)
#undef PLAIT_IMPL
}
TORCH_LIBRARY_IMPL(plait, AutocastCUDA, m) {
  m.impl("softmax", Autocast<at::kCUDA>::softmax);
  m.impl("rms_norm", Autocast<at::kCUDA>::rms_norm);
  m.impl("add_rms_norm", Autocast<at::kCUDA>::add_rms_norm);
  m.impl("cross_entropy", Autocast<at::kCUDA>::cross_entropy);
  m.impl("matmul", Autocast<at::kCUDA>::matmul);
}
TORCH_LIBRARY_IMPL(plait, AutocastCPU, m) { m.impl("matmul", Autocast<at::kCPU>::matmul); }
}  // namespace

// ---- plait/ops.h
Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return call::add(self, other, alpha);
}
Tensor rms_norm(const Tensor& input, at::IntArrayRef normalized_shape, const Maybe& weight,
                std::optional<double> eps) {
  return call::rms_norm_op(input, c10::fromIntArrayRefSlow(normalized_shape), weight, eps);
}
Two add_rms_norm(const Tensor& input, const Tensor& residual, at::IntArrayRef normalized_shape,
                 const Maybe& weight, std::optional<double> eps) {
  return call::add_rms_norm_op(input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight,
                               eps);
}
Tensor softmax(const Tensor& self, int64_t dim, Type dtype) {
  return call::softmax(self, dim, dtype);
}
Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,
              int64_t offset, bool interleaved, bool inverse) {
  return call::rotary(x, cos, sin, offsets, offset, interleaved, inverse);
}
Tensor cross_entropy(const Tensor& self, const Tensor& target, const Maybe& weight,
                     int64_t reduction, int64_t ignore_index, double label_smoothing) {
  return call::cross_entropy_op(self, target, weight, reduction, ignore_index, label_smoothing);
}
Tensor matmul(const Tensor& self, const Tensor& other) { return call::matmul_op(self, other); }

}  // namespace plait::ops
