// native/torch/record.cpp: recording a partition while it runs, see graphs.h.
#include "graphs.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>

#include "dead_memory.h"
#include "dispatch_guard.h"
#include "memory.h"
#include "moved_results.h"
#include "run.h"

namespace plait {
namespace {

// What was put on a stream last, inside a recording.
cuda::GraphNode last_node(cuda::Stream stream) {
  const Recorded r = recorded_on(stream);
  if (r.n_last != 1) throw std::runtime_error("a launch is not the last node of its recording");
  return r.last[0];
}

Recording::Copy record_copy(const c10::StorageImpl& from, c10::DataPtr room, cuda::Stream stream) {
  Recording::Copy made{.nbytes = from.nbytes(), .room = std::move(room)};
  if (made.nbytes == 0) return made;
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.copy(made.room.get(), from.data(), made.nbytes, stream), "cuMemcpyDtoDAsync");
  made.node = last_node(stream);
  made.now = made.room.get();
  return made;
}

void note_launch(Frame& f, const PartitionInfo& p, const GridLaunch& l, Recording& r) {
  const int64_t grid = f.value(l.grid);
  if (grid <= 0) return;
  RecordedLaunch made{last_node(f.stream), l.loaded, static_cast<uint64_t>(grid), {}, {}};
  void* const* params = f.params.data() + l.params.first;
  for (int32_t i = 0; i < l.params.n; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, params[i], sizeof word);
    made.words.push_back(word);
  }
  for (uint64_t& word : made.words) made.addresses.push_back(&word);
  for (int32_t i = 0; i < l.args.n; ++i) {
    const Patch& root = f.code.buf_roots[static_cast<size_t>(l.args.first + i)];
    for (size_t k = 0; k < p.imports.size(); ++k)
      if (p.imports[k].slot == root.buf)
        r.imports[k].uses.push_back({static_cast<int32_t>(r.launches.size()), i, root.delta});
  }
  r.launches.push_back(std::move(made));
}

// From here on the frame's slot is this tensor.
void substitute(Frame& f, SlotId s, const at::Tensor* tensor) {
  f.refs[static_cast<size_t>(s)] = tensor;
  if (f.slot(s).needs_pointer) patch(f, s, first_of(*tensor));
}

// Views from before the partition are of what their bases are now.
void name_again(Frame& f, const PartitionInfo& p) {
  for (int32_t at : p.names) run_step(f, f.code.steps[static_cast<size_t>(at)], false);
}

// Whether a slot names memory that a recording has copied out, so that nothing in it needs the
// slot.
bool is_brought_out(const Frame& f, const PartitionInfo& p, const Recording& r, SlotId s) {
  while (f.slot(s).kind == SlotInfo::Kind::view) s = f.slot(s).base;
  for (size_t k = 0; k < p.exports.size(); ++k)
    if (p.exports[k].slot == s) return r.exports[k].copy >= 0;
  return false;
}

// What this allocates is the recording's own.
template <class F>
void keeping(const Host& host, void* capture, const F& f) {
  host.keep_allocations(capture, true);
  try {
    f();
  } catch (...) {
    host.keep_allocations(capture, false);
    throw;
  }
  host.keep_allocations(capture, false);
}

// Copies results for the caller into `rooms` (by export), or has the nodes that `moved` knows write
// them there, and lets go of where they lay: those that nothing touches after step `at`, unless
// others share their memory; at the end, all that are left.
void bring_out(Frame& f, const PartitionInfo& p, int32_t at, std::vector<c10::DataPtr>& rooms,
               Recording& r, MovedResults& moved) {
  const bool at_end = at == p.last;
  std::vector<std::pair<const c10::StorageImpl*, int32_t>> brought;
  for (size_t k = 0; k < p.exports.size(); ++k) {
    const PartitionInfo::Export& from = p.exports[k];
    Recording::Export& e = r.exports[k];
    at::Tensor& t = f.own(from.slot);
    if (!from.escapes || e.copy >= 0 || (!at_end && from.last != at) || !is_on_gpu(t)) continue;
    for (SlotId v : from.views) drop(f, v);
    if (!at_end && t.storage().use_count() != 1) continue;
    const c10::StorageImpl* memory = memory_of(t);
    if (memory->nbytes() != e.nbytes)
      throw std::runtime_error("'" + f.slot(from.slot).name + "' has another size than before");
    const auto same = std::find_if(brought.begin(), brought.end(),
                                   [&](const auto& b) { return b.first == memory; });
    if (same == brought.end()) {
      e.copy = static_cast<int32_t>(r.copies.size());
      brought.emplace_back(memory, e.copy);
      std::vector<MovedNode> nodes = moved.take(k);
      if (nodes.empty())
        r.copies.push_back(record_copy(*memory, std::move(rooms[k]), f.stream));
      else
        r.copies.push_back(
            {.nbytes = memory->nbytes(), .room = std::move(rooms[k]), .moved = std::move(nodes)});
    } else {
      e.copy = same->second;
    }
    e.tensor = sharing(t);
    e.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
        storage_on({nullptr, f.code.gpu->device()}, e.nbytes, f.code.gpu->allocator()));
    t.reset();
  }
}

