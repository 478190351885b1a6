// triton_launch/src/tune.h: what decorators decided, on disk too, and how long kernels take.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "core/cuda.h"
#include "specialize.h"

namespace plait::triton {

inline cuda::Stream of_driver(Stream stream) { return reinterpret_cast<cuda::Stream>(stream); }

// Facts of one function, as signature.h writes them. Threads may share it.
class Facts {
 public:
  void read(const std::string& function, std::string_view line);  // throws Error
  std::optional<std::string> find(const std::string& kind, const Settings& told) const;
  // Says how the new one is written.
  std::string add(const std::string& kind, const std::vector<std::string>& names,
                  const Settings& told, const std::string& result);
  std::vector<std::string> names() const;  // of all that a fact depends on
  std::vector<std::string> lines() const;

 private:
  using Results = std::map<std::vector<std::string>, std::string>;  // by values
  mutable std::mutex mutex_;
  std::map<std::string, std::map<std::vector<std::string>, Results>> all_;  // by kind, then names
};
// `a=1;b=-`, in the order of the names.
std::string conditions(const std::vector<std::string>& names, const Settings& told);

// The place of one result in a folder, or none where nothing can be written. While this object is
// there, no other process has the same one.
class TunedFile {
 public:
  TunedFile(const Tuning* tuning, const std::string& key);
  ~TunedFile();
  TunedFile(const TunedFile&) = delete;
  TunedFile& operator=(const TunedFile&) = delete;
  std::optional<std::string> read() const;
  void write(const std::string& result) const;

 private:
  const std::string key_;
  std::string path_;  // empty: there is no folder, or none that is used
  int lock_ = -1;
};

// Device memory for a while, ordered as the stream is: the user's (set_scratch) or the driver's.
class Memory {
 public:
  Memory(const cuda::Driver& driver, size_t nbytes, size_t alignment, Stream stream);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(const Memory&) = delete;
  void* data = nullptr;

 private:
  const cuda::Driver& driver_;
  const Stream stream_;
  const Scratch* const user_;
};

// Zeros in device memory, ordered as the stream is.
void clear(const cuda::Driver& driver, void* data, size_t nbytes, Stream stream);

// A tensor that a timed kernel must find as it was, or zeroed.
struct Kept {
  void* data;
  size_t nbytes;
  bool zero;
};

// Median ms of each launch on a device whose L2 cache holds other things; infinity for those that
// are refused. Throws if all are. Tensors are restored and zeroed before each launch, and at the
// end.
std::vector<double> times(const cuda::Driver& driver, Stream stream, const std::vector<Kept>& kept,
                          std::span<const std::function<void()>> launches);

// What results of timing depend on, besides the kernel.
struct Machine {
  std::string gpu, driver;
};
Machine machine_of(const cuda::Driver& driver);

}  // namespace plait::triton
