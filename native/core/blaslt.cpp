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
  kBiasBatchStep = 10,
  kBatchCount = 5,
  kBatchStep = 6,
  kMaxWorkspace = 1,
  kReductions = 3,
  kAlignmentX = 5,
  kAlignmentY = 6,
  kAlignmentC = 7,
  kAlignmentD = 8,
};
// What it answers where it does not take a product.
enum : int { kInvalidValue = 7, kArchMismatch = 8, kNotSupported = 15 };
constexpr int32_t kTransposed = 1;
constexpr int32_t kAddBias = 4;
constexpr uintptr_t kMaxAlignment = 256;
constexpr int64_t kVector = 16;

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
std::optional<Layout> layout_of(const Matrix& m, int64_t batch) {
  const int64_t batch_step = batch == 1 ? 0 : m.batch_step;
  const uint32_t aligned = alignment(m.data);
  if ((m.row_step == 1 || m.rows == 1) && (m.col_step >= m.rows || m.cols == 1))
    return Layout{m.cols == 1 ? m.rows : m.col_step, batch_step, 0, aligned};
  if ((m.col_step == 1 || m.cols == 1) && (m.row_step >= m.cols || m.rows == 1))
    return Layout{m.rows == 1 ? m.cols : m.row_step, batch_step, kTransposed, aligned};
  return std::nullopt;
}
std::optional<Layout> untransposed(const Matrix& m, int64_t batch) {
  const std::optional<Layout> as = layout_of(m, batch);
  return as && as->transposed ? std::nullopt : as;
}

