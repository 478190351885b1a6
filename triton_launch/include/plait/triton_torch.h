// plait/triton_torch.h: at::Tensor, and the dtypes that libtorch has, as arguments of Triton
// kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <plait/triton.h>

namespace plait::triton {

template <>
inline constexpr DType dtype_of<c10::Half> = DType::fp16;
template <>
inline constexpr DType dtype_of<c10::BFloat16> = DType::bf16;
template <>
inline constexpr DType dtype_of<c10::Float8_e4m3fn> = DType::fp8e4nv;
template <>
inline constexpr DType dtype_of<c10::Float8_e5m2> = DType::fp8e5;
template <>
inline constexpr DType dtype_of<c10::Float8_e4m3fnuz> = DType::fp8e4b8;
template <>
inline constexpr DType dtype_of<c10::Float8_e5m2fnuz> = DType::fp8e5b16;

inline DType dtype_of_torch(c10::ScalarType t) {
  switch (t) {
    case c10::ScalarType::Bool: return DType::u1;
    case c10::ScalarType::Char: return DType::i8;
    case c10::ScalarType::Short: return DType::i16;
    case c10::ScalarType::Int: return DType::i32;
    case c10::ScalarType::Long: return DType::i64;
    case c10::ScalarType::Byte: return DType::u8;
    case c10::ScalarType::UInt16: return DType::u16;
    case c10::ScalarType::UInt32: return DType::u32;
    case c10::ScalarType::UInt64: return DType::u64;
    case c10::ScalarType::Half: return DType::fp16;
    case c10::ScalarType::BFloat16: return DType::bf16;
    case c10::ScalarType::Float: return DType::fp32;
    case c10::ScalarType::Double: return DType::fp64;
    case c10::ScalarType::Float8_e4m3fn: return DType::fp8e4nv;
    case c10::ScalarType::Float8_e5m2: return DType::fp8e5;
    case c10::ScalarType::Float8_e4m3fnuz: return DType::fp8e4b8;
    case c10::ScalarType::Float8_e5m2fnuz: return DType::fp8e5b16;
    default: return state::unknown;
  }
}

namespace detail {
inline DType dtype_of_tensor(const at::Tensor& t) {
  if (t.is_cpu() && !t.is_pinned()) return state::not_on_gpu;
  return dtype_of_torch(t.scalar_type());
}
}  // namespace detail

// An undefined tensor is None.
template <>
struct Traits<at::Tensor> : detail::One<Kind::pointer> {
  static void write(Writer& w, const at::Tensor& t) {
    if (!t.defined()) return w.put(state::none, 0);
    detail::put_pointer(w, t.data_ptr(), detail::dtype_of_tensor(t));
  }
  static uint64_t nbytes(const at::Tensor& t) {
    return t.defined() && t.is_non_overlapping_and_dense() ? t.nbytes() : 0;
  }
};

inline TensorDescriptor descriptor(const at::Tensor& t, Extents block_shape,
                                   Padding padding = Padding::zero) {
  return {t.data_ptr(), detail::dtype_of_tensor(t), t.sizes(), t.strides(), block_shape, padding};
}

// Numbers of Python, whatever they were rounded to.
template <>
struct Traits<c10::Half> : Traits<float> {};
template <>
struct Traits<c10::BFloat16> : Traits<float> {};

template <>
struct Traits<c10::ScalarType> : Traits<DType> {
  static void write(Writer& w, c10::ScalarType t) { Traits<DType>::write(w, dtype_of_torch(t)); }
};

}  // namespace plait::triton
