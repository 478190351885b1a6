// plait/wrapper.h: what a generated C++ program calls: a table of C functions, and a thin layer
// over it.
//
// A call has a frame of numbered slots, one a tensor. The functions are those that the native
// executor runs on; they return 0, or anything else where the call failed: then the error is kept
// and the program returns at once (TRY). Sizes, strides and offsets are in elements. No header but
// <stdint.h> is included, so that programs build fast.
#pragma once

#include <stdint.h>

#define PLAIT_TABLE_VERSION 5

extern "C" {

struct plait_call;

typedef int64_t (*plait_kernel)(int64_t tid, int64_t n_threads, void* const* buffers,
                                const int64_t* sizes);

// One kernel call with all of its arguments.
struct plait_task {
  plait_kernel run;
  void* const* buffers;
  const int64_t* sizes;
  int64_t what;  // its number from bit 32 on, plait_split, plait_barrier
};
// Divided over threads; starts after every earlier task has ended.
enum { plait_split = 1, plait_barrier = 1 << 8 };

// A tensor's slot, or an integer.
struct plait_operand {
  int64_t value;
};

enum plait_what { plait_size, plait_stride, plait_offset, plait_item };
enum plait_number { plait_integer, plait_bool, plait_real, plait_complex };

// Slots, kernels and calls of operators, Python objects and subprograms go by their numbers in the
// program's plan.
struct plait_table {
  int64_t (*symbol)(const plait_call*, int32_t symbol);  // an int argument, or an int result
  int (*read)(plait_call*, int32_t tensor, int what, int64_t dim, int64_t* out);
  int (*arena)(plait_call*, int32_t arena, int64_t nbytes);
  int (*place)(plait_call*, int32_t tensor, int64_t offset, int rank, const int64_t* sizes,
               const int64_t* strides);
  int (*alloc)(plait_call*, int32_t tensor, int rank, const int64_t* sizes, const int64_t* strides);
  int (*view)(plait_call*, int32_t tensor, char* first, int rank, const int64_t* sizes,
              const int64_t* strides);
  int (*storage)(plait_call*, int32_t tensor, char** first);  // where its storage starts
  void (*drop)(plait_call*, int32_t tensor);
  int (*run)(plait_call*, const plait_task* tasks, int n, int64_t split_ns);
  int (*failed)(plait_call*, int32_t kernel, int64_t code);  // which a kernel returned
  int (*launch)(plait_call*, int32_t kernel, void* const* buffers, const int64_t* sizes,
                int64_t grid);
  int (*op)(plait_call*, int32_t index, const plait_operand* operands, int n);
  int (*python)(plait_call*, int32_t index, const plait_operand* operands, int n);
  int (*programs)(plait_call*, int32_t index, const plait_operand* operands, int n);
  int (*copy)(plait_call*, int32_t dst, int32_t src, bool bump);
  int (*bump)(plait_call*, int32_t tensor);
  int (*fill)(plait_call*, int32_t tensor, int kind, int64_t integer, double real,
              double imaginary);
  int (*layout)(plait_call*, int32_t tensor, const char* origin, bool copies, int dtype, int rank,
                const int64_t* sizes, const int64_t* strides);
  int (*aligned)(plait_call*, int32_t tensor, const char* first, int64_t nbytes);
  int (*finite)(plait_call*, int32_t tensor, const char* origin, bool infinities);
  int (*fail)(plait_call*, int error, const char* message, int64_t n_bytes, const int64_t* values,
              int n_values);
  int (*overflow)(plait_call*);  // fails for a size that does not fit
  int (*give)(plait_call*, const plait_operand* results, int n);
  // Of sizes; false where it has no value.
  bool (*function)(int64_t number, int64_t a, int64_t b, int64_t* out);
};

// Which table a program was made for.
extern const int32_t plait_table_version __attribute__((weak)) = PLAIT_TABLE_VERSION;

struct plait_call {
  const plait_table* table;
  const plait_kernel* kernels;  // of the CPU
  char* const* pointers;        // by slot, of tensors with memory of their own
  bool profiled;                // somebody wants to see every kernel
};
}

