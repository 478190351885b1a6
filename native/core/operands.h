// native/core/operands.h: what the fields of instructions are made of. No torch, no Python.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "tables.h"

namespace plait {

// The plan bytes are damaged, or of another version.
struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The plan is sound but cannot be bound here: a kernel, constant or operator is missing.
struct LoadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Of one element; 0 for an extern result whose type the plan does not know (kAny).
inline int64_t element_size(DType dtype) { return kElementSize[static_cast<size_t>(dtype)]; }
inline const char* dtype_name(DType dtype) { return kDTypeName[static_cast<size_t>(dtype)]; }

using SlotId = int32_t;  // a tensor or opaque value
using ExprId = int32_t;  // an integer expression
inline constexpr int32_t kNone = -1;

// One node of the integer programs; operands of a node stand before it.
struct ExprNode {
  using Op = ExprOp;  // behind it, the functions of functions.h by number
  Op op;
  // constant: a is the value; symbol: a is the symbol's number; else both are numbers of nodes
  int64_t a = 0, b = 0;
};

struct Operand {
  using Kind = OperandKind;
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
  using Kind = SourceKind;
  Kind kind;
  ExprId expr = kNone;
  SlotId tensor = kNone;
  int64_t dim = 0;
};
// What a run-time check that failed raises.
struct Check {
  using Error = ErrorKind;
  Error error;
  std::string message;
};
// A result is a tensor slot, a symbol (an int result) or dropped.
struct Result {
  using Kind = ResultKind;
  Kind kind;
  int32_t id;
};
struct KeywordOperand {
  std::string name;
  Operand value;
};

// What walk() calls for the fields of an instruction, by their kinds; what it defines comes last. A
// walker is derived from this and passes over the fields whose methods it does not write anew.
struct Walker {
  void uses(SlotId) {}
  void ends(SlotId) {}
  void arena(SlotId) {}
  void operand(const Operand&) {}
  void output(const Operand&) {}
  void source(const Source&) {}
  void size(ExprId) {}
  void shape(const Shape&) {}
  void symbol(int32_t) {}
  void defines(SlotId) {}
  void result(const Result&) {}
};

}  // namespace plait
