// native/core/blaslt.h: matrix products by cuBLASLt, prepared once and called again.
//
// Needs neither CUDA headers nor the library to build: it is found in the process, where others
// have loaded it. Everything but the pointers is part of a plan: descriptors, layouts, the
// algorithm and what memory it works in. A current context is the caller's business.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "core/cuda.h"

namespace plait::blaslt {

// As in the library's interface (cudaDataType, cublasComputeType_t, cublasLtReductionScheme_t).
enum class Type : int32_t { f32 = 0, f16 = 2, bf16 = 14 };
enum class Compute : int32_t { f32 = 68, tf32 = 77 };
enum class Reductions : uint32_t { none = 0, in_compute_type = 2, any = 7 };
// What is computed of a result before it is stored: gelu by its formula of tanh.
enum class Activation : int32_t { none = 0, relu = 2, gelu = 32 };

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

class Plans;

// The entry points of one library. Handles of descriptors are pointers to what only it knows.
class Library {
 public:
  // The one that a shared library of this process uses; null where that is not there, or has it
  // inside itself.
  static std::unique_ptr<Library> used_by(const char* shared_library);
  // Throws std::runtime_error where an entry point is missing. handle: from dlopen, stays open; of
  // the library or of one that depends on it.
  explicit Library(void* handle);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // The library's context on this device, which is current. Null where it cannot be made.
  void* context(int device) const;
  // What was prepared on this device; null where its number is too large.
  Plans* plans(int device) const;

  int (*create)(void**);
  int (*create_product)(void**, int32_t compute, int32_t scale);
  int (*destroy_product)(void*);
  int (*set_product)(void*, int32_t attribute, const void*, size_t);
  int (*create_layout)(void**, int32_t type, uint64_t rows, uint64_t cols, int64_t ld);
  int (*destroy_layout)(void*);
  int (*set_layout)(void*, int32_t attribute, const void*, size_t);
  int (*create_preference)(void**);
  int (*destroy_preference)(void*);
  int (*set_preference)(void*, int32_t attribute, const void*, size_t);
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*);
  int (*run)(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
             const void*, void*, void*, void*, const Algorithm*, void*, size_t, cuda::Stream);

 private:
  static constexpr int kMaxDevices = 64;
  mutable std::mutex mutex_;
  mutable std::atomic<void*> contexts_[kMaxDevices] = {};
  mutable std::atomic<Plans*> plans_[kMaxDevices] = {};
};

// A matrix, or one a batch, as a tensor describes it; steps in elements.
struct Matrix {
  const void* data;
  int64_t rows, cols, row_step, col_step, batch_step;

  Matrix transposed() const { return {data, cols, rows, col_step, row_step, batch_step}; }
};

// A column-major matrix: its columns are `ld` elements apart.
struct Layout {
  int64_t ld = 0, batch_step = 0;
  int32_t transposed = 0;  // stored as its transpose
  uint32_t alignment = 0;  // of its memory, in bytes, 256 at most

  bool operator==(const Layout&) const = default;
};

// All that a plan depends on.
struct Problem {
  Type type;
  Compute compute;
  Reductions reductions;
  bool bias;  // c is one column (of each of a batch), added to every column of the product
  Activation activation;  // after a bias alone
  int64_t rows, cols, inner, batch;
  Layout x, y, c, d;

  bool operator==(const Problem&) const = default;
};

// d = alpha * x @ y + beta * c, column-major.
struct Product {
  Problem problem;
  const void *x, *y, *c;
  void* d;
  float alpha, beta;
};

// out = alpha * a @ b + beta * addend. addend: of out's sizes, null for none; a step of 0 repeats
// its row or batch. activation: of out. Nothing where the library cannot do it, an empty product
// included.
std::optional<Product> make_product(Type type, Compute compute, Reductions reductions,
                                    const Matrix& a, const Matrix& b, const Matrix* addend,
                                    const Matrix& out, int64_t batch, float alpha, float beta,
                                    Activation activation = Activation::none);

// Threads may run one plan at once.
class Plan {
 public:
  // The first product of its kind: the heuristics look at the alignment of its pointers.
  Plan(const Library& library, int device, const Product& first, size_t max_workspace);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Problem& problem() const { return problem_; }
  bool usable() const { return usable_; }  // the library has an algorithm
  size_t workspace() const { return workspace_; }
  // False where the library refuses these operands: nothing was put on the stream. Throws
  // std::runtime_error where it failed, which says nothing about the stream.
  bool run(const Product& p, void* workspace, cuda::Stream stream) const;

 private:
  bool prepare(const Product& first, size_t max_workspace);
  bool make_layout(void*& layout, const Layout& as, int64_t rows, int64_t cols) const;
  bool enqueue(const Product& p, void* workspace, cuda::Stream stream) const;

  const Library& library_;
  Problem problem_;
  void* context_;
  void *product_ = nullptr, *x_ = nullptr, *y_ = nullptr, *c_ = nullptr, *d_ = nullptr;
  Algorithm algorithm_{};
  size_t workspace_ = 0;
  bool usable_ = false;
  mutable std::mutex bias_mutex_;  // the pointer to a bias is part of the descriptor
  mutable const void* bias_ = nullptr;
};

// The plans of one device. A place of a program mostly brings the same few problems at every call,
// and many places share them; sizes that are always new push out what was used least recently, but
// not before they are seen a second time.
class Plans {
 public:
  static constexpr size_t kSets = 128, kWays = 8;

  Plans(const Library& library, int device) : library_(library), device_(device) {}
  Plans(const Plans&) = delete;
  Plans& operator=(const Plans&) = delete;

  // Null where the library has no algorithm, or where it does not pay yet to look for one.
  std::shared_ptr<const Plan> find(const Product& p, size_t max_workspace);

 private:
  struct Entry {
    uint64_t hash = 0, used = 0;
    std::shared_ptr<const Plan> plan;
  };
  static constexpr size_t kMissed = 1024;

  const Library& library_;
  int device_;
  std::mutex mutex_;
  uint64_t clock_ = 0;
  Entry entries_[kSets][kWays];
  uint64_t missed_[kMissed] = {};  // hashes of problems that came once and had to go
};

}  // namespace plait::blaslt