namespace plait {

// A kernel of less estimated work is cheaper on one thread.
constexpr int64_t kSplitTaskNs = 2'000;
// A region with no more work than this that could be split is always run by one thread.
constexpr int64_t kSerialRegionNs = 6'000;

namespace wrapper {

#define TRY(step) \
  if (step) return 1

// An int64_t of this name.
#define SIZE(name, expression)                                \
  const ::plait::wrapper::Int name##_checked = (expression);  \
  if (name##_checked.bad) return call->table->overflow(call); \
  const int64_t name = name##_checked.value

// An integer that knows whether its computation overflowed or divided by a number that is not
// positive.
struct Int {
  int64_t value;
  bool bad;
  constexpr Int(int64_t v, bool b = false) : value(v), bad(b) {}
};
inline Int operator+(Int a, Int b) {
  int64_t r = 0;
  const bool over = __builtin_add_overflow(a.value, b.value, &r);
  return {r, over || a.bad || b.bad};
}
inline Int operator*(Int a, Int b) {
  int64_t r = 0;
  const bool over = __builtin_mul_overflow(a.value, b.value, &r);
  return {r, over || a.bad || b.bad};
}
// Floor division and its remainder.
inline Int div(Int a, Int b) {
  if (a.bad || b.bad || b.value <= 0) return {0, true};
  return a.value / b.value - (a.value % b.value < 0);
}
inline Int mod(Int a, Int b) {
  if (a.bad || b.bad || b.value <= 0) return {0, true};
  return a.value % b.value + (a.value % b.value < 0 ? b.value : 0);
}
inline Int min(Int a, Int b) { return {a.value < b.value ? a.value : b.value, a.bad || b.bad}; }
inline Int max(Int a, Int b) { return {a.value > b.value ? a.value : b.value, a.bad || b.bad}; }
inline Int eq(Int a, Int b) { return {a.value == b.value, a.bad || b.bad}; }
inline Int ne(Int a, Int b) { return {a.value != b.value, a.bad || b.bad}; }
inline Int lt(Int a, Int b) { return {a.value < b.value, a.bad || b.bad}; }
inline Int le(Int a, Int b) { return {a.value <= b.value, a.bad || b.bad}; }

using Call = plait_call*;

inline Int function(Call call, int64_t number, Int a, Int b) {
  Int r(0, a.bad || b.bad);
  if (!r.bad) r.bad = !call->table->function(number, a.value, b.value, &r.value);
  return r;
}

// A tensor in its slot. Sizes and strides are left out where there are no dimensions.
class Slot {
 public:
  Slot(Call call, int32_t slot) : call(call), slot(slot) {}
  char* data() const { return call->pointers[slot]; }
  int read(int what, int64_t dim, int64_t& out) const {
    return call->table->read(call, slot, what, dim, &out);
  }
  int storage(char*& first) const { return call->table->storage(call, slot, &first); }
  void drop() const { call->table->drop(call, slot); }

  // Of an arena: memory for the call.
  int take(int64_t nbytes) const { return call->table->arena(call, slot, nbytes); }
  // With memory of its own.
  int alloc() const { return call->table->alloc(call, slot, 0, nullptr, nullptr); }
  template <int N>
  int alloc(const int64_t (&sizes)[N], const int64_t (&strides)[N]) const {
    return call->table->alloc(call, slot, N, sizes, strides);
  }
  // At a byte of the arena.
  int place(int64_t offset) const {
    return call->table->place(call, slot, offset, 0, nullptr, nullptr);
  }
  template <int N>
  int place(int64_t offset, const int64_t (&sizes)[N], const int64_t (&strides)[N]) const {
    return call->table->place(call, slot, offset, N, sizes, strides);
  }
  // On memory that another tensor holds.
  int view(char* first) const { return call->table->view(call, slot, first, 0, nullptr, nullptr); }
  template <int N>
  int view(char* first, const int64_t (&sizes)[N], const int64_t (&strides)[N]) const {
    return call->table->view(call, slot, first, N, sizes, strides);
  }
  // Fails, naming origin, unless these are its element type (by number), sizes and strides. copies:
  // with other strides it becomes a copy that has them.
  int require(const char* origin, bool copies, int dtype) const {
    return call->table->layout(call, slot, origin, copies, dtype, 0, nullptr, nullptr);
  }
  template <int N>
  int require(const char* origin, bool copies, int dtype, const int64_t (&sizes)[N],
              const int64_t (&strides)[N]) const {
    return call->table->layout(call, slot, origin, copies, dtype, N, sizes, strides);
  }
  int require_aligned(const char* first, int64_t nbytes) const {
    return call->table->aligned(call, slot, first, nbytes);
  }
  int require_finite(const char* origin, bool infinities) const {
    return call->table->finite(call, slot, origin, infinities);
  }
  int copy(const Slot& from, bool bump) const {
    return call->table->copy(call, slot, from.slot, bump);
  }
  int bump() const { return call->table->bump(call, slot); }
  int fill(int kind, int64_t integer, double real = 0, double imaginary = 0) const {
    return call->table->fill(call, slot, kind, integer, real, imaginary);
  }

  const Call call;
  const int32_t slot;
};

// A tensor that the call owns: dropped at the end of its life, unless it was handed over.
class Tensor : public Slot {
 public:
  Tensor(Call call, int32_t slot) : Slot(call, slot) {}
  Tensor(const Tensor&) = delete;
  ~Tensor() {
    if (owned_) Slot::drop();
  }
  void drop() {
    owned_ = false;
    Slot::drop();
  }
  const Slot& keep() {
    owned_ = false;
    return *this;
  }

 private:
  bool owned_ = true;
};

struct Operand : plait_operand {
  Operand(const Slot& t) : plait_operand{t.slot} {}
  Operand(int64_t v) : plait_operand{v} {}
};

inline int64_t symbol(Call call, int32_t index) { return call->table->symbol(call, index); }
// error: 0 an IndexError, 1 a RuntimeError. values: what the first marks {} of the message stand
// for.
template <int N>
int require(Call call, int64_t holds, const char (&message)[N], int error = 1) {
  return holds ? 0 : call->table->fail(call, error, message, N - 1, nullptr, 0);
}
template <int N, int M>
int require(Call call, int64_t holds, const char (&message)[N], int error,
            const int64_t (&values)[M]) {
  return holds ? 0 : call->table->fail(call, error, message, N - 1, values, M);
}

// ---- operators, Python objects and subprograms
inline int op(Call call, int32_t index) { return call->table->op(call, index, nullptr, 0); }
template <int N>
int op(Call call, int32_t index, const Operand (&operands)[N]) {
  return call->table->op(call, index, operands, N);
}
inline int python(Call call, int32_t index) { return call->table->python(call, index, nullptr, 0); }
template <int N>
int python(Call call, int32_t index, const Operand (&operands)[N]) {
  return call->table->python(call, index, operands, N);
}
inline int programs(Call call, int32_t index) {
  return call->table->programs(call, index, nullptr, 0);
}
template <int N>
int programs(Call call, int32_t index, const Operand (&operands)[N]) {
  return call->table->programs(call, index, operands, N);
}
inline int give(Call call) { return call->table->give(call, nullptr, 0); }
template <int N>
int give(Call call, const Operand (&results)[N]) {
  return call->table->give(call, results, N);
}

// ---- kernels
enum { kWhole = 1, kNoBarrier = 2 };  // not to be split; may overlap those before it in its region

// Sizes that are constants.
template <int64_t... S>
constexpr int64_t kSizes[sizeof...(S) ? sizeof...(S) : 1] = {S...};

// A kernel with its arguments; these alone are in memory. work_ns: its estimated time on one core.
template <int N, int M>
struct Launch {
  int32_t kernel;
  void* const (&buffers)[N ? N : 1];
  const int64_t (&sizes)[M ? M : 1];
  int64_t work_ns;
  int flags;

  bool split() const { return !(flags & kWhole) && work_ns >= kSplitTaskNs; }
  int64_t split_ns() const { return split() ? work_ns : 0; }
  plait_task task(Call call) const {
    const int64_t what = (split() ? plait_split : 0) | (flags & kNoBarrier ? 0 : plait_barrier);
    return {call->kernels[kernel], buffers, sizes, what | int64_t(kernel) << 32};
  }
};

__attribute__((noinline, unused)) static int run_seen(Call call, const plait_task& task) {
  return call->table->run(call, &task, 1, 0);
}
template <int N, int M>
__attribute__((always_inline)) inline int run_alone(Call call, const Launch<N, M>& l) {
  if (__builtin_expect(call->profiled, 0)) return run_seen(call, l.task(call));
  const int64_t code = call->kernels[l.kernel](0, 1, l.buffers, l.sizes);
  return __builtin_expect(code != 0, 0) ? call->table->failed(call, l.kernel, code) : 0;
}

// Kernels that follow each other run as one region.
template <class... L>
__attribute__((always_inline)) inline int run(Call call, const L&... launches) {
  const int64_t split_ns = (launches.split_ns() + ...);
  if (split_ns <= kSerialRegionNs) return (run_alone(call, launches) || ...);
  const plait_task tasks[] = {launches.task(call)...};
  return call->table->run(call, tasks, sizeof...(L), split_ns);
}

// On a GPU: what a grid of programs works on.
template <int N, int M>
struct Arguments {
  void* buffers[N ? N : 1];
  int64_t sizes[M ? M : 1];
};
template <int N, int M>
int launch(Call call, int32_t kernel, int64_t grid, const Arguments<N, M>& a) {
  return call->table->launch(call, kernel, a.buffers, a.sizes, grid);
}

}  // namespace wrapper
}  // namespace plait
