// native/torch/load/calls.cpp: calls of operators and of Python, and what else works on whole
// tensors: copies, fills, versions; partitions, and what is returned.
#include <algorithm>

#include "walks.h"

namespace plait {
namespace {

template <class Call>
void learn_call(SlotLearner& l, const Call& i, bool escapes) {
  for (const Operand& o : i.args) l.use_operand(o, escapes);
  if constexpr (requires { i.kwargs; })
    for (const KeywordOperand& o : i.kwargs) l.use_operand(o.value, escapes);
  for (const Result& r : i.outs) l.result(r);
  l.code.needs_guard = true;
}

// A generated program hands operands over in a list, constants aside: they are numbered so, see
// Operands. The slots of what it hands over, by number; kNone for a size.
template <class Call>
std::vector<SlotId> number_operands(StepEmitter& e, Call& call) {
  std::vector<SlotId> slots;
  if (!e.code.generated) return slots;
  const std::vector<ExprNode>& exprs = e.code.plan.exprs;
  const auto is_literal = [&](ExprId id) {
    return exprs[static_cast<size_t>(id)].op == ExprNode::Op::constant;
  };
  const auto number = [&](auto& self, Operand& o) -> void {
    const bool tensor = o.kind == Operand::Kind::ref;
    if (tensor || (o.kind == Operand::Kind::size && !is_literal(o.id))) {
      const size_t n = slots.size();
      slots.push_back(tensor ? o.id : kNone);
      o.id = static_cast<int32_t>(tensor ? n : exprs.size() + n);
    }
    for (Operand& item : o.items) self(self, item);
  };
  for (Operand& o : call.args) number(number, o);
  if constexpr (requires { call.kwargs; })
    for (KeywordOperand& o : call.kwargs) number(number, o.value);
  e.constants.resize(std::max(e.constants.size(), exprs.size() + slots.size()));
  return slots;
}

// mm and addmm of float or double with shapes that the plan knows run on pointers alone, see
// gemm.cpp.
void bind_gemm(StepEmitter& e, ExternCall& call, const std::vector<SlotId>& given) {
  if (call.road != ExternCall::Road::mm && call.road != ExternCall::Road::addmm) return;
  const size_t n = call.tensors.size() - (call.makes_result ? 1 : 0);
  const auto slot = [&](size_t k) {
    return e.code.generated ? given[static_cast<size_t>(call.tensors[k])] : call.tensors[k];
  };
  const DType dtype = e.info(slot(0)).dtype;
  if (dtype != DType::f32 && dtype != DType::f64) return;
  for (size_t k = 0; k < n; ++k) {
    const SlotInfo& i = e.info(slot(k));
    if (i.kind == SlotInfo::Kind::result || i.dtype != dtype) return;
    e.shape(i.meta.ids);
  }
  call.single = dtype == DType::f32;
  call.bufs = static_cast<int32_t>(e.code.n_bufs);
  if (!e.code.generated)
    for (SlotId s : call.tensors) e.add_buf(s);
}

}  // namespace

void learn(SlotLearner& l, const CallExtern& i) {
  learn_call(l, i, i.may_keep);
  for (SlotId s : i.into) l.use_header(s);
}
void emit(StepEmitter& e, const CallExtern& i) {
  e.close_region();
  for (SlotId s : i.into) e.write(s);
  walk(i, e);
  CallExtern renumbered = i;
  const std::vector<SlotId> given = number_operands(e, renumbered);
  ExternCall call = resolve_extern(renumbered, e.constants);
  call.n_given = static_cast<int32_t>(given.size());
  if (e.code.gpu)
    call.road = ExternCall::Road::boxed;  // the other roads are those of the CPU
  else
    bind_gemm(e, call, given);
  e.code.forks |= call.forks;
  e.push(StepKind::call_extern, static_cast<int32_t>(e.code.externs.size()));
  e.code.stack_size = std::max(e.code.stack_size, call.stack.size());
  e.code.externs.push_back(std::move(call));
}

void learn(SlotLearner& l, const CallPython& i) { learn_call(l, i, true); }
void emit(StepEmitter& e, const CallPython& i) {
  e.close_region();
  walk(i, e);
  CallPython renumbered = i;
  const auto n_given = static_cast<int32_t>(number_operands(e, renumbered).size());
  e.push(StepKind::call_python, static_cast<int32_t>(e.code.pythons.size()));
  e.code.pythons.push_back({i.index, i.label, renumbered.args, renumbered.kwargs, i.outs, n_given});
}

void learn(SlotLearner& l, const CallPrograms& i) { learn_call(l, i, true); }
void emit(StepEmitter& e, const CallPrograms& i) {
  e.close_region();
  walk(i, e);
  CallPrograms renumbered = i;
  const auto n_given = static_cast<int32_t>(number_operands(e, renumbered).size());
  ProgramsCall call{i.kind,
                    {},
                    static_cast<size_t>(i.carried),
                    static_cast<size_t>(i.scanned),
                    i.label,
                    renumbered.args,
                    i.outs,
                    n_given};
  for (int32_t k : i.programs) call.programs.push_back(e.code.programs[static_cast<size_t>(k)]);
  e.push(StepKind::call_programs, static_cast<int32_t>(e.code.programs_calls.size()));
  e.code.programs_calls.push_back(std::move(call));
}

void emit(StepEmitter& e, const Copy& i) {
  e.close_region();
  e.code.needs_guard = true;
  e.write(i.dst);
  e.push_run(i);
}

void emit(StepEmitter& e, const Fill& i) {
  e.close_region();
  e.code.needs_guard = true;
  e.write(i.tensor);
  walk(i, e);
  e.push_run(i);
}

void emit(StepEmitter& e, const BumpVersion& i) {
  e.mark_written(i.tensor);
  e.push(StepKind::bump, i.tensor);
}

void emit(StepEmitter& e, const Partition& i) {
  e.close_region();
  if (!e.code.gpu || e.code.generated) return;   // a CPU has nothing to record
  const bool first = e.code.partitions.empty();  // unused inputs are dropped before anything runs
  const auto at = first ? 0 : static_cast<int32_t>(e.code.steps.size());
  if (!first) e.code.partitions.back().last = at;
  e.code.partitions.push_back({.first = at, .last = at, .recorded = i.recorded});
}

void emit(StepEmitter& e, const Return& i) {
  e.close_region();
  walk(i, e);
  e.code.outputs = &i.values;
}

}  // namespace plait
