// native/torch/graphs.cpp: recording and replaying the partitions of a program, see graphs.h.
#include "graphs.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <unordered_map>

#include "dispatch_guard.h"
#include "program.h"

namespace plait {
namespace {

constexpr size_t kMaxSizes = 16;       // choices of sizes that one partition is recorded for
constexpr size_t kMaxRecordings = 4;   // at once, for one choice of sizes
constexpr int32_t kMaxMade = 32;       // in all: what moves so often is not worth recording
constexpr size_t kCopyNbytes = 16 << 20;  // an input of an operator up to this is copied once it moves
constexpr size_t kMoveNbytes = 1 << 20;   // results up to this are moved out of the way
constexpr unsigned kNoTiming = 2;         // CU_EVENT_DISABLE_TIMING

// What the recordings of one device share. The GIL guards it.
struct Shared {
  bool busy = false;
  bool replayed = false;
  cuda::Stream last = nullptr;
  cuda::Event event = nullptr;

  static Shared& of(c10::DeviceIndex device) {
    static std::unordered_map<int, Shared> all;
    return all[device];
  }

  // A replay reads and writes memory of the one before it, wherever that was put.
  void follow(cuda::Stream stream) {
    const cuda::Driver& driver = cuda::Driver::machine();
    if (replayed && last != stream) {
      if (!event) driver.check(driver.make_event(&event, kNoTiming), "cuEventCreate");
      driver.check(driver.record_event(event, last), "cuEventRecord");
      driver.check(driver.wait_event(stream, event, 0), "cuStreamWaitEvent");
    }
    replayed = true;
    last = stream;
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
  return at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

c10::StorageImpl* impl_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Whether nobody has given the memory another size or place.
bool is_whole(const Recording& r) {
  for (const Recording::Export& e : r.exports)
    if (e.tensor.defined() &&
        (impl_of(e.tensor)->data() != e.pointer || impl_of(e.tensor)->nbytes() != e.nbytes))
      return false;
  return true;
}

// Owners of a storage that are the recording's own.
size_t own_uses(const Recording& r, const c10::StorageImpl* storage) {
  size_t n = 0;
  for (const Recording::Export& e : r.exports) n += e.tensor.defined() && impl_of(e.tensor) == storage;
  return n;
}

bool is_held(const Recording& r, const Recording::Export& e) {
  if (!e.tensor.defined() || e.tensor.device().is_cpu()) return false;
  const c10::StorageImpl* storage = impl_of(e.tensor);
  const size_t uses = e.tensor.storage().use_count();
  return uses > 1 && uses > own_uses(r, storage);
}

}  // namespace

const void* Program::address(const Frame& f, SlotId s) const {
  const SlotInfo::Kind kind = slots_[static_cast<size_t>(s)].kind;
  if (kind == SlotInfo::Kind::arena) return f.pointers[static_cast<size_t>(s)];
  return data_of(*f.refs[static_cast<size_t>(s)]);
}

// ----------------------------------------------------------------------------------------------------
// recording
void Program::note_launch(Frame& f, const PartitionInfo& p, const GridLaunch& l, Recording& r) const {
  const int64_t grid = value(f, l.grid);
  if (grid <= 0) return;
  const cuda::Driver& driver = cuda::Driver::machine();
  int status = 0;
  uint64_t id = 0;
  size_t n = 0;
  void* graph = nullptr;
  const cuda::GraphNode* nodes = nullptr;
  driver.check(driver.capture_info(f.stream, &status, &id, &graph, &nodes, &n),
               "cuStreamGetCaptureInfo");
  if (n != 1) throw std::runtime_error("a launch is not the last node of its recording");
  RecordedLaunch made{nodes[0], l.loaded, static_cast<uint64_t>(grid), {}, {}};
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
  const bool plain = !is_lazy(from) && from.device() == copy.device() &&
                     from.is_non_overlapping_and_dense() && from.strides() == copy.strides();
  if (plain) {
    const cuda::Driver& driver = cuda::Driver::machine();
    if (from.nbytes() > 0)
      driver.check(driver.copy(copy.unsafeGetTensorImpl()->mutable_data(),
                               from.unsafeGetTensorImpl()->data(), from.nbytes(), f.stream),
                   "cuMemcpyDtoDAsync");
    return;
  }
  const DispatchGuard below;
  copy.copy_(from);
}

// The partition, recorded and launched; null if it cannot be.
Recording* Program::record(Frame& f, size_t partition, Recordings& at) const {
  const PartitionInfo& p = partitions_[partition];
  auto r = std::make_unique<Recording>();
  r->imports.resize(p.imports.size());
  at.copied.resize(p.imports.size());
  for (size_t i = 0; i < p.imports.size(); ++i) {
    const SlotId s = p.imports[i].slot;
    Recording::Import& import = r->imports[i];
    if (at.copied[i]) {
      const at::Tensor& from = *f.refs[static_cast<size_t>(s)];
      const DispatchGuard below;
      import.copy = at::empty_strided(from.sizes(), from.strides(), from.options());
      copy_import(f, s, import.copy);
      f.owns_inputs = true;  // the frame drops it after the call
      f.tensors[static_cast<size_t>(s)] = import.copy;
      f.refs[static_cast<size_t>(s)] = &f.tensors[static_cast<size_t>(s)];
      if (slots_[static_cast<size_t>(s)].needs_pointer)
        patch(f, s, static_cast<char*>(import.copy.unsafeGetTensorImpl()->mutable_data()));
    }
    import.pointer = address(f, s);
  }
  const cuda::Stream outer = f.stream;
  void* capture = nullptr;
  try {
    capture = host_.begin_capture(gpu_->device().index());
    f.stream = gpu_->stream();
    const DispatchGuard below;
    for (int32_t at_step = p.first; at_step < p.last; ++at_step) {
      const Step& s = steps_[static_cast<size_t>(at_step)];
      step(f, s, false);
      if (s.kind == StepKind::launch)
        note_launch(f, p, grid_launches_[static_cast<size_t>(s.a)], *r);
    }
    r->exec = host_.end_capture(capture);
  } catch (const std::exception& error) {
    if (capture) host_.abort_capture(capture);
    f.stream = outer;
    graphs_->partitions[partition].refused = error.what();
    return nullptr;
  }
  r->host = capture;
  f.stream = outer;
  for (SlotId s : p.exports) {
    const at::Tensor& t = f.tensors[static_cast<size_t>(s)];
    Recording::Export e{s, {}, nullptr, 0};
    if (t.defined()) {
      e.tensor = sharing(t);
      e.pointer = impl_of(t)->data();
      e.nbytes = impl_of(t)->nbytes();
    }
    r->exports.push_back(std::move(e));
  }
  if (p.defines_symbols) r->values = f.values;
  launch_recording(f, p, *r);
  ++graphs_->counts.recorded;
  at.all.push_back(std::move(r));
  return at.all.back().get();
}

void Program::launch_recording(Frame& f, const PartitionInfo& p, const Recording& r) const {
  Shared::of(gpu_->device().index()).follow(f.stream);
  if (p.random) return host_.replay(r.host);
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.launch_graph(r.exec, f.stream), "cuGraphLaunch");
}

// ----------------------------------------------------------------------------------------------------
// replaying
// Memory of results that somebody still holds goes on in memory of its own.
void Program::move_results(Frame& f, Recording& r) const {
  const cuda::Driver& driver = cuda::Driver::machine();
  for (Recording::Export& e : r.exports) {
    if (!is_held(r, e)) continue;
    const auto held = e.tensor.storage();
    c10::StorageImpl* storage = held.unsafeGetStorageImpl();
    c10::DataPtr fresh = gpu_->allocate(static_cast<int64_t>(e.nbytes));
    if (e.nbytes > 0)
      driver.check(driver.copy(fresh.get(), e.pointer, e.nbytes, f.stream), "cuMemcpyDtoDAsync");
    auto kept = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, e.nbytes,
                                                      storage->set_data_ptr(std::move(fresh)),
                                                      gpu_->allocator(), true);
    for (Recording::Export& other : r.exports)
      if (other.tensor.defined() && impl_of(other.tensor) == storage)
        other.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(at::Storage(kept));
    ++graphs_->counts.moved;
  }
}

void Program::replay(Frame& f, const PartitionInfo& p, Recording& r) const {
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
      launch.changed = true;
    }
    import.pointer = now;
  }
  for (RecordedLaunch& launch : r.launches) {
    if (!launch.changed) continue;
    launch.kernel->set_node(r.exec, launch.node, launch.grid, launch.addresses.data());
    launch.changed = false;
    ++graphs_->counts.patched;
  }
  move_results(f, r);
  launch_recording(f, p, r);
  ++graphs_->counts.replayed;
  for (const Recording::Export& e : r.exports) {
    const auto s = static_cast<size_t>(e.slot);
    f.tensors[s] = e.tensor.defined() ? sharing(e.tensor) : at::Tensor();
    if (slots_[s].needs_pointer && e.tensor.defined())
      patch(f, e.slot, static_cast<char*>(f.tensors[s].unsafeGetTensorImpl()->mutable_data()));
  }
  if (p.defines_symbols) f.values = r.values;
  for (int32_t at : p.after) step(f, steps_[static_cast<size_t>(at)], false);
  for (SlotId s : p.bumps) f.refs[static_cast<size_t>(s)]->unsafeGetTensorImpl()->bump_version();
}

