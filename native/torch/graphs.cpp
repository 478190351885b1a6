// native/torch/graphs.cpp: replaying the partitions of a program, see graphs.h.
#include "graphs.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <set>

#include "dead_memory.h"
#include "dispatch_guard.h"
#include "memory.h"
#include "moved_results.h"
#include "run.h"

namespace plait {
namespace {

constexpr size_t kMaxSizes = 1024;  // choices of sizes of one partition that are remembered
// Further recordings of one partition drive out none of others.
constexpr size_t kFewSizes = 16, kFewRecordings = 4;
constexpr size_t kMaxMade = 32;  // in the place of one: what moves so often is not worth recording
// Inputs of operators up to this are copied once they move.
constexpr size_t kCopyNbytes = 16 << 20;

// Makes a recording read and write what this call has.
void update_recording(Graphs& graphs, const Frame& f, const PartitionInfo& p, Recording& r) {
  for (size_t i = 0; i < p.imports.size(); ++i) {
    Recording::Import& import = r.imports[i];
    const SlotId s = p.imports[i].slot;
    if (import.copy.defined()) {
      copy_import(f, s, import.copy);
      ++graphs.counts.copied;
      continue;
    }
    if (p.imports[i].fixed) continue;
    char* now = f.pointers[static_cast<size_t>(s)];
    if (now == import.pointer) continue;
    for (const Recording::Import::Use& u : import.uses) {
      RecordedLaunch& launch = r.launches[static_cast<size_t>(u.launch)];
      launch.words[static_cast<size_t>(u.word)] = reinterpret_cast<uint64_t>(now + u.delta);
      if (!std::exchange(launch.changed, true)) r.changed.push_back(u.launch);
    }
    import.pointer = now;
  }
  for (int32_t k : r.changed) {
    RecordedLaunch& launch = r.launches[static_cast<size_t>(k)];
    launch.kernel->set_node(r.exec, launch.node, launch.grid, launch.addresses.data());
    launch.changed = false;
    ++graphs.counts.patched;
  }
  r.changed.clear();
  for (Recording::Copy& c : r.copies) {
    c.room = f.code.gpu->allocate(static_cast<int64_t>(c.nbytes));
    if (move_result(r.exec, c)) ++graphs.counts.patched;
  }
}

// A recording that knows the addresses of this call and whose memory nobody holds, or null. Of many
// that know others, one goes that nobody holds, and what moved is copied from then on; no memory is
// lent any more that was another one at a call before.
Recording* find_recording(const Frame& f, const PartitionInfo& p, Recordings& at) {
  std::erase_if(at.all, [](const std::unique_ptr<Recording>& r) { return !is_whole(*r); });
  const auto lies_elsewhere = [&](const Recording& r, size_t i) {
    return p.imports[i].fixed && !r.imports[i].copy.defined() &&
           data_of(f.tensor(p.imports[i].slot)) != r.imports[i].pointer;
  };
  const auto may_write = [&](const Recording& r, const Recording::Lent& l) {
    const auto s = static_cast<size_t>(p.imports[static_cast<size_t>(l.import)].slot);
    const at::Tensor& t = f.tensors[s];
    return f.refs[s] == &t && t.defined() && t.use_count() == 1 && memory_of(t) == l.memory &&
           l.memory->data() == l.data && t.storage().use_count() == l.uses;
  };
  bool known = false;
  for (const auto& r : at.all) {
    bool here = true;
    for (const Recording::Lent& l : r->lent) {
      if (may_write(*r, l)) continue;
      here = false;
      at.apart[static_cast<size_t>(l.import)] = true;
    }
    for (size_t i = 0; here && i < p.imports.size(); ++i) here = !lies_elsewhere(*r, i);
    if (here && !is_held(*r)) return r.get();
    known = known || here;
  }
  if (at.all.empty() || known) return nullptr;
  const Recording& last = *at.all.back();
  const auto may_copy = [&](size_t i) {
    return lies_elsewhere(last, i) && !p.imports[i].written && !p.imports[i].stored &&
           f.tensor(p.imports[i].slot).is_non_overlapping_and_dense();
  };
  size_t moved = 0;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (may_copy(i)) moved += f.tensor(p.imports[i].slot).nbytes();
  const bool full = at.all.size() >= kFewRecordings;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (may_copy(i) && (moved <= kCopyNbytes || full)) at.copied[i] = true;
  const auto idle =
      std::find_if(at.all.begin(), at.all.end(), [](const auto& r) { return !is_held(*r); });
  if (full && idle != at.all.end()) at.all.erase(idle);
  return nullptr;
}

// Whether a partition has so few recordings that others may go for one more.
bool has_few(const PartitionState& state, const Recordings& at) {
  const auto n_sizes = std::count_if(state.by_size.begin(), state.by_size.end(),
                                     [](const auto& sized) { return !sized.second.all.empty(); });
  return at.all.size() < std::min(kFewRecordings, at.most) &&
         static_cast<size_t>(n_sizes) < kFewSizes;
}

// Why one that has many gets no other one; "" if it does.
std::string why_no_more(const Frame& f, const PartitionState& state, const Recordings& at) {
  size_t n = 0;
  int64_t largest = 0, held = 0;
  for (const auto& [sizes, found] : state.by_size) {
    n += found.all.size();
    for (const auto& r : found.all) {
      held += r->nbytes;
      largest = std::max(largest, r->nbytes);
    }
  }
  const std::string over = DeviceRecordings::of(f.code.gpu->device()).over(largest);
  if (over.empty() && at.all.size() < at.most) return "";
  return "it has " + std::to_string(n) + " recordings of " + mib(held) +
         ", in use or of other sizes" + (over.empty() ? "" : ": with one more, " + over);
}

void run_below(Frame& f, const PartitionInfo& p) {
  if (p.first == p.last) return;
  std::optional<DispatchGuard> below;
  if (f.code.needs_guard) {
    f.excluded_by_us = DispatchGuard::added();
    below.emplace();
  }
  const bool profiled = at::hasCallbacks();
  if (p.waits) f.gil = f.code.host.release_gil();
  try {
    for (int32_t at = p.first; at < p.last; ++at)
      run_step(f, f.code.steps[static_cast<size_t>(at)], profiled);
  } catch (...) {
    if (f.gil) f.code.host.retake_gil(std::exchange(f.gil, nullptr));
    throw;
  }
  if (f.gil) f.code.host.retake_gil(std::exchange(f.gil, nullptr));
}

// The first time operators choose their algorithms, and how large results are is seen.
void run_first(Frame& f, const PartitionInfo& p, Recordings& at) {
  run_below(f, p);
  std::set<const c10::StorageImpl*> seen;  // results may share memory
  for (const PartitionInfo::Export& e : p.exports) {
    const at::Tensor& t = f.own(e.slot);
    at.nbytes.push_back(is_on_gpu(t) ? memory_of(t)->nbytes() : 0);
    if (!e.escapes && at.nbytes.back() >= static_cast<size_t>(kLentNbytes) &&
        seen.insert(memory_of(t)).second)
      at.kept_nbytes += whole_blocks(at.nbytes.back());
  }
}

// Whether the partition was replayed or recorded; false: its steps are still to run.
bool run_recorded(Graphs& graphs, Frame& f, size_t partition, Recordings& at) {
  const PartitionInfo& p = f.code.partitions[partition];
  if (!at.refused.empty()) return false;
  if (Recording* r = find_recording(f, p, at)) {
    try {
      update_recording(graphs, f, p, *r);
    } catch (const cuda::DriverError& error) {
      refuse(f.code, partition, at.refused, error.what());
      at.all.clear();
      return false;
    }
    ++graphs.counts.replayed;
    launch_recording(f, p, *r);
    return true;
  }
  PartitionState& state = graphs.partitions[partition];
  const bool few = has_few(state, at);
  const std::string why = few ? "" : why_no_more(f, state, at);
  if (!why.empty()) {
    refuse(f.code, partition, state.refused, why);
    return false;
  }
  if (++at.made > kMaxMade * (at.all.size() + 1)) {
    refuse(f.code, partition, at.refused,
           "its tensors lie elsewhere at every call, or other recordings need the memory");
    at.all.clear();
    return false;
  }
  return record(graphs, f, partition, at, few);
}

void run_partition(Graphs& graphs, Frame& f, size_t partition) {
  const PartitionInfo& p = f.code.partitions[partition];
  if (!p.recorded) return run_below(f, p);
  PartitionState& state = graphs.partitions[partition];
  std::vector<int64_t> key;
  key.reserve(p.key.size());
  for (ExprId e : p.key) key.push_back(f.value(e));
  const auto found = state.by_size.find(key);
  if (found != state.by_size.end()) {
    if (!run_recorded(graphs, f, partition, found->second)) run_below(f, p);
    return;
  }
  if (state.by_size.size() >= kMaxSizes) {
    refuse(f.code, partition, state.refused,
           "it was met with more than " + std::to_string(kMaxSizes) + " sizes");
    return run_below(f, p);
  }
  Recordings seen;
  run_first(f, p, seen);
  state.by_size.emplace(std::move(key), std::move(seen));
}

}  // namespace

void refuse(const Code& code, size_t partition, std::string& kept, const std::string& why) {
  if (!kept.empty()) return;
  kept = why.empty() ? "unknown error" : why.substr(0, why.find('\n'));
  code.host.refused(code.plan.name, partition, kept);
}

void copy_import(const Frame& f, SlotId s, const at::Tensor& copy) {
  const at::Tensor& from = f.tensor(s);
  if (is_lazy(from) || from.strides() != copy.strides()) {
    const DispatchGuard below;
    copy.copy_(from);
  } else if (from.nbytes() > 0) {
    const cuda::Driver& driver = cuda::Driver::machine();
    driver.check(driver.copy(copy.unsafeGetTensorImpl()->mutable_data(),
                             from.unsafeGetTensorImpl()->data(), from.nbytes(), f.stream),
                 "cuMemcpyDtoDAsync");
  }
}

void launch_recording(Frame& f, const PartitionInfo& p, Recording& r) {
  static uint64_t now = 0;
  r.used = ++now;
  const cuda::Driver& driver = cuda::Driver::machine();
  if (p.random)
    f.code.host.replay(r.host);
  else
    driver.check(driver.launch_graph(r.exec, f.stream), "cuGraphLaunch");
  std::vector<at::Storage> given;
  given.reserve(r.copies.size());
  for (Recording::Copy& c : r.copies)
    given.push_back(storage_on(std::move(c.room), c.nbytes, f.code.gpu->allocator()));
  for (size_t k = 0; k < r.exports.size(); ++k) {
    const Recording::Export& e = r.exports[k];
    const SlotId s = p.exports[k].slot;
    at::Tensor& t = f.own(s) = e.tensor.defined() ? sharing(e.tensor) : at::Tensor();
    if (!t.defined()) continue;
    if (e.copy >= 0)
      t.unsafeGetTensorImpl()->set_storage_keep_dtype(given[static_cast<size_t>(e.copy)]);
    if (f.slot(s).needs_pointer) patch(f, s, first_of(t));
  }
  for (size_t k = 0; k < p.values.size(); ++k)
    f.values[static_cast<size_t>(p.values[k])] = r.values[k];
  for (int32_t at : p.after) run_step(f, f.code.steps[static_cast<size_t>(at)], false);
  for (SlotId s : p.bumps) f.tensor(s).unsafeGetTensorImpl()->bump_version();
}

bool run_graphs(Graphs& graphs, Frame& f) {
  DeviceRecordings& shared = DeviceRecordings::of(f.code.gpu->device());
  std::optional<c10::DeviceGuard> on_gpu;
  if (!f.code.gpu->is_current()) on_gpu.emplace(f.code.gpu->device());
  if (!shared.busy) f.stream = f.code.gpu->stream();
  if (shared.busy || is_capturing(f.stream)) {
    ++graphs.counts.bypassed;
    return false;
  }
  shared.busy = true;  // until this returns, or throws
  const std::unique_ptr<bool, void (*)(bool*)> busy(&shared.busy, [](bool* b) { *b = false; });
  shared.follow(f.stream);
  for (size_t k = 0; k < f.code.partitions.size(); ++k) run_partition(graphs, f, k);
  if (!f.copied.empty()) [[unlikely]]
    write_back(f);
  return true;
}

void note_beside(const Frame& f) {
  std::vector<cuda::Stream>& beside = DeviceRecordings::of(f.code.gpu->device()).beside;
  if (!is_capturing(f.stream) && std::find(beside.begin(), beside.end(), f.stream) == beside.end())
    beside.push_back(f.stream);
}

}  // namespace plait
