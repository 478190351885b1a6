// native/core/instructions.h: the instructions of a plan, their reader, and a walk over their
// fields. Written by `python -m tests.instruction_table` from plait/wrapper/instructions.py, where
// the meaning of each is written.
#pragma once

#include "operands.h"

// clang-format off

namespace plait {

struct Symbol {
  int32_t symbol;
  Source value;
};

struct AssertScalar {
  ExprId expr;
  std::string message;
  std::vector<ExprId> values;
  Check::Error error;
};

struct AssertSizeStride {
  SlotId tensor;
  DType dtype;
  Shape shape;
  std::string origin;
  bool copies;
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
  SlotId slot;
  SlotId arena;
  ExprId offset;
  Shape shape;
};

struct Alloc {
  SlotId slot;
  Shape shape;
  std::string device;
};

struct Reuse {
  SlotId slot;
  SlotId old;
  Shape shape;
};

struct Free {
  SlotId slot;
};

struct View {
  SlotId slot;
  SlotId base;
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
  bool parallel;
  bool barrier;
  ExprId grid;
};

struct CallExtern {
  std::string op;
  std::string overload;
  std::vector<Operand> args;
  std::vector<KeywordOperand> kwargs;
  std::vector<Result> outs;
  std::vector<SlotId> into;
  bool may_keep;
  bool as_eager;
};

struct CallPython {
  int32_t index;
  std::string label;
  std::vector<Operand> args;
  std::vector<KeywordOperand> kwargs;
  std::vector<Result> outs;
};

struct CallPrograms {
  ControlKind kind;
  std::vector<int32_t> programs;
  int64_t carried;
  int64_t scanned;
  std::string label;
  std::vector<Operand> args;
  std::vector<Result> outs;
};

struct Copy {
  SlotId dst;
  SlotId src;
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
        Arena, Place, Alloc, Reuse, Free, View, Constant, Launch, CallExtern, CallPython,
        CallPrograms, Copy, BumpVersion, Fill, Partition, Return>;

#define PLAIT_INSTRUCTIONS(_) \
  _(Symbol) _(AssertScalar) _(AssertSizeStride) _(AssertAlignment) _(CheckFinite) _(Arena) \
  _(Place) _(Alloc) _(Reuse) _(Free) _(View) _(Constant) _(Launch) _(CallExtern) \
  _(CallPython) _(CallPrograms) _(Copy) _(BumpVersion) _(Fill) _(Partition) _(Return)

// Braced initialisers are evaluated left to right: fields stand in the order of the words.
template <class Reader>
Instr read_instr(Reader& in, int32_t opcode) {
  switch (opcode) {
    case 0: return Symbol{in.symbol(), in.source()};
    case 1: return AssertScalar{in.expr(), in.string(), in.exprs(), in.error()};
    case 2: return AssertSizeStride{in.slot(), in.dtype(), in.shape(), in.string(), in.flag()};
    case 3: return AssertAlignment{in.slot(), in.word()};
    case 4: return CheckFinite{in.slot(), in.string(), in.flag()};
    case 5: return Arena{in.slot(), in.expr(), in.string()};
    case 6: return Place{in.slot(), in.slot(), in.expr(), in.shape()};
    case 7: return Alloc{in.slot(), in.shape(), in.string()};
    case 8: return Reuse{in.slot(), in.slot(), in.shape()};
    case 9: return Free{in.slot()};
    case 10: return View{in.slot(), in.slot(), in.shape(), in.expr(), in.flag()};
    case 11: return Constant{in.slot(), in.constant()};
    case 12: return Launch{in.kernel(), in.slots(), in.exprs(), in.slots(), in.expr(), in.flag(),
        in.flag(), in.expr()};
    case 13: return CallExtern{in.string(), in.string(), in.operands(), in.keywords(), in.results(),
        in.slots(), in.flag(), in.flag()};
    case 14: return CallPython{in.callable(), in.string(), in.operands(), in.keywords(),
        in.results()};
    case 15: return CallPrograms{in.control(), in.programs(), in.word(), in.word(), in.string(),
        in.operands(), in.results()};
    case 16: return Copy{in.slot(), in.slot(), in.flag()};
    case 17: return BumpVersion{in.slot()};
    case 18: return Fill{in.slot(), in.operand()};
    case 19: return Partition{in.flag(), in.string()};
    case 20: return Return{in.operands()};
    default: throw PlanError("damaged plan: an unknown opcode");
  }
}

template <class V>
void walk(const Symbol& i, V& v) {
  v.source(i.value);
  v.symbol(i.symbol);
}

template <class V>
void walk(const AssertScalar& i, V& v) {
  v.size(i.expr);
  for (const auto& e : i.values) v.size(e);
}

template <class V>
void walk(const AssertSizeStride& i, V& v) {
  v.uses(i.tensor);
  v.shape(i.shape);
}

template <class V>
void walk(const AssertAlignment& i, V& v) {
  v.uses(i.tensor);
}

template <class V>
void walk(const CheckFinite& i, V& v) {
  v.uses(i.tensor);
}

template <class V>
void walk(const Arena& i, V& v) {
  v.size(i.nbytes);
  v.defines(i.slot);
}

template <class V>
void walk(const Place& i, V& v) {
  v.arena(i.arena);
  v.size(i.offset);
  v.shape(i.shape);
  v.defines(i.slot);
}

template <class V>
void walk(const Alloc& i, V& v) {
  v.shape(i.shape);
  v.defines(i.slot);
}

template <class V>
void walk(const Reuse& i, V& v) {
  v.uses(i.old);
  v.shape(i.shape);
  v.defines(i.slot);
}

template <class V>
void walk(const Free& i, V& v) {
  v.ends(i.slot);
}

template <class V>
void walk(const View& i, V& v) {
  v.uses(i.base);
  v.shape(i.shape);
  v.size(i.offset);
  v.defines(i.slot);
}

template <class V>
void walk(const Constant& i, V& v) {
  v.defines(i.slot);
}

template <class V>
void walk(const Launch& i, V& v) {
  for (const auto& e : i.args) v.uses(e);
  for (const auto& e : i.sizes) v.size(e);
  for (const auto& e : i.outs) v.uses(e);
  v.size(i.work_ns);
  v.size(i.grid);
}

template <class V>
void walk(const CallExtern& i, V& v) {
  for (const auto& e : i.args) v.operand(e);
  for (const auto& k : i.kwargs) v.operand(k.value);
  for (const auto& e : i.into) v.uses(e);
  for (const auto& e : i.outs) v.result(e);
}

template <class V>
void walk(const CallPython& i, V& v) {
  for (const auto& e : i.args) v.operand(e);
  for (const auto& k : i.kwargs) v.operand(k.value);
  for (const auto& e : i.outs) v.result(e);
}

template <class V>
void walk(const CallPrograms& i, V& v) {
  for (const auto& e : i.args) v.operand(e);
  for (const auto& e : i.outs) v.result(e);
}

template <class V>
void walk(const Copy& i, V& v) {
  v.uses(i.dst);
  v.uses(i.src);
}

template <class V>
void walk(const BumpVersion& i, V& v) {
  v.uses(i.tensor);
}

template <class V>
void walk(const Fill& i, V& v) {
  v.uses(i.tensor);
  v.operand(i.value);
}

template <class V>
void walk(const Partition&, V&) {
}

template <class V>
void walk(const Return& i, V& v) {
  for (const auto& e : i.values) v.output(e);
}

}
