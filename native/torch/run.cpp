// native/torch/run.cpp: one call of a Program: binding inputs, walking the steps, giving everything
// back.
#include <ATen/Parallel.h>
#include <ATen/core/TensorBase.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/stable/c/shim.h>
#include <x86intrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "dispatch_guard.h"
#include "dead_memory.h"
#include "program.h"

namespace plait {
namespace {

constexpr int64_t kReleaseGilTicks = 100 * kTicksPerUs;
// Going parallel pays once the time saved exceeds the cost of a region: about 2 us while the pool's
// threads still spin, 39 us after.
constexpr int64_t kColdRegionNs = 60'000, kWarmRegionNs = kSerialRegionNs;
constexpr uint64_t kWarmTicks = 500 * kTicksPerUs;
constexpr int64_t kThreadNs = 8'000;  // least share of a region for a thread
constexpr int64_t kBarrierNs = 300;
constexpr int64_t kSmallCopyBytes = 1 << 15;
std::atomic<uint64_t> last_candidate{0};

// How many threads a region is worth. After a region that could have been parallel a short while
// ago the pool is warm, or will be from now on: a stream of middling regions pays for waking it
// once.
int32_t region_threads(int64_t split_ns, int32_t n_tasks) {
  if (split_ns <= kWarmRegionNs) return 1;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), split_ns / kThreadNs);
  if (threads <= 1 || at::in_parallel_region()) return 1;
  const int64_t saved_ns = split_ns - split_ns / threads - n_tasks * kBarrierNs;
  const bool warm = __rdtsc() - last_candidate.load(std::memory_order_relaxed) < kWarmTicks;
  return saved_ns > (warm ? kWarmRegionNs : kColdRegionNs) ? static_cast<int32_t>(threads) : 1;
}

void parallel_for(int64_t begin, int64_t end, void (*body)(int64_t, int64_t, void*),
                  void* context) {
  if (torch_parallel_for(begin, end, 1, body, context) != 0)
    throw std::runtime_error("ATen's thread pool failed");
}

const ThreadPool& aten_pool() {
  static const ThreadPool pool{
      parallel_for,
      at::get_parallel_info().find("ATen parallel backend: OpenMP") != std::string::npos};
  return pool;
}

const at::Storage& empty_storage() {
  static const at::Storage* s = new at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t{}, 0, at::DataPtr(nullptr, c10::kCPU), nullptr, false));
  return *s;
}

std::string list(c10::IntArrayRef values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + "]";
}

// Memory of an output. posix_memalign, which the CPU allocator calls, takes up to 60 ns longer than
// malloc: small blocks are aligned here instead. A profiler that follows memory sees the allocator
// as ever.
at::DataPtr allocate_bytes(int64_t nbytes, c10::Allocator* allocator) {
  constexpr int64_t kAlign = 64, kSmall = 1 << 15;
  if (nbytes > kSmall || nbytes == 0 || c10::memoryProfilingEnabled())
    return allocator->allocate(static_cast<size_t>(nbytes));
  void* block = std::malloc(static_cast<size_t>(nbytes + kAlign));
  if (!block) throw std::bad_alloc();
  const auto aligned =
      (reinterpret_cast<uintptr_t>(block) + kAlign - 1) & ~static_cast<uintptr_t>(kAlign - 1);
  return {reinterpret_cast<void*>(aligned), block, std::free, c10::kCPU};
}

c10::DispatchKeySet keys_of(c10::Device device) {
  return c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
}

at::Tensor tensor_in(at::DataPtr memory, int64_t nbytes, c10::Allocator* allocator,
                     c10::ScalarType type) {
  const c10::Device device = memory.device();
  return at::Tensor(at::detail::make_tensor_base<c10::TensorImpl>(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, nbytes,
                                            std::move(memory), allocator, true),
      keys_of(device), c10::scalarTypeToTypeMeta(type)));
}

at::Tensor new_on_host(int64_t nbytes, c10::ScalarType type) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  return tensor_in(allocate_bytes(nbytes, allocator), nbytes, allocator, type);
}

void refuse_negative(int64_t size, int64_t stride) {
  if (size < 0 || stride < 0)
    throw std::runtime_error("a tensor would have a negative size or stride");
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

Extents::Extents(const Meta& m, const std::vector<int64_t>& values) {
  if (m.is_static) {
    sizes = m.sizes;
    strides = m.strides;
    return;
  }
  const size_t rank = m.ids.sizes.size();
  for (size_t d = 0; d < rank; ++d) {
    at_[d] = values[static_cast<size_t>(m.ids.sizes[d])];
    at_[rank + d] = values[static_cast<size_t>(m.ids.strides[d])];
    refuse_negative(at_[d], at_[rank + d]);
  }
  sizes = {at_, rank};
  strides = {at_ + rank, rank};
}

Extents::Extents(c10::IntArrayRef given_sizes, c10::IntArrayRef given_strides)
    : sizes(given_sizes), strides(given_strides) {
  for (size_t d = 0; d < sizes.size(); ++d) refuse_negative(sizes[d], strides[d]);
}

int64_t Extents::nbytes(int64_t element) const {
  int64_t span = 1, step = 0;
  bool overflow = false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    overflow |= __builtin_mul_overflow(sizes[d] - 1, strides[d], &step) ||
                __builtin_add_overflow(span, step, &span);
  }
  overflow |= __builtin_mul_overflow(span, element, &span);
  if (overflow) throw std::runtime_error("a tensor's size overflows");
  return span;
}

