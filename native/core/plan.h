// native/core/plan.h: a compiled program as plain data, read from plan bytes. No torch, no Python.
//
// The layout of the bytes is written in plan.cpp, its writer is plait/wrapper/native.py. The
// meaning of every instruction is written where Python defines it (plait/wrapper/instructions.py);
// the structs here mirror that file. A Plan that read_plan() returned has been verified: every id
// is in range and defined before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
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

inline constexpr uint32_t kPlanVersion = 7;

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

struct Slot {
  std::string name;
  DType dtype;
};

struct Input {
  enum class Kind : int32_t { tensor, symbol, opaque };
  Kind kind;
  int32_t id;  // tensor, opaque: slot; symbol: symbol number
  DType dtype = DType::kAny;
  Shape shape;
  std::string device;
};

struct Symbol {
  enum class Source : int32_t { expr, size, stride, offset, item };
  int32_t symbol;
  Source source;
  ExprId expr = kNone;
  SlotId tensor = kNone;
  int64_t dim = 0;
};
struct Check {
  enum class Error : int32_t { index, runtime };
  Error error;
  std::string message;
};
struct AssertScalar {
  ExprId expr;
  std::string message;
  std::vector<ExprId> values;  // what the first marks {} of message stand for
  Check::Error error;
};
struct AssertSizeStride {
  SlotId tensor;
  DType dtype;  // opaque: any
  Shape shape;
  std::string origin;  // what made the tensor, for the error
  bool copies;         // with other strides it becomes a copy that has these
};
struct AssertAlignment {
  SlotId tensor;
  int64_t nbytes;
};
struct CheckFinite {
  SlotId tensor;
  std::string origin;
  bool infinities;
};
struct Arena {
  SlotId slot;
  ExprId nbytes;
  std::string device;
};
struct Place {
  SlotId slot, arena;
  ExprId offset;
  Shape shape;
};
struct Alloc {
  SlotId slot;
  Shape shape;
  std::string device;
};
struct Reuse {
  SlotId slot, old;
  Shape shape;
};
struct Free {
  SlotId slot;
};
struct View {
  SlotId slot, base;
  Shape shape;
  ExprId offset;
  bool relative;
};
struct Constant {
  SlotId slot;
  int32_t index;
};
struct Launch {
  int32_t kernel;
  std::vector<SlotId> args;
  std::vector<ExprId> sizes;
  std::vector<SlotId> outs;
  ExprId work_ns;
  bool parallel, barrier;
  ExprId grid;
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
struct CallExtern {
  std::string op, overload;
  std::vector<Operand> args;
  std::vector<KeywordOperand> kwargs;
  std::vector<Result> outs;
  std::vector<SlotId> into;
  bool may_keep;
};
struct CallPython {
  int32_t index;
  std::string label;
  std::vector<Operand> args;
  std::vector<KeywordOperand> kwargs;
  std::vector<Result> outs;
};
struct Copy {
  SlotId dst, src;
  bool bump;
};
struct BumpVersion {
  SlotId tensor;
};
struct Fill {
  SlotId tensor;
  Operand value;
};
struct Partition {
  bool recorded;
  std::string reason;
};
struct Return {
  std::vector<Operand> values;
};

using Instr = std::variant<Symbol, AssertScalar, AssertSizeStride, AssertAlignment, CheckFinite,
                           Arena, Place, Alloc, Reuse, Free, View, Constant, Launch, CallExtern,
                           CallPython, Copy, BumpVersion, Fill, Partition, Return>;

// What a failed run-time check of a kernel raises.
struct Kernel {
  std::string name;
  int32_t n_args, n_sizes;
  std::vector<Check> checks;  // a kernel that returns k > 0 fails with checks[k - 1]
  std::string device;
};

struct Plan {
  std::string name;
  int32_t n_constants = 0, n_callables = 0;
  int32_t n_results = kNone;  // first of the returned values that are for the caller; kNone: all
  std::vector<ExprNode> exprs;
  std::vector<std::string> symbols;
  std::vector<Slot> slots;
  std::vector<Input> inputs;
  std::vector<Kernel> kernels;
  std::vector<Instr> body;
};

// Reads, checks and verifies plan bytes. Throws PlanError.
Plan read_plan(std::span<const std::byte> bytes);

// Checks the rules that need no bytes: defined before use, freed once, ranks, kernels' argument
// counts. Throws PlanError.
void verify(const Plan& plan);

// Whether Python takes the bytes as a str.
bool is_utf8(std::string_view text);

// The value of a node over `values` of earlier nodes; false on overflow or a divisor that is not
// positive.
bool evaluate(const ExprNode& node, const int64_t* values, int64_t& out);

}  // namespace plait
