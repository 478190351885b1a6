// native/torch/gemm.cpp: mm and addmm of float and double on the CPU, by the BLAS that ATen itself
// would call, on bare pointers: no tensor, no dispatch (0.3 us instead of 1.4).
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "memory.h"

namespace plait {
namespace {

// The Fortran interface of the BLAS inside libtorch_cpu, the one that ATen's own matmul calls;
// null where it is not exported.
struct Blas {
  template <class T>
  using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*,
                        const T*, const int*, const T*, const int*, const T*, T*, const int*);
  Gemm<float> sgemm = nullptr;
  Gemm<double> dgemm = nullptr;

  Blas() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&torch_parallel_for), &info)) return;
    void* torch_cpu = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!torch_cpu) return;
    sgemm = reinterpret_cast<Gemm<float>>(dlsym(torch_cpu, "sgemm_"));
    dgemm = reinterpret_cast<Gemm<double>>(dlsym(torch_cpu, "dgemm_"));
  }
};
const Blas& blas() {
  static const Blas b;
  return b;
}

// A matrix as BLAS sees it (column-major): row-major memory is its transpose.
struct Matrix {
  char trans = 'N';
  int64_t ld = 0;
  bool usable = false;
};
Matrix row_major(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  if ((col_stride == 1 || cols == 1) && (row_stride >= cols || rows == 1))
    return {'N', rows == 1 ? cols : row_stride, true};
  if ((row_stride == 1 || rows == 1) && (col_stride >= rows || cols == 1))
    return {'T', cols == 1 ? rows : col_stride, true};
  return {};
}

template <class T>
void gemm(Blas::Gemm<T> fn, const Matrix& a, const Matrix& b, const Matrix& c, int64_t m, int64_t n,
          int64_t k, double alpha, const void* pa, const void* pb, double beta, void* pc) {
  // C = A B in row-major memory is C' = B' A' in column-major memory.
  const int rows = static_cast<int>(n), cols = static_cast<int>(m), inner = static_cast<int>(k);
  const int lda = static_cast<int>(b.ld), ldb = static_cast<int>(a.ld),
            ldc = static_cast<int>(c.ld);
  const T scale = static_cast<T>(alpha), keep = static_cast<T>(beta);
  fn(&b.trans, &a.trans, &rows, &cols, &inner, &scale, static_cast<const T*>(pb), &lda,
     static_cast<const T*>(pa), &ldb, &keep, static_cast<T*>(pc), &ldc);
}

// Writes the addend of addmm where the product is added to it.
struct Addend {
  const char* from;
  char* to;
  int64_t row_step, to_step, row_bytes;  // in bytes; row_step 0 repeats one row
};
constexpr int64_t kParallelAddendBytes = 1 << 18;
void copy_rows(int64_t begin, int64_t end, void* context) {
  const Addend& a = *static_cast<const Addend*>(context);
  for (int64_t r = begin; r < end; ++r)
    std::memcpy(a.to + r * a.to_step, a.from + r * a.row_step, static_cast<size_t>(a.row_bytes));
}

// What the product of two matrices needs to know, read from the sizes and strides of this call.
struct Gemm {
  Matrix a, b, c;
  int64_t m, n, k;
  double beta = 0;
  Addend addend{};
};

// False where the strides, sizes or precision settings of this call want the general path.
bool plan_gemm(const Frame& f, const ExternCall& c, const Operands& o, Gemm& g) {
  const bool add = c.road == ExternCall::Road::addmm;
  const size_t first = add ? 1 : 0;
  const auto extents = [&](size_t i) {
    // What the program made is as it says, of an input only the tensor knows.
    if (!o.is_given() && f.slot(c.tensors[i]).kind != SlotInfo::Kind::input)
      return Extents(f.slot(c.tensors[i]).meta, f.values);
    const at::Tensor& t = o.tensor(c.tensors[i]);
    return Extents(t.sizes(), t.strides());
  };
  const Extents a = extents(first), b = extents(first + 1);
  if (a.sizes.size() != 2 || b.sizes.size() != 2) return false;
  g.m = a.sizes[0], g.k = a.sizes[1], g.n = b.sizes[1];
  if (g.m <= 0 || g.n <= 0 || g.k <= 0 || g.m > INT_MAX || g.n > INT_MAX || g.k > INT_MAX ||
      b.sizes[0] != g.k)
    return false;
  g.a = row_major(g.m, g.k, a.strides[0], a.strides[1]);
  g.b = row_major(g.k, g.n, b.strides[0], b.strides[1]);
  g.c = {'N', g.n, true};
  if (!c.makes_result) {
    const Extents out = extents(first + 2);
    if (out.sizes.size() != 2 || out.sizes[0] != g.m || out.sizes[1] != g.n) return false;
    g.c = row_major(g.m, g.n, out.strides[0], out.strides[1]);
  }
  if (!g.a.usable || !g.b.usable || !g.c.usable || g.c.trans != 'N' ||
      std::max({g.a.ld, g.b.ld, g.c.ld}) > INT_MAX)
    return false;
  if (c.single ? !blas().sgemm || !f.code.full_precision : !blas().dgemm) return false;
  if (!add || c.beta == 0) return true;
  const Extents s = extents(0);
  const size_t rank = s.sizes.size();
  if (c.beta != 1 || rank == 0 || rank > 2) return false;
  const int64_t rows = rank == 2 ? s.sizes[0] : 1;
  if (s.sizes[rank - 1] != g.n || s.strides[rank - 1] != 1 || (rows != 1 && rows != g.m))
    return false;
  const int64_t item = c.single ? 4 : 8;
  g.addend = {nullptr, nullptr, rows == 1 ? 0 : s.strides[0] * item, g.c.ld * item, g.n * item};
  g.beta = 1;
  return true;
}

}  // namespace

bool call_gemm(Frame& f, const ExternCall& c, const Operands& o) {
  Gemm g;
  if (!plan_gemm(f, c, o, g)) return false;
  if (c.makes_result) define(f, c.tensors.back(), empty_matrix(g.m, g.n, c.single));
  const auto data = [&](size_t i) -> void* {
    if (!o.is_given()) return f.bufs[static_cast<size_t>(c.bufs) + i];
    const bool made = c.makes_result && i + 1 == c.tensors.size();
    const at::Tensor& t = made ? f.own(c.tensors[i]) : o.tensor(c.tensors[i]);
    return t.unsafeGetTensorImpl()->mutable_data();
  };
  const size_t first = c.road == ExternCall::Road::addmm ? 1 : 0;
  if (g.beta != 0) {
    g.addend.from = static_cast<const char*>(data(0));
    g.addend.to = static_cast<char*>(data(3));
    const int64_t rows = std::max<int64_t>(1, (kParallelAddendBytes >> 2) / g.addend.row_bytes);
    if (g.m * g.addend.row_bytes < kParallelAddendBytes ||
        torch_parallel_for(0, g.m, rows, copy_rows, &g.addend) != 0)
      copy_rows(0, g.m, &g.addend);
  }
  void *a = data(first), *b = data(first + 1), *out = data(first + 2);
  if (c.single)
    gemm(blas().sgemm, g.a, g.b, g.c, g.m, g.n, g.k, c.alpha, a, b, g.beta, out);
  else
    gemm(blas().dgemm, g.a, g.b, g.c, g.m, g.n, g.k, c.alpha, a, b, g.beta, out);
  return true;
}

}  // namespace plait