at::Tensor empty_matrix(int64_t rows, int64_t cols, bool single) {
  at::Tensor t = new_on_host(rows * cols * (single ? 4 : 8), single ? c10::kFloat : c10::kDouble);
  t.unsafeGetTensorImpl()->set_sizes_contiguous({rows, cols});
  return t;
}

// ------------------------------------------------------------------------------------------ frames
std::unique_ptr<Frame> Program::take_frame() {
  if (!frames_.empty()) {
    std::unique_ptr<Frame> f = std::move(frames_.back());
    frames_.pop_back();
    return f;
  }
  auto f = std::make_unique<Frame>();
  f->values = values_;
  f->bufs.resize(static_cast<size_t>(n_bufs_));
  f->syms.resize(static_cast<size_t>(n_syms_));
  f->params.resize(static_cast<size_t>(n_params_));
  f->tensors.resize(slots_.size());
  f->pointers.resize(slots_.size());
  f->opaques.resize(slots_.size());
  f->stack.reserve(stack_size_ + 8);
  for (at::Tensor& t : f->tensors) f->refs.push_back(&t);
  for (const LaunchInfo& l : launches_) {
    for (size_t i = 0; i < l.size_ids.size(); ++i)
      f->syms[static_cast<size_t>(l.sizes.first) + i] = values_[static_cast<size_t>(l.size_ids[i])];
    f->tasks.push_back({l.fn, f->bufs.data() + l.args.first, f->syms.data() + l.sizes.first,
                        l.parallel && values_[static_cast<size_t>(l.work_ns)] >= kSplitTaskNs,
                        l.barrier, l.kernel});
  }
  for (const GridLaunch& l : grid_launches_) {
    void** param = f->params.data() + l.params.first;
    for (int32_t i = 0; i < l.args.n; ++i)
      *param++ = &f->bufs[static_cast<size_t>(l.args.first + i)];
    for (int32_t i = 0; i < l.sizes.n; ++i) {
      int64_t& size = f->syms[static_cast<size_t>(l.sizes.first + i)];
      size = values_[static_cast<size_t>(l.size_ids[static_cast<size_t>(i)])];
      *param++ = &size;
    }
    for (void*& pointer : f->scratch) *param++ = &pointer;
  }
  for (size_t s = 0; s < slots_.size(); ++s) {
    if (slots_[s].kind != SlotInfo::Kind::constant) continue;
    const at::Tensor& t = constants_[static_cast<size_t>(slots_[s].offset)];
    f->refs[s] = &t;
    if (!slots_[s].needs_pointer) continue;
    require_reach(static_cast<SlotId>(s), t.unsafeGetTensorImpl());
    patch(*f, static_cast<SlotId>(s), first_of(t));
  }
  return f;
}

void Program::give_frame(std::unique_ptr<Frame> frame) noexcept {
  frames_.push_back(std::move(frame));
}

void Program::patch(Frame& f, SlotId s, char* pointer) const {
  f.pointers[static_cast<size_t>(s)] = pointer;
  const Range r = slots_[static_cast<size_t>(s)].patches;
  const Patch* p = patches_.data() + r.first;
  for (const Patch* end = p + r.n; p != end; ++p)
    f.bufs[static_cast<size_t>(p->buf)] = pointer + p->delta;
}

// Tensors that stand for others: subclasses, and what torch.func and functionalisation wrap.
static constexpr c10::DispatchKeySet kNotPlain({c10::DispatchKey::Python,
                                                c10::DispatchKey::FuncTorchBatched,
                                                c10::DispatchKey::FuncTorchGradWrapper,
                                                c10::DispatchKey::Functionalize});

std::string Program::wrapper_kind(const at::Tensor& t) {
  using c10::DispatchKey;
  const c10::DispatchKeySet keys = t.key_set();
  if (keys.has(DispatchKey::Batched) || keys.has(DispatchKey::FuncTorchBatched))
    return "a batched tensor of torch.func";
  if (keys.has(DispatchKey::FuncTorchGradWrapper)) return "a tensor of a gradient of torch.func";
  if (keys.has(DispatchKey::Functionalize)) return "a tensor that torch.func.functionalize wraps";
  return keys.has(DispatchKey::Python) ? "a tensor of a subclass" : "";
}

