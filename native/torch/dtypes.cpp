// native/torch/dtypes.cpp: element types of plans as torch has them.
#include "steps.h"

namespace plait {

c10::ScalarType scalar_type(DType dtype) {
  using S = c10::ScalarType;
  static constexpr S types[] = {
      S::Bool,          S::Byte,        S::UInt16,          S::UInt32,
      S::UInt64,        S::Char,        S::Short,           S::Int,
      S::Long,          S::Half,        S::BFloat16,        S::Float,
      S::Double,        S::ComplexHalf, S::ComplexFloat,    S::ComplexDouble,
      S::Float8_e4m3fn, S::Float8_e5m2, S::Float8_e4m3fnuz, S::Float8_e5m2fnuz,
      S::Float8_e8m0fnu};
  static_assert(std::size(types) == static_cast<size_t>(DType::opaque));
  if (dtype >= DType::opaque) throw LoadError("the element type 'opaque' cannot be allocated");
  return types[static_cast<size_t>(dtype)];
}

DType from_scalar_type(c10::ScalarType type) {
  for (int32_t d = 0; d < static_cast<int32_t>(DType::opaque); ++d)
    if (scalar_type(static_cast<DType>(d)) == type) return static_cast<DType>(d);
  return DType::opaque;
}

}  // namespace plait
