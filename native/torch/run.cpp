// native/torch/run.cpp: one step of a program, see run.h.
#include "run.h"

#include <cstring>

#include "checks.h"
#include "memory.h"

namespace plait {
namespace {

constexpr int64_t kSmallCopyBytes = 1 << 15;

void evaluate_range(Frame& f, int32_t first, int32_t n) {
  for (int32_t k = first; k < first + n; ++k) {
    const size_t e = static_cast<size_t>(f.code.evals[static_cast<size_t>(k)]);
    if (!evaluate(f.code.plan.exprs[e], f.values.data(), f.values[e])) [[unlikely]]
      fail_size();
  }
}

}  // namespace

int64_t read(const Frame& f, SlotId s, Source::Kind source, int64_t dim) {
  const at::Tensor& t = f.tensor(s);
  if (source == Source::Kind::offset) return t.storage_offset();
  if (source == Source::Kind::item) {
    TORCH_CHECK(t.numel() == 1, "'", f.slot(s).name, "' has ", t.numel(),
                " elements, one was expected");
    return t.item().to<int64_t>();
  }
  const c10::IntArrayRef dims = source == Source::Kind::size ? t.sizes() : t.strides();
  TORCH_CHECK(static_cast<size_t>(dim) < dims.size(), "'", f.slot(s).name, "' has no dimension ",
              dim);
  return dims[static_cast<size_t>(dim)];
}

void run(Frame& f, const Symbol& i) {
  set_symbol(f, i.symbol, read(f, i.value.tensor, i.value.kind, i.value.dim));
}

void run(Frame& f, const Copy& c) {
  const at::Tensor& dst = f.tensor(c.dst);
  const at::Tensor& src = f.tensor(c.src);
  const bool plain = dst.scalar_type() == src.scalar_type() && dst.is_contiguous() &&
                     src.is_contiguous() && dst.sizes() == src.sizes() && src.device().is_cpu() &&
                     dst.device().is_cpu() && !src.is_neg() && !src.is_conj() && !dst.is_neg() &&
                     !dst.is_conj();
  if (plain && dst.nbytes() <= kSmallCopyBytes) {
    if (dst.nbytes() > 0) std::memmove(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes());
  } else {
    dst.copy_(src);
  }
  if (c.bump) dst.unsafeGetTensorImpl()->bump_version();
}

void run(Frame& f, const Fill& i) {
  const at::Tensor& t = f.tensor(i.tensor);
  switch (i.value.kind) {
    case Operand::Kind::size: t.fill_(f.value(i.value.id)); return;
    case Operand::Kind::boolean: t.fill_(i.value.id != 0); return;
    case Operand::Kind::real: t.fill_(i.value.re); return;
    case Operand::Kind::complex: t.fill_(c10::complex<double>(i.value.re, i.value.im)); return;
    default:
      throw std::runtime_error("'" + f.slot(i.tensor).name + "' cannot be filled with this value");
  }
}

void run_step(Frame& f, const Step& s, bool profiled) {
  if (s.run) return s.run(f, *s.instr);
  switch (s.kind) {
    case StepKind::eval: return evaluate_range(f, s.a, s.b);
    case StepKind::define: return set_symbol(f, s.a, f.value(s.b));
    case StepKind::arena: return take_arena(f, s.a, f.value(s.b));
    case StepKind::alloc: return allocate(f, s.a);
    case StepKind::pointer: return set_pointer(f, s.a);
    case StepKind::inside:
      return require_inside(f, s.a, pointer_of(f, s.a), Extents(f.slot(s.a).meta, f.values));
    case StepKind::header: return bind_header(f, s.a);
    case StepKind::region: return run_region(f, f.code.regions[static_cast<size_t>(s.a)], profiled);
    case StepKind::launch:
      return run_launch(f, f.code.grid_launches[static_cast<size_t>(s.a)], profiled);
    case StepKind::call_extern:
      return call_operator(f, f.code.externs[static_cast<size_t>(s.a)], Operands(f), profiled);
    case StepKind::call_python:
      return call_python(f, f.code.pythons[static_cast<size_t>(s.a)], Operands(f));
    case StepKind::call_programs:
      return call_programs(f, f.code.programs_calls[static_cast<size_t>(s.a)], Operands(f));
    case StepKind::bump: return f.tensor(s.a).unsafeGetTensorImpl()->bump_version();
    case StepKind::drop: return drop(f, s.a);
    case StepKind::drop_input: return drop_input(f, s.a);
    case StepKind::instruction: return;  // above
  }
}

}  // namespace plait
