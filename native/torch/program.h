// native/torch/program.h: a Plan bound to this process, ready to be called, and the state of one
// call.
//
// load() (load.cpp) turns a verified Plan into a flat list of steps: sizes that are constants are
// folded, consecutive launches become regions, and a tensor that only kernels read is reduced to
// pointer arithmetic. run() (run.cpp) walks the steps over a Frame. A Frame belongs to one call at
// a time: two threads in one program hold two frames.
//
// Pointers: a slot is a `root` (its pointer is known only when it is defined) or lies at a constant
// byte distance from one. Every place where kernels read a pointer is a patch of its root, so
// defining a root writes all of them and a static View or Place costs nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "accelerator.h"
#include "core/arena.h"
#include "core/cubins.h"
#include "core/library.h"
#include "core/plan.h"
#include "core/region.h"
#include "graphs.h"
#include "plait/wrapper.h"

namespace plait {

class DeadMemory;
class Program;

inline constexpr int64_t kTicksPerUs =
    2500;  // of the time stamp counter, roughly: for thresholds only

struct Patch {
  int32_t buf;    // index into Frame::bufs
  int64_t delta;  // bytes from the root
};

// A list of ids [first, first + n) in one of Program's tables.
struct Range {
  int32_t first = 0, n = 0;
};

// Sizes and strides of a slot: constants, or expressions gathered at the call.
struct Meta {
  Shape ids;
  std::vector<int64_t> sizes, strides;  // valid where is_static
  bool is_static = false, contiguous = false;
  int64_t nbytes = 0;  // from first to past last element, valid where is_static
};

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

struct SlotInfo {
  std::string name;
  DType dtype = DType::kAny;
  c10::ScalarType scalar = c10::ScalarType::Undefined;  // of dtype
  enum class Kind {
    none,
    input,
    opaque,
    constant,
    arena,
    place,
    alloc,
    view,
    result
  } kind = Kind::none;  // view: View and Reuse
  SlotId root = kNone;
  int64_t delta = 0;      // bytes from root's pointer
  SlotId base = kNone;    // view: whose storage it shares; place: the arena
  ExprId offset = kNone;  // view, place: not folded into delta
  bool relative = true, folded = false;
  bool header = false;         // an at::Tensor of this slot is needed
  bool escapes = false;        // somebody may keep the at::Tensor
  bool needs_pointer = false;  // of a root: Frame::pointers is filled
  // Bytes from the pointer of an input, constant or result that views of constant sizes reach: they
  // lie in its storage, which is asked when it is defined.
  int64_t lowest = 0, highest = 0;
  bool reaches = false;
  bool inside = false;   // of a view or place: it is known to lie in its memory
  bool found = false;    // of a result: the program reads its sizes, and may ask more of them
  bool written = false;  // an input that the program changes
  c10::Device device = c10::kCPU;  // of an input
  Meta meta;
  Range patches;  // of a root
};

struct Frame;
class Operands;

// What a tensor should be.
struct Layout {
  DType dtype;  // opaque: any
  c10::IntArrayRef sizes, strides;
};

// An operator call with everything resolved but tensors and dynamic sizes.
struct ExternCall {
  // What is put into the stack at a call: stack[pos] = ...
  struct Fill {
    enum class Kind {
      tensor,
      opaque,
      integer,
      real,
      number_tensor,
      tensor_list,
      optional_tensor_list,
      int_list
    } kind;
    int32_t pos;
    int32_t id = kNone;        // slot or expression
    std::vector<int32_t> ids;  // lists: slots (kNone: absent) or expressions
  };
  enum class Road { boxed, mm, addmm, bmm, baddbmm };
  std::string name;
  std::optional<c10::OperatorHandle> op;
  std::vector<c10::IValue> stack;
  std::vector<Fill> fills;
  std::vector<Result> outs;
  bool returns_list = false, builtin = true;
  bool forks = false;  // makes another stream the current one
  Road road = Road::boxed;
  std::vector<SlotId> tensors;  // fast roads: operands in order, output last
  std::vector<SlotId> written;  // must keep their sizes, which the program goes by
  double beta = 1, alpha = 1;
  bool may_keep = true;
  bool makes_result = false;  // no `out` operand: the result is allocated at the call
  // mm, addmm on pointers alone: where the operands stand in Frame::bufs, and whether they are
  // float or double.
  int32_t bufs = kNone;
  bool single = true;
  bool by_blaslt = false;  // a product, which on a GPU goes to cuBLASLt, see blaslt.cpp
  int32_t n_given = 0;     // operands that a generated program hands over
};

struct PythonCall {
  int32_t index;
  std::string label;
  std::vector<Operand> args;
  std::vector<KeywordOperand> kwargs;
  std::vector<Result> outs;
  int32_t n_given = 0;
};

struct RegionInfo {
  int32_t first, n;      // launches, in order
  int64_t work_ns = 0;   // of all, where is_static
  int64_t split_ns = 0;  // of those that are divided over threads
  bool is_static = true;
};

struct LaunchInfo {
  int32_t kernel;
  KernelFn fn;
  Range args, sizes;  // into Frame::bufs and Frame::syms
  std::vector<ExprId> size_ids;
  bool dynamic_sizes = false;
  ExprId work_ns;
  bool parallel, barrier;
};

// A launch on the GPU: nothing but what changes from call to call is left to do.
struct GridLaunch {
  int32_t kernel;
  const cuda::Kernel* loaded;
  Range args, sizes;  // into Frame::bufs and Frame::syms
  Range params;       // into Frame::params: their addresses, then those of scratch memory
  std::vector<ExprId> size_ids;
  bool dynamic_sizes = false;
  ExprId grid;
};

enum class StepKind : int32_t {
  eval,
  define,
  read_symbol,
  arena,
  alloc,
  pointer,
  inside,
  header,
  region,
  launch,
  call_extern,
  call_python,
  copy,
  bump,
  fill,
  drop,
  drop_input,
  assert_scalar,
  assert_size_stride,
  assert_alignment,
  check_finite
};
struct Step {
  StepKind kind;
  int32_t a = kNone, b = kNone;
};

// What the Python binding lends: this library part knows no Python.
struct Host {
  struct Captured {
    cuda::GraphExec exec;
    // Of memory that is its own, and that all recordings of the device share; what these may hold.
    int64_t nbytes, shared, limit;
  };
  void* (*release_gil)();
  void (*retake_gil)(void* state);
  void (*call_python)(const Program&, Frame&, const PythonCall&,
                      const Operands&);    // with the GIL held
  c10::IValue (*to_ivalue)(void* object);  // with the GIL held
  // Recording what is put on a stream, with the GIL held. begin() makes a stream current that is
  // recorded, end() the one before it; both throw std::runtime_error. abort() after a failure.
  // keep(): whether what is allocated from now on is the recording's own.
  void* (*begin_capture)(int device);
  void (*keep_allocations)(void* capture, bool kept);
  Captured (*end_capture)(void* capture);
  void (*abort_capture)(void* capture);
  void (*replay)(void* capture);  // with new random numbers for torch's operators
  void (*release)(void* object);
  void (*refused)(const std::string& program, size_t partition, const std::string& why);
};

// Runs what a plan calls as Python without any.
using ControlFlow = std::function<void(const Program&, Frame&, const PythonCall&, const Operands&)>;

// An input that kernels cannot read as it is (lazily negated or conjugated, or at an address that
// is not aligned), and the copy that the program works on. What the program changes goes back into
// the input, and results that are views of the copy are made views of the input.
struct Copied {
  at::Tensor given, values;
  bool written;
};

struct Frame {
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
  DeadMemory* dead_memory = nullptr;   // while something is recorded: room for what it makes
  c10::DispatchKeySet excluded_by_us;  // what run() added to the thread's excluded keys
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
  const at::Tensor& tensor(int32_t id) const { return *f_.refs[static_cast<size_t>(slot(id))]; }

