// native/torch/graphs.h: the GPU's work of a program as CUDA graphs.
//
// A program is cut into partitions (plait/wrapper/partition.py). One that can be recorded runs as
// it is the first time that its sizes are met, is recorded the second time and replayed from then
// on. A recording holds the addresses of what it reads and writes:
// - What only our kernels touch may lie anywhere: a new address is written into their graph nodes.
// - What operators touch as well must lie where it lay. If it moves, the partition is recorded
//   again, or, for small tensors, a copy that stays is read instead.
// - What lives no longer than a run lies in a memory pool that all recordings of the device share.
//   So no two of them run at once, and a call on another stream waits for the one before it. A call
//   that finds another under way, or a recording of the user's own, runs as it is; later ones wait
//   for it.
// - A result for the caller that operators write is copied inside the graph, after the last step
//   that touches it, to memory of the caller's, and its place in the pool serves later steps.
// - What is saved for a backward pass, or for a later partition, lies in a pool of the recording's
//   own, and while it is held another recording serves the call. Once it is dead, the recording of
//   the backward pass uses its memory, see dead_memory.h.
// The recordings of a device may hold so many bytes; for one more, those used least recently go.
#pragma once

#include "frame.h"
#include "recordings.h"

namespace plait {

// A call with recordings; false where it must run without: another is under way, or the caller
// records a graph of their own.
bool run_graphs(Graphs& graphs, Frame& f);
// A call that has run without, though it may have read what recordings keep.
void note_beside(const Frame& f);

// The partition, recorded and run; false if it cannot be (record.cpp). Other recordings may go for
// it if `drives_out`.
bool record(Graphs& graphs, Frame& f, size_t partition, Recordings& at, bool drives_out);
// Runs a recording that is up to date and leaves the frame as the steps would.
void launch_recording(Frame& f, const PartitionInfo& p, Recording& r);
void copy_import(const Frame& f, SlotId s, const at::Tensor& copy);
// Notes why there is no recording, and says so the first time.
void refuse(const Code& code, size_t partition, std::string& kept, const std::string& why);

}  // namespace plait