uint64_t hash_of(const Problem& p) {
  uint64_t hash = 0;
  const auto mix = [&](auto value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  };
  mix(static_cast<uint64_t>(p.activation) << 40 | static_cast<uint64_t>(p.type) << 32 |
      static_cast<uint64_t>(p.compute) << 8 | static_cast<uint64_t>(p.reductions) << 1 |
      static_cast<uint64_t>(p.bias));
  for (int64_t size : {p.rows, p.cols, p.inner, p.batch}) mix(size);
  for (const Layout* l : {&p.x, &p.y, &p.c, &p.d}) {
    mix(l->ld);
    mix(l->batch_step);
    mix(l->alignment << 1 | static_cast<uint32_t>(l->transposed));
  }
  return hash;
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

std::unique_ptr<Library> Library::used_by(const char* shared_library) {
  // Names are looked up in what it depends on: another version may be there too.
  void* user = dlopen(shared_library, RTLD_NOW | RTLD_NOLOAD);
  return user && dlsym(user, "cublasLtMatmul") ? std::make_unique<Library>(user) : nullptr;
}

Library::~Library() {
  for (std::atomic<Plans*>& plans : plans_) delete plans.load();
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

Plans* Library::plans(int device) const {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  std::atomic<Plans*>& plans = plans_[device];
  if (Plans* made = plans.load(std::memory_order_acquire)) return made;
  const std::lock_guard lock(mutex_);
  Plans* made = plans.load(std::memory_order_relaxed);
  if (!made) plans.store(made = new Plans(*this, device), std::memory_order_release);
  return made;
}

// Row-major memory is the transpose of what the library sees: where out is row-major, its
// transpose, b' @ a', is computed.
std::optional<Product> make_product(Type type, Compute compute, Reductions reductions,
                                    const Matrix& a, const Matrix& b, const Matrix* addend,
                                    const Matrix& out, int64_t batch, float alpha, float beta,
                                    Activation activation) {
  if (out.rows <= 0 || out.cols <= 0 || a.cols <= 0 || batch <= 0) return std::nullopt;
  if (std::max({out.rows, out.cols, a.cols, batch}) > INT_MAX) return std::nullopt;
  if (a.rows != out.rows || b.cols != out.cols || a.cols != b.rows) return std::nullopt;
  std::optional<Layout> d = untransposed(out.transposed(), batch);
  const bool row_major = d.has_value();
  if (!row_major) d = untransposed(out, batch);
  const Matrix x = row_major ? b.transposed() : a, y = row_major ? a.transposed() : b;
  const std::optional<Layout> lx = layout_of(x, batch), ly = layout_of(y, batch);
  if (!d || !lx || !ly) return std::nullopt;
  Product p{{type, compute, reductions, false, activation, x.rows, y.cols, x.cols, batch, *lx, *ly,
             *d, *d},
            x.data,
            y.data,
            out.data,
            const_cast<void*>(out.data),
            alpha,
            0};
  const bool plain = activation == Activation::none;
  if (!addend || beta == 0) return plain ? std::optional(p) : std::nullopt;
  const Matrix c = row_major ? addend->transposed() : *addend;
  // Kernels read such a column 16 bytes at a time, wherever that of another batch begins.
  const int64_t unit = kVector / (type == Type::f32 ? 4 : 2);
  const bool one_column = (c.col_step == 0 || c.cols == 1) && (c.row_step == 1 || c.rows == 1) &&
                          (c.batch_step == 0 || batch == 1 ||
                           (c.batch_step % unit == 0 && alignment(c.data) >= kVector));
  const std::optional<Layout> lc = untransposed(c, batch);
  p.c = c.data;
  if (one_column && beta == 1) {
    p.problem.bias = true;
    p.problem.c = Layout{0, batch == 1 ? 0 : c.batch_step, 0, alignment(c.data)};
  } else if (lc && plain) {
    p.problem.c = *lc;
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

bool Plan::make_layout(void*& layout, const Layout& as, int64_t rows, int64_t cols) const {
  if (as.transposed) std::swap(rows, cols);
  if (library_.create_layout(&layout, static_cast<int32_t>(problem_.type),
                             static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), as.ld))
    return false;
  if (problem_.batch == 1) return true;
  return set(library_.set_layout, layout, kBatchCount, static_cast<int32_t>(problem_.batch)) &&
         set(library_.set_layout, layout, kBatchStep, as.batch_step);
}

bool Plan::prepare(const Product& first, size_t max_workspace) {
  const Problem& p = problem_;
  const auto scale = static_cast<int32_t>(Type::f32);
  if (library_.create_product(&product_, static_cast<int32_t>(p.compute), scale)) return false;
  if (!set(library_.set_product, product_, kTransposeX, p.x.transposed) ||
      !set(library_.set_product, product_, kTransposeY, p.y.transposed))
    return false;
  const int32_t epilogue = kAddBias | static_cast<int32_t>(p.activation);
  if (p.bias && (!set(library_.set_product, product_, kEpilogue, epilogue) ||
                 !set(library_.set_product, product_, kBiasPointer, bias_ = first.c)))
    return false;
  if (p.bias && p.c.batch_step &&
      !set(library_.set_product, product_, kBiasBatchStep, p.c.batch_step))
    return false;
  if (!make_layout(x_, p.x, p.rows, p.inner) || !make_layout(y_, p.y, p.inner, p.cols) ||
      !make_layout(c_, p.bias ? p.d : p.c, p.rows, p.cols) || !make_layout(d_, p.d, p.rows, p.cols))
    return false;
  void* wish = nullptr;
  if (library_.create_preference(&wish)) return false;
  const auto ask = [&](int32_t attribute, auto value) {
    return set(library_.set_preference, wish, attribute, value);
  };
  Heuristic found{};
  int n = 0;
  const bool done =
      ask(kMaxWorkspace, static_cast<uint64_t>(max_workspace)) &&
      ask(kReductions, static_cast<uint32_t>(p.reductions)) && ask(kAlignmentX, p.x.alignment) &&
      ask(kAlignmentY, p.y.alignment) && ask(kAlignmentC, p.bias ? p.d.alignment : p.c.alignment) &&
      ask(kAlignmentD, p.d.alignment) &&
      library_.heuristic(context_, product_, x_, y_, c_, d_, wish, 1, &found, &n) == 0;
  library_.destroy_preference(wish);
  algorithm_ = found.algorithm;
  workspace_ = found.workspace;
  return done && n == 1 && found.status == 0;
}

bool Plan::enqueue(const Product& p, void* workspace, cuda::Stream stream) const {
  const void* c = problem_.bias ? p.d : p.c;
  const int status = library_.run(context_, product_, &p.alpha, p.x, x_, p.y, y_, &p.beta, c, c_,
                                  p.d, d_, &algorithm_, workspace, workspace_, stream);
  if (status == kInvalidValue || status == kArchMismatch || status == kNotSupported) return false;
  if (status) throw std::runtime_error("cuBLASLt failed with status " + std::to_string(status));
  return true;
}

bool Plan::run(const Product& p, void* workspace, cuda::Stream stream) const {
  if (!problem_.bias) return enqueue(p, workspace, stream);
  const std::lock_guard lock(bias_mutex_);
  if (p.c != bias_ && !set(library_.set_product, product_, kBiasPointer, bias_ = p.c)) return false;
  return enqueue(p, workspace, stream);
}

std::shared_ptr<const Plan> Plans::find(const Product& p, size_t max_workspace) {
  const uint64_t hash = hash_of(p.problem);
  const std::lock_guard lock(mutex_);
  Entry(&set)[kWays] = entries_[hash % kSets];
  Entry* oldest = set;
  for (Entry& e : set) {
    if (e.plan && e.hash == hash && e.plan->problem() == p.problem) {
      e.used = ++clock_;
      return e.plan->usable() ? e.plan : nullptr;
    }
    if (e.used < oldest->used) oldest = &e;
  }
  if (oldest->plan && std::exchange(missed_[hash / kSets % kMissed], hash) != hash) return nullptr;
  *oldest = {hash, ++clock_, std::make_shared<const Plan>(library_, device_, p, max_workspace)};
  return oldest->plan->usable() ? oldest->plan : nullptr;
}

}  // namespace plait::blaslt
