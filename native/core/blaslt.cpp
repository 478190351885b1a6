// native/core/blaslt.cpp: cuBLASLt's entry points, what its descriptors are made of, and plans.
#include "core/blaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

namespace plait::blaslt {
namespace {
// Attributes of the library's descriptors.
enum : int32_t {
  kTransposeX = 3,
  kTransposeY = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kBatchCount = 5,
  kBatchStep = 6,
  kMaxWorkspace = 1,
  kReductions = 3,
  kAlignmentX = 5,
  kAlignmentY = 6,
  kAlignmentC = 7,
  kAlignmentD = 8,
};
constexpr int32_t kTransposed = 1;
constexpr int32_t kAddBias = 4;
constexpr uintptr_t kMaxAlignment = 256;

template <class F>
void find(void* library, F& entry, const char* name) {
  entry = reinterpret_cast<F>(dlsym(library, name));
  if (!entry) throw std::runtime_error(std::string("cuBLASLt has no ") + name);
}

template <class T>
bool set(int (*setter)(void*, int32_t, const void*, size_t), void* object, int32_t attribute,
         const T& value) {
  return setter(object, attribute, &value, sizeof value) == 0;
}

uint32_t alignment(const void* pointer) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(pointer) | kMaxAlignment;
  return static_cast<uint32_t>(bits & -bits);
}

// m as a column-major matrix, stored as it is or as its transpose.
std::optional<Side> side_of(const Matrix& m, int64_t batch) {
  const int64_t batch_step = batch == 1 ? 0 : m.batch_step;
  const uint32_t aligned = alignment(m.data);
  if ((m.row_step == 1 || m.rows == 1) && (m.col_step >= m.rows || m.cols == 1))
    return Side{m.cols == 1 ? m.rows : m.col_step, batch_step, 0, aligned};
  if ((m.col_step == 1 || m.cols == 1) && (m.row_step >= m.cols || m.rows == 1))
    return Side{m.rows == 1 ? m.cols : m.row_step, batch_step, kTransposed, aligned};
  return std::nullopt;
}
std::optional<Side> untransposed(const Matrix& m, int64_t batch) {
  const std::optional<Side> side = side_of(m, batch);
  return side && side->transposed ? std::nullopt : side;
}
}  // namespace