Program::Misfit Program::misfit(const Input& input, const at::Tensor& t) const {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  const c10::ScalarType want = slots_[static_cast<size_t>(input.id)].scalar;
  if (want != c10::ScalarType::Undefined && impl->dtype().toScalarType() != want)
    return Misfit::dtype;
  const c10::DispatchKeySet keys = impl->key_set();
  const c10::Device device = slots_[static_cast<size_t>(input.id)].device;
  const bool there = device.is_cpu() ? keys.has(c10::DispatchKey::CPU)
                                     : keys.has(c10::DispatchKey::CUDA) && impl->device() == device;
  // Attention gives the state of its random numbers on the host, though the fake tensors say
  // otherwise. What only operators take may be anywhere.
  if (!there && !device.is_cpu() && impl->dim() == 0 &&
      !slots_[static_cast<size_t>(input.id)].needs_pointer)
    return Misfit::none;
  return there && !keys.has_any(kNotPlain) ? Misfit::none : Misfit::device;
}

void Program::require_fit(const Input& input, const at::Tensor& t) const {
  const Misfit what = misfit(input, t);
  if (what == Misfit::none) return;
  const std::string head = "input '" + slot(input.id).name + "': expected ";
  if (what == Misfit::dtype)
    throw InputTypeError(head + "dtype " + torch_name(input.dtype) + ", got " +
                         torch_name(from_scalar_type(t.scalar_type())));
  const std::string kind = wrapper_kind(t);
  throw InputTypeError(head + "a plain tensor on device " + input.device + ", got " +
                       (kind.empty() ? "one on " + t.device().str() : kind));
}

void Program::bind(Frame& f, const Input& input, const at::Tensor& t) const {
  const size_t s = static_cast<size_t>(input.id);
  const SlotInfo& slot = slots_[s];
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
  if (slot.reaches) require_reach(input.id, f.refs[s]->unsafeGetTensorImpl());
  patch(f, input.id, first_of(*f.refs[s]));
}

void Program::define(Frame& f, SlotId s, at::Tensor value) const {
  const size_t i = static_cast<size_t>(s);
  const bool copied =
      value.defined() && (is_lazy(value) || (slots_[i].needs_pointer && is_odd(value)));
  if (f.arena_storage && value.defined() && value.has_storage() &&
      value.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(f.arena_storage)) [[unlikely]]
    throw std::runtime_error("'" + slots_[i].name +
                             "' would lie in the arena, which ends with the call");
  f.tensors[i] = copied ? materialised(value) : std::move(value);
  if (!slots_[i].needs_pointer) return;
  if (!f.tensors[i].defined())
    throw std::runtime_error("'" + slots_[i].name + "' is needed and was not returned");
  if (slots_[i].reaches) require_reach(s, f.tensors[i].unsafeGetTensorImpl());
  patch(f, s, first_of(f.tensors[i]));
}

// Views of constant sizes lie in the storage of what they are views of.
void Program::require_reach(SlotId s, const c10::TensorImpl* root) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  const int64_t at = root->storage_offset() * static_cast<int64_t>(root->itemsize());
  const auto room = static_cast<int64_t>(root->unsafe_storage().unsafeGetStorageImpl()->nbytes());
  if (at + i.lowest < 0 || at + i.highest > room) [[unlikely]]
    throw std::runtime_error("'" + i.name + "' is smaller than what is read of it");
}

bool Program::in_arena(SlotId s) const {
  while (slots_[static_cast<size_t>(s)].base != kNone) s = slots_[static_cast<size_t>(s)].base;
  return slots_[static_cast<size_t>(s)].kind == SlotInfo::Kind::arena;
}

void Program::set_symbol(Frame& f, int32_t symbol, int64_t value) const {
  for (ExprId e : symbol_exprs_[static_cast<size_t>(symbol)])
    f.values[static_cast<size_t>(e)] = value;
}

// An input of a boxed call; of another one the caller holds it.
void Program::drop_input(Frame& f, SlotId s) const {
  if (f.owns_inputs) f.tensors[static_cast<size_t>(s)].reset();
}

// A header that nobody else holds stays with the frame, without its storage: the next call saves
// making it.
void Program::drop(Frame& f, SlotId s) const {
  const size_t i = static_cast<size_t>(s);
  at::Tensor& t = f.tensors[i];
  if (!t.defined()) return;
  const SlotInfo::Kind kind = slots_[i].kind;
  if (kind == SlotInfo::Kind::place && t.use_count() == 1) return;
  if (kind == SlotInfo::Kind::view && !slots_[i].escapes && t.use_count() == 1)
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(empty_storage());
  else
    t.reset();
}

void Program::reset(Frame& f) const noexcept {
  for (SlotId s : owned_)
    if (f.tensors[static_cast<size_t>(s)].defined()) drop(f, s);
  if (f.owns_inputs)
    for (const Input& i : plan_.inputs)
      if (i.kind == Input::Kind::tensor) f.tensors[static_cast<size_t>(i.id)].reset();
  f.stack.clear();
  f.copied.clear();
  drop_arena(f);
  f.owns_inputs = false;
}