// A slot from before the partition is needed no more in it.
void note_death(const Frame& f, const PartitionInfo& p, SlotId s, const Recordings& at,
                DeadMemory& dead) {
  const at::Tensor& own = f.own(s);
  // It is the caller's, or a copy is read instead.
  if (f.refs[static_cast<size_t>(s)] != &own) return;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (p.imports[i].slot == s && !at.apart[i]) dead.dies(static_cast<int32_t>(i), own);
}

// Records a step whose results `moved` exports may be written where the caller wants them, with the
// checks of their strides: their steps.
std::vector<int32_t> record_moved(Frame& f, const PartitionInfo& p, int32_t at,
                                  const std::vector<size_t>& exports, MovedResults& moved) {
  std::vector<int32_t> checked;
  moved.record(f, p, at, exports);
  for (size_t k : exports) {
    const PartitionInfo::Export& made = p.exports[k];
    if (made.last == at) continue;
    const void* here = is_on_gpu(f.own(made.slot)) ? memory_of(f.own(made.slot)) : nullptr;
    run_step(f, f.code.steps[static_cast<size_t>(made.last)], false);
    checked.push_back(made.last);
    if (here && memory_of(f.own(made.slot)) != here) moved.take(k);  // a copy that has the strides
  }
  return checked;
}

// What may die in the partition before it has run lives to its end: it runs as it is if recording
// fails.
void capture_steps(Frame& f, const PartitionInfo& p, void* capture,
                   std::vector<c10::DataPtr>& rooms, Recording& r, MovedResults& moved) {
  DeadMemory dead(r, DeviceRecordings::of(f.code.gpu->device()).all);
  f.excluded_by_us = DispatchGuard::added();
  const DispatchGuard below;
  std::vector<int32_t> checked;  // steps that ran with one before them
  for (int32_t at = p.first; at < p.last; ++at) {
    if (std::find(checked.begin(), checked.end(), at) != checked.end()) continue;
    const Step& s = f.code.steps[static_cast<size_t>(at)];
    const bool drops = s.kind == StepKind::drop_input || s.kind == StepKind::drop;
    if (s.kind == StepKind::bump ||
        (drops && std::find(p.dropped.begin(), p.dropped.end(), s.a) != p.dropped.end())) {
      if (drops) note_death(f, p, s.a, r.owner, dead);
      continue;
    }
    if ((s.kind == StepKind::header || s.kind == StepKind::pointer) && is_brought_out(f, p, r, s.a))
      continue;
    std::vector<size_t> moves;
    if (std::find(p.kept.begin(), p.kept.end(), at) != p.kept.end()) {
      keeping(f.code.host, capture, [&] { run_step(f, s, false); });
    } else if (!(moves = MovedResults::made_by(f, p, at)).empty()) {
      checked = record_moved(f, p, at, moves, moved);
    } else {
      f.dead_memory = &dead;
      run_step(f, s, false);
      f.dead_memory = nullptr;
    }
    if (s.kind == StepKind::launch)
      note_launch(f, p, f.code.grid_launches[static_cast<size_t>(s.a)], r);
    bring_out(f, p, at, rooms, r, moved);
    if (moves.empty()) continue;
    for (int32_t k : checked) bring_out(f, p, k, rooms, r, moved);
    moved.forget();
  }
  bring_out(f, p, p.last, rooms, r, moved);
}

// Imports that are read from copies, and what the frame had in their place.
using Replaced = std::vector<std::pair<SlotId, const at::Tensor*>>;

void read_imports(Frame& f, const PartitionInfo& p, const std::vector<bool>& copied, Recording& r,
                  Replaced& replaced) {
  for (size_t i = 0; i < p.imports.size(); ++i) {
    const SlotId s = p.imports[i].slot;
    Recording::Import& import = r.imports[i];
    const at::Tensor& from = f.tensor(s);
    if (p.imports[i].fixed && from.defined() && from.device().is_cpu())
      throw std::runtime_error("'" + f.slot(s).name + "' is on the host");
    if (copied[i]) {
      const DispatchGuard below;
      import.copy = at::empty_strided(from.sizes(), from.strides(), from.options());
      copy_import(f, s, import.copy);
      replaced.emplace_back(s, &from);
      substitute(f, s, &import.copy);
    }
    import.pointer = data_of(f.tensor(s));
  }
  if (!replaced.empty()) name_again(f, p);
}

