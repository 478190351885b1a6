// native/torch/memory.h: the memory of slots: arena, allocations, and the pointers and headers of
// what lies in them.
//
// - A slot's pointer is set before anything reads it, and lies in memory that is alive.
// - What is known only at the call (sizes, offsets) is checked against the memory that it lies in
//   before a kernel or an operator sees it; nothing here is trusted that the loader has not proven.
// - Memory on a GPU is handed out in the order of the frame's stream.
#pragma once

#include "frame.h"

namespace plait {

// Sizes and strides of a slot at this call. Throws if one is negative.
class Extents {
 public:
  Extents(const Meta& m, const std::vector<int64_t>& values);
  Extents(c10::IntArrayRef sizes, c10::IntArrayRef strides);
  Extents(const Extents&) = delete;
  Extents& operator=(const Extents&) = delete;
  int64_t nbytes(int64_t element) const;  // from first to past last element; throws on overflow

  c10::IntArrayRef sizes, strides;

 private:
  int64_t at_[128];
};

void take_arena(Frame& f, SlotId s, int64_t nbytes);
void drop_arena(Frame& f) noexcept;
void allocate(Frame& f, SlotId s);
void allocate(Frame& f, SlotId s, const Extents& e, int64_t nbytes, bool contiguous);
at::DataPtr memory_on(Frame& f, c10::Device d, int64_t nbytes);  // of a GPU
at::Tensor new_tensor(Frame& f, c10::Device d, int64_t nbytes, c10::ScalarType type);
at::Tensor empty_matrix(int64_t rows, int64_t cols, bool single);  // row-major, float or double

const at::Storage& storage_of(const Frame& f, SlotId s, bool from_start = false);
inline char* pointer_of(const Frame& f, SlotId s) {
  return f.pointer(f.slot(s).root) + f.slot(s).delta;
}
// Where a Place at this byte of its arena lies.
char* place(const Frame& f, SlotId s, int64_t offset, const Extents& e);
void set_pointer(Frame& f, SlotId s);
void require_inside(const Frame& f, SlotId s, const char* pointer, const Extents& e);
void bind_header(Frame& f, SlotId s);
void bind_header(Frame& f, SlotId s, const char* pointer, const Extents& e);

}  // namespace plait
