// native/torch/graphs.cpp: recording and replaying the partitions of a program, see graphs.h.
#include "graphs.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "dispatch_guard.h"
#include "dead_memory.h"
#include "program.h"

namespace plait {
namespace {

constexpr size_t kMaxSizes = 16;      // choices of sizes that one partition is recorded for
constexpr size_t kMaxRecordings = 4;  // at once, for one choice of sizes
constexpr int32_t kMaxMade = 32;      // in all: what moves so often is not worth recording
constexpr size_t kCopyNbytes =
    16 << 20;  // inputs of operators up to this are copied once they move
constexpr int64_t kMiB = 1 << 20;
constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

// What the recordings of one device share. The GIL guards it.
struct Shared {
  bool busy = false;
  bool used = false;
  cuda::Stream last = nullptr;
  std::vector<cuda::Stream> beside;  // of calls that have run without recordings since then
  cuda::Event event = nullptr;
  int64_t nbytes = 0;  // of the memory that all recordings share
  std::vector<Recording*> recordings;

  static auto& all() {
    static auto* all = new std::array<Shared, 128>;  // every index of a device; outlives recordings
    return *all;
  }
  static Shared& of(c10::DeviceIndex device) { return all()[static_cast<size_t>(device)]; }

  // A call uses memory of the one before it, wherever that was put, and what those beside have
  // read.
  void follow(cuda::Stream stream) {
    if (used) wait(stream, last);
    for (cuda::Stream other : beside) wait(stream, other);
    beside.clear();
    used = true;
    last = stream;
  }

