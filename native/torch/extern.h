// native/torch/extern.h: calls of other code: operators of PyTorch, resolved when a program is
// loaded and called by the cheapest way that gives the same result, Python functions, and
// subprograms (control.h).
//
// - What a call may do to memory was decided by the plan: a result never lies in the arena.
// - Operators run below autograd and autocast, as the program does; operators that are not ATen's,
//   Python functions and subprograms see the caller's dispatch state, gradients and autocast off.
// - The GIL is taken back for as long as Python runs.
// - An operator leaves the sizes of what it writes as they are, or the call throws.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>

#include "core/plan.h"
#include "plait/wrapper.h"

namespace plait {

namespace blaslt {
class Library;
enum class Activation : int32_t;
}  // namespace blaslt
struct Frame;
class Operands;
class Subprogram;

// An operator call with everything resolved but tensors and dynamic sizes.
struct ExternCall {
  // What is put into the stack at a call: stack[pos] = ...
  struct Fill {
    enum class Kind {
      tensor,
      opaque,
      integer,
      real,
      number_tensor,
      tensor_list,
      optional_tensor_list,
      int_list
    } kind;
    int32_t pos;
    int32_t id = kNone;        // slot or expression
    std::vector<int32_t> ids;  // lists: slots (kNone: absent) or expressions
  };
  enum class Road { boxed, mm, addmm, bmm, baddbmm };
  std::string name;
  std::optional<c10::OperatorHandle> op;
  std::vector<c10::IValue> stack;
  std::vector<Fill> fills;
  std::vector<Result> outs;
  bool has_lists = false, builtin = true;  // has_lists: among its results
  bool forks = false;                      // makes another stream the current one
  Road road = Road::boxed;
  std::vector<SlotId> tensors;  // fast roads: operands in order, output last
  std::vector<SlotId> written;  // must keep their sizes, which the program goes by
  double beta = 1, alpha = 1;
  bool may_keep = true;
  bool makes_result = false;  // no `out` operand: the result is allocated at the call
  // mm, addmm on pointers alone: where the operands stand in Frame::bufs, and whether they are
  // float or double.
  int32_t bufs = kNone;
  bool single = true;
  bool by_blaslt = false;           // a product, which on a GPU goes to cuBLASLt, see blaslt.cpp
  blaslt::Activation activation{};  // of the product; ATen's call computes it too
  int32_t n_given = 0;              // operands that a generated program hands over
};

struct PythonCall {
  int32_t index;
  std::string label;
  std::vector<Operand> args;
  std::vector<KeywordOperand> kwargs;
  std::vector<Result> outs;
  int32_t n_given = 0;
};

struct ProgramsCall {
  ControlKind kind;
  std::vector<std::shared_ptr<Subprogram>> programs;
  size_t carried, scanned;
  std::string label;
  std::vector<Operand> args;
  std::vector<Result> outs;
  int32_t n_given = 0;
};

// Throws LoadError. constants: of each expression, where it is one.
ExternCall resolve_extern(const CallExtern& call,
                          const std::vector<std::optional<int64_t>>& constants);

void call_operator(Frame& f, const ExternCall& c, const Operands& o, bool profiled);
void call_python(Frame& f, const PythonCall& c, const Operands& o);
void call_programs(Frame& f, const ProgramsCall& c, const Operands& o);

// Products of matrices on bare pointers, on the CPU by BLAS and on a GPU by cuBLASLt. False where
// the strides, sizes or precision settings of this call want the general way.
bool call_gemm(Frame& f, const ExternCall& c, const Operands& o);
bool call_blaslt(Frame& f, const ExternCall& c, const Operands& o);
// The library that torch's own products use; null where there is none.
const blaslt::Library* blaslt_library();

}  // namespace plait
