// native/torch/extern.cpp: calls of operators and of Python, see extern.h.
//
// The general way is the dispatcher's boxed call on a stack whose constant part was built at load.
// bmm and baddbmm into existing memory call the CPU implementation directly.
#include "extern.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/record_function.h>

#include "control.h"
#include "memory.h"

namespace plait {
namespace {

// Code that is not ATen's may use autograd of its own: it sees the caller's dispatch state, but
// gradients and autocast are off (the graph was traced with autocast decided).
c10::impl::LocalDispatchKeySet outer_keys(const Frame& f) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - (f.excluded_by_us - c10::autocast_dispatch_keyset);
  return keys;
}

// An input of the host's own kind (generator, float, None) as an operand; a tensor where the slot
// turned out to hold one.
c10::IValue opaque(Frame& f, SlotId s) {
  void* object = f.opaques[static_cast<size_t>(s)];
  if (!object) return c10::IValue(f.tensor(s));
  const bool released = f.gil != nullptr;
  if (released) f.code.host.retake_gil(std::exchange(f.gil, nullptr));
  c10::IValue result = f.code.host.to_ivalue(object);
  if (released) f.gil = f.code.host.release_gil();
  return result;
}

template <class T, class Item>
c10::IValue list(const std::vector<int32_t>& ids, const Item& item) {
  c10::List<T> values;
  for (int32_t id : ids) values.push_back(item(id));
  return c10::IValue(std::move(values));
}

void push_operands(Frame& f, const ExternCall& c, const Operands& o) {
  using Kind = ExternCall::Fill::Kind;
  f.stack.assign(c.stack.begin(), c.stack.end());
  for (const ExternCall::Fill& fill : c.fills) {
    c10::IValue& at = f.stack[static_cast<size_t>(fill.pos)];
    switch (fill.kind) {
      case Kind::tensor: at = c10::IValue(o.tensor(fill.id)); break;
      case Kind::opaque: at = opaque(f, o.slot(fill.id)); break;
      case Kind::integer: at = c10::IValue(o.value(fill.id)); break;
      case Kind::real: at = c10::IValue(static_cast<double>(o.value(fill.id))); break;
      case Kind::number_tensor: {
        at::Tensor t = c10::scalar_to_tensor(o.value(fill.id));
        t.unsafeGetTensorImpl()->set_wrapped_number(true);
        at = c10::IValue(std::move(t));
        break;
      }
      case Kind::tensor_list:
        at = list<at::Tensor>(fill.ids, [&](int32_t s) { return o.tensor(s); });
        break;
      case Kind::optional_tensor_list:
        at = list<std::optional<at::Tensor>>(fill.ids, [&](int32_t s) {
          return s == kNone ? std::nullopt : std::optional<at::Tensor>(o.tensor(s));
        });
        break;
      case Kind::int_list:
        at = list<int64_t>(fill.ids, [&](int32_t e) { return o.value(e); });
        break;
    }
  }
}

void store_results(Frame& f, const std::vector<Result>& outs, bool has_lists) {
  if (has_lists) {  // their items are results each
    std::vector<c10::IValue> flat;
    for (const c10::IValue& v : f.stack) {
      const auto items = v.isList() ? v.toListRef() : c10::ArrayRef<c10::IValue>(v);
      flat.insert(flat.end(), items.begin(), items.end());
    }
    f.stack = std::move(flat);
  }
  TORCH_CHECK(f.stack.size() >= outs.size(), "the operator returned ", f.stack.size(), " values, ",
              outs.size(), " were expected");
  for (size_t i = 0; i < outs.size(); ++i) {
    const c10::IValue& v = f.stack[i];
    switch (outs[i].kind) {
      case Result::Kind::dropped: break;
      case Result::Kind::tensor:
        define(f, outs[i].id, v.isNone() ? at::Tensor() : v.toTensor());
        break;
      case Result::Kind::symbol:
        set_symbol(f, outs[i].id, v.isBool() ? v.toBool() : v.toInt());
        break;
    }
  }
  f.stack.clear();
}

void call_boxed(Frame& f, const ExternCall& c, const Operands& o) {
  push_operands(f, c, o);
  if (c.builtin) {
    c.op->callBoxed(&f.stack);
  } else {
    const c10::impl::ForceDispatchKeyGuard guard(outer_keys(f));
    c.op->callBoxed(&f.stack);
  }
  store_results(f, c.outs, c.has_lists);
}

void call_direct(Frame& f, const ExternCall& c, const Operands& o) {
  using Road = ExternCall::Road;
  const auto tensor = [&](size_t i) -> const at::Tensor& { return o.tensor(c.tensors[i]); };
  at::Tensor& out = f.own(o.slot(c.tensors.back()));
  switch (c.road) {
    case Road::mm: at::cpu::mm_out(out, tensor(0), tensor(1)); return;
    case Road::addmm:
      at::cpu::addmm_out(out, tensor(0), tensor(1), tensor(2), c.beta, c.alpha);
      return;
    case Road::bmm: at::cpu::bmm_out(out, tensor(0), tensor(1)); return;
    case Road::baddbmm:
      at::cpu::baddbmm_out(out, tensor(0), tensor(1), tensor(2), c.beta, c.alpha);
      return;
    case Road::boxed: return;
  }
}

// Operators give a tensor that they write other sizes, and other memory, where theirs do not fit.
void require_sizes_kept(const Frame& f, const ExternCall& c) {
  for (SlotId s : c.written) {
    const SlotInfo& i = f.slot(s);
    const at::Tensor& t = f.tensor(s);
    const bool made = i.kind == SlotInfo::Kind::alloc || i.kind == SlotInfo::Kind::view ||
                      i.kind == SlotInfo::Kind::place;
    const bool kept = made ? t.sizes() == Extents(i.meta, f.values).sizes
                           : !i.needs_pointer || t.unsafeGetTensorImpl()->data() == f.pointer(s);
    if (!kept) [[unlikely]]
      throw std::runtime_error("operator " + c.name + " gave '" + i.name + "' other sizes");
  }
}

void call_extern(Frame& f, const ExternCall& c, const Operands& o) {
  using Road = ExternCall::Road;
  if (c.bufs != kNone && call_gemm(f, c, o)) return;
  if (f.code.gpu && c.by_blaslt && call_blaslt(f, c, o)) return;
  // An output that is the caller's tensor (an input or constant) is not ours to hand out as a
  // mutable reference.
  const bool boxed =
      c.road == Road::boxed || c.makes_result || !f.own(o.slot(c.tensors.back())).defined();
  try {
    boxed ? call_boxed(f, c, o) : call_direct(f, c, o);
  } catch (c10::Error& e) {
    e.add_context("in operator " + c.name + " of program " + f.code.plan.name);
    throw;
  }
  if (!c.written.empty() && !o.is_given()) require_sizes_kept(f, c);
}

}  // namespace

void call_operator(Frame& f, const ExternCall& c, const Operands& o, bool profiled) {
  if (c.forks) {
    call_extern(f, c, o);
    if (f.code.gpu) f.stream = f.code.gpu->stream();
    return;
  }
  if (!profiled || c.road == ExternCall::Road::boxed) return call_extern(f, c, o);
  // The fast roads pass by the dispatcher, which records the others.
  RECORD_FUNCTION(c.op->operator_name().name, std::vector<c10::IValue>());
  call_extern(f, c, o);
}

void call_python(Frame& f, const PythonCall& c, const Operands& o) {
  const c10::impl::ForceDispatchKeyGuard guard(outer_keys(f));
  const bool released = f.gil != nullptr;
  if (released) f.code.host.retake_gil(std::exchange(f.gil, nullptr));
  f.code.host.call_python(f, c, o);
  if (released) f.gil = f.code.host.release_gil();
}

void call_programs(Frame& f, const ProgramsCall& c, const Operands& o) {
  const c10::impl::ForceDispatchKeyGuard guard(outer_keys(f));
  run_programs(f, c, o);
}

}  // namespace plait
