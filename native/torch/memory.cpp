// native/torch/memory.cpp: arena, allocations, pointers and headers, see memory.h.
#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstdlib>

#include "checks.h"
#include "dead_memory.h"

namespace plait {
namespace {

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

void bind_arena(Frame& f, SlotId s, at::DataPtr block, int64_t nbytes) {
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

// A view of an element type that the plan does not know ('opaque') has its base's.
caffe2::TypeMeta type_of(const Frame& f, const SlotInfo& i) {
  if (i.scalar != c10::ScalarType::Undefined) return c10::scalarTypeToTypeMeta(i.scalar);
  return f.tensor(i.base).dtype();
}

// A view that leaves the program shares the version counter of what it views, as autograd expects
// of views.
void share_version(Frame& f, SlotId s) {
  SlotId owner = s;
  while (f.slot(owner).kind == SlotInfo::Kind::view) owner = f.slot(owner).base;
  if (f.slot(owner).kind == SlotInfo::Kind::place) return;
  const at::Tensor& base = f.tensor(owner);
  const at::Tensor& view = f.own(s);
  if (base.is_inference() || view.is_inference()) return;  // these have none
  view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
}

}  // namespace

const Accelerator& Code::on(c10::Device d) const {
  for (const Accelerator& other : others)
    if (other.device() == d) return other;
  return *gpu;
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

at::DataPtr memory_on(Frame& f, c10::Device d, int64_t nbytes) {
  if (f.code.is_elsewhere(d)) [[unlikely]] {
    const c10::DeviceGuard there(d);
    return f.code.on(d).allocate(nbytes);
  }
  if (f.dead_memory) [[unlikely]]
    if (at::DataPtr lent = f.dead_memory->take(nbytes, d)) return lent;
  return f.code.gpu->allocate(nbytes);
}

at::Tensor new_tensor(Frame& f, c10::Device d, int64_t nbytes, c10::ScalarType type) {
  if (d.is_cpu()) return new_on_host(nbytes, type);
  return tensor_in(memory_on(f, d, nbytes), nbytes, f.code.gpu->allocator(), type);
}

void take_arena(Frame& f, SlotId s, int64_t nbytes) {
  if (nbytes < 0) throw std::runtime_error("an arena would have a negative size");
  const c10::Device device = f.slot(s).device;
  if (!device.is_cpu()) return bind_arena(f, s, memory_on(f, device, nbytes), nbytes);
  f.arena = ArenaBlock(nbytes);
  bind_arena(f, s, at::DataPtr(f.arena.data(), c10::kCPU), f.arena.size());
}

void drop_arena(Frame& f) noexcept {
  f.arena = ArenaBlock();
  if (f.code.gpu && f.arena_storage)
    f.arena_storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
        {nullptr, f.arena_storage.device()});
}

void allocate(Frame& f, SlotId s, const Extents& e, int64_t nbytes, bool contiguous) {
  const SlotInfo& i = f.slot(s);
  at::Tensor& t = f.own(s);
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

void allocate(Frame& f, SlotId s) {
  const SlotInfo& i = f.slot(s);
  const Extents e(i.meta, f.values);
  const int64_t nbytes = i.meta.is_static ? i.meta.nbytes : e.nbytes(element_size(i.dtype));
  allocate(f, s, e, nbytes, i.meta.contiguous);
}

const at::Storage& storage_of(const Frame& f, SlotId s, bool from_start) {
  for (; f.slot(s).kind == SlotInfo::Kind::view; s = f.slot(s).base)
    from_start = from_start || !f.slot(s).relative;
  if (f.slot(s).kind == SlotInfo::Kind::place) return f.arena_storage;
  const at::Tensor& t = f.tensor(s);
  if (from_start)  // the copy of an input has another start
    for (const Copied& c : f.copied)
      if (c.values.is_same(t) && !is_lazy(c.given)) return c.given.storage();
  return t.storage();
}

// Where a Place at this byte of its arena lies.
char* place(const Frame& f, SlotId s, int64_t offset, const Extents& e) {
  const SlotInfo& i = f.slot(s);
  const int64_t nbytes = e.nbytes(element_size(i.dtype));
  const auto room = static_cast<int64_t>(f.arena_storage.nbytes());
  if (offset < 0 || nbytes > room || offset > room - nbytes)
    throw std::runtime_error("'" + i.name + "' reaches beyond its arena");
  return f.pointers[static_cast<size_t>(i.base)] + offset;
}

// Nobody else stands for the sizes and the place of a view that are known only now.
void require_inside(const Frame& f, SlotId s, const char* pointer, const Extents& e) {
  const SlotInfo& i = f.slot(s);
  const int64_t nbytes = e.nbytes(static_cast<int64_t>(type_of(f, i).itemsize()));
  if (nbytes == 0) return;
  const c10::StorageImpl* storage = storage_of(f, s).unsafeGetStorageImpl();
  const int64_t at = pointer - static_cast<const char*>(storage->data());
  const auto room = static_cast<int64_t>(storage->nbytes());
  if (at < 0 || nbytes > room || at > room - nbytes) [[unlikely]]
    throw std::runtime_error("'" + i.name + "' reaches beyond its memory");
}

// The pointer of a View or Place whose offset is known only now.
void set_pointer(Frame& f, SlotId s) {
  const SlotInfo& i = f.slot(s);
  if (i.kind == SlotInfo::Kind::place)
    return patch(f, s, place(f, s, f.value(i.offset), Extents(i.meta, f.values)));
  char* from = i.relative
                   ? pointer_of(f, i.base)
                   : static_cast<char*>(storage_of(f, s).unsafeGetStorageImpl()->mutable_data());
  int64_t delta = 0;
  if (__builtin_mul_overflow(f.value(i.offset), element_size(i.dtype), &delta)) fail_size();
  char* const pointer = from + delta;
  if (!i.header) require_inside(f, s, pointer, Extents(i.meta, f.values));
  patch(f, s, pointer);
}

void bind_header(Frame& f, SlotId s, const char* pointer, const Extents& e) {
  const SlotInfo& i = f.slot(s);
  at::Tensor& t = f.own(s);
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

void bind_header(Frame& f, SlotId s) {
  const Extents e(f.slot(s).meta, f.values);
  const char* pointer = pointer_of(f, s);
  if (!f.slot(s).inside) require_inside(f, s, pointer, e);
  bind_header(f, s, pointer, e);
}

}  // namespace plait
