// native/core/tables.h: the numbers and names that plans and packages have. The place of a
// name is its number. Written by `python -m tests.instruction_table` from the tables of the
// writers, plait/wrapper/native.py and plait/wrapper/package.py.
#pragma once

#include <cstdint>

// clang-format off

namespace plait {

inline constexpr uint32_t kPlanVersion = 10;
inline constexpr uint32_t kPackageVersion = 5;
inline constexpr int64_t kSizeFunctions = 39;

// How many enumerators E has.
template <class E>
inline constexpr int64_t kCount = 0;

enum class DType : int32_t { b1, u8, u16, u32, u64, i8, i16, i32, i64, f16, bf16, f32, f64, c32,
        c64, c128, f8e4m3fn, f8e5m2, f8e4m3fnuz, f8e5m2fnuz, f8e8m0fnu, opaque, kAny };
template <>
inline constexpr int64_t kCount<DType> = 23;

enum class ExprOp : int32_t { constant, symbol, add, mul, floordiv, mod, min, max, eq, ne, lt, le };
template <>
inline constexpr int64_t kCount<ExprOp> = 12;

enum class OperandKind : int32_t { ref, size, none, boolean, real, string, complex, dtype, device,
        layout, memory_format, list, value };
template <>
inline constexpr int64_t kCount<OperandKind> = 13;

enum class SourceKind : int32_t { expr, size, stride, offset, item };
template <>
inline constexpr int64_t kCount<SourceKind> = 5;

enum class ResultKind : int32_t { dropped, tensor, symbol };
template <>
inline constexpr int64_t kCount<ResultKind> = 3;

enum class ErrorKind : int32_t { index, runtime };
template <>
inline constexpr int64_t kCount<ErrorKind> = 2;

enum class InputKind : int32_t { tensor, symbol, opaque };
template <>
inline constexpr int64_t kCount<InputKind> = 3;

enum class ControlKind : int32_t { call, cond, loop, rounds, scan };
template <>
inline constexpr int64_t kCount<ControlKind> = 5;

// Of element types by number: bytes, name, name in torch.
inline constexpr int64_t kElementSize[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1,
        1, 1, 1, 0};
inline constexpr const char* kDTypeName[] = {"b1", "u8", "u16", "u32", "u64", "i8", "i16", "i32",
        "i64", "f16", "bf16", "f32", "f64", "c32", "c64", "c128", "f8e4m3fn", "f8e5m2",
        "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu", "opaque", "any"};
inline constexpr const char* kTorchName[] = {"bool", "uint8", "uint16", "uint32", "uint64", "int8",
        "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex32",
        "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu", "opaque", "any"};

}