 private:
  const Frame& f_;
  const plait_operand* given_ = nullptr;
  size_t n_exprs_ = 0;
  bool is_given_ = false;
};

// The same program as C++ that was built, see plait/wrapper/cpp.py. Throws LoadError.
class Generated {
 public:
  Generated(const std::string& path, const std::string& entry);
  int run(plait_call* call) const { return run_(call); }

 private:
  std::shared_ptr<Library> library_;
  int (*run_)(plait_call*);
};

class Program {
 public:
  // Throws PlanError, LoadError. callables are borrowed objects of the host. generated: runs
  // instead of the plan's steps. control: in the place of callables.
  Program(Plan plan, std::shared_ptr<Library> library, std::shared_ptr<Cubins> cubins,
          std::vector<at::Tensor> constants, const Host& host, void* owner,
          std::optional<Generated> generated, ControlFlow control = {});

  std::unique_ptr<Frame> take_frame();  // the caller holds the GIL
  void give_frame(std::unique_ptr<Frame> frame) noexcept;

  // Inputs are bound one by one, then run() is called, then the outputs are read, then the frame is
  // given back. `bind` trusts that misfit() found nothing.
  void bind(Frame& f, const Input& input, const at::Tensor& t) const;
  enum class Misfit { none, dtype, device };
  Misfit misfit(const Input& input, const at::Tensor& t) const;
  void require_fit(const Input& input, const at::Tensor& t) const;  // throws InputTypeError
  // What t is if it stands for another tensor, "" if it does not.
  static std::string wrapper_kind(const at::Tensor& t);
  void run(Frame& f) const;
  void reset(Frame& f) const noexcept;  // drops every tensor of the call

