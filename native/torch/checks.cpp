// native/torch/checks.cpp: what a program asserts of its values, see checks.h.
#include "checks.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>

#include "memory.h"
#include "run.h"

namespace plait {

void fail_size() {
  throw std::runtime_error(
      "a size expression overflows or divides by a number that is not positive");
}

void fail_assert(Check::Error error, std::string message, c10::IntArrayRef values) {
  size_t at = 0;
  for (int64_t v : values) {
    at = message.find("{}", at);
    if (at == std::string::npos) break;
    const std::string number = std::to_string(v);
    message.replace(at, 2, number);
    at += number.size();
  }
  TORCH_CHECK_INDEX(error != Check::Error::index, message);
  throw AssertError(std::move(message));
}

// A tensor whose layout has no strides may have any; so may a dimension of size 1 and a tensor
// without elements.
bool has_layout(const Frame& f, SlotId s, const Layout& want) {
  const at::Tensor& t = f.tensor(s);
  if (!t.defined()) return false;
  if (want.dtype < DType::opaque && t.scalar_type() != scalar_type(want.dtype)) return false;
  if (t.is_nested()) return true;
  if (t.sizes() != want.sizes) return false;
  if (t.layout() != c10::kStrided || t.strides() == want.strides || t.numel() == 0) return true;
  for (size_t d = 0; d < want.sizes.size(); ++d)
    if (want.sizes[d] != 1 && t.strides()[d] != want.strides[d]) return false;
  return true;
}

// A tensor that is not what it should be: a copy takes its place if that mends it.
void mend_layout(Frame& f, SlotId s, const Layout& want, const char* origin, bool copies) {
  const at::Tensor t = f.tensor(s);
  const std::string by = *origin ? std::string(", made by ") + origin + "," : "";
  TORCH_CHECK(t.defined(), "'", f.slot(s).name, "'", by, " is needed and was not returned");
  TORCH_CHECK(want.dtype >= DType::opaque || t.scalar_type() == scalar_type(want.dtype), "'",
              f.slot(s).name, "'", by, " has dtype ", torch_name(from_scalar_type(t.scalar_type())),
              ", expected ", torch_name(want.dtype));
  const bool strided = t.layout() == c10::kStrided;
  if (copies && strided && t.sizes() == want.sizes) {
    const Extents checked(want.sizes, want.strides);
    at::Tensor made = at::empty_strided(want.sizes, want.strides, t.options());
    made.copy_(t);
    return define(f, s, std::move(made));
  }
  TORCH_CHECK(false, "'", f.slot(s).name, "'", by, " has sizes ", t.sizes(),
              strided ? " and strides " + at::str(t.strides()) : std::string(), ", expected ",
              want.sizes, " and ", want.strides, *origin ? " when it was traced" : "");
}

void run(Frame& f, const AssertSizeStride& a) {
  c10::SmallVector<int64_t, 16> at;
  for (ExprId e : a.shape.sizes) at.push_back(f.value(e));
  for (ExprId e : a.shape.strides) at.push_back(f.value(e));
  const size_t rank = a.shape.sizes.size();
  const Layout want{a.dtype, {at.data(), rank}, {at.data() + rank, rank}};
  if (!has_layout(f, a.tensor, want)) [[unlikely]]
    mend_layout(f, a.tensor, want, a.origin.c_str(), a.copies);
}

void run(Frame& f, const AssertScalar& a) {
  if (f.value(a.expr) != 0) [[likely]]
    return;
  c10::SmallVector<int64_t, 4> values;
  for (ExprId e : a.values) values.push_back(f.value(e));
  fail_assert(a.error, a.message, values);
}

void check_alignment(const Frame& f, SlotId s, const char* pointer, int64_t nbytes) {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(nbytes) == 0, "'",
              f.slot(s).name, "' is not aligned to ", nbytes, " bytes");
}

void run(Frame& f, const AssertAlignment& i) {
  check_alignment(f, i.tensor, pointer_of(f, i.tensor), i.nbytes);
}

void check_finite(const Frame& f, SlotId s, const char* origin, bool infinities) {
  const at::Tensor& t = f.tensor(s);
  if (!t.is_floating_point() && !t.is_complex()) return;
  const bool fine =
      infinities ? at::isfinite(t).all().item<bool>() : !at::isnan(t).any().item<bool>();
  TORCH_CHECK(fine, "'", f.slot(s).name, "' holds a NaN", infinities ? " or an infinity" : "",
              ", computed by ", origin);
}

void run(Frame& f, const CheckFinite& i) {
  check_finite(f, i.tensor, i.origin.c_str(), i.infinities);
}

}  // namespace plait