// ------------------------------------------------------------------------------------------ memory
const Accelerator& Program::on(c10::Device d) const {
  for (const Accelerator& other : others_)
    if (other.device() == d) return other;
  return *gpu_;
}

at::DataPtr Program::memory(Frame& f, c10::Device d, int64_t nbytes) const {
  if (is_elsewhere(d)) [[unlikely]] {
    const c10::DeviceGuard there(d);
    return on(d).allocate(nbytes);
  }
  if (f.dead_memory) [[unlikely]]
    if (at::DataPtr lent = f.dead_memory->take(nbytes, d)) return lent;
  return gpu_->allocate(nbytes);
}

at::Tensor Program::new_tensor(Frame& f, c10::Device d, int64_t nbytes,
                               c10::ScalarType type) const {
  if (d.is_cpu()) return new_on_host(nbytes, type);
  return tensor_in(memory(f, d, nbytes), nbytes, gpu_->allocator(), type);
}

void Program::take_arena(Frame& f, SlotId s, int64_t nbytes) const {
  if (nbytes < 0) throw std::runtime_error("an arena would have a negative size");
  const c10::Device device = slots_[static_cast<size_t>(s)].device;
  if (!device.is_cpu()) return bind_arena(f, s, memory(f, device, nbytes), nbytes);
  f.arena = ArenaBlock(nbytes);
  bind_arena(f, s, at::DataPtr(f.arena.data(), c10::kCPU), f.arena.size());
}

void Program::bind_arena(Frame& f, SlotId s, at::DataPtr block, int64_t nbytes) const {
  char* data = static_cast<char*>(block.get());
  const auto size = static_cast<size_t>(nbytes);
  if (f.arena_storage && data == f.arena_storage.data() && f.arena_storage.nbytes() == size) return;
  patch(f, s, data);
  if (!f.arena_storage)
    f.arena_storage = at::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t{}, size, at::DataPtr(nullptr, block.device()), nullptr,
        false));
  c10::StorageImpl* storage = f.arena_storage.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(block));
  storage->set_nbytes(size);
}

void Program::drop_arena(Frame& f) const noexcept {
  f.arena = ArenaBlock();
  if (gpu_ && f.arena_storage)
    f.arena_storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
        {nullptr, f.arena_storage.device()});
}

void Program::allocate(Frame& f, SlotId s, const Extents& e, int64_t nbytes,
                       bool contiguous) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  at::Tensor& t = f.tensors[static_cast<size_t>(s)];
  t = new_tensor(f, i.device, nbytes, i.scalar);
  if (contiguous)
    t.unsafeGetTensorImpl()->set_sizes_contiguous(e.sizes);
  else
    t.unsafeGetTensorImpl()->set_sizes_and_strides(e.sizes, e.strides);
  if (i.needs_pointer)
    patch(f, s,
          static_cast<char*>(
              t.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl()->mutable_data()));
}

void Program::allocate(Frame& f, SlotId s) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  const Extents e(i.meta, f.values);
  const int64_t nbytes = i.meta.is_static ? i.meta.nbytes : e.nbytes(element_size(i.dtype));
  allocate(f, s, e, nbytes, i.meta.contiguous);
}

const at::Storage& Program::storage_of(Frame& f, SlotId s, bool from_start) const {
  for (; slots_[static_cast<size_t>(s)].kind == SlotInfo::Kind::view;
       s = slots_[static_cast<size_t>(s)].base)
    from_start = from_start || !slots_[static_cast<size_t>(s)].relative;
  if (slots_[static_cast<size_t>(s)].kind == SlotInfo::Kind::place) return f.arena_storage;
  const at::Tensor& t = *f.refs[static_cast<size_t>(s)];
  if (from_start)  // the copy of an input has another start
    for (const Copied& c : f.copied)
      if (c.values.is_same(t) && !is_lazy(c.given)) return c.given.storage();
  return t.storage();
}

// Where a Place at this byte of its arena lies.
char* Program::place(const Frame& f, SlotId s, int64_t offset, const Extents& e) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  const int64_t nbytes = e.nbytes(element_size(i.dtype));
  const auto room = static_cast<int64_t>(f.arena_storage.nbytes());
  if (offset < 0 || nbytes > room || offset > room - nbytes)
    throw std::runtime_error("'" + i.name + "' reaches beyond its arena");
  return f.pointers[static_cast<size_t>(i.base)] + offset;
}

char* Program::pointer_of(const Frame& f, SlotId s) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  return f.pointers[static_cast<size_t>(i.root)] + i.delta;
}