  const Plan& plan() const { return plan_; }
  const std::vector<Operand>& outputs() const { return *outputs_; }
  const SlotInfo& slot(SlotId s) const { return slots_[static_cast<size_t>(s)]; }
  bool in_arena(SlotId s) const;  // its memory is the program's only during a call
  void set_symbol(Frame& f, int32_t symbol, int64_t value) const;
  // A tensor result of an extern or Python call.
  void define(Frame& f, SlotId s, at::Tensor value) const;
  const std::vector<RegionInfo>& regions() const { return regions_; }
  const std::vector<LaunchInfo>& launches() const { return launches_; }
  void* owner() const { return owner_; }  // what the host handed in
  const std::vector<PythonCall>& pythons() const { return pythons_; }
  const std::vector<ExternCall>& externs() const { return externs_; }
  size_t n_steps() const { return steps_.size(); }
  int64_t arena_bytes() const { return arena_bytes_; }
  const std::vector<PartitionInfo>& partitions() const { return partitions_; }
  const Graphs* graphs() const { return graphs_.get(); }  // null: nothing is recorded

 private:
  friend class Loader;
  friend class PartitionLearner;
  friend struct Table;  // what generated programs call, see table.cpp

  void patch(Frame& f, SlotId s, char* pointer) const;
  void take_arena(Frame& f, SlotId s, int64_t nbytes) const;
  void bind_arena(Frame& f, SlotId s, at::DataPtr block, int64_t nbytes) const;
  void drop_arena(Frame& f) const noexcept;
  const at::Storage& storage_of(Frame& f, SlotId s, bool from_start = false) const;
  void allocate(Frame& f, SlotId s) const;
  void allocate(Frame& f, SlotId s, const Extents& e, int64_t nbytes, bool contiguous) const;
  char* place(const Frame& f, SlotId s, int64_t offset, const Extents& e) const;
  void set_pointer(Frame& f, SlotId s) const;
  void require_inside(Frame& f, SlotId s, const char* pointer, const Extents& e) const;
  void require_reach(SlotId s, const c10::TensorImpl* root) const;
  void require_sizes_kept(const Frame& f, const ExternCall& c) const;
  char* pointer_of(const Frame& f, SlotId s) const;
  void bind_header(Frame& f, SlotId s) const;
  void bind_header(Frame& f, SlotId s, const char* pointer, const Extents& e) const;
  caffe2::TypeMeta type_of(const Frame& f, const SlotInfo& i) const;
  void share_version(Frame& f, SlotId s) const;
  void run_steps(Frame& f) const;
  void walk(Frame& f, bool profiled) const;
  void run_generated(Frame& f, bool profiled) const;
  void run_region(Frame& f, const RegionInfo& r, bool profiled) const;
  void run_tasks(const Task* tasks, int32_t n, int64_t split_ns, bool profiled) const;
  void run_launch(Frame& f, const GridLaunch& l, bool profiled) const;
  void run_grid(Frame& f, int32_t kernel, int64_t grid, void** params, bool profiled) const;
  void copy(Frame& f, const Copy& c) const;
  void call_operator(Frame& f, const ExternCall& c, const Operands& o, bool profiled) const;
  void call_extern(Frame& f, const ExternCall& c, const Operands& o) const;
  void call_direct(Frame& f, const ExternCall& c, const Operands& o) const;
  void call_boxed(Frame& f, const ExternCall& c, const Operands& o) const;
  void push_operands(Frame& f, const ExternCall& c, const Operands& o) const;
  c10::IValue opaque(Frame& f, SlotId s) const;
  c10::impl::LocalDispatchKeySet outer_keys(const Frame& f) const;
  struct Gemm;
  bool plan_gemm(const Frame& f, const ExternCall& c, const Operands& o, Gemm& g) const;
  bool call_gemm(Frame& f, const ExternCall& c, const Operands& o) const;
  bool call_blaslt(Frame& f, const ExternCall& c, const Operands& o) const;
  void store_results(Frame& f, const std::vector<Result>& outs, bool is_list) const;
  void check_finite(const Frame& f, SlotId s, const char* origin, bool infinities) const;
  [[noreturn]] void fail_check(int32_t kernel, int64_t code) const;
  void check_scalar(const Frame& f, const AssertScalar& a) const;
  void check_size_stride(Frame& f, const AssertSizeStride& a) const;
  bool has_layout(const Frame& f, SlotId s, const Layout& want) const;
  void mend_layout(Frame& f, SlotId s, const Layout& want, const char* origin, bool copies) const;
  void check_alignment(SlotId s, const char* pointer, int64_t nbytes) const;
  void fill(const Frame& f, const Fill& i) const;
  int64_t read(const Frame& f, SlotId s, Source::Kind source, int64_t dim) const;
  void evaluate_range(Frame& f, int32_t first, int32_t n) const;
  void drop(Frame& f, SlotId s) const;
  void drop_input(Frame& f, SlotId s) const;
  void run_python(Frame& f, const PythonCall& c, const Operands& o) const;
  void write_back(Frame& f) const;
  bool run_graphs(Frame& f) const;
  void note_beside(const Frame& f) const;
  void run_below(Frame& f, const PartitionInfo& p) const;
  void run_partition(Frame& f, size_t partition) const;
  void run_first(Frame& f, const PartitionInfo& p, Recordings& at) const;
  bool run_recorded(Frame& f, size_t partition, Recordings& at) const;
  void refuse(size_t partition, std::string& kept, const std::string& why) const;
  Recording* find_recording(const Frame& f, const PartitionInfo& p, Recordings& at) const;
  bool record(Frame& f, size_t partition, Recordings& at) const;
  void capture_steps(Frame& f, const PartitionInfo& p, void* capture,
                     std::vector<c10::DataPtr>& rooms, Recording& r) const;
  bool is_brought_out(const PartitionInfo& p, const Recording& r, SlotId s) const;
  void bring_out(Frame& f, const PartitionInfo& p, int32_t at, std::vector<c10::DataPtr>& rooms,
                 Recording& r) const;
  void note_launch(Frame& f, const PartitionInfo& p, const GridLaunch& l, Recording& r) const;
  void update_recording(Frame& f, const PartitionInfo& p, Recording& r) const;
  void launch_recording(Frame& f, const PartitionInfo& p, Recording& r) const;
  void note_death(const Frame& f, const PartitionInfo& p, SlotId s, DeadMemory& dead) const;
  template <class F>
  void keeping(void* capture, const F& f) const;
  void copy_import(Frame& f, SlotId s, const at::Tensor& copy) const;
  void substitute(Frame& f, SlotId s, const at::Tensor* tensor) const;
  void name_again(Frame& f, const PartitionInfo& p) const;
  void step(Frame& f, const Step& s, bool profiled) const;
  template <class T>
  const T& instr(int32_t index) const {
    return std::get<T>(plan_.body[static_cast<size_t>(index)]);
  }
  int64_t value(const Frame& f, ExprId e) const { return f.values[static_cast<size_t>(e)]; }
  bool is_elsewhere(c10::Device d) const { return !others_.empty() && gpu_->device() != d; }
  const Accelerator& on(c10::Device d) const;
  at::DataPtr memory(Frame& f, c10::Device d, int64_t nbytes) const;
  at::Tensor new_tensor(Frame& f, c10::Device d, int64_t nbytes, c10::ScalarType type) const;
  void launch_on(const Accelerator& gpu, cuda::Stream stream, Frame& f, int32_t kernel,
                 int64_t grid, void** params, bool profiled) const;

