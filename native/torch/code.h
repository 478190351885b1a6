// native/torch/code.h: a Plan bound to this process, as data.
//
// The loader (load/) fills it once; after that nothing changes it, so any number of calls in any
// number of threads may read it. What changes in a call is in the call's Frame, what is learned
// from call to call in Program and Graphs.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "accelerator.h"
#include "core/library.h"
#include "extern.h"
#include "partitions.h"
#include "steps.h"

namespace plait {

// What the Python binding lends: this library part knows no Python.
struct Host {
  struct Captured {
    cuda::GraphExec exec;
    // Of memory that is its own, and that all recordings of the device share; what these may hold.
    int64_t nbytes, shared, limit;
  };
  void* (*release_gil)();
  void (*retake_gil)(void* state);
  void (*call_python)(Frame&, const PythonCall&, const Operands&);  // with the GIL held
  c10::IValue (*to_ivalue)(void* object);                           // with the GIL held
  // Recording what is put on a stream, with the GIL held. begin() makes a stream current that is
  // recorded, stop() the one before it; these and end() throw std::runtime_error. abort() after a
  // failure. keep(): whether what is allocated from now on is the recording's own.
  void* (*begin_capture)(int device);
  void (*keep_allocations)(void* capture, bool kept);
  void (*stop_capture)(void* capture);  // from now on nodes may be taken out of it
  Captured (*end_capture)(void* capture);
  void (*abort_capture)(void* capture);
  void (*replay)(void* capture);  // with new random numbers for torch's operators
  void (*release)(void* object);
  void (*refused)(const std::string& program, size_t partition, const std::string& why);
};

struct Code {
  Plan plan;
  std::shared_ptr<Library> library;
  std::shared_ptr<Cubins> cubins;
  std::vector<at::Tensor> constants;
  Host host;
  void* owner;             // what the host handed in
  bool generated = false;  // a library runs in the place of the steps

  std::optional<Accelerator> gpu;            // current while the program runs
  std::vector<Accelerator> others;           // the other ones of a program that uses several
  std::vector<KernelFn> functions;           // of the CPU, by number in the plan
  std::vector<const cuda::Kernel*> kernels;  // of the GPU
  std::vector<c10::Device> kernel_devices;   // of each kernel

  std::vector<SlotInfo> slots;
  std::vector<Patch> patches;
  std::vector<std::vector<ExprId>> symbol_exprs;  // nodes of each symbol
  std::vector<int64_t> values;                    // initial values: constants
  std::vector<ExprId> evals;                      // what eval steps compute, in order
  std::vector<Step> steps;
  std::vector<LaunchInfo> launches;
  std::vector<GridLaunch> grid_launches;
  std::vector<RegionInfo> regions;
  std::vector<ExternCall> externs;
  std::vector<PythonCall> pythons;
  std::vector<std::shared_ptr<Subprogram>> programs;  // of the plan; whose plans moved there
  std::vector<ProgramsCall> programs_calls;
  std::vector<SlotId> owned;  // slots to reset after a call
  const std::vector<Operand>* outputs = nullptr;
  int64_t arena_bytes = 0;
  int64_t n_bufs = 0, n_syms = 0, n_params = 0;
  size_t stack_size = 0;

  bool needs_guard = false;
  bool forks = false;          // it works on streams besides its caller's
  bool full_precision = true;  // float matmuls may not be rounded to bfloat16 or TF32
  bool small = false;          // its work is known to be below what releasing the GIL costs
  int64_t typical_ticks = 0;   // of a call, a first guess
  std::vector<PartitionInfo> partitions;
  std::vector<Patch> buf_roots;  // of Frame::bufs: the slot (as `buf`) and the distance from it

  const SlotInfo& slot(SlotId s) const { return slots[static_cast<size_t>(s)]; }
  bool is_elsewhere(c10::Device d) const { return !others.empty() && gpu->device() != d; }
  const Accelerator& on(c10::Device d) const;
};

// Fills the rest of a Code that has a plan and what it came with (to `generated`). Throws
// LoadError.
void load(Code& code);

}  // namespace plait
