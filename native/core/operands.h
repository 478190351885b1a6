// native/core/operands.h: what the fields of instructions are made of. No torch, no Python.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace plait {

// The plan bytes are damaged, or of another version.
struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The plan is sound but cannot be bound here: a kernel, constant or operator is missing.
struct LoadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Element types in the order of plait/ir/dtypes.py; kAny is an extern result whose type the plan
// does not know.
enum class DType : int32_t {
  b1,
  u8,
  u16,
  u32,
  u64,
  i8,
  i16,
  i32,
  i64,
  f16,
  bf16,
  f32,
  f64,
  c32,
  c64,
  c128,
  f8e4m3fn,
  f8e5m2,
  f8e4m3fnuz,
  f8e5m2fnuz,
  f8e8m0fnu,
  opaque,
  kAny
};
int64_t element_size(DType dtype);
const char* dtype_name(DType dtype);

using SlotId = int32_t;  // a tensor or opaque value
using ExprId = int32_t;  // an integer expression
inline constexpr int32_t kNone = -1;

// One node of the integer programs; operands of a node stand before it.
struct ExprNode {
  // From `function` on, the functions of functions.h by number.
  enum class Op : int32_t {
    constant,
    symbol,
    add,
    mul,
    floordiv,
    mod,
    min,
    max,
    eq,
    ne,
    lt,
    le,
    function
  };
  Op op;
  int64_t a = 0,
          b = 0;  // constant: a is the value; symbol: a is the symbol's number; else node ids
};

struct Operand {
  enum class Kind : int32_t {
    ref,
    size,
    none,
    boolean,
    real,
    string,
    complex,
    dtype,
    device,
    layout,
    memory_format,
    list,
    value
  };
  Kind kind = Kind::none;
  int32_t id = kNone;          // ref, value: slot; size: expression; dtype: DType; boolean: 0 or 1
  double re = 0, im = 0;       // real, complex
  std::string text;            // string, device, layout, memory_format
  std::vector<Operand> items;  // list
};

struct Shape {
  std::vector<ExprId> sizes, strides;
};

// Where the value of a symbol comes from.
struct Source {
  enum class Kind : int32_t { expr, size, stride, offset, item };
  Kind kind;
  ExprId expr = kNone;
  SlotId tensor = kNone;
  int64_t dim = 0;
};
struct Check {
  enum class Error : int32_t { index, runtime };
  Error error;
  std::string message;
};
// A result is a tensor slot, a symbol (an int result) or dropped.
struct Result {
  enum class Kind : int32_t { dropped, tensor, symbol };
  Kind kind;
  int32_t id;
};
struct KeywordOperand {
  std::string name;
  Operand value;
};

}  // namespace plait
