// native/torch/graphs.h: the GPU's work of a program as CUDA graphs.
//
// A program is cut into partitions (plait/wrapper/partition.py). One that can be recorded runs as
// it is the first time that its sizes are met, is recorded the second time and replayed from then
// on. A recording holds the addresses of what it reads and writes:
// - What only our kernels touch may lie anywhere: a new address is written into their graph nodes.
// - What operators touch as well must lie where it lay. If it moves, the partition is recorded
// again,
//   or, for small tensors, a copy that stays is read instead.
// - What lives no longer than a run lies in a memory pool that all recordings of the device share.
// So
//   no two of them run at once, and a call on another stream waits for the one before it. A call
//   that finds another under way, or a recording of the user's own, runs as it is; later ones wait
//   for it.
// - A result for the caller that operators write is copied inside the graph, after the last step
// that
//   touches it, to memory of the caller's, and its place in the pool serves later steps.
// - What is saved for a backward pass, or for a later partition, lies in a pool of the recording's
// own,
//   and while it is held another recording serves the call. Once it is dead, the recording of the
//   backward pass uses its memory, see dead_memory.h.
// The recordings of a device may hold so many bytes; for one more, those used least recently go.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda.h"

namespace plait {

struct PartitionInfo {
  int32_t first = 0, last = 0;  // steps [first, last)
  bool recorded = false;
  // What it reads or writes that exists before it. fixed: others than our kernels touch it, too.
  // stored: views count from the start of its storage.
  struct Import {
    int32_t slot;
    bool fixed = false, written = false, stored = false;
  };
  // Allocations and results that live on after it. escapes: the caller gets them.
  struct Export {
    int32_t slot;
    bool escapes = false;
    int32_t last;                // the step that needs its memory last
    std::vector<int32_t> views;  // of its memory, made in the partition
  };
  std::vector<Import> imports;
  std::vector<Export> exports;
  std::vector<int32_t> kept;     // steps that make memory which outlives a run without being copied
  std::vector<int32_t> after;    // steps that a replay does not spare: sizes, headers of views
  std::vector<int32_t> names;    // steps before it that make headers and pointers for it
  std::vector<int32_t> bumps;    // inputs whose versions go up
  std::vector<int32_t> dropped;  // slots from before it that die in it
  std::vector<int32_t> made;     // slots whose tensors are made in it
  std::vector<int32_t> key;      // expressions of the symbols from before it that it reads
  std::vector<int32_t> values;   // expressions of the symbols that it reads off its results
  int32_t n_direct = 0;          // results for the caller that kernels write where they belong
  bool random = false;
  bool waits = false;  // not recorded: the host may wait for the device in it
};

// A launch of ours inside a recording, with the parameters that it has now: pointers, sizes,
// scratch.
struct RecordedLaunch {
  cuda::GraphNode node;
  const cuda::Kernel* kernel;
  uint64_t grid;
  std::vector<uint64_t> words;
  std::vector<void*> addresses;
  bool changed = false;
};

struct Recordings;
struct Recording {
  struct Import {
    const void* pointer = nullptr;  // where it lies for the recording
    struct Use {
      int32_t launch, word;
      int64_t delta;
    };
    std::vector<Use> uses;
    at::Tensor copy;  // what is read instead of it
  };
  struct Export {
    at::Tensor tensor;  // its memory in the recording; of what is copied out, the sizes alone
    const void* pointer = nullptr;
    size_t nbytes = 0;
    int32_t copy = -1;  // of `copies`
  };
  // Brings a result to the caller. node: none for an empty one. room: for the next launch.
  struct Copy {
    cuda::GraphNode node = nullptr;
    cuda::CopyParams params{};
    size_t nbytes = 0;
    c10::DataPtr room;
  };
  // Memory of others that serves its temporaries: that of an import, once it is dead.
  struct Lent {
    int32_t import;
    const c10::StorageImpl* memory;
    const void* data;  // of the memory
    size_t uses;       // of the memory: by those whose it is, and by imports
  };
  Recording(void (*release)(void*), Recordings& owner) : release(release), owner(owner) {}
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void (*release)(void*);
  Recordings& owner;
  void* host = nullptr;  // the host's object
  int64_t nbytes = 0;    // of memory of its own
  uint64_t used = 0;     // when it was launched last
  cuda::GraphExec exec = nullptr;
  std::vector<RecordedLaunch> launches;
  std::vector<int32_t> changed;  // of these, by number
  std::vector<Import> imports;
  std::vector<Export> exports;  // as in PartitionInfo
  std::vector<Copy> copies;
  std::vector<int64_t> values;  // as in PartitionInfo
  std::vector<Lent> lent;
  std::vector<const Recording*> lenders;
  bool orphaned = false;  // a lender has gone
  // Where most of what it keeps lies in one piece.
  const char* piece = nullptr;
  size_t piece_nbytes = 0;
};

// The recordings of one partition at one choice of sizes.
struct Recordings {
  std::vector<std::unique_ptr<Recording>> all;
  std::vector<bool> copied;    // by import
  std::vector<size_t> nbytes;  // by export, as met before recording
  size_t kept_nbytes = 0;      // of large ones that stay in the recording
  int32_t made = 0;
  std::string refused;  // why nothing is recorded any more
};

struct PartitionState {
  std::map<std::vector<int64_t>, Recordings> by_size;
  std::string refused;  // why there was no recording for a call, the first time
};

// results_copied, results_direct: of all recordings that were made, how many results for the caller
// are copied in them and how many are written where they belong. bypassed: calls that ran without,
// because another was under way or the user recorded.
struct GraphCounts {
  int64_t recorded = 0, replayed = 0, patched = 0, copied = 0, results_copied = 0,
          results_direct = 0, bypassed = 0;
};

struct Graphs {
  std::vector<PartitionState> partitions;
  GraphCounts counts;
};

}  // namespace plait
