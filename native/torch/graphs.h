// native/torch/graphs.h: the GPU's work of a program as CUDA graphs.
//
// A program is cut into partitions (plait/wrapper/partition.py). One that can be recorded runs as it
// is the first time that its sizes are met, is recorded the second time and replayed from then on.
// A recording holds the addresses of what it reads and writes:
// - What only our kernels touch may lie anywhere: a new address is written into their graph nodes.
// - What operators touch as well must lie where it lay. If it moves, the partition is recorded again,
//   or, for small tensors, a copy that stays is read instead.
// - Results of operators lie in memory that the recording owns. A result that its user still holds
//   when the next replay would overwrite it is moved out of the way, or another recording with
//   memory of its own serves the call: results stay valid.
// Recordings of one device share one pool of memory, so no two programs replay at once, and a replay
// on another stream waits for the last one. A call that finds another under way runs as it is.
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
  struct Import {
    int32_t slot;
    bool fixed = false, written = false;
  };
  std::vector<Import> imports;
  std::vector<int32_t> exports;  // allocations and results that live on after it
  std::vector<int32_t> after;    // steps that a replay does not spare: headers of views
  std::vector<int32_t> bumps;    // inputs whose versions go up
  std::vector<int32_t> key;      // expressions of the symbols that are known before it
  bool defines_symbols = false, random = false;
};

// A launch of ours inside a recording, with the parameters that it has now: pointers, sizes, scratch.
struct RecordedLaunch {
  cuda::GraphNode node;
  const cuda::Kernel* kernel;
  uint64_t grid;
  std::vector<uint64_t> words;
  std::vector<void*> addresses;
  bool changed = false;
};

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
    int32_t slot;
    at::Tensor tensor;  // shares the memory; its storage has no other owner once the user is done
    const void* pointer;
    size_t nbytes;
  };
  void* host = nullptr;  // the host's object
  cuda::GraphExec exec = nullptr;
  std::vector<RecordedLaunch> launches;
  std::vector<Import> imports;
  std::vector<Export> exports;
  std::vector<int64_t> values;  // of all expressions, after it
};

// The recordings of one partition at one choice of sizes.
struct Recordings {
  std::vector<std::unique_ptr<Recording>> all;
  std::vector<bool> copied;  // by import
  int32_t made = 0;
  bool seen = false;
};

struct PartitionState {
  std::map<std::vector<int64_t>, Recordings> by_size;
  std::string refused;  // why it is not recorded any more
};

struct GraphCounts {
  int64_t recorded = 0, replayed = 0, patched = 0, copied = 0, moved = 0;
};

struct Graphs {
  std::vector<PartitionState> partitions;
  std::map<int64_t, c10::DataPtr> arenas;  // by size, where an arena outlives one recording
  GraphCounts counts;
};

}  // namespace plait