 private:
  void wait(cuda::Stream stream, cuda::Stream other) {
    if (other == stream) return;
    const cuda::Driver& driver = cuda::Driver::machine();
    if (!event) driver.check(driver.make_event(&event, kNoTiming), "cuEventCreate");
    if (driver.record_event(event, other) == 0)
      driver.check(driver.wait_event(stream, event, 0), "cuStreamWaitEvent");
    else  // the stream is gone
      driver.check(driver.synchronize(), "cuCtxSynchronize");
  }
};

class Busy {
 public:
  explicit Busy(Shared& shared) : shared_(shared) { shared_.busy = true; }
  ~Busy() { shared_.busy = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Shared& shared_;
};

bool is_capturing(cuda::Stream stream) {
  if (!stream) return false;  // the default stream cannot be recorded
  int status = 0;
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

const void* data_of(const at::Tensor& t) {
  if (!t.defined()) return nullptr;
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->data() : impl;
}

at::Tensor sharing(const at::Tensor& t) {
  return at::Tensor(
      t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

c10::StorageImpl* memory_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool is_on_gpu(const at::Tensor& t) { return t.defined() && !t.device().is_cpu(); }

at::Storage storage_on(c10::DataPtr memory, size_t nbytes, c10::Allocator* allocator) {
  return at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t{}, nbytes, std::move(memory), allocator, true));
}

// What was put on a stream last, inside a recording.
cuda::GraphNode last_node(cuda::Stream stream) {
  const cuda::Driver& driver = cuda::Driver::machine();
  int status = 0;
  uint64_t id = 0;
  size_t n = 0;
  void* graph = nullptr;
  const cuda::GraphNode* nodes = nullptr;
  driver.check(driver.capture_info(stream, &status, &id, &graph, &nodes, &n),
               "cuStreamGetCaptureInfo");
  if (n != 1) throw std::runtime_error("a launch is not the last node of its recording");
  return nodes[0];
}

Recording::Copy record_copy(const c10::StorageImpl& from, c10::DataPtr room, cuda::Stream stream) {
  Recording::Copy made{.nbytes = from.nbytes(), .room = std::move(room)};
  if (made.nbytes == 0) return made;
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.copy(made.room.get(), from.data(), made.nbytes, stream), "cuMemcpyDtoDAsync");
  made.node = last_node(stream);
  return made;
}

// Whether its memory and what it was lent are there, in the size and place that they had.
bool is_whole(const Recording& r) {
  return !r.orphaned &&
         std::all_of(r.exports.begin(), r.exports.end(), [](const Recording::Export& e) {
           return !e.tensor.defined() || (memory_of(e.tensor)->data() == e.pointer &&
                                          memory_of(e.tensor)->nbytes() == e.nbytes);
         });
}

// Whether somebody else than the recording holds memory that it writes.
bool is_held(const Recording& r) {
  for (const Recording::Export& e : r.exports) {
    if (!is_on_gpu(e.tensor) || e.tensor.storage().use_count() == 1) continue;
    size_t own = 0;  // results may share memory
    for (const Recording::Export& other : r.exports)
      own += other.tensor.defined() && memory_of(other.tensor) == memory_of(e.tensor);
    if (e.tensor.storage().use_count() > own) return true;
  }
  return false;
}

// Throws where there is no room for a new recording; else others that nobody needs may have gone.
void make_room(const Shared& shared, const Recording& made, int64_t limit) {
  const int64_t alone = shared.nbytes + made.nbytes;
  for (;;) {
    int64_t all = alone;
    for (const Recording* r : shared.recordings) all += r->nbytes;
    if (all <= limit) return;
    Recording* oldest = nullptr;
    for (Recording* r : shared.recordings)
      if (!is_held(*r) && (!oldest || r->used < oldest->used)) oldest = r;
    if (alone > limit || !oldest)
      throw std::runtime_error("it would hold " + std::to_string(alone / kMiB) +
                               " MiB, all recordings " + std::to_string(all / kMiB) +
                               " MiB, and those of a device may hold " +
                               std::to_string(limit / kMiB) + " MiB");
    std::erase_if(oldest->owner.all, [&](const auto& r) { return r.get() == oldest; });
  }
}

}  // namespace

Recording::~Recording() {
  for (Shared& shared : Shared::all()) {
    std::erase(shared.recordings, this);
    for (Recording* r : shared.recordings)
      r->orphaned |= std::find(r->lenders.begin(), r->lenders.end(), this) != r->lenders.end();
  }
  if (host) release(host);
}

// --------------------------------------------------------------------------------------- recording
void Program::note_launch(Frame& f, const PartitionInfo& p, const GridLaunch& l,
                          Recording& r) const {
  const int64_t grid = value(f, l.grid);
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
    const Patch& root = buf_roots_[static_cast<size_t>(l.args.first + i)];
    for (size_t k = 0; k < p.imports.size(); ++k)
      if (p.imports[k].slot == root.buf)
        r.imports[k].uses.push_back({static_cast<int32_t>(r.launches.size()), i, root.delta});
  }
  r.launches.push_back(std::move(made));
}

void Program::copy_import(Frame& f, SlotId s, const at::Tensor& copy) const {
  const at::Tensor& from = *f.refs[static_cast<size_t>(s)];
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

// From here on the frame's slot is this tensor.
void Program::substitute(Frame& f, SlotId s, const at::Tensor* tensor) const {
  f.refs[static_cast<size_t>(s)] = tensor;
  if (slots_[static_cast<size_t>(s)].needs_pointer) patch(f, s, first_of(*tensor));
}

// Views from before the partition are of what their bases are now.
void Program::name_again(Frame& f, const PartitionInfo& p) const {
  for (int32_t at : p.names) step(f, steps_[static_cast<size_t>(at)], false);
}

// Whether a slot names memory that a recording has copied out, so that nothing in it needs the
// slot.
bool Program::is_brought_out(const PartitionInfo& p, const Recording& r, SlotId s) const {
  while (slots_[static_cast<size_t>(s)].kind == SlotInfo::Kind::view)
    s = slots_[static_cast<size_t>(s)].base;
  for (size_t k = 0; k < p.exports.size(); ++k)
    if (p.exports[k].slot == s) return r.exports[k].copy >= 0;
  return false;
}

// What this allocates is the recording's own.
template <class F>
void Program::keeping(void* capture, const F& f) const {
  host_.keep_allocations(capture, true);
  try {
    f();
  } catch (...) {
    host_.keep_allocations(capture, false);
    throw;
  }
  host_.keep_allocations(capture, false);
}

// Copies results for the caller into `rooms` (by export) and lets go of where they lay: those that
// nothing touches after step `at`, unless others share their memory; at the end, all that are left.
void Program::bring_out(Frame& f, const PartitionInfo& p, int32_t at,
                        std::vector<c10::DataPtr>& rooms, Recording& r) const {
  const bool at_end = at == p.last;
  std::vector<std::pair<const c10::StorageImpl*, int32_t>> brought;
  for (size_t k = 0; k < p.exports.size(); ++k) {
    const PartitionInfo::Export& from = p.exports[k];
    Recording::Export& e = r.exports[k];
    at::Tensor& t = f.tensors[static_cast<size_t>(from.slot)];
    if (!from.escapes || e.copy >= 0 || (!at_end && from.last != at) || !is_on_gpu(t)) continue;
    for (SlotId v : from.views) drop(f, v);
    if (!at_end && t.storage().use_count() != 1) continue;
    const c10::StorageImpl* memory = memory_of(t);
    if (memory->nbytes() != e.nbytes)
      throw std::runtime_error("'" + slot(from.slot).name + "' has another size than before");
    const auto same = std::find_if(brought.begin(), brought.end(),
                                   [&](const auto& b) { return b.first == memory; });
    if (same == brought.end()) {
      e.copy = static_cast<int32_t>(r.copies.size());
      brought.emplace_back(memory, e.copy);
      r.copies.push_back(record_copy(*memory, std::move(rooms[k]), f.stream));
    } else {
      e.copy = same->second;
    }
    e.tensor = sharing(t);
    e.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
        storage_on({nullptr, gpu_->device()}, e.nbytes, gpu_->allocator()));
    t.reset();
  }
}

// A slot from before the partition is needed no more in it.
void Program::note_death(const Frame& f, const PartitionInfo& p, SlotId s, DeadMemory& dead) const {
  const at::Tensor& own = f.tensors[static_cast<size_t>(s)];
  // It is the caller's, or a copy is read instead.
  if (f.refs[static_cast<size_t>(s)] != &own) return;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (p.imports[i].slot == s) dead.dies(static_cast<int32_t>(i), own);
}

// What may die in the partition before it has run lives to its end: it runs as it is if recording
// fails.
void Program::capture_steps(Frame& f, const PartitionInfo& p, void* capture,
                            std::vector<c10::DataPtr>& rooms, Recording& r) const {
  DeadMemory dead(r, Shared::of(gpu_->device().index()).recordings);
  f.excluded_by_us = DispatchGuard::added();
  const DispatchGuard below;
  for (int32_t at = p.first; at < p.last; ++at) {
    const Step& s = steps_[static_cast<size_t>(at)];
    const bool drops = s.kind == StepKind::drop_input || s.kind == StepKind::drop;
    if (s.kind == StepKind::bump ||
        (drops && std::find(p.dropped.begin(), p.dropped.end(), s.a) != p.dropped.end())) {
      if (drops) note_death(f, p, s.a, dead);
      continue;
    }
    if ((s.kind == StepKind::header || s.kind == StepKind::pointer) && is_brought_out(p, r, s.a))
      continue;
    if (std::find(p.kept.begin(), p.kept.end(), at) != p.kept.end()) {
      keeping(capture, [&] { step(f, s, false); });
    } else {
      f.dead_memory = &dead;
      step(f, s, false);
      f.dead_memory = nullptr;
    }
    if (s.kind == StepKind::launch) note_launch(f, p, grid_launches_[static_cast<size_t>(s.a)], r);
    bring_out(f, p, at, rooms, r);
  }
  bring_out(f, p, p.last, rooms, r);
}

// Notes why there is no recording, and says so the first time.
void Program::refuse(size_t partition, std::string& kept, const std::string& why) const {
  if (!kept.empty()) return;
  kept = why.empty() ? "unknown error" : why.substr(0, why.find('\n'));
  host_.refused(plan_.name, partition, kept);
}

// The partition, recorded and run; false if it cannot be.
bool Program::record(Frame& f, size_t partition, Recordings& at) const {
  const PartitionInfo& p = partitions_[partition];
  Shared& shared = Shared::of(gpu_->device().index());
  auto r = std::make_unique<Recording>(host_.release, at);
  r->imports.resize(p.imports.size());
  r->exports.resize(p.exports.size());
  at.copied.resize(p.imports.size());
  std::vector<std::pair<SlotId, const at::Tensor*>> replaced;
  const cuda::Stream outer = f.stream;
  void* capture = nullptr;
  std::optional<std::string> failed;
  try {
    for (size_t i = 0; i < p.imports.size(); ++i) {
      const SlotId s = p.imports[i].slot;
      Recording::Import& import = r->imports[i];
      const at::Tensor& from = *f.refs[static_cast<size_t>(s)];
      if (p.imports[i].fixed && from.defined() && from.device().is_cpu())
        throw std::runtime_error("'" + slots_[static_cast<size_t>(s)].name + "' is on the host");
      if (at.copied[i]) {
        const DispatchGuard below;
        import.copy = at::empty_strided(from.sizes(), from.strides(), from.options());
        copy_import(f, s, import.copy);
        replaced.emplace_back(s, &from);
        substitute(f, s, &import.copy);
      }
      import.pointer = data_of(*f.refs[static_cast<size_t>(s)]);
    }
    if (!replaced.empty()) name_again(f, p);
    std::vector<c10::DataPtr> rooms(p.exports.size());  // outside of the recording's pool
    for (size_t k = 0; k < rooms.size(); ++k) {
      r->exports[k].nbytes = at.nbytes[k];
      if (p.exports[k].escapes) rooms[k] = gpu_->allocate(static_cast<int64_t>(at.nbytes[k]));
    }
    capture = host_.begin_capture(gpu_->device().index());
    f.stream = gpu_->stream();
    // One piece wastes less than the allocator's segments, and can be lent as one.
    if (at.kept_nbytes > 0) {
      r->piece_nbytes = at.kept_nbytes;
      keeping(capture, [&] {
        r->piece =
            static_cast<const char*>(gpu_->allocate(static_cast<int64_t>(at.kept_nbytes)).get());
      });
    }
    capture_steps(f, p, capture, rooms, *r);
    drop_arena(f);
    const Host::Captured made = host_.end_capture(capture);
    r->exec = made.exec;
    r->nbytes = made.nbytes;
    shared.nbytes = made.shared;
    const cuda::Driver& driver = cuda::Driver::machine();
    for (Recording::Copy& c : r->copies)
      if (c.node) driver.check(driver.copy_node(c.node, &c.params), "cuGraphMemcpyNodeGetParams");
    make_room(shared, *r, made.limit);
    for (const Recording* lender : r->lenders)
      if (std::find(shared.recordings.begin(), shared.recordings.end(), lender) ==
          shared.recordings.end())
        throw std::runtime_error("memory that it was lent has gone");
    r->host = capture;
  } catch (const c10::Error& error) {
    failed = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failed = error.what();
  }
  f.stream = outer;
  f.dead_memory = nullptr;
  for (auto& [slot, tensor] : replaced) substitute(f, slot, tensor);
  if (!replaced.empty()) name_again(f, p);
  if (failed) {
    for (SlotId s : p.made) f.tensors[static_cast<size_t>(s)].reset();
    drop_arena(f);
    r->copies.clear();
    if (capture) host_.abort_capture(capture);
    refuse(partition, at.refused, *failed);
    return false;
  }
  for (size_t k = 0; k < p.exports.size(); ++k) {
    const at::Tensor& t = f.tensors[static_cast<size_t>(p.exports[k].slot)];
    Recording::Export& made = r->exports[k];
    if (made.copy >= 0 || !t.defined()) continue;
    made.tensor = sharing(t);
    made.pointer = memory_of(t)->data();
    made.nbytes = memory_of(t)->nbytes();
  }
  for (ExprId e : p.values) r->values.push_back(value(f, e));
  ++graphs_->counts.recorded;
  graphs_->counts.results_copied += static_cast<int64_t>(r->copies.size());
  graphs_->counts.results_direct += p.n_direct;
  shared.recordings.push_back(r.get());
  at.all.push_back(std::move(r));
  launch_recording(f, p, *at.all.back());
  return true;
}

// --------------------------------------------------------------------------------------- replaying
// Runs a recording that is up to date and leaves the frame as the steps would.
void Program::launch_recording(Frame& f, const PartitionInfo& p, Recording& r) const {
  static uint64_t now = 0;
  r.used = ++now;
  const cuda::Driver& driver = cuda::Driver::machine();
  if (p.random)
    host_.replay(r.host);
  else
    driver.check(driver.launch_graph(r.exec, f.stream), "cuGraphLaunch");
  std::vector<at::Storage> given;
  given.reserve(r.copies.size());
  for (Recording::Copy& c : r.copies)
    given.push_back(storage_on(std::move(c.room), c.nbytes, gpu_->allocator()));
  for (size_t k = 0; k < r.exports.size(); ++k) {
    const Recording::Export& e = r.exports[k];
    const auto s = static_cast<size_t>(p.exports[k].slot);
    f.tensors[s] = e.tensor.defined() ? sharing(e.tensor) : at::Tensor();
    if (!e.tensor.defined()) continue;
    if (e.copy >= 0)
      f.tensors[s].unsafeGetTensorImpl()->set_storage_keep_dtype(
          given[static_cast<size_t>(e.copy)]);
    if (slots_[s].needs_pointer) patch(f, p.exports[k].slot, first_of(f.tensors[s]));
  }
  for (size_t k = 0; k < p.values.size(); ++k)
    f.values[static_cast<size_t>(p.values[k])] = r.values[k];
  for (int32_t at : p.after) step(f, steps_[static_cast<size_t>(at)], false);
  for (SlotId s : p.bumps) f.refs[static_cast<size_t>(s)]->unsafeGetTensorImpl()->bump_version();
}

// Makes a recording read and write what this call has.
void Program::update_recording(Frame& f, const PartitionInfo& p, Recording& r) const {
  for (size_t i = 0; i < p.imports.size(); ++i) {
    Recording::Import& import = r.imports[i];
    const SlotId s = p.imports[i].slot;
    if (import.copy.defined()) {
      copy_import(f, s, import.copy);
      ++graphs_->counts.copied;
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
    ++graphs_->counts.patched;
  }
  r.changed.clear();
  void* context = nullptr;
  const cuda::Driver& driver = cuda::Driver::machine();
  if (!r.copies.empty()) driver.check(driver.current_context(&context), "cuCtxGetCurrent");
  for (Recording::Copy& c : r.copies) {
    c.room = gpu_->allocate(static_cast<int64_t>(c.nbytes));
    if (!c.node || c.room.get() == c.params.to.device) continue;
    cuda::CopyParams params = c.params;
    params.to.device = c.room.get();
    driver.check(driver.set_copy_node(r.exec, c.node, &params, context),
                 "cuGraphExecMemcpyNodeSetParams");
    c.params = params;
    ++graphs_->counts.patched;
  }
}

// A recording that knows the addresses of this call and whose memory nobody holds; null: there is
// none, and there is room for one.
Recording* Program::find_recording(const Frame& f, const PartitionInfo& p, Recordings& at) const {
  std::erase_if(at.all, [](const std::unique_ptr<Recording>& r) { return !is_whole(*r); });
  const auto lies_elsewhere = [&](const Recording& r, size_t i) {
    return p.imports[i].fixed && !r.imports[i].copy.defined() &&
           data_of(*f.refs[static_cast<size_t>(p.imports[i].slot)]) != r.imports[i].pointer;
  };
  const auto may_write = [&](const Recording& r, const Recording::Lent& l) {
    const auto s = static_cast<size_t>(p.imports[static_cast<size_t>(l.import)].slot);
    const at::Tensor& t = f.tensors[s];
    return f.refs[s] == &t && t.defined() && t.use_count() == 1 && memory_of(t) == l.memory &&
           l.memory->data() == l.data && t.storage().use_count() == l.uses;
  };
  bool known = false;
  for (const auto& r : at.all) {
    bool here = std::all_of(r->lent.begin(), r->lent.end(),
                            [&](const Recording::Lent& l) { return may_write(*r, l); });
    for (size_t i = 0; here && i < p.imports.size(); ++i) here = !lies_elsewhere(*r, i);
    if (here && !is_held(*r)) return r.get();
    known = known || here;
  }
  if (at.all.empty() || known) return nullptr;
  const Recording& last = *at.all.back();
  const auto may_copy = [&](size_t i) {
    return lies_elsewhere(last, i) && !p.imports[i].written && !p.imports[i].stored &&
           f.refs[static_cast<size_t>(p.imports[i].slot)]->is_non_overlapping_and_dense();
  };
  size_t moved = 0;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (may_copy(i)) moved += f.refs[static_cast<size_t>(p.imports[i].slot)]->nbytes();
  const bool full = at.all.size() >= kMaxRecordings;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (may_copy(i) && (moved <= kCopyNbytes || full)) at.copied[i] = true;
  if (full) at.all.erase(at.all.begin());
  return nullptr;
}

// The first time operators choose their algorithms, and how large results are is seen.
void Program::run_first(Frame& f, const PartitionInfo& p, Recordings& at) const {
  run_below(f, p);
  std::set<const c10::StorageImpl*> seen;  // results may share memory
  for (const PartitionInfo::Export& e : p.exports) {
    const at::Tensor& t = f.tensors[static_cast<size_t>(e.slot)];
    at.nbytes.push_back(is_on_gpu(t) ? memory_of(t)->nbytes() : 0);
    if (!e.escapes && at.nbytes.back() >= static_cast<size_t>(kLentNbytes) &&
        seen.insert(memory_of(t)).second)
      at.kept_nbytes += whole_blocks(at.nbytes.back());
  }
}

void Program::run_partition(Frame& f, size_t partition) const {
  const PartitionInfo& p = partitions_[partition];
  if (!p.recorded) return run_below(f, p);
  PartitionState& state = graphs_->partitions[partition];
  std::vector<int64_t> key;
  key.reserve(p.key.size());
  for (ExprId e : p.key) key.push_back(value(f, e));
  const auto found = state.by_size.find(key);
  if (found != state.by_size.end()) {
    if (!run_recorded(f, partition, found->second)) run_below(f, p);
    return;
  }
  if (state.by_size.size() >= kMaxSizes) {
    refuse(partition, state.refused,
           "it was met with more than " + std::to_string(kMaxSizes) + " sizes");
    return run_below(f, p);
  }
  Recordings seen;
  run_first(f, p, seen);
  state.by_size.emplace(std::move(key), std::move(seen));
}

// Whether the partition was replayed or recorded; false: its steps are still to run.
bool Program::run_recorded(Frame& f, size_t partition, Recordings& at) const {
  const PartitionInfo& p = partitions_[partition];
  if (!at.refused.empty()) return false;
  if (Recording* r = find_recording(f, p, at)) {
    try {
      update_recording(f, p, *r);
    } catch (const cuda::DriverError& error) {
      refuse(partition, at.refused, error.what());
      at.all.clear();
      return false;
    }
    ++graphs_->counts.replayed;
    launch_recording(f, p, *r);
    return true;
  }
  if (at.all.size() >= kMaxRecordings) {
    refuse(partition, graphs_->partitions[partition].refused,
           "the results of " + std::to_string(kMaxRecordings) + " recordings are in use at once");
    return false;
  }
  if (++at.made > kMaxMade) {
    refuse(partition, at.refused,
           "its tensors lie elsewhere at every call, or other recordings need the memory");
    at.all.clear();
    return false;
  }
  return record(f, partition, at);
}

void Program::run_below(Frame& f, const PartitionInfo& p) const {
  if (p.first == p.last) return;
  std::optional<DispatchGuard> below;
  if (needs_guard_) {
    f.excluded_by_us = DispatchGuard::added();
    below.emplace();
  }
  const bool profiled = at::hasCallbacks();
  if (p.waits) f.gil = host_.release_gil();
  try {
    for (int32_t at = p.first; at < p.last; ++at)
      step(f, steps_[static_cast<size_t>(at)], profiled);
  } catch (...) {
    if (f.gil) host_.retake_gil(std::exchange(f.gil, nullptr));
    throw;
  }
  if (f.gil) host_.retake_gil(std::exchange(f.gil, nullptr));
}

// A call with recordings; false where it must run without: another is under way, or the caller
// records a graph of their own.
bool Program::run_graphs(Frame& f) const {
  Shared& shared = Shared::of(gpu_->device().index());
  std::optional<c10::DeviceGuard> on_gpu;
  if (!gpu_->is_current()) on_gpu.emplace(gpu_->device());
  if (!shared.busy) f.stream = gpu_->stream();
  if (shared.busy || is_capturing(f.stream)) {
    ++graphs_->counts.bypassed;
    return false;
  }
  const Busy busy(shared);
  shared.follow(f.stream);
  for (size_t k = 0; k < partitions_.size(); ++k) run_partition(f, k);
  if (!f.copied.empty()) [[unlikely]]
    write_back(f);
  return true;
}

// A call that has run without, though it may have read what recordings keep.
void Program::note_beside(const Frame& f) const {
  std::vector<cuda::Stream>& beside = Shared::of(gpu_->device().index()).beside;
  if (!is_capturing(f.stream) && std::find(beside.begin(), beside.end(), f.stream) == beside.end())
    beside.push_back(f.stream);
}

}  // namespace plait
