// native/torch/load/walks.h: the two walks over the body of a plan that make Code of it.
//
// The first learns what each slot is and how it is used, the second emits steps. What they do for
// an instruction is written in the file of its subject (memory.cpp, launches.cpp, calls.cpp,
// values.cpp), for both walks: learn() and emit(). What a kind of field means, whatever the
// instruction, is in the walks.
//
// - The first walk is over before the second one begins: emit() may trust what is known of a slot.
// - A slot is alive until the last instruction that touches it or a view of it; `last_use` says
//   which.
// - An expression is evaluated by a step before the first one that needs it.
// - Launches on the CPU that follow each other are gathered in a region. Whatever runs between two
//   launches closes it first, but a step that kernels cannot see.
#pragma once

#include "torch/run.h"

namespace plait {

// By expression: its value, where it is one for every call.
using Constants = std::vector<std::optional<int64_t>>;

// What both walks have at hand.
struct LoadWalk : Walker {
  SlotInfo& info(SlotId s) { return code.slots[static_cast<size_t>(s)]; }
  const std::optional<int64_t>& constant(ExprId e) const {
    return constants[static_cast<size_t>(e)];
  }

  Code& code;
  Constants& constants;
  int at = -1;  // the place in the body
};

// The first walk: fills Code::slots, the devices and what a call has to prepare.
class SlotLearner : public LoadWalk {
 public:
  using Kind = SlotInfo::Kind;
  SlotLearner(Code& made, Constants& known)
      : LoadWalk{{}, made, known}, last_use(made.plan.slots.size(), -1) {}
  void run();

  // What the fields of an instruction mean where it does not say otherwise: a tensor that it uses
  // is used as a tensor, not by its address alone.
  void uses(SlotId s) { use_header(s); }
  void operand(const Operand& o) { use_operand(o, false); }
  void output(const Operand& o);
  void source(const Source& s);
  void result(const Result& r) {
    if (r.kind == Result::Kind::tensor) define(r.id, Kind::result);
  }

  c10::Device device(const std::string& text);  // which the program uses
  SlotInfo& define(SlotId s, Kind kind, const Shape& shape = {});
  // The slot and everything whose memory it lives in are alive until now.
  void touch(SlotId s);
  void use_header(SlotId s, bool escapes = false);
  void use_operand(const Operand& o, bool escapes);
  // Whether a place or view is known to lie in its memory.
  void learn_reach(SlotInfo& s);

  std::vector<int> last_use;  // by slot: a place in the body, -1 for none

 private:
  void learn(const Input& i);
  Meta meta(const Shape& shape, DType dtype) const;
};

// The second walk: fills Code::steps and the tables that they point into.
class StepEmitter : public LoadWalk {
 public:
  StepEmitter(Code& made, Constants& known, const std::vector<int>& last_use)
      : LoadWalk{{}, made, known}, patches(made.plan.slots.size()), last_use_(last_use) {}
  void run();

  void push(StepKind kind, int32_t a = kNone, int32_t b = kNone) {
    code.steps.push_back({kind, a, b});
  }
  // A step that is the instruction at hand, which has a run() in torch/run.h. waits: the host may
  // wait for the device in it.
  template <class I>
  void push_run(const I&, bool waits = false) {
    code.steps.push_back({StepKind::instruction, waits, kNone,
                          [](Frame& f, const Instr& i) { plait::run(f, *std::get_if<I>(&i)); },
                          &code.plan.body[static_cast<size_t>(at)]});
  }
  // Emits the evaluation of what is not yet known of these expressions. A walk over an instruction
  // does so for all that it has.
  void need(const std::vector<ExprId>& ids);
  void size(ExprId e) { need({e}); }
  void shape(const Shape& shape) {
    need(shape.sizes);
    need(shape.strides);
  }
  void operand(const Operand& o);
  void output(const Operand& o) { operand(o); }
  void source(const Source& s) {
    if (s.kind == Source::Kind::expr) size(s.expr);
  }
  void close_region();
  // Memory that dies in the open region is only given back at its end: large memory is worth ending
  // it before an allocation.
  void close_before_alloc();
  // A place where kernels read the pointer of a slot.
  int32_t add_buf(SlotId s);
  // A root whose pointer is used by more than patches (headers of views, dynamic offsets, checks).
  void mark_pointer(SlotId s) { info(info(s).root).needs_pointer = true; }
  // The slot and what it is a view of.
  void mark_written(SlotId s);
  void write(SlotId s);  // here

  std::vector<std::vector<Patch>> patches;         // by root
  std::vector<LaunchInfo> region;                  // that is open
  std::vector<std::pair<int32_t, SlotId>> writes;  // partition, what it writes

 private:
  void plan_drop(SlotId s);
  void flatten_patches();

  const std::vector<int>& last_use_;
  std::vector<bool> evaluated_ = std::vector<bool>(code.plan.exprs.size());
  std::vector<std::vector<Step>> drops_;  // by place in the body: behind it
  std::vector<Step> pending_drops_;       // behind the open region
};

// The first walk over instructions that are not what the kinds of their fields say.
template <class I>
void learn(SlotLearner& l, const I& i) {
  walk(i, l);
}
void learn(SlotLearner& l, const AssertAlignment& i);
void learn(SlotLearner& l, const Arena& i);
void learn(SlotLearner& l, const Place& i);
void learn(SlotLearner& l, const Alloc& i);
void learn(SlotLearner& l, const Reuse& i);
void learn(SlotLearner& l, const View& i);
void learn(SlotLearner& l, const Constant& i);
void learn(SlotLearner& l, const Launch& i);
void learn(SlotLearner& l, const CallExtern& i);
void learn(SlotLearner& l, const CallPython& i);
void learn(SlotLearner& l, const CallPrograms& i);

// The second walk: every instruction says its steps.
#define PLAIT_EMIT(I) void emit(StepEmitter& e, const I& i);
PLAIT_INSTRUCTIONS(PLAIT_EMIT)
#undef PLAIT_EMIT

}  // namespace plait