// The pointer of a View or Place whose offset is known only now.
void Program::set_pointer(Frame& f, SlotId s) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  if (i.kind == SlotInfo::Kind::place)
    return patch(f, s, place(f, s, value(f, i.offset), Extents(i.meta, f.values)));
  char* from = i.relative
                   ? pointer_of(f, i.base)
                   : static_cast<char*>(storage_of(f, s).unsafeGetStorageImpl()->mutable_data());
  int64_t delta = 0;
  if (__builtin_mul_overflow(value(f, i.offset), element_size(i.dtype), &delta)) fail_size();
  char* const pointer = from + delta;
  if (!i.header) require_inside(f, s, pointer, Extents(i.meta, f.values));
  patch(f, s, pointer);
}

// Nobody else stands for the sizes and the place of a view that are known only now.
void Program::require_inside(Frame& f, SlotId s, const char* pointer, const Extents& e) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  const int64_t nbytes = e.nbytes(static_cast<int64_t>(type_of(f, i).itemsize()));
  if (nbytes == 0) return;
  const c10::StorageImpl* storage = storage_of(f, s).unsafeGetStorageImpl();
  const int64_t at = pointer - static_cast<const char*>(storage->data());
  const auto room = static_cast<int64_t>(storage->nbytes());
  if (at < 0 || nbytes > room || at > room - nbytes) [[unlikely]]
    throw std::runtime_error("'" + i.name + "' reaches beyond its memory");
}

// A view of an element type that the plan does not know ('opaque') has its base's.
caffe2::TypeMeta Program::type_of(const Frame& f, const SlotInfo& i) const {
  if (i.scalar != c10::ScalarType::Undefined) return c10::scalarTypeToTypeMeta(i.scalar);
  return f.refs[static_cast<size_t>(i.base)]->dtype();
}

void Program::bind_header(Frame& f, SlotId s, const char* pointer, const Extents& e) const {
  const SlotInfo& i = slots_[static_cast<size_t>(s)];
  at::Tensor& t = f.tensors[static_cast<size_t>(s)];
  const bool cached = t.defined() && t.use_count() == 1;
  if (cached && i.kind == SlotInfo::Kind::place && i.folded && i.meta.is_static) return;
  const at::Storage& storage = storage_of(f, s);
  const char* start = static_cast<const char*>(storage.unsafeGetStorageImpl()->data());
  const int64_t offset = (pointer - start) / element_size(i.dtype);
  if (cached)
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  else
    t = at::Tensor(at::detail::make_tensor_base<c10::TensorImpl>(
        at::Storage(storage), keys_of(storage.device()), type_of(f, i)));
  if (cached && i.meta.is_static) {
    t.unsafeGetTensorImpl()->set_storage_offset(offset);
    return;
  }
  t.unsafeGetTensorImpl()->set_sizes_and_strides(e.sizes, e.strides, offset);
  if (i.escapes && i.kind == SlotInfo::Kind::view) share_version(f, s);
}

void Program::bind_header(Frame& f, SlotId s) const {
  const Extents e(slot(s).meta, f.values);
  const char* pointer = pointer_of(f, s);
  if (!slot(s).inside) require_inside(f, s, pointer, e);
  bind_header(f, s, pointer, e);
}

// A view that leaves the program shares the version counter of what it views, as autograd expects
// of views.
void Program::share_version(Frame& f, SlotId s) const {
  SlotId owner = s;
  while (slots_[static_cast<size_t>(owner)].kind == SlotInfo::Kind::view)
    owner = slots_[static_cast<size_t>(owner)].base;
  if (slots_[static_cast<size_t>(owner)].kind == SlotInfo::Kind::place) return;
  const at::Tensor& base = *f.refs[static_cast<size_t>(owner)];
  const at::Tensor& view = f.tensors[static_cast<size_t>(s)];
  if (base.is_inference() || view.is_inference()) return;  // these have none
  view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
}

// ------------------------------------------------------------------------------------------- steps
void fail_size() {
  throw std::runtime_error(
      "a size expression overflows or divides by a number that is not positive");
}

void Program::evaluate_range(Frame& f, int32_t first, int32_t n) const {
  for (int32_t k = first; k < first + n; ++k) {
    const size_t e = static_cast<size_t>(evals_[static_cast<size_t>(k)]);
    if (!evaluate(plan_.exprs[e], f.values.data(), f.values[e])) [[unlikely]]
      fail_size();
  }
}

int64_t Program::read(const Frame& f, SlotId s, Source::Kind source, int64_t dim) const {
  const at::Tensor& t = *f.refs[static_cast<size_t>(s)];
  if (source == Source::Kind::offset) return t.storage_offset();
  if (source == Source::Kind::item) {
    TORCH_CHECK(t.numel() == 1, "'", slot(s).name, "' has ", t.numel(),
                " elements, one was expected");
    return t.item().to<int64_t>();
  }
  const c10::IntArrayRef dims = source == Source::Kind::size ? t.sizes() : t.strides();
  TORCH_CHECK(static_cast<size_t>(dim) < dims.size(), "'", slot(s).name, "' has no dimension ",
              dim);
  return dims[static_cast<size_t>(dim)];
}

