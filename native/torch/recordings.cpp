// native/torch/recordings.cpp: what the recordings of a device share, and who holds their memory,
// see recordings.h.
#include "recordings.h"

#include <algorithm>
#include <array>

namespace plait {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

auto& devices() {
  static auto* all = new std::array<DeviceRecordings, 128>;  // every index; outlives recordings
  return *all;
}

}  // namespace

DeviceRecordings& DeviceRecordings::of(c10::Device device) {
  return devices()[static_cast<size_t>(device.index())];
}

void DeviceRecordings::follow(cuda::Stream stream) {
  if (used) wait(stream, last);
  for (cuda::Stream other : beside) wait(stream, other);
  beside.clear();
  used = true;
  last = stream;
}

void DeviceRecordings::wait(cuda::Stream stream, cuda::Stream other) {
  if (other == stream) return;
  const cuda::Driver& driver = cuda::Driver::machine();
  if (!event) driver.check(driver.make_event(&event, kNoTiming), "cuEventCreate");
  if (driver.record_event(event, other) == 0)
    driver.check(driver.wait_event(stream, event, 0), "cuStreamWaitEvent");
  else  // the stream is gone
    driver.check(driver.synchronize(), "cuCtxSynchronize");
}

void DeviceRecordings::make_room(const Recording& made, bool drives_out) const {
  const int64_t alone = nbytes + made.nbytes;
  for (;;) {
    const std::string why = over(made.nbytes);
    if (why.empty()) return;
    Recording* oldest = nullptr;
    for (Recording* r : all)
      if (!is_held(*r) && (!oldest || r->used < oldest->used)) oldest = r;
    if (alone > limit || !oldest || !drives_out)
      throw std::runtime_error("it would hold " + mib(alone) + ", " + why);
    std::erase_if(oldest->owner.all, [&](const auto& r) { return r.get() == oldest; });
  }
}

std::string DeviceRecordings::over(int64_t more) const {
  int64_t total = nbytes + more;
  for (const Recording* r : all) total += r->nbytes;
  if (total <= limit) return "";
  return "all recordings " + mib(total) + ", and those of a device may hold " + mib(limit);
}

Recording::~Recording() {
  for (DeviceRecordings& device : devices()) {
    std::erase(device.all, this);
    for (Recording* r : device.all)
      r->orphaned |= std::find(r->lenders.begin(), r->lenders.end(), this) != r->lenders.end();
  }
  if (host) release(host);
}

bool is_whole(const Recording& r) {
  return !r.orphaned &&
         std::all_of(r.exports.begin(), r.exports.end(), [](const Recording::Export& e) {
           return !e.tensor.defined() || (memory_of(e.tensor)->data() == e.pointer &&
                                          memory_of(e.tensor)->nbytes() == e.nbytes);
         });
}

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

std::string mib(int64_t nbytes) { return std::to_string(nbytes / kMiB) + " MiB"; }

const void* data_of(const at::Tensor& t) {
  if (!t.defined()) return nullptr;
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->data() : impl;
}

at::Tensor sharing(const at::Tensor& t) {
  return at::Tensor(
      t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

at::Storage storage_on(c10::DataPtr memory, size_t nbytes, c10::Allocator* allocator) {
  return at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t{}, nbytes, std::move(memory), allocator, true));
}

bool is_capturing(cuda::Stream stream) {
  if (!stream) return false;  // the default stream cannot be recorded
  int status = 0;
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

Recorded recorded_on(cuda::Stream stream) {
  const cuda::Driver& driver = cuda::Driver::machine();
  int status = 0;
  uint64_t id = 0;
  Recorded r;
  driver.check(driver.capture_info(stream, &status, &id, &r.graph, &r.last, &r.n_last),
               "cuStreamGetCaptureInfo");
  return r;
}

}  // namespace plait
