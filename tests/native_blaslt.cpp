// tests/native_blaslt.cpp: matrix products through the cuBLASLt that it is given, against loops.
//
// Integers of a few bits: every type and every order of sums gives them exactly.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/blaslt.h"

using namespace plait::blaslt;

namespace {
int failed = 0, checked = 0, declined = 0;

#define CHECK(x)                                           \
  do {                                                     \
    ++checked;                                             \
    if (!(x)) {                                            \
      ++failed;                                            \
      std::printf("line %d: %s is false\n", __LINE__, #x); \
    }                                                      \
  } while (0)

size_t width(Type type) { return type == Type::f32 ? 4 : 2; }
float read(Type type, const void* data, int64_t at) {
  if (type == Type::f32) return static_cast<const float*>(data)[at];
  if (type == Type::f16) return static_cast<float>(static_cast<const _Float16*>(data)[at]);
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[at]} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
void write(Type type, void* data, int64_t at, float value) {
  if (type == Type::f32) {
    static_cast<float*>(data)[at] = value;
  } else if (type == Type::f16) {
    static_cast<_Float16*>(data)[at] = static_cast<_Float16>(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(bits >> 16);
  }
}

// Memory at an address that is aligned to `align` and to no more.
struct Memory {
  std::vector<char> bytes;
  char* start;
  Memory(size_t n, size_t align) : bytes(n + 1024) {
    const auto at = (reinterpret_cast<uintptr_t>(bytes.data()) + 511) / 512 * 512;
    start = reinterpret_cast<char*>(at) + (align < 256 ? align : 0);
  }
};

struct Tensor {
  Type type;
  Matrix m;
  int64_t batch;
  Memory memory;
  // kind: row-major, column-major, each with gaps, one row repeated, one column repeated, every
  // second element of each row.
  enum Kind { rows, cols, wide_rows, wide_cols, one_row, one_col, apart, n_kinds };
  Tensor(Type type, Kind kind, int64_t n_rows, int64_t n_cols, int64_t batch, size_t align,
         bool one_batch)
      : type(type),
        m(strides(kind, n_rows, n_cols, one_batch)),
        batch(batch),
        memory(width(type) * static_cast<size_t>(batch * (n_rows + 3) * (n_cols + 3) * 2), align) {
    m.data = memory.start;
  }
  static Matrix strides(Kind kind, int64_t r, int64_t c, bool one_batch) {
    const int64_t step = one_batch ? 0 : (r + 3) * (c + 3) * 2;
    switch (kind) {
      case rows: return {nullptr, r, c, c, 1, step};
      case cols: return {nullptr, r, c, 1, r, step};
      case wide_rows: return {nullptr, r, c, c + 3, 1, step};
      case wide_cols: return {nullptr, r, c, 1, r + 3, step};
      case one_row: return {nullptr, r, c, 0, 1, step};
      case one_col: return {nullptr, r, c, 1, 0, step};
      default: return {nullptr, r, c, 2 * c, 2, step};
    }
  }
  int64_t at(int64_t b, int64_t i, int64_t j) const {
    return b * m.batch_step + i * m.row_step + j * m.col_step;
  }
  float get(int64_t b, int64_t i, int64_t j) const { return read(type, m.data, at(b, i, j)); }
  void set(int64_t b, int64_t i, int64_t j, float v) { write(type, memory.start, at(b, i, j), v); }
  template <class F>
  void each(F f) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < m.rows; ++i)
        for (int64_t j = 0; j < m.cols; ++j) f(b, i, j);
  }
};

struct Random {
  std::mt19937 engine{7};
  int operator()(int n) { return static_cast<int>(engine() % static_cast<unsigned>(n)); }
};

void fill(Tensor& t, Random& random) {
  t.each([&](auto b, auto i, auto j) { t.set(b, i, j, static_cast<float>(random(5) - 2)); });
}

// One product of random layouts. The answer says whether a plan computed it.
bool product(Random& random, Plans& plans) {
  constexpr int64_t sizes[] = {1, 2, 3, 8, 13, 70};
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16};
  constexpr size_t aligns[] = {4, 16, 64, 256};
  const auto pick = [&](const auto& from) {
    return from[random(static_cast<int>(std::size(from)))];
  };
  const Type type = pick(types);
  const int64_t m = pick(sizes), k = pick(sizes), n = pick(sizes), batch = random(2) ? 1 : 3;
  const auto kind = [&](int n_kinds) { return static_cast<Tensor::Kind>(random(n_kinds)); };
  Tensor a(type, kind(Tensor::n_kinds), m, k, batch, pick(aligns), random(4) == 0);
  Tensor b(type, kind(Tensor::n_kinds), k, n, batch, pick(aligns), random(4) == 0);
  Tensor c(type, kind(Tensor::n_kinds), m, n, batch, pick(aligns), random(2) == 0);
  Tensor out(type, kind(4), m, n, batch, pick(aligns), false);
  for (Tensor* t : {&a, &b, &c, &out}) fill(*t, random);
  const bool add = random(3) != 0;
  const float alpha = random(2) ? 1 : 2, beta = static_cast<float>(random(3));
  constexpr Activation activations[] = {Activation::none, Activation::relu, Activation::gelu};
  const Activation activation = random(4) ? Activation::none : pick(activations);
  const auto p =
      make_product(type, Compute::f32, random(2) ? Reductions::any : Reductions::none, a.m, b.m,
                   add ? &c.m : nullptr, out.m, batch, alpha, beta, activation);
  if (!p) return false;
  CHECK(p->problem.bias || activation == Activation::none);
  const auto plan = plans.find(*p, 1 << 20);
  CHECK((p->problem.rows == 13) == (plan == nullptr));
  if (!plan) return false;
  std::vector<float> want;
  out.each([&](auto s, auto i, auto j) {
    float sum = 0;
    for (int64_t l = 0; l < k; ++l) sum += a.get(s, i, l) * b.get(s, l, j);
    sum = alpha * sum + (add ? beta * c.get(s, i, j) : 0);
    if (activation == Activation::relu) sum = std::max(sum, 0.f);
    want.push_back(activation == Activation::gelu ? sum / 2 : sum);
  });
  std::vector<char> workspace(plan->workspace());
  CHECK(plan->run(*p, workspace.empty() ? nullptr : workspace.data(), nullptr));
  bool same = true;
  size_t at = 0;
  out.each([&](auto s, auto i, auto j) {
    // Sums above 256 are rounded to bfloat16.
    const float got = out.get(s, i, j), exact = want[at++];
    same = same && std::abs(got - exact) <= (type == Type::bf16 ? std::abs(exact) / 256 : 0);
  });
  CHECK(same);
  return true;
}

