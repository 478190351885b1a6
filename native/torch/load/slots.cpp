// native/torch/load/slots.cpp: the walk that learns what each slot is and how it is used.
#include <algorithm>

#include "walks.h"

namespace plait {

void SlotLearner::run() {
  for (const Input& i : code.plan.inputs) learn(i);
  for (const Instr& i : code.plan.body) {
    ++at;
    std::visit([this](const auto& of) { plait::learn(*this, of); }, i);
  }
}

void SlotLearner::learn(const Input& i) {
  if (i.kind == Input::Kind::symbol) return;
  SlotInfo& s = info(i.id);
  s.kind = i.kind == Input::Kind::tensor ? Kind::input : Kind::opaque;
  s.meta = meta(i.shape, s.dtype);
  if (i.kind == Input::Kind::tensor) s.device = device(i.device);
}

void SlotLearner::output(const Operand& o) {
  use_operand(o, true);
  if (o.kind == Operand::Kind::value) use_header(o.id);
}

void SlotLearner::source(const Source& s) {
  if (s.kind == Source::Kind::expr) return;
  use_header(s.tensor);
  info(s.tensor).found = true;
}

c10::Device SlotLearner::device(const std::string& text) {
  if (text == "cpu") return c10::kCPU;
  c10::Device d(c10::kCPU);
  try {
    d = c10::Device(text);
  } catch (const c10::Error&) {
    throw LoadError("there is no device '" + text + "'");
  }
  if (!d.is_cuda()) throw LoadError("a tensor on device '" + text + "'");
  if (!code.gpu) code.gpu.emplace(d);
  const auto is_known = [&](const Accelerator& g) { return g.device() == d; };
  if (!is_known(*code.gpu) && std::none_of(code.others.begin(), code.others.end(), is_known))
    code.others.emplace_back(d);
  return d;
}

Meta SlotLearner::meta(const Shape& shape, DType dtype) const {
  Meta m;
  m.ids = shape;
  m.is_static = true;
  for (const auto* ids : {&shape.sizes, &shape.strides})
    for (ExprId e : *ids) m.is_static = m.is_static && constant(e).has_value();
  if (!m.is_static) return m;
  int64_t span = 1, want = 1;
  bool empty = false;
  m.contiguous = true;
  for (size_t d = 0; d < shape.sizes.size(); ++d) {
    m.sizes.push_back(*constant(shape.sizes[d]));
    m.strides.push_back(*constant(shape.strides[d]));
    empty = empty || m.sizes[d] == 0;
    span += (m.sizes[d] - 1) * m.strides[d];
  }
  for (size_t d = m.sizes.size(); d-- > 0;) {
    m.contiguous = m.contiguous && m.strides[d] == want;
    if (__builtin_mul_overflow(want, std::max<int64_t>(m.sizes[d], 1), &want)) want = -1;
  }
  m.nbytes = empty ? 0 : span * element_size(dtype);
  return m;
}

SlotInfo& SlotLearner::define(SlotId s, Kind kind, const Shape& shape) {
  SlotInfo& i = info(s);
  i.kind = kind;
  i.meta = meta(shape, i.dtype);
  last_use[static_cast<size_t>(s)] = at;
  return i;
}

void SlotLearner::touch(SlotId s) {
  for (; s != kNone; s = info(s).base) last_use[static_cast<size_t>(s)] = at;
}

void SlotLearner::use_header(SlotId s, bool escapes) {
  touch(s);
  info(s).header = true;
  info(s).escapes = info(s).escapes || escapes;
}

void SlotLearner::use_operand(const Operand& o, bool escapes) {
  if (o.kind == Operand::Kind::ref) use_header(o.id, escapes);
  for (const Operand& item : o.items) use_operand(item, escapes);
}

// It is known at load where all is constant, and the verifier has compared it with what the program
// allocates; of another's tensor, that is asked when it comes. Elsewhere a step asks: of a result
// whose sizes the program reads, after its own checks of them.
void SlotLearner::learn_reach(SlotInfo& s) {
  if (!s.meta.is_static || s.scalar == c10::ScalarType::Undefined) return;
  SlotInfo& root = info(s.root);
  if (root.kind == Kind::arena || root.kind == Kind::alloc) {
    const int64_t room = root.kind == Kind::arena ? code.arena_bytes
                         : root.meta.is_static    ? root.meta.nbytes
                                                  : 0;
    s.inside = s.meta.nbytes == 0 ||
               (s.delta >= 0 && s.meta.nbytes <= room && s.delta <= room - s.meta.nbytes);
    return;
  }
  s.inside = root.kind != Kind::opaque && root.kind != Kind::place && root.kind != Kind::view &&
             !root.found;
  if (!s.inside || s.meta.nbytes == 0) return;
  const int64_t own = root.kind == Kind::input && root.meta.is_static ? root.meta.nbytes : 0;
  // As every tensor.
  if (s.delta >= 0 && s.meta.nbytes <= own && s.delta <= own - s.meta.nbytes) return;
  root.reaches = true;
  root.lowest = std::min(root.lowest, s.delta);
  root.highest = std::max(root.highest, s.delta + s.meta.nbytes);
}

}  // namespace plait
