// plait/triton/providers.h: where kernels come from, and the errors of all that happens to them.
//
// A call whose key is new becomes text, `*fp32:D,i32,=1024`: the types and attributes that Triton
// itself would find. A provider makes a cubin and its facts of that. What @triton.heuristics and
// @triton.autotune add to a call is found before: their Python functions are asked of it too.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "plait/errors.h"

namespace plait::triton {

// What went wrong with a kernel. argument: its index in the Python signature, or -1. traceback:
// Python's.
struct PLAIT_API Error : std::runtime_error {
  Error(const std::string& what, std::string kernel, std::string specialization = "",
        int argument = -1, std::string traceback = "");
  std::string kernel, specialization, traceback;
  int argument;
};

// The compiler or the device has not the room for a kernel; with other options it may have.
struct PLAIT_API Refused : Error {
  using Error::Error;
};

// A compiled kernel and what its launch must respect, as Triton's metadata has it.
struct Binary {
  std::string image, symbol;
  uint32_t num_warps = 4, num_ctas = 1, shared = 0;
  int64_t global_scratch = 0, global_alignment = 1, profile_scratch = 0, profile_alignment = 1;
  bool cooperative = false, pdl = false;
  std::string descriptors;  // what the kernel takes for them (triton_launch/src/specialize.h)
};

struct Request {
  std::string file, function, specialization, options;
  int capability;  // such as 90
};

// What a decorator's Python function is asked. kind: `heuristics` or `pruned`, and the decorator's
// number. arguments: names with values or types, `x=*fp32;n=100`; after an item `*`, those given by
// name.
struct Question {
  std::string file, function, kind, arguments;
};

// Where kernels come from. Its functions may be called by several threads.
class PLAIT_API Provider {
 public:
  virtual ~Provider() = default;
  // Names that the answer depends on, with commas; a newline; and the answer, as
  // triton_launch/src/signature.h has facts. Asked only where there are decorators.
  virtual std::string evaluate(const Question& question);
  // How many kernels it compiles at once.
  virtual unsigned concurrency() const { return 1; }
  // Locks what may be locked while it is asked. One that takes another lock then says here how to
  // wait.
  virtual std::unique_lock<std::mutex> hold(std::mutex& mutex) const {
    return std::unique_lock(mutex);
  }
  // The function's parameters, a line each; triton_launch/src/signature.h says how.
  virtual std::string describe(const std::string& file, const std::string& function) = 0;
  virtual Binary compile(const Request& request) = 0;
};
// A file that `python -m plait.tools.pack` wrote.
PLAIT_API std::shared_ptr<Provider> open_pack(const std::string& path);
// A Python process, started when first asked, that has plait and Triton on its path.
PLAIT_API std::shared_ptr<Provider> worker(const std::string& python = "python3");

// The Python that runs in this process, which must find plait and Triton.
PLAIT_API std::shared_ptr<Provider> embedded();

}  // namespace plait::triton