// A recording that knows the addresses of this call and whose results nobody holds, or one whose
// held results are better moved than kept beside those of another recording; null: make one.
Recording* Program::find_recording(const Frame& f, const PartitionInfo& p, Recordings& at) const {
  std::erase_if(at.all, [&](const std::unique_ptr<Recording>& r) {
    const bool whole = is_whole(*r);
    if (!whole) host_.release(r->host);
    return !whole;
  });
  Recording* held = nullptr;
  size_t held_nbytes = 0, all_nbytes = 0;
  for (const auto& r : at.all) {
    bool here = true;
    for (size_t i = 0; here && i < p.imports.size(); ++i)
      here = !p.imports[i].fixed || r->imports[i].copy.defined() ||
             address(f, p.imports[i].slot) == r->imports[i].pointer;
    if (!here) continue;
    size_t now = 0, all = 0;
    for (const Recording::Export& e : r->exports) {
      all += e.nbytes;
      if (is_held(*r, e)) now += e.nbytes;
    }
    if (now == 0) return r.get();
    if (held) continue;
    held = r.get();
    held_nbytes = now;
    all_nbytes = all;
  }
  if (held) {
    const bool mostly = held_nbytes > kMoveNbytes && 2 * held_nbytes >= all_nbytes;
    return mostly && at.all.size() < kMaxRecordings ? nullptr : held;
  }
  if (at.all.empty()) return nullptr;
  size_t moved = 0;
  const auto is_moved = [&](size_t i) {
    return p.imports[i].fixed && !p.imports[i].written && !at.all.back()->imports[i].copy.defined() &&
           address(f, p.imports[i].slot) != at.all.back()->imports[i].pointer;
  };
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (is_moved(i)) moved += f.refs[static_cast<size_t>(p.imports[i].slot)]->nbytes();
  const bool full = at.all.size() >= kMaxRecordings;
  for (size_t i = 0; i < p.imports.size(); ++i)
    if (is_moved(i) && (moved <= kCopyNbytes || full)) at.copied[i] = true;
  if (full) {
    host_.release(at.all.front()->host);
    at.all.erase(at.all.begin());
  }
  return nullptr;
}