void Program::run_region(Frame& f, const RegionInfo& r, bool profiled) const {
  int64_t split_ns = r.split_ns;
  Task* tasks = f.tasks.data() + r.first;
  if (!r.is_static) {
    split_ns = 0;
    for (int32_t k = 0; k < r.n; ++k) {
      const LaunchInfo& l = launches_[static_cast<size_t>(r.first + k)];
      const int64_t work = value(f, l.work_ns);
      tasks[k].split = l.parallel && work >= kSplitTaskNs;
      if (tasks[k].split) split_ns += work;
    }
  }
  for (int32_t k = r.first; k < r.first + r.n; ++k) {
    const LaunchInfo& l = launches_[static_cast<size_t>(k)];
    if (!l.dynamic_sizes) continue;
    for (size_t i = 0; i < l.size_ids.size(); ++i)
      f.syms[static_cast<size_t>(l.sizes.first) + i] = value(f, l.size_ids[i]);
  }
  run_tasks(tasks, r.n, split_ns, profiled);
}

// split_ns: estimated work of the tasks that are divided over threads.
void Program::run_tasks(const Task* tasks, int32_t n_tasks, int64_t split_ns, bool profiled) const {
  const int32_t nthreads = region_threads(split_ns, n_tasks);
  Failure failure;
  const auto run = [&](int32_t first, int32_t n) {
    return nthreads == 1 ? run_serial(tasks + first, n)
                         : run_parallel(tasks + first, n, nthreads, aten_pool());
  };
  if (profiled) [[unlikely]] {
    for (int32_t k = 0; k < n_tasks && failure.code == 0; ++k) {
      RECORD_FUNCTION(plan_.kernels[static_cast<size_t>(tasks[k].kernel)].name,
                      std::vector<c10::IValue>());
      failure = run(k, 1);
      failure.task = k;
    }
  } else {
    failure = run(0, n_tasks);
  }
  if (split_ns > kWarmRegionNs) last_candidate.store(__rdtsc(), std::memory_order_relaxed);
  if (failure.code != 0) [[unlikely]]
    fail_check(tasks[failure.task].kernel, failure.code);
}

void Program::fail_check(int32_t kernel, int64_t code) const {
  const Kernel& k = plan_.kernels[static_cast<size_t>(kernel)];
  const auto at = static_cast<size_t>(code - 1);
  TORCH_CHECK(at < k.checks.size(), "check ", code, " (in kernel ", k.name, ")");
  const Check& check = k.checks[at];
  TORCH_CHECK_INDEX(check.error != Check::Error::index, check.message, " (in kernel ", k.name, ")");
  TORCH_CHECK(false, check.message, " (in kernel ", k.name, ")");
}

void Program::run_launch(Frame& f, const GridLaunch& l, bool profiled) const {
  if (l.dynamic_sizes)
    for (size_t i = 0; i < l.size_ids.size(); ++i)
      f.syms[static_cast<size_t>(l.sizes.first) + i] = value(f, l.size_ids[i]);
  run_grid(f, l.kernel, value(f, l.grid), f.params.data() + l.params.first, profiled);
}

void Program::run_grid(Frame& f, int32_t kernel, int64_t grid, void** params, bool profiled) const {
  if (grid <= 0) return;
  const c10::Device device = kernel_devices_[static_cast<size_t>(kernel)];
  if (!is_elsewhere(device)) [[likely]]
    return launch_on(*gpu_, f.stream, f, kernel, grid, params, profiled);
  const c10::DeviceGuard there(device);
  const Accelerator& gpu = on(device);
  launch_on(gpu, gpu.stream(), f, kernel, grid, params, profiled);
}

void Program::launch_on(const Accelerator& gpu, cuda::Stream stream, Frame& f, int32_t kernel,
                        int64_t grid, void** params, bool profiled) const {
  const cuda::Kernel& loaded = *kernels_[static_cast<size_t>(kernel)];
  const cuda::KernelFacts& facts = loaded.facts();
  if (facts.global_scratch == 0 && facts.profile_scratch == 0 && !profiled) [[likely]]
    return loaded.launch(stream, static_cast<uint64_t>(grid), params);
  RECORD_FUNCTION(plan_.kernels[static_cast<size_t>(kernel)].name, std::vector<c10::IValue>());
  // The allocator hands memory out in the order of the stream: it may go back at once.
  const int64_t programs = grid * facts.num_ctas;
  const c10::DataPtr global = gpu.allocate(programs * facts.global_scratch),
                     profile = gpu.allocate(programs * facts.profile_scratch);
  f.scratch[0] = global.get();
  f.scratch[1] = profile.get();
  loaded.launch(stream, static_cast<uint64_t>(grid), params);
}

