// native/torch/frame.cpp: making a frame, binding inputs and results, giving everything back, see
// frame.h.
#include "frame.h"

#include <ATen/ops/empty_strided.h>

#include "dispatch_guard.h"
#include "memory.h"

namespace plait {
namespace {

const at::Storage& empty_storage() {
  static const at::Storage* s = new at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t{}, 0, at::DataPtr(nullptr, c10::kCPU), nullptr, false));
  return *s;
}

// Tensors that stand for others: subclasses, and what torch.func and functionalisation wrap.
constexpr c10::DispatchKeySet kNotPlain({c10::DispatchKey::Python,
                                         c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::Functionalize});

// Views of constant sizes lie in the storage of what they are views of.
void require_reach(const SlotInfo& i, const c10::TensorImpl* root) {
  const int64_t at = root->storage_offset() * static_cast<int64_t>(root->itemsize());
  const auto room = static_cast<int64_t>(root->unsafe_storage().unsafeGetStorageImpl()->nbytes());
  if (at + i.lowest < 0 || at + i.highest > room) [[unlikely]]
    throw std::runtime_error("'" + i.name + "' is smaller than what is read of it");
}

}  // namespace

at::Tensor materialised(const at::Tensor& t) {
  const DispatchGuard guard;
  at::Tensor result = at::empty_strided(t.sizes(), t.strides(), t.options());
  at::Tensor from = t, to = result;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.stride(d) == 0 && t.size(d) > 1) from = from.narrow(d, 0, 1), to = to.narrow(d, 0, 1);
  to.copy_(from);
  return result;
}

bool is_odd(const at::Tensor& t) {
  return !t.device().is_cpu() && t.has_storage() &&
         reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->data()) % 16 != 0;
}

bool is_lazy(const at::Tensor& t) {
  using K = c10::DispatchKey;
  return t.unsafeGetTensorImpl()->key_set().has_any(
      c10::DispatchKeySet({K::Conjugate, K::Negative, K::ZeroTensor}));
}

Frame::Frame(const Code& made) : code(made), values(made.values) {
  bufs.resize(static_cast<size_t>(code.n_bufs));
  syms.resize(static_cast<size_t>(code.n_syms));
  params.resize(static_cast<size_t>(code.n_params));
  tensors.resize(code.slots.size());
  pointers.resize(code.slots.size());
  opaques.resize(code.slots.size());
  stack.reserve(code.stack_size + 8);
  for (at::Tensor& t : tensors) refs.push_back(&t);
  for (const LaunchInfo& l : code.launches) {
    for (size_t i = 0; i < l.size_ids.size(); ++i)
      syms[static_cast<size_t>(l.sizes.first) + i] =
          code.values[static_cast<size_t>(l.size_ids[i])];
    tasks.push_back({l.fn, bufs.data() + l.args.first, syms.data() + l.sizes.first,
                     l.parallel && code.values[static_cast<size_t>(l.work_ns)] >= kSplitTaskNs,
                     l.barrier, l.kernel});
  }
  for (const GridLaunch& l : code.grid_launches) {
    void** param = params.data() + l.params.first;
    for (int32_t i = 0; i < l.args.n; ++i) *param++ = &bufs[static_cast<size_t>(l.args.first + i)];
    for (int32_t i = 0; i < l.sizes.n; ++i) {
      int64_t& size = syms[static_cast<size_t>(l.sizes.first + i)];
      size = code.values[static_cast<size_t>(l.size_ids[static_cast<size_t>(i)])];
      *param++ = &size;
    }
    for (void*& pointer : scratch) *param++ = &pointer;
  }
  for (size_t s = 0; s < code.slots.size(); ++s) {
    const SlotInfo& i = code.slots[s];
    if (i.kind != SlotInfo::Kind::constant) continue;
    const at::Tensor& t = code.constants[static_cast<size_t>(i.offset)];
    refs[s] = &t;
    if (!i.needs_pointer) continue;
    require_reach(i, t.unsafeGetTensorImpl());
    patch(*this, static_cast<SlotId>(s), first_of(t));
  }
}

std::string wrapper_kind(const at::Tensor& t) {
  using c10::DispatchKey;
  const c10::DispatchKeySet keys = t.key_set();
  if (keys.has(DispatchKey::Batched) || keys.has(DispatchKey::FuncTorchBatched))
    return "a batched tensor of torch.func";
  if (keys.has(DispatchKey::FuncTorchGradWrapper)) return "a tensor of a gradient of torch.func";
  if (keys.has(DispatchKey::Functionalize)) return "a tensor that torch.func.functionalize wraps";
  return keys.has(DispatchKey::Python) ? "a tensor of a subclass" : "";
}