// Runs the steps while they are recorded. capture: the host's object, set once there is one.
void capture_partition(Frame& f, const PartitionInfo& p, const Recordings& at, Recording& r,
                       bool drives_out, void*& capture) {
  const Accelerator& gpu = *f.code.gpu;
  const Host& host = f.code.host;
  std::vector<c10::DataPtr> rooms(p.exports.size());  // outside of the recording's pool
  for (size_t k = 0; k < rooms.size(); ++k) {
    r.exports[k].nbytes = at.nbytes[k];
    if (p.exports[k].escapes) rooms[k] = gpu.allocate(static_cast<int64_t>(at.nbytes[k]));
  }
  capture = host.begin_capture(gpu.device().index());
  f.stream = gpu.stream();
  f.recorded = 1;
  // One piece wastes less than the allocator's segments, and can be lent as one.
  if (at.kept_nbytes > 0) {
    const auto nbytes = static_cast<int64_t>(at.kept_nbytes);
    r.piece_nbytes = at.kept_nbytes;
    keeping(host, capture, [&] { r.piece = static_cast<const char*>(gpu.allocate(nbytes).get()); });
  }
  MovedResults moved;
  capture_steps(f, p, capture, rooms, r, moved);
  r.why_copied = moved.copied();
  drop_arena(f);
  host.stop_capture(capture);
  moved.leave_out();
  const Host::Captured made = host.end_capture(capture);
  r.exec = made.exec;
  r.nbytes = made.nbytes;
  DeviceRecordings& shared = DeviceRecordings::of(gpu.device());
  shared.nbytes = made.shared;
  shared.limit = made.limit;
  const cuda::Driver& driver = cuda::Driver::machine();
  for (Recording::Copy& c : r.copies) {
    if (c.node) driver.check(driver.copy_node(c.node, &c.params), "cuGraphMemcpyNodeGetParams");
    move_result(r.exec, c);
  }
  shared.make_room(r, drives_out);
  for (const Recording* lender : r.lenders)
    if (std::find(shared.all.begin(), shared.all.end(), lender) == shared.all.end())
      throw std::runtime_error("memory that it was lent has gone");
  r.host = capture;
}

void keep_results(const Frame& f, const PartitionInfo& p, Recording& r) {
  for (size_t k = 0; k < p.exports.size(); ++k) {
    const at::Tensor& t = f.own(p.exports[k].slot);
    Recording::Export& made = r.exports[k];
    if (made.copy >= 0 || !t.defined()) continue;
    made.tensor = sharing(t);
    made.pointer = memory_of(t)->data();
    made.nbytes = memory_of(t)->nbytes();
  }
  for (ExprId e : p.values) r.values.push_back(f.value(e));
}

}  // namespace

bool record(Graphs& graphs, Frame& f, size_t partition, Recordings& at, bool drives_out) {
  const PartitionInfo& p = f.code.partitions[partition];
  auto r = std::make_unique<Recording>(f.code.host.release, at);
  r->imports.resize(p.imports.size());
  r->exports.resize(p.exports.size());
  at.copied.resize(p.imports.size());
  at.apart.resize(p.imports.size());
  Replaced replaced;
  const cuda::Stream outer = f.stream;
  void* capture = nullptr;
  std::optional<std::string> failed;
  try {
    read_imports(f, p, at.copied, *r, replaced);
    capture_partition(f, p, at, *r, drives_out, capture);
  } catch (const c10::Error& error) {
    failed = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failed = error.what();
  }
  f.stream = outer;
  f.recorded = 0;
  f.dead_memory = nullptr;
  for (auto& [slot, tensor] : replaced) substitute(f, slot, tensor);
  if (!replaced.empty()) name_again(f, p);
  if (failed) {
    for (SlotId s : p.made) f.own(s).reset();
    drop_arena(f);
    r->copies.clear();
    if (capture) f.code.host.abort_capture(capture);
    at.most = at.all.size();
    PartitionState& state = graphs.partitions[partition];
    refuse(f.code, partition, at.most == 0 ? at.refused : state.refused, *failed);
    return false;
  }
  keep_results(f, p, *r);
  ++graphs.counts.recorded;
  const auto copied = std::count_if(r->copies.begin(), r->copies.end(),
                                    [](const Recording::Copy& c) { return c.moved.empty(); });
  graphs.counts.results_copied += copied;
  for (const auto& [why, n] : r->why_copied) graphs.counts.why_copied[why] += n;
  graphs.counts.results_direct += p.n_direct + static_cast<int64_t>(r->copies.size()) - copied;
  DeviceRecordings::of(f.code.gpu->device()).all.push_back(r.get());
  at.all.push_back(std::move(r));
  launch_recording(f, p, *at.all.back());
  return true;
}

}  // namespace plait
