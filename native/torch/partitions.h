// native/torch/partitions.h: what each partition of a program takes from those before it and leaves
// to those after it. Learned once, when the program is loaded.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "steps.h"

namespace plait {

struct Code;

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

// Fills the partitions of a program whose steps are there, and its buf_roots.
// patches: by root, where kernels read its pointer. writes: (partition, what it writes).
void learn_partitions(Code& code, const std::vector<std::vector<Patch>>& patches,
                      const std::vector<std::pair<int32_t, SlotId>>& writes);

}  // namespace plait