void Program::copy(Frame& f, const Copy& c) const {
  const at::Tensor& dst = *f.refs[static_cast<size_t>(c.dst)];
  const at::Tensor& src = *f.refs[static_cast<size_t>(c.src)];
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

void Program::fill(const Frame& f, const Fill& i) const {
  const at::Tensor& t = *f.refs[static_cast<size_t>(i.tensor)];
  switch (i.value.kind) {
    case Operand::Kind::size: t.fill_(value(f, i.value.id)); return;
    case Operand::Kind::boolean: t.fill_(i.value.id != 0); return;
    case Operand::Kind::real: t.fill_(i.value.re); return;
    case Operand::Kind::complex: t.fill_(c10::complex<double>(i.value.re, i.value.im)); return;
    default:
      throw std::runtime_error("'" + slot(i.tensor).name + "' cannot be filled with this value");
  }
}

void Program::check_finite(const Frame& f, SlotId s, const char* origin, bool infinities) const {
  const at::Tensor& t = *f.refs[static_cast<size_t>(s)];
  if (!t.is_floating_point() && !t.is_complex()) return;
  const bool fine =
      infinities ? at::isfinite(t).all().item<bool>() : !at::isnan(t).any().item<bool>();
  TORCH_CHECK(fine, "'", slot(s).name, "' holds a NaN", infinities ? " or an infinity" : "",
              ", computed by ", origin);
}

// A tensor whose layout has no strides may have any; so may a dimension of size 1 and a tensor
// without elements.
bool Program::has_layout(const Frame& f, SlotId s, const Layout& want) const {
  const at::Tensor& t = *f.refs[static_cast<size_t>(s)];
  if (!t.defined()) return false;
  if (want.dtype < DType::opaque && t.scalar_type() != scalar_type(want.dtype)) return false;
  if (t.is_nested()) return true;
  if (t.sizes() != want.sizes) return false;
  if (t.layout() != c10::kStrided || t.strides() == want.strides || t.numel() == 0) return true;
  for (size_t d = 0; d < want.sizes.size(); ++d)
    if (want.sizes[d] != 1 && t.strides()[d] != want.strides[d]) return false;
  return true;
}

// A tensor that is not what it should be: a copy takes its place if that mends it.
void Program::mend_layout(Frame& f, SlotId s, const Layout& want, const char* origin,
                          bool copies) const {
  const at::Tensor t = *f.refs[static_cast<size_t>(s)];
  const std::string by = *origin ? std::string(", made by ") + origin + "," : "";
  TORCH_CHECK(t.defined(), "'", slot(s).name, "'", by, " is needed and was not returned");
  TORCH_CHECK(want.dtype >= DType::opaque || t.scalar_type() == scalar_type(want.dtype), "'",
              slot(s).name, "'", by, " has dtype ", torch_name(from_scalar_type(t.scalar_type())),
              ", expected ", torch_name(want.dtype));
  const bool strided = t.layout() == c10::kStrided;
  if (copies && strided && t.sizes() == want.sizes) {
    const Extents checked(want.sizes, want.strides);
    at::Tensor made = at::empty_strided(want.sizes, want.strides, t.options());
    made.copy_(t);
    return define(f, s, std::move(made));
  }
  TORCH_CHECK(false, "'", slot(s).name, "'", by, " has sizes ", list(t.sizes()),
              strided ? " and strides " + list(t.strides()) : std::string(), ", expected ",
              list(want.sizes), " and ", list(want.strides), *origin ? " when it was traced" : "");
}

void Program::check_size_stride(Frame& f, const AssertSizeStride& a) const {
  c10::SmallVector<int64_t, 16> at;
  for (ExprId e : a.shape.sizes) at.push_back(value(f, e));
  for (ExprId e : a.shape.strides) at.push_back(value(f, e));
  const size_t rank = a.shape.sizes.size();
  const Layout want{a.dtype, {at.data(), rank}, {at.data() + rank, rank}};
  if (!has_layout(f, a.tensor, want)) [[unlikely]]
    mend_layout(f, a.tensor, want, a.origin.c_str(), a.copies);
}

void Program::check_scalar(const Frame& f, const AssertScalar& a) const {
  if (value(f, a.expr) != 0) [[likely]]
    return;
  c10::SmallVector<int64_t, 4> values;
  for (ExprId e : a.values) values.push_back(value(f, e));
  fail_assert(a.error, a.message, values);
}

void fail_assert(Check::Error error, std::string message, c10::IntArrayRef values) {
  size_t at = 0;
  for (int64_t v : values) {
    at = message.find("{}", at);
    if (at == std::string::npos) break;
    const std::string number = std::to_string(v);
    message.replace(at, 2, number);
    at += number.size();
  }
  TORCH_CHECK_INDEX(error != Check::Error::index, message);
  throw AssertError(std::move(message));
}

void Program::check_alignment(SlotId s, const char* pointer, int64_t nbytes) const {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(nbytes) == 0, "'",
              slot(s).name, "' is not aligned to ", nbytes, " bytes");
}

// Code that is not ATen's may use autograd of its own: it sees the caller's dispatch state, but
// gradients and autocast are off (the graph was traced with autocast decided).
c10::impl::LocalDispatchKeySet Program::outer_keys(const Frame& f) const {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - (f.excluded_by_us - c10::autocast_dispatch_keyset);
  return keys;
}

