// native/core/library.h: a kernel library (a shared object without dependencies) and its entry
// points.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace plait {

// Returns 0, or k > 0 when run-time check k of the kernel failed. A library says of kernel NAME how
// many of bufs and of syms it reads, in `const int32_t NAME_takes[2]`.
using KernelFn = int64_t (*)(int64_t tid, int64_t nthreads, void* const* bufs, const int64_t* syms);

// Loads a shared object, a file or the bytes of one, and hands it the table of math functions
// (plait_init). Closed by the destructor.
class Library {
 public:
  Library(const std::string& path, std::vector<void*> math_table);  // throws LoadError
  Library(std::span<const std::byte> image, std::vector<void*> math_table);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Throws LoadError where there is no such kernel, or one that takes other arguments.
  KernelFn kernel(const std::string& name, int32_t n_args, int32_t n_sizes) const;
  void* find(const char* symbol) const;  // null: there is none
  const std::string& path() const { return path_; }

 private:
  class ImageFile;
  void open(const std::string& file);

  std::string path_;
  std::unique_ptr<ImageFile> image_;
  void* handle_ = nullptr;
  std::vector<void*> math_table_;  // the library keeps a pointer to it
};

}  // namespace plait
