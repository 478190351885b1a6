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

// Returns 0, or k > 0 when run-time check k of the kernel failed.
using KernelFn = int64_t (*)(int64_t tid, int64_t nthreads, void* const* bufs, const int64_t* syms);

// Loads a shared object, a file or the bytes of one, and hands it the table of math functions (plait_init). Closed by the
// destructor.
class Library {
 public:
  Library(const std::string& path, std::vector<void*> math_table);  // throws LoadError
  Library(std::span<const std::byte> image, std::vector<void*> math_table);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  KernelFn kernel(const std::string& name) const;  // throws LoadError
  void* find(const char* symbol) const;            // null: there is none
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
