// native/torch/steps.h: what the executor walks: the steps of a loaded program and the tables that
// they point into.
//
// Plain data that nothing changes once a program is loaded. Sizes that are constants are folded,
// and consecutive launches on the CPU are one region.
//
// Pointers: a slot is a `root` (its pointer is known only when it is defined) or lies at a constant
// byte distance from one. Every place where kernels read a pointer is a patch of its root, so
// defining a root writes all of them and a static View or Place costs nothing.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <string>
#include <vector>

#include "core/cubins.h"
#include "core/plan.h"
#include "core/region.h"

namespace plait {

inline constexpr int64_t kTicksPerUs =
    2500;  // of the time stamp counter, roughly: for thresholds only

struct Patch {
  int32_t buf;    // index into Frame::bufs
  int64_t delta;  // bytes from the root
};

// A list of ids [first, first + n) in one of Code's tables.
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
  arena,
  alloc,
  pointer,
  inside,
  header,
  region,
  launch,
  call_extern,
  call_python,
  call_programs,
  bump,
  drop,
  drop_input,
  instruction  // which runs as it stands; a: whether the host may wait for the device in it
};
struct Frame;
struct Step {
  StepKind kind;
  int32_t a = kNone, b = kNone;
  void (*run)(Frame&, const Instr&) = nullptr;  // of an instruction
  const Instr* instr = nullptr;                 // of the plan's body
};

c10::ScalarType scalar_type(DType dtype);     // throws LoadError for opaque
inline const char* torch_name(DType dtype) {  // "float32"
  return kTorchName[static_cast<size_t>(dtype)];
}
DType from_scalar_type(c10::ScalarType type);

}  // namespace plait
