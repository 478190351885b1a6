// native/torch/load/memory.cpp: instructions that make memory or name a part of it.
#include "walks.h"

namespace plait {
namespace {

// A tensor or pointer that is not at a constant distance from a root, and its header where one is
// needed.
void emit_slot(StepEmitter& e, SlotId s) {
  const SlotInfo& i = e.info(s);
  if (!i.inside) e.shape(i.meta.ids);
  if (!i.folded) {
    e.size(i.offset);
    e.push(StepKind::pointer, s);
  } else if (!i.inside && !i.header && !e.code.gpu) {
    // Kernels alone read it. On a GPU recordings may have its memory elsewhere than this step.
    e.push(StepKind::inside, s);
    e.mark_pointer(s);
  }
  if (!i.header) return;
  e.shape(i.meta.ids);
  e.push(StepKind::header, s);
}

}  // namespace

void learn(SlotLearner& l, const Arena& i) {
  l.define(i.slot, SlotInfo::Kind::arena).device = l.device(i.device);
  l.code.arena_bytes = l.constant(i.nbytes).value_or(0);
}
void emit(StepEmitter& e, const Arena& i) {
  walk(i, e);
  e.push(StepKind::arena, i.slot, i.nbytes);
}

void learn(SlotLearner& l, const Place& i) {
  SlotInfo& s = l.define(i.slot, SlotInfo::Kind::place, i.shape);
  scalar_type(s.dtype);
  s.base = i.arena;
  s.offset = i.offset;
  if (!l.constant(i.offset)) return;
  s.root = i.arena;
  s.delta = *l.constant(i.offset);
  s.folded = true;
  l.learn_reach(s);
}
void emit(StepEmitter& e, const Place& i) { emit_slot(e, i.slot); }

void learn(SlotLearner& l, const Alloc& i) {
  SlotInfo& s = l.define(i.slot, SlotInfo::Kind::alloc, i.shape);
  s.device = l.device(i.device);
  scalar_type(s.dtype);
}
void emit(StepEmitter& e, const Alloc& i) {
  e.close_before_alloc();
  walk(i, e);
  e.push(StepKind::alloc, i.slot);
}

void learn(SlotLearner& l, const Reuse& i) {
  SlotInfo& s = l.define(i.slot, SlotInfo::Kind::view, i.shape);
  const SlotInfo& old = l.info(i.old);
  s.base = i.old;
  s.root = old.root;
  s.delta = old.delta;
  s.folded = true;
  const bool whole = s.meta.ids.sizes == old.meta.ids.sizes &&
                     s.meta.ids.strides == old.meta.ids.strides &&
                     element_size(s.dtype) <= element_size(old.dtype);
  s.inside = whole && (old.kind == SlotInfo::Kind::alloc || old.inside);
  if (!s.inside) l.learn_reach(s);
  if (!s.inside) l.touch(i.old);
}
void emit(StepEmitter& e, const Reuse& i) { emit_slot(e, i.slot); }

void learn(SlotLearner& l, const View& i) {
  SlotInfo& s = l.define(i.slot, SlotInfo::Kind::view, i.shape);
  if (s.scalar == c10::ScalarType::Undefined)
    l.use_header(i.base);  // which brings the element type
  const SlotInfo& base = l.info(i.base);
  s.base = i.base;
  s.offset = i.offset;
  // The storage of an allocation starts where it points; elsewhere only the tensor knows.
  const bool from_storage = !i.relative && l.info(base.root).kind != SlotInfo::Kind::alloc;
  s.relative = i.relative;
  // Its memory is asked for its end.
  if (!l.constant(i.offset) || from_storage) return l.touch(i.base);
  s.root = base.root;
  s.delta = (i.relative ? base.delta : 0) + *l.constant(i.offset) * element_size(s.dtype);
  s.folded = true;
  l.learn_reach(s);
  if (!s.inside) l.touch(i.base);
}
void emit(StepEmitter& e, const View& i) { emit_slot(e, i.slot); }

void learn(SlotLearner& l, const Constant& i) {
  SlotInfo& s = l.define(i.slot, SlotInfo::Kind::constant);
  at::Tensor& t = l.code.constants[static_cast<size_t>(i.index)];
  if (is_odd(t)) t = materialised(t);
  s.offset = i.index;
  s.dtype = from_scalar_type(t.scalar_type());
  s.meta.is_static = true;
  s.meta.sizes = t.sizes().vec();
  s.meta.strides = t.strides().vec();
}
void emit(StepEmitter&, const Constant&) {}  // bound before a call

void emit(StepEmitter&, const Free&) {}  // liveness is computed: it ends no later than this

}  // namespace plait