Library::Library(void* handle) {
  find(handle, create, "cublasLtCreate");
  find(handle, create_product, "cublasLtMatmulDescCreate");
  find(handle, destroy_product, "cublasLtMatmulDescDestroy");
  find(handle, set_product, "cublasLtMatmulDescSetAttribute");
  find(handle, create_layout, "cublasLtMatrixLayoutCreate");
  find(handle, destroy_layout, "cublasLtMatrixLayoutDestroy");
  find(handle, set_layout, "cublasLtMatrixLayoutSetAttribute");
  find(handle, create_preference, "cublasLtMatmulPreferenceCreate");
  find(handle, destroy_preference, "cublasLtMatmulPreferenceDestroy");
  find(handle, set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(handle, heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(handle, run, "cublasLtMatmul");
}

const Library* Library::loaded() {
  static const Library* library = [] {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
      if (void* handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return new Library(handle);
    return static_cast<Library*>(nullptr);
  }();
  return library;
}

void* Library::context(int device) const {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  std::atomic<void*>& context = contexts_[device];
  if (void* made = context.load(std::memory_order_acquire)) return made;
  const std::lock_guard lock(mutex_);
  void* made = context.load(std::memory_order_relaxed);
  if (!made && create(&made) == 0) context.store(made, std::memory_order_release);
  return made;
}

// Row-major memory is the transpose of what the library sees: where out is row-major, its
// transpose, b' @ a', is computed.
std::optional<Product> arrange(Type type, Compute compute, Reductions reductions, const Matrix& a,
                               const Matrix& b, const Matrix* addend, const Matrix& out,
                               int64_t batch, float alpha, float beta) {
  if (out.rows <= 0 || out.cols <= 0 || a.cols <= 0 || batch <= 0) return std::nullopt;
  if (std::max({out.rows, out.cols, a.cols, batch}) > INT_MAX) return std::nullopt;
  if (a.rows != out.rows || b.cols != out.cols || a.cols != b.rows) return std::nullopt;
  std::optional<Side> d = untransposed(out.transposed(), batch);
  const bool row_major = d.has_value();
  if (!row_major) d = untransposed(out, batch);
  const Matrix x = row_major ? b.transposed() : a, y = row_major ? a.transposed() : b;
  const std::optional<Side> sx = side_of(x, batch), sy = side_of(y, batch);
  if (!d || !sx || !sy) return std::nullopt;
  Product p{{type, compute, reductions, false, x.rows, y.cols, x.cols, batch, *sx, *sy, *d, *d},
            x.data, y.data, out.data, const_cast<void*>(out.data), alpha, 0};
  if (!addend || beta == 0) return p;
  const Matrix c = row_major ? addend->transposed() : *addend;
  const bool one_column = (c.col_step == 0 || c.cols == 1) && (c.row_step == 1 || c.rows == 1) &&
                          (c.batch_step == 0 || batch == 1);
  const std::optional<Side> sc = untransposed(c, batch);
  p.c = c.data;
  if (one_column && beta == 1) {
    p.problem.bias = true;
    p.problem.c = Side{0, 0, 0, alignment(c.data)};
  } else if (sc) {
    p.problem.c = *sc;
    p.beta = beta;
  } else {
    return std::nullopt;
  }
  return p;
}

Plan::Plan(const Library& library, int device, const Product& first, size_t max_workspace)
    : library_(library), problem_(first.problem), context_(library.context(device)) {
  usable_ = context_ && prepare(first, max_workspace);
}

Plan::~Plan() {
  if (product_) library_.destroy_product(product_);
  for (void* layout : {x_, y_, c_, d_})
    if (layout) library_.destroy_layout(layout);
}

bool Plan::make_layout(void*& layout, const Side& side, int64_t rows, int64_t cols) const {
  if (side.transposed) std::swap(rows, cols);
  if (library_.create_layout(&layout, static_cast<int32_t>(problem_.type),
                             static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), side.ld))
    return false;
  if (problem_.batch == 1) return true;
  return set(library_.set_layout, layout, kBatchCount, static_cast<int32_t>(problem_.batch)) &&
         set(library_.set_layout, layout, kBatchStep, side.batch_step);
}

bool Plan::prepare(const Product& first, size_t max_workspace) {
  const Problem& p = problem_;
  const auto scale = static_cast<int32_t>(Type::f32);
  if (library_.create_product(&product_, static_cast<int32_t>(p.compute), scale)) return false;
  if (!set(library_.set_product, product_, kTransposeX, p.x.transposed) ||
      !set(library_.set_product, product_, kTransposeY, p.y.transposed))
    return false;
  if (p.bias && (!set(library_.set_product, product_, kEpilogue, kAddBias) ||
                 !set(library_.set_product, product_, kBiasPointer, bias_ = first.c)))
    return false;
  if (!make_layout(x_, p.x, p.rows, p.inner) || !make_layout(y_, p.y, p.inner, p.cols) ||
      !make_layout(c_, p.bias ? p.d : p.c, p.rows, p.cols) ||
      !make_layout(d_, p.d, p.rows, p.cols))
    return false;
  void* wish = nullptr;
  if (library_.create_preference(&wish)) return false;
  const auto ask = [&](int32_t attribute, auto value) {
    return set(library_.set_preference, wish, attribute, value);
  };
  Heuristic found{};
  int n = 0;
  const bool done = ask(kMaxWorkspace, static_cast<uint64_t>(max_workspace)) &&
                    ask(kReductions, static_cast<uint32_t>(p.reductions)) &&
                    ask(kAlignmentX, p.x.alignment) && ask(kAlignmentY, p.y.alignment) &&
                    ask(kAlignmentC, p.bias ? p.d.alignment : p.c.alignment) &&
                    ask(kAlignmentD, p.d.alignment) &&
                    library_.heuristic(context_, product_, x_, y_, c_, d_, wish, 1, &found, &n) ==
                        0;
  library_.destroy_preference(wish);
  algorithm_ = found.algorithm;
  workspace_ = found.workspace;
  return done && n == 1 && found.status == 0;
}

int Plan::enqueue(const Product& p, void* workspace, cuda::Stream stream) const {
  const void* c = problem_.bias ? p.d : p.c;
  return library_.run(context_, product_, &p.alpha, p.x, x_, p.y, y_, &p.beta, c, c_, p.d, d_,
                      &algorithm_, workspace, workspace_, stream);
}

bool Plan::run(const Product& p, void* workspace, cuda::Stream stream) const {
  if (!problem_.bias) return enqueue(p, workspace, stream) == 0;
  const std::lock_guard lock(bias_mutex_);
  if (p.c != bias_ && !set(library_.set_product, product_, kBiasPointer, bias_ = p.c)) return false;
  return enqueue(p, workspace, stream) == 0;
}

Plans::~Plans() {
  for (Node* n = head_; n;) delete std::exchange(n, n->next);
}

const Plans::Node* Plans::seek(const Problem& problem) const {
  const Node* n = head_.load(std::memory_order_acquire);
  while (n && !(n->plan.problem() == problem)) n = n->next;
  return n;
}

const Plan* Plans::find(const Library& library, int device, const Product& p,
                        size_t max_workspace) {
  const Node* found = seek(p.problem);
  if (!found) [[unlikely]] {
    const std::lock_guard lock(mutex_);
    found = seek(p.problem);  // another thread may have made it
    if (!found && size_ == kMost) return nullptr;
    if (!found) {
      auto* made = new Node{{library, device, p, max_workspace}, head_};
      head_.store(made, std::memory_order_release);
      ++size_;
      found = made;
    }
  }
  return found->plan.usable() ? &found->plan : nullptr;
}

}  // namespace plait::blaslt