Misfit find_misfit(const SlotInfo& input, const at::Tensor& t) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (input.scalar != c10::ScalarType::Undefined && impl->dtype().toScalarType() != input.scalar)
    return Misfit::dtype;
  const c10::DispatchKeySet keys = impl->key_set();
  const bool there = input.device.is_cpu()
                         ? keys.has(c10::DispatchKey::CPU)
                         : keys.has(c10::DispatchKey::CUDA) && impl->device() == input.device;
  // Attention gives the state of its random numbers on the host, though the fake tensors say
  // otherwise. What only operators take may be anywhere.
  if (!there && !input.device.is_cpu() && impl->dim() == 0 && !input.needs_pointer)
    return Misfit::none;
  return there && !keys.has_any(kNotPlain) ? Misfit::none : Misfit::device;
}

void require_fit(const Frame& f, const Input& input, const at::Tensor& t) {
  const Misfit what = find_misfit(f.slot(input.id), t);
  if (what == Misfit::none) return;
  const std::string head = "input '" + f.slot(input.id).name + "': expected ";
  if (what == Misfit::dtype)
    throw InputTypeError(head + "dtype " + torch_name(input.dtype) + ", got " +
                         torch_name(from_scalar_type(t.scalar_type())));
  const std::string kind = wrapper_kind(t);
  throw InputTypeError(head + "a plain tensor on device " + input.device + ", got " +
                       (kind.empty() ? "one on " + t.device().str() : kind));
}

void bind_input(Frame& f, const Input& input, const at::Tensor& t) {
  const size_t s = static_cast<size_t>(input.id);
  const SlotInfo& slot = f.code.slots[s];
  if (f.owns_inputs) f.tensors[s] = t;
  f.refs[s] = f.owns_inputs ? &f.tensors[s] : &t;
  if (is_lazy(t) || (slot.needs_pointer && is_odd(t))) [[unlikely]] {
    f.owns_inputs = true;  // the frame drops the copy after the call
    at::Tensor values = materialised(t);
    f.copied.push_back({t, values, slot.written});
    f.tensors[s] = std::move(values);
    f.refs[s] = &f.tensors[s];
  }
  if (!slot.needs_pointer) return;
  if (slot.reaches) require_reach(slot, f.refs[s]->unsafeGetTensorImpl());
  patch(f, input.id, first_of(*f.refs[s]));
}

void define(Frame& f, SlotId s, at::Tensor value) {
  const SlotInfo& i = f.slot(s);
  at::Tensor& t = f.own(s);
  const bool copied = value.defined() && (is_lazy(value) || (i.needs_pointer && is_odd(value)));
  if (f.arena_storage && value.defined() && value.has_storage() &&
      value.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(f.arena_storage)) [[unlikely]]
    throw std::runtime_error("'" + i.name + "' would lie in the arena, which ends with the call");
  t = copied ? materialised(value) : std::move(value);
  if (!i.needs_pointer) return;
  if (!t.defined()) throw std::runtime_error("'" + i.name + "' is needed and was not returned");
  if (i.reaches) require_reach(i, t.unsafeGetTensorImpl());
  patch(f, s, first_of(t));
}

bool in_arena(const Code& code, SlotId s) {
  while (code.slot(s).base != kNone) s = code.slot(s).base;
  return code.slot(s).kind == SlotInfo::Kind::arena;
}

// An input of a boxed call; of another one the caller holds it.
void drop_input(Frame& f, SlotId s) {
  if (f.owns_inputs) f.own(s).reset();
}

// A header that nobody else holds stays with the frame, without its storage: the next call saves
// making it.
void drop(Frame& f, SlotId s) {
  at::Tensor& t = f.own(s);
  if (!t.defined()) return;
  const SlotInfo::Kind kind = f.slot(s).kind;
  if (kind == SlotInfo::Kind::place && t.use_count() == 1) return;
  if (kind == SlotInfo::Kind::view && !f.slot(s).escapes && t.use_count() == 1)
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(empty_storage());
  else
    t.reset();
}

void write_back(Frame& f) {
  const DispatchGuard guard;
  for (auto& [input, values, written] : f.copied) {
    if (!written) continue;
    input.copy_(values);
    if (!input.is_inference() && values._version() > 0)  // the program counts it as changed
      input.unsafeGetTensorImpl()->bump_version();
  }
}

void reset(Frame& f) noexcept {
  for (SlotId s : f.code.owned)
    if (f.own(s).defined()) drop(f, s);
  if (f.owns_inputs)
    for (const Input& i : f.code.plan.inputs)
      if (i.kind == Input::Kind::tensor) f.own(i.id).reset();
  f.stack.clear();
  f.copied.clear();
  drop_arena(f);
  f.owns_inputs = false;
}

}  // namespace plait
