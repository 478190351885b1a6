// native/torch/recordings.h: recorded CUDA graphs of partitions, as data.
//
// A Recording is good for calls that find what it reads and writes where it lay (graphs.h), whose
// memory nobody else holds (is_held) and that is whole (is_whole). All recordings of a device share
// memory, a bound on bytes, and the order of the streams that they ran on: DeviceRecordings. The
// GIL guards all of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "told_node.h"

namespace plait {

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

// A node inside a recording that writes a result for the caller.
struct MovedNode {
  struct Use {
    size_t word;
    uint64_t delta;  // from where the result begins
  };
  ToldNode told;
  std::vector<Use> uses;
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
  // Brings a result to the caller. node: of a copy; none for an empty result, nor where those that
  // write it are told where (moved). room: for the next launch. now: where it is brought.
  struct Copy {
    cuda::GraphNode node = nullptr;
    cuda::CopyParams params{};
    size_t nbytes = 0;
    c10::DataPtr room;
    std::vector<MovedNode> moved;
    const void* now = nullptr;
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
  std::map<std::string, int64_t> why_copied;  // results of operators that might be written directly
  std::vector<int64_t> values;                // as in PartitionInfo
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
  std::vector<bool> apart;     // by import: calls bring different memory, so none of it is lent
  std::vector<size_t> nbytes;  // by export, as met before recording
  size_t kept_nbytes = 0;      // of large ones that stay in the recording
  size_t made = 0;
  size_t most = SIZE_MAX;  // at once: one more failed
  std::string refused;     // why nothing is recorded any more
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
  std::map<std::string, int64_t> why_copied;  // as in Recording
};

struct Graphs {
  explicit Graphs(size_t n) : partitions(n) {}
  std::vector<PartitionState> partitions;
  GraphCounts counts;
};

// What the recordings of one device share.
struct DeviceRecordings {
  bool busy = false;
  bool used = false;
  cuda::Stream last = nullptr;
  std::vector<cuda::Stream> beside;  // of calls that have run without recordings since then
  cuda::Event event = nullptr;
  int64_t nbytes = 0;  // of the memory that all recordings share
  int64_t limit = 0;   // to it and what each has to itself, as the host said last
  std::vector<Recording*> all;

  static DeviceRecordings& of(c10::Device device);
  // A call uses memory of the one before it, wherever that was put, and what those beside have
  // read.
  void follow(cuda::Stream stream);
  // Throws where there is no room for a new recording; else others that nobody needs may have gone,
  // if it drives them out.
  void make_room(const Recording& made, bool drives_out) const;
  // What all recordings and one more of so many bytes would hold, if that is too much; else "".
  std::string over(int64_t more) const;

 private:
  void wait(cuda::Stream stream, cuda::Stream other);
};

// Whether its memory and what it was lent are there, in the size and place that they had.
bool is_whole(const Recording& r);
// Whether somebody else than the recording holds memory that it writes.
bool is_held(const Recording& r);

bool is_capturing(cuda::Stream stream);  // whether what is put on it is recorded
// The graph that a stream is recorded into, and its nodes that what comes next will follow.
struct Recorded {
  cuda::Graph graph = nullptr;
  const cuda::GraphNode* last = nullptr;
  size_t n_last = 0;
};
Recorded recorded_on(cuda::Stream stream);

std::string mib(int64_t nbytes);           // "3 MiB"
const void* data_of(const at::Tensor& t);  // null for none; without storage, the tensor
at::Tensor sharing(const at::Tensor& t);   // a new header of the same memory
inline c10::StorageImpl* memory_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
inline bool is_on_gpu(const at::Tensor& t) { return t.defined() && !t.device().is_cpu(); }
at::Storage storage_on(c10::DataPtr memory, size_t nbytes, c10::Allocator* allocator);

}  // namespace plait