void Program::run_python(Frame& f, const PythonCall& c, const Operands& o) const {
  const c10::impl::ForceDispatchKeyGuard guard(outer_keys(f));
  if (control_) return control_(*this, f, c, o);
  const bool released = f.gil != nullptr;
  if (released) host_.retake_gil(std::exchange(f.gil, nullptr));
  host_.call_python(*this, f, c, o);
  if (released) f.gil = host_.release_gil();
}

void Program::step(Frame& f, const Step& s, bool profiled) const {
  switch (s.kind) {
    case StepKind::eval: return evaluate_range(f, s.a, s.b);
    case StepKind::define: return set_symbol(f, s.a, value(f, s.b));
    case StepKind::read_symbol: {
      const Symbol& i = instr<Symbol>(s.a);
      return set_symbol(f, i.symbol, read(f, i.value.tensor, i.value.kind, i.value.dim));
    }
    case StepKind::arena: return take_arena(f, s.a, value(f, s.b));
    case StepKind::alloc: return allocate(f, s.a);
    case StepKind::pointer: return set_pointer(f, s.a);
    case StepKind::inside:
      return require_inside(f, s.a, pointer_of(f, s.a),
                            Extents(slots_[static_cast<size_t>(s.a)].meta, f.values));
    case StepKind::header: return bind_header(f, s.a);
    case StepKind::region: return run_region(f, regions_[static_cast<size_t>(s.a)], profiled);
    case StepKind::launch: return run_launch(f, grid_launches_[static_cast<size_t>(s.a)], profiled);
    case StepKind::call_extern:
      return call_operator(f, externs_[static_cast<size_t>(s.a)], Operands(f), profiled);
    case StepKind::call_python:
      return run_python(f, pythons_[static_cast<size_t>(s.a)], Operands(f));
    case StepKind::copy: return copy(f, instr<Copy>(s.a));
    case StepKind::bump:
      return f.refs[static_cast<size_t>(s.a)]->unsafeGetTensorImpl()->bump_version();
    case StepKind::fill: return fill(f, instr<Fill>(s.a));
    case StepKind::drop: return drop(f, s.a);
    case StepKind::drop_input: return drop_input(f, s.a);
    case StepKind::assert_scalar: return check_scalar(f, instr<AssertScalar>(s.a));
    case StepKind::assert_size_stride: return check_size_stride(f, instr<AssertSizeStride>(s.a));
    case StepKind::assert_alignment: {
      const AssertAlignment& i = instr<AssertAlignment>(s.a);
      return check_alignment(i.tensor, pointer_of(f, i.tensor), i.nbytes);
    }
    case StepKind::check_finite: {
      const CheckFinite& i = instr<CheckFinite>(s.a);
      return check_finite(f, i.tensor, i.origin.c_str(), i.infinities);
    }
  }
}

void Program::walk(Frame& f, bool profiled) const {
  if (generated_)
    run_generated(f, profiled);
  else
    for (const Step& s : steps_) step(f, s, profiled);
  if (!f.copied.empty()) [[unlikely]]
    write_back(f);
}

void Program::run_steps(Frame& f) const {
  const bool profiled = at::hasCallbacks();
  std::optional<c10::DeviceGuard> on_gpu;
  c10::OptionalStreamGuard callers_stream;
  if (gpu_) {
    if (!gpu_->is_current()) on_gpu.emplace(gpu_->device());
    f.stream = gpu_->stream();
    if (forks_) {  // the caller's stream is current again, whatever fails
      const c10::impl::VirtualGuardImpl streams(gpu_->device().type());
      callers_stream.reset_stream(streams.getStream(gpu_->device()));
    }
  }
  if (!needs_guard_) return walk(f, profiled);
  f.excluded_by_us = DispatchGuard::added();
  const DispatchGuard guard;
  walk(f, profiled);
}

void Program::write_back(Frame& f) const {
  const DispatchGuard guard;
  for (auto& [input, values, written] : f.copied) {
    if (!written) continue;
    input.copy_(values);
    if (!input.is_inference() && values._version() > 0)  // the program counts it as changed
      input.unsafeGetTensorImpl()->bump_version();
  }
}

void Program::run(Frame& f) const {
  if (small_) return run_steps(f);
  if (graphs_ && run_graphs(f)) return;
  if (typical_ticks_.load(std::memory_order_relaxed) > kReleaseGilTicks)
    f.gil = host_.release_gil();
  const auto end = [&] {
    if (f.gil) host_.retake_gil(std::exchange(f.gil, nullptr));
    if (graphs_) note_beside(f);
  };
  const uint64_t start = __rdtsc();
  try {
    run_steps(f);
  } catch (...) {
    end();
    throw;
  }
  typical_ticks_.store(static_cast<int64_t>(__rdtsc() - start), std::memory_order_relaxed);
  end();
}

}  // namespace plait
