// native/torch/call.cpp: outputs of a program, and the functions of this process that its kernels
// call.
#include "torch/call.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch/dispatch_guard.h"

namespace plait {

std::vector<Output> plan_outputs(const Program& p) {
  std::vector<Output> out;
  std::vector<int> uses(p.plan().slots.size());
  for (const Operand& o : p.outputs())
    if (o.kind == Operand::Kind::ref) ++uses[static_cast<size_t>(o.id)];
  for (const Operand& o : p.outputs()) {
    using Kind = Output::Kind;
    Output v{Kind::none, o.id, o.re};
    if (o.kind == Operand::Kind::ref) {
      const SlotInfo::Kind kind = p.slot(o.id).kind;
      const bool owned = kind == SlotInfo::Kind::alloc || kind == SlotInfo::Kind::result ||
                         kind == SlotInfo::Kind::view;
      v.kind = kind == SlotInfo::Kind::opaque                  ? Kind::opaque
               : owned && uses[static_cast<size_t>(o.id)] == 1 ? Kind::moved_tensor
                                                               : Kind::tensor;
    } else if (o.kind == Operand::Kind::size) {
      v.kind = Kind::integer;
    } else if (o.kind == Operand::Kind::value) {
      v.kind = Kind::value;
    } else if (o.kind == Operand::Kind::real) {
      v.kind = Kind::real;
    } else if (o.kind == Operand::Kind::boolean) {
      v.kind = Kind::boolean;
    } else if (o.kind != Operand::Kind::none) {
      throw LoadError("a value of this kind cannot be returned");
    }
    out.push_back(v);
  }
  return out;
}

namespace {
// All of base's storage, seen as elements of another type.
at::Tensor retyped(const at::Tensor& base, c10::ScalarType type) {
  const auto item = static_cast<int64_t>(base.element_size());
  const int64_t step = std::max(item, static_cast<int64_t>(c10::elementSize(type)));
  const int64_t n = static_cast<int64_t>(base.storage().nbytes()) / step * step / item;
  const c10::ScalarType from = base.scalar_type();
  const at::Tensor flat = at::as_strided(base, {n}, {1}, 0);
  if (c10::isComplexType(from) && c10::toRealValueType(from) == type)
    return at::view_as_real(flat).view(-1);
  if (c10::isComplexType(type) && c10::toRealValueType(type) == from)
    return at::view_as_complex(flat.view({-1, 2}));
  return flat.view(type);
}

// t, or where it shares memory with the copy of an input, what it would be without the copy.
at::Tensor of_caller(const Frame& f, at::Tensor t) {
  for (const auto& [given, values, written] : f.copied) {
    if (!t.defined() || !t.has_storage() || !t.storage().is_alias_of(values.storage())) continue;
    if (t.is_same(values)) return given;
    if (!given.has_storage() || given._is_zerotensor()) return t;
    const DispatchGuard guard;
    const auto item = static_cast<int64_t>(t.element_size());
    const int64_t start = given.storage_offset() * static_cast<int64_t>(given.element_size());
    const bool same = t.scalar_type() == given.scalar_type();
    at::Tensor view = at::as_strided(same ? given : retyped(given, t.scalar_type()), t.sizes(),
                                     t.strides(), start / item + t.storage_offset());
    if (!given.is_inference() && !view.is_inference())
      view.unsafeGetTensorImpl()->set_version_counter(
          given.unsafeGetTensorImpl()->version_counter());
    return view;
  }
  return t;
}
}  // namespace

const at::Tensor& input_at(const Program& p, const Frame& f, int64_t input) {
  const SlotId slot = p.plan().inputs[static_cast<size_t>(input)].id;
  const at::Tensor& t = *f.refs[static_cast<size_t>(slot)];
  for (const Copied& c : f.copied)
    if (c.values.is_same(t)) return c.given;
  return t;
}

static at::Tensor taken(Frame& f, const Output& o) {
  if (o.kind == Output::Kind::moved_tensor) return std::move(f.tensors[static_cast<size_t>(o.id)]);
  if (o.kind == Output::Kind::tensor) return *f.refs[static_cast<size_t>(o.id)];
  return {};
}

at::Tensor take_tensor(Frame& f, const Output& o) {
  if (f.copied.empty()) [[likely]]
    return taken(f, o);
  return of_caller(f, taken(f, o));
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& bound, const at::Tensor& like,
                   const Produced& r) {
  TORCH_CHECK(r.offset || like.storage().is_alias_of(bound.storage()),
              "a result that should be a view of an input is a copy");
  at::Tensor view;
  if (like.scalar_type() == base.scalar_type()) {
    const int64_t offset = r.offset ? *r.offset : like.storage_offset() - bound.storage_offset();
    view = at::as_strided(base, like.sizes(), like.strides(), base.storage_offset() + offset);
  } else {
    const bool complex = base.is_complex() != like.is_complex();
    view = at::as_strided(retyped(base, like.scalar_type()), like.sizes(), like.strides(),
                          like.storage_offset());
    if (!complex) view = view.detach();  // autograd sees no view in other bits
  }
  return view.requires_grad() && !r.requires_grad ? view.detach() : view;
}

std::vector<void*> math_table(const std::vector<std::string>& names) {
  static void* torch_cpu = [] {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(&torch_parallel_for), &info)
               ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
               : nullptr;
  }();
  static void* libm = dlopen("libm.so.6", RTLD_LAZY);
  std::vector<void*> table;
  for (const std::string& name : names) {
    void* address = torch_cpu ? dlsym(torch_cpu, name.c_str()) : nullptr;
    if (!address && libm) address = dlsym(libm, name.c_str());
    table.push_back(address);
  }
  return table;
}

}  // namespace plait
