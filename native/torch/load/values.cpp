// native/torch/load/values.cpp: symbols, and what is asserted of values.
#include "walks.h"

namespace plait {

void emit(StepEmitter& e, const Symbol& i) {
  walk(i, e);
  if (i.value.kind == Source::Kind::expr) return e.push(StepKind::define, i.symbol, i.value.expr);
  if (i.value.kind == Source::Kind::item) e.close_region();
  e.push_run(i, i.value.kind == Source::Kind::item);
}

void emit(StepEmitter& e, const AssertScalar& i) {
  walk(i, e);
  e.push_run(i);
}

void emit(StepEmitter& e, const AssertSizeStride& i) {
  walk(i, e);
  e.push_run(i);
}

void learn(SlotLearner& l, const AssertAlignment& i) { l.touch(i.tensor); }
void emit(StepEmitter& e, const AssertAlignment& i) {
  e.push_run(i);
  e.mark_pointer(i.tensor);
}

void emit(StepEmitter& e, const CheckFinite& i) {
  e.close_region();
  e.push_run(i, true);
}

}  // namespace plait