Tensor plain(Tensor::Kind kind, int64_t rows, int64_t cols) {
  return {Type::f32, kind, rows, cols, 1, 256, false};
}

// One problem, many threads, a bias each: no thread sees another's.
void threads(const Library& library, int (*queries)()) {
  Plans plans(library, 0);
  const int before = queries();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> running;
  for (int t = 0; t < 4; ++t)
    running.emplace_back([&, t] {
      Random random;
      const Tensor a = plain(Tensor::rows, 4, 8), b = plain(Tensor::cols, 8, 4),
                   out = plain(Tensor::rows, 4, 4);
      Tensor c = plain(Tensor::one_row, 4, 4);
      c.each([&](auto s, auto i, auto j) { c.set(s, i, j, static_cast<float>(t)); });
      for (int n = 0; n < 500; ++n) {
        const auto p =
            make_product(Type::f32, Compute::f32, Reductions::any, a.m, b.m, &c.m, out.m, 1, 1, 1);
        const auto plan = p ? plans.find(*p, 0) : nullptr;
        if (!plan || !p->problem.bias || !plan->run(*p, nullptr, nullptr) ||
            out.get(0, 3, 2) != static_cast<float>(t))
          ++wrong;
      }
    });
  for (std::thread& t : running) t.join();
  CHECK(wrong == 0);
  CHECK(queries() == before + 1);
}

// The product of Tensor::plain's kind that is n rows long.
std::optional<Product> long_product(int64_t n) {
  const auto plain = [](int64_t r, int64_t c) {
    return Tensor::strides(Tensor::rows, r, c, false);
  };
  return make_product(Type::f32, Compute::f32, Reductions::any, plain(n, 2), plain(2, 2), nullptr,
                      plain(n, 2), 1, 1, 0);
}

// Sizes that are always new: what is kept is bounded, what is used stays, and what comes again
// comes in.
void many_sizes(const Library& library, int (*queries)(), int (*live)()) {
  const int before = live();
  {
    Plans plans(library, 0);
    constexpr int64_t kept = Plans::kSets * Plans::kWays, many = 20 * kept;
    const auto often = plans.find(*long_product(many + 1), 0);
    const auto once = plans.find(*long_product(1), 0);
    CHECK(often && once);
    int planned = 2;
    const int asked = queries();
    for (int64_t n = 2; n <= many; ++n) {
      planned += plans.find(*long_product(n), 0) != nullptr;
      CHECK(plans.find(*long_product(many + 1), 0) == often);
    }
    CHECK(planned == kept && queries() == asked + kept - 2);
    for (int64_t n = many - 99; n <= many; ++n) {
      plans.find(*long_product(n), 0);
      const auto again = plans.find(*long_product(n), 0);
      CHECK(again && plans.find(*long_product(n), 0) == again);
    }
    CHECK(queries() == asked + kept + 98);
    const int held = live();
    for (int64_t n = 1; n <= many; ++n)
      plans.find(*long_product(n), 0), plans.find(*long_product(n), 0);
    CHECK(live() == held + 10 && plans.find(*long_product(1), 0) != once);  // and `often`
    const Tensor x = plain(Tensor::rows, 1, 2), y = plain(Tensor::rows, 2, 2),
                 z = plain(Tensor::rows, 1, 2);
    const auto p =
        make_product(Type::f32, Compute::f32, Reductions::any, x.m, y.m, nullptr, z.m, 1, 1, 0);
    CHECK(p->problem == once->problem());
    CHECK(once->run(*p, nullptr, nullptr));  // it outlives its place
  }
  CHECK(live() == before);
}