// Whether the partition was replayed or recorded; false: its steps are still to run.
bool Program::run_recorded(Frame& f, size_t partition) const {
  const PartitionInfo& p = partitions_[partition];
  PartitionState& state = graphs_->partitions[partition];
  if (!state.refused.empty()) return false;
  std::vector<int64_t> key;
  key.reserve(p.key.size());
  for (ExprId e : p.key) key.push_back(value(f, e));
  auto found = state.by_size.find(key);
  if (found == state.by_size.end()) {
    if (state.by_size.size() < kMaxSizes) state.by_size.emplace(std::move(key), Recordings());
    return false;  // the first time: operators choose their algorithms
  }
  Recordings& at = found->second;
  if (Recording* r = find_recording(f, p, at)) {
    replay(f, p, *r);
    return true;
  }
  if (++at.made > kMaxMade) {
    state.refused = "its tensors lie elsewhere at every call";
    return false;
  }
  return record(f, partition, at) != nullptr;
}

void Program::run_below(Frame& f, const PartitionInfo& p) const {
  if (p.first == p.last) return;
  std::optional<DispatchGuard> below;
  if (needs_guard_) {
    f.excluded_by_us = DispatchGuard::added();
    below.emplace();
  }
  for (int32_t at = p.first; at < p.last; ++at) {
    const Step& s = steps_[static_cast<size_t>(at)];
    if (s.kind == StepKind::arena && !p.recorded)
      take_arena(f, s, true);
    else
      step(f, s, at::hasCallbacks());
  }
}

// A call with recordings, the GIL held throughout; false where it must run without: another is under
// way, or the caller records a graph of their own.
bool Program::run_graphs(Frame& f) const {
  Shared& shared = Shared::of(gpu_->device().index());
  if (shared.busy) return false;
  const c10::DeviceGuard on_gpu(gpu_->device());
  f.stream = gpu_->stream();
  if (is_capturing(f.stream)) return false;
  const Busy busy(shared);
  for (size_t k = 0; k < partitions_.size(); ++k)
    if (!partitions_[k].recorded || !run_recorded(f, k)) run_below(f, partitions_[k]);
  if (!f.written_back.empty()) [[unlikely]]
    write_back(f);
  return true;
}

Program::~Program() {
  if (!graphs_) return;
  for (const PartitionState& state : graphs_->partitions)
    for (const auto& [sizes, at] : state.by_size)
      for (const auto& r : at.all) host_.release(r->host);
}

}  // namespace plait
