// native/torch/frame.h: the values of one call: tensors, sizes, kernel arguments and the arena.
//
// - A Frame belongs to one call at a time: two threads in one program hold two frames.
// - `refs` is what a slot is now: a tensor of the frame, of the caller or of the program. Those of
//   the caller live as long as the call.
// - Inputs are bound one by one, then the program runs, then the outputs are read, then the frame
//   is reset and given back, whatever has happened.
// - Between calls a frame keeps the headers of tensors that nobody else holds, without their
//   memory, and what does not change: constants, their patches, the addresses of launch parameters.
#pragma once

#include "core/arena.h"
#include "code.h"

namespace plait {

class DeadMemory;

// An input that kernels cannot read as it is (lazily negated or conjugated, or at an address that
// is not aligned), and the copy that the program works on. What the program changes goes back into
// the input, and results that are views of the copy are made views of the input.
struct Copied {
  at::Tensor given, values;
  bool written;
};

struct Frame {
  explicit Frame(const Code& code);
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  const SlotInfo& slot(SlotId s) const { return code.slot(s); }
  const at::Tensor& tensor(SlotId s) const { return *refs[static_cast<size_t>(s)]; }
  at::Tensor& own(SlotId s) { return tensors[static_cast<size_t>(s)]; }
  const at::Tensor& own(SlotId s) const { return tensors[static_cast<size_t>(s)]; }
  int64_t value(ExprId e) const { return values[static_cast<size_t>(e)]; }
  char* pointer(SlotId s) const { return pointers[static_cast<size_t>(s)]; }

  const Code& code;
  std::vector<int64_t> values;  // of expressions
  std::vector<void*> bufs;      // kernel arguments
  std::vector<int64_t> syms;
  std::vector<Task> tasks;                // one a launch on the CPU
  std::vector<void*> params;              // of launches on the GPU: addresses in bufs and syms
  void* scratch[2] = {nullptr, nullptr};  // of the launch at hand: global, profile
  cuda::Stream stream = nullptr;
  std::vector<at::Tensor> tensors;      // by slot: what the frame owns
  std::vector<const at::Tensor*> refs;  // by slot: &tensors[slot], or the caller's
  std::vector<char*> pointers;          // by slot, of roots
  std::vector<void*> opaques;           // by slot: borrowed objects of the host
  std::vector<c10::IValue> stack;
  ArenaBlock arena;
  at::Storage arena_storage;  // borrows arena's memory for headers of Places
  bool owns_inputs = false;
  std::vector<Copied> copied;
  size_t recorded = 0;  // while work is recorded: 1, and 1 more for each conditional node around it
  DeadMemory* dead_memory = nullptr;   // while something is recorded: room for what it makes
  c10::DispatchKeySet excluded_by_us;  // what the call added to the thread's excluded keys
  void* gil = nullptr;
};

// What the ids in the operands of a call stand for: slots and expressions of the frame; in a
// generated program, places in the list that it hands over. Sizes have those from n_exprs on.
class Operands {
 public:
  explicit Operands(const Frame& f) : f_(f) {}
  Operands(const Frame& f, const plait_operand* given, size_t n_exprs)
      : f_(f), given_(given), n_exprs_(n_exprs), is_given_(true) {}
  bool is_given() const { return is_given_; }
  SlotId slot(int32_t id) const {
    return is_given_ ? static_cast<SlotId>(given_[static_cast<size_t>(id)].value) : id;
  }
  int64_t value(ExprId id) const {
    const auto i = static_cast<size_t>(id);
    return is_given_ && i >= n_exprs_ ? given_[i - n_exprs_].value : f_.values[i];
  }
  const at::Tensor& tensor(int32_t id) const { return f_.tensor(slot(id)); }

 private:
  const Frame& f_;
  const plait_operand* given_ = nullptr;
  size_t n_exprs_ = 0;
  bool is_given_ = false;
};

// Of the caller: whether an input can take this tensor.
enum class Misfit { none, dtype, device };
Misfit find_misfit(const SlotInfo& input, const at::Tensor& t);
void require_fit(const Frame& f, const Input& input, const at::Tensor& t);  // throws InputTypeError
std::string wrapper_kind(const at::Tensor& t);  // what it stands for, "" if for itself

// Trusts that find_misfit() found nothing.
void bind_input(Frame& f, const Input& input, const at::Tensor& t);
inline void set_symbol(Frame& f, int32_t symbol, int64_t value) {
  for (ExprId e : f.code.symbol_exprs[static_cast<size_t>(symbol)])
    f.values[static_cast<size_t>(e)] = value;
}
// A tensor result of an extern or Python call.
void define(Frame& f, SlotId s, at::Tensor value);
// The pointer of a root, for all that is at a constant distance from it.
inline void patch(Frame& f, SlotId s, char* pointer) {
  f.pointers[static_cast<size_t>(s)] = pointer;
  const Range r = f.slot(s).patches;
  const Patch* p = f.code.patches.data() + r.first;
  for (const Patch* end = p + r.n; p != end; ++p)
    f.bufs[static_cast<size_t>(p->buf)] = pointer + p->delta;
}
bool in_arena(const Code& code, SlotId s);  // its memory is the program's only during a call
void drop(Frame& f, SlotId s);
void drop_input(Frame& f, SlotId s);
void write_back(Frame& f);      // what the program changed of copied inputs
void reset(Frame& f) noexcept;  // drops every tensor of the call

// Conjugated or negated by a bit of the tensor, or zeros without memory: kernels and headers of
// views know no such bits.
bool is_lazy(const at::Tensor& t);
// On a GPU, and no multiple of 16, which kernels are compiled for.
bool is_odd(const at::Tensor& t);
// Its values in memory of their own, with its strides, gaps and all.
at::Tensor materialised(const at::Tensor& t);
// Where the elements of t begin. Torch calls the place of a tensor without elements null, but a
// view of it has an offset of its own.
inline char* first_of(const at::Tensor& t) {
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (void* first = impl->mutable_data()) [[likely]]
    return static_cast<char*>(first);
  return static_cast<char*>(impl->unsafe_storage().unsafeGetStorageImpl()->mutable_data()) +
         impl->storage_offset() * static_cast<int64_t>(impl->itemsize());
}
// A sanity check of an input failed: wrong dtype or device.
struct InputTypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace plait