  Plan plan_;
  std::shared_ptr<Library> library_;
  std::shared_ptr<Cubins> cubins_;
  std::optional<Accelerator> gpu_;            // current while the program runs
  std::vector<Accelerator> others_;           // the other ones of a program that uses several
  std::vector<KernelFn> functions_;           // of the CPU, by number in the plan
  std::vector<const cuda::Kernel*> kernels_;  // of the GPU
  std::vector<c10::Device> kernel_devices_;   // of each kernel
  std::optional<Generated> generated_;
  std::vector<at::Tensor> constants_;
  Host host_;
  void* owner_;
  ControlFlow control_;  // null: the host's Python
  std::vector<SlotInfo> slots_;
  std::vector<Patch> patches_;
  std::vector<std::vector<ExprId>> symbol_exprs_;  // nodes of each symbol
  std::vector<int64_t> values_;                    // initial values: constants
  std::vector<ExprId> evals_;                      // what eval steps compute, in order
  std::vector<Step> steps_;
  std::vector<LaunchInfo> launches_;
  std::vector<GridLaunch> grid_launches_;
  std::vector<RegionInfo> regions_;
  std::vector<ExternCall> externs_;
  std::vector<PythonCall> pythons_;
  std::vector<SlotId> owned_;  // slots to reset after a call
  const std::vector<Operand>* outputs_ = nullptr;
  SlotId arena_slot_ = kNone;
  int64_t arena_bytes_ = 0;
  int64_t n_bufs_ = 0, n_syms_ = 0, n_params_ = 0;
  size_t stack_size_ = 0;
  bool needs_guard_ = false;
  bool forks_ = false;          // it works on streams besides its caller's
  bool full_precision_ = true;  // float matmuls may not be rounded to bfloat16 or TF32
  bool small_ = false;          // its work is known to be below what releasing the GIL costs
  std::vector<PartitionInfo> partitions_;
  std::vector<Patch> buf_roots_;  // of Frame::bufs: the slot (as `buf`) and the distance from it
  std::unique_ptr<Graphs> graphs_;
  std::vector<std::unique_ptr<Frame>> frames_;
  mutable std::atomic<int64_t> typical_ticks_{0};  // of the last call
};

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
at::Tensor empty_matrix(int64_t rows, int64_t cols, bool single);  // row-major, float or double
c10::ScalarType scalar_type(DType dtype);                          // throws LoadError for opaque
const char* torch_name(DType dtype);                               // "float32"
[[noreturn]] void fail_size();                                     // an expression overflowed
DType from_scalar_type(c10::ScalarType type);
ExternCall resolve_extern(const CallExtern& call,
                          const std::vector<std::optional<int64_t>>& constants);

// A sanity check of an input failed: wrong dtype or device.
struct InputTypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An AssertScalar that failed. what() ends at the first zero byte, text does not.
struct AssertError : std::runtime_error {
  explicit AssertError(std::string message)
      : std::runtime_error(message), text(std::move(message)) {}
  std::string text;
};
// Throws AssertError or c10::IndexError. values: what the first marks {} of message stand for.
[[noreturn]] void fail_assert(Check::Error error, std::string message, c10::IntArrayRef values);

}  // namespace plait