template <class F>
bool throws(F f) {
  try {
    f();
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}
}  // namespace

// Arguments: a library of another version and, unless it is alone, the one that torch's library
// depends on, and torch's library.
int main(int argc, char** argv) {
  CHECK(dlopen(argv[1], RTLD_NOW));
  if (argc == 2) {
    CHECK(!Library::used_by("libtorch_cuda.so"));
    return failed != 0;
  }
  void* handle = dlopen(argv[2], RTLD_NOW);
  CHECK(dlopen(argv[3], RTLD_NOW));
  const auto used = Library::used_by("libtorch_cuda.so");
  CHECK(used && reinterpret_cast<void*>(used->run) == dlsym(handle, "cublasLtMatmul"));
  const auto count = [&](const char* name) {
    return reinterpret_cast<int (*)()>(dlsym(handle, name));
  };
  const auto live = count("fake_live"), queries = count("fake_queries");
  const Library library(handle);
  {
    Random random;
    int taken = 0;
    for (int t = 0; t < 400; ++t) {
      Plans plans(library, 0);
      for (int n = 0; n < 20; ++n) product(random, plans) ? ++taken : ++declined;
    }
    std::printf("%s\n", taken > 2000 && declined > 1000 ? "both" : "one path is hardly taken");
  }
  threads(library, queries);

  const Tensor a = plain(Tensor::rows, 4, 70), b = plain(Tensor::rows, 70, 8),
               out = plain(Tensor::rows, 4, 8), row = plain(Tensor::one_row, 4, 8),
               col = plain(Tensor::one_col, 4, 8);
  const auto product_of = [&](const Matrix* c, float beta, const Matrix& to) {
    return make_product(Type::f32, Compute::tf32, Reductions::any, a.m, b.m, c, to, 1, 1, beta);
  };
  many_sizes(library, queries, live);
  CHECK(library.plans(0) && library.plans(0) == library.plans(0));
  CHECK(library.plans(0) != library.plans(1) && !library.plans(64) && !library.plans(-1));
  std::optional<Plans> kept(std::in_place, library, 0);
  Plans& plans = *kept;
  const auto p = product_of(nullptr, 0, out.m);
  const int before = queries();
  auto plan = plans.find(*p, 1 << 20);
  CHECK(plans.find(*p, 1 << 20) == plan && queries() == before + 1);
  char workspace[4096];
  CHECK(plan->workspace() == sizeof workspace);
  CHECK(plan->run(*p, workspace, nullptr) && !plan->run(*p, nullptr, nullptr));
  const auto stream = [](size_t n) { return reinterpret_cast<plait::cuda::Stream>(n); };
  CHECK(!plan->run(*p, workspace, stream(13)));
  CHECK(
      throws([&] { plan->run(*p, workspace, stream(14)); }));  // it may have been computed in part
  CHECK(product_of(&row.m, 1, out.m)->problem.bias);
  CHECK(!product_of(&row.m, 2, out.m));  // a repeated row that is scaled
  CHECK(!product_of(&col.m, 1, out.m));  // a repeated column of a row-major result
  CHECK(product_of(&col.m, 0, out.m)->beta == 0);
  CHECK(product_of(&col.m, 1, Tensor::strides(Tensor::cols, 4, 8, false))->problem.bias);
  CHECK(!product_of(nullptr, 0, Tensor::strides(Tensor::apart, 4, 8, false)));
  CHECK(!product_of(nullptr, 0, Tensor::strides(Tensor::rows, 4, 7, false)));
  for (const auto& [rows, inner, cols] : {std::array{0, 70, 8}, {4, 0, 8}, {4, 70, 0}}) {
    const auto none = [](int r, int c) { return Tensor::strides(Tensor::rows, r, c, false); };
    CHECK(!make_product(Type::f32, Compute::f32, Reductions::any, none(rows, inner),
                        none(inner, cols), nullptr, none(rows, cols), 1, 1, 0));
  }
  CHECK(library.context(0) == library.context(0) && library.context(0) != library.context(1));
  CHECK(!library.context(64) && !library.context(-1));
  kept.reset();
  plan.reset();
  CHECK(live() == 0);
  std::printf("%d of %d checks failed\n", failed, checked);
  return failed != 0;
}
