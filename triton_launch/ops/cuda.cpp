// triton_launch/ops/cuda.cpp: the operators on CUDA: checks and results by ATen's utilities,
// launches of Triton kernels.
//
// Stream and device are torch's current ones, found without CUDA headers (torch/accelerator.h).
// Results are what shape:: gives. Tiles are a function of sizes alone, rounded to powers of two, so
// that few kernels are compiled.
#include <ATen/TensorIterator.h>
#include <ATen/native/BinaryOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DynamicCast.h>
#include <dlfcn.h>
#include <plait/ops.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "launching.h"

namespace plait::ops {
namespace {
// ---- where kernels come from
std::atomic<const Kernels*> chosen{};

// The file that lies beside the Python package plait, which has this library. A prefix has none,
// and what lies beside a prefix is not plait's.
std::string kernel_file() {
  Dl_info info;
  TORCH_CHECK(dladdr(reinterpret_cast<const void*>(&kernel_file), &info) && info.dli_fname,
              "plait::ops does not know where its library lies");
  const std::string library = info.dli_fname;
  const std::string folder = library.substr(0, library.rfind('/') + 1);
  TORCH_CHECK(access((folder + "../__init__.py").c_str(), F_OK) == 0,
              "plait::ops has no kernels beside ", library, ": call plait::ops::use_pack");
  return folder + "../../triton_launch/ops/kernels.py";
}

}  // namespace

// Sets are never freed: another thread may launch from one.
const Kernels& kernels() {
  if (const Kernels* set = chosen.load(std::memory_order_acquire)) [[likely]]
    return *set;
  const Kernels* none = nullptr;
  const auto* made = new Kernels{[](const char* name) { return triton::jit(kernel_file(), name); }};
  if (!chosen.compare_exchange_strong(none, made, std::memory_order_acq_rel)) delete made;
  return *chosen.load(std::memory_order_acquire);
}

namespace {
// How lines of n elements are cut: `rows` of them by `block` elements are a program's. A line of
// more than `longest` is walked in a loop.
struct Tile {
  int64_t rows, block;
  bool looped;
  int16_t num_warps;
};
Tile tile_of(int64_t n, int64_t n_lines, int64_t longest) {
  constexpr int64_t small = 2048, looped_block = 8192;
  const bool looped = n > longest;
  const int64_t block = looped ? std::min(longest, looped_block) : pow2(n);
  const int64_t rows = std::clamp<int64_t>(small / block, 1, pow2(n_lines));
  return {rows, block, looped,
          static_cast<int16_t>(std::clamp<int64_t>(rows * block / 512, 1, 16))};
}

// A tensor as lines of its last dimensions, which are contiguous: a copy only where they, or the
// steps from line to line, are not regular.
struct Lines {
  Tensor t;
  int64_t n_lines, n, step;
};
Lines lines_of(const Tensor& t, int64_t n_dims) {
  const int64_t split = t.dim() - n_dims;
  int64_t n = 1, n_lines = 1, step = 0;
  bool regular = true;
  for (int64_t d = t.dim() - 1; d >= split; --d) {
    regular = regular && (t.size(d) == 1 || t.stride(d) == n);
    n *= t.size(d);
  }
  for (int64_t d = split - 1; d >= 0; --d) {
    if (t.size(d) != 1) {
      if (n_lines == 1) step = t.stride(d);
      regular = regular && t.stride(d) == step * n_lines;
    }
    n_lines *= t.size(d);
  }
  if (!regular) return {t.contiguous(), n_lines, n, n};
  return {t, n_lines, n, n_lines == 1 ? n : step};
}

Maybe contiguous(const Maybe& t) { return is_given(t) ? Maybe(t->contiguous()) : Maybe(); }
}  // namespace

void use_pack(const std::string& path) {
  const auto pack = triton::open_pack(path);
  chosen.store(new Kernels{[pack](const char* name) { return triton::from_pack(pack, name); }},
               std::memory_order_release);
}

void use_tiles(const std::string& how) {
  static constexpr triton::Tuning ways[] = {
      {triton::Miss::tune}, {triton::Miss::first}, {triton::Miss::error}};
  const size_t k = how == "tune" ? 0 : how == "first" ? 1 : 2;
  TORCH_CHECK(k != 2 || how == "error", "plait::ops::use_tiles wants tune, first or error, not ",
              how);
  triton::set_tuning(&ways[k]);
}

void use_python(const std::string& python) {
  const auto provider = triton::worker(python);
  chosen.store(new Kernels{[provider](const char* name) {
                 return triton::jit(kernel_file(), name, provider);
               }},
               std::memory_order_release);
}

namespace cuda {
namespace {
// What the kernel adds in; none for types that Triton has no arithmetic of.
std::optional<DType> computed_in(at::ScalarType t) {
  switch (t) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat: return DType::fp32;
    case at::kDouble: return DType::fp64;
    case at::kLong: return DType::i64;
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt: return DType::i32;
    default: return std::nullopt;
  }
}

// A number both as it is and cut to an integer: the kernel takes what fits its type.
struct Number {
  double real = 0;
  int64_t whole = 0;
};
Number number(const at::Scalar& s) {
  return s.isFloatingPoint() ? Number{s.toDouble(), 0}
                             : Number{static_cast<double>(s.toLong()), s.toLong()};
}

// Dimensions around the innermost one that a launch of the add kernel walks.
constexpr int64_t kOuter = 4;

// Operands of a TensorIterator: out, x, y. Strides are in elements.
struct Addition {
  Addition(at::TensorIterator& iter, DType compute, const at::Scalar& alpha)
      : iter(iter), compute(compute), alpha(number(alpha)) {
    int64_t reach = iter.numel();
    for (int k = 0; k < 3; ++k) {
      const auto itemsize = static_cast<int64_t>(iter.element_size(k));
      int64_t last = 0;
      for (int d = 0; d < iter.ndim(); ++d) {
        strides[k].push_back(iter.strides(k)[d] / itemsize);
        last += (iter.shape()[d] - 1) * strides[k].back();
      }
      reach = std::max(reach, last + 1);
      data[k] = static_cast<char*>(iter.data_ptr(k));
      strides[k].resize(std::max<size_t>(strides[k].size(), 1 + kOuter), 0);
      if (k > 0 && iter.is_cpu_scalar(k)) {
        scalar = {c10::fetch_and_cast<double>(iter.dtype(k), data[k]),
                  c10::fetch_and_cast<int64_t>(iter.dtype(k), data[k])};
        data[k] = nullptr;
      }
    }
    sizes.assign(iter.shape().begin(), iter.shape().end());
    sizes.resize(strides[0].size(), 1);
    is_wide = reach > std::numeric_limits<int32_t>::max();
  }

  // From the outermost dimension inwards, one that a launch does not walk becomes a loop here.
  void run(const Here& here, size_t n_dims) {
    if (n_dims <= 1 + kOuter)
      return launch(here, std::max<int64_t>(static_cast<int64_t>(n_dims) - 1, 0));
    const size_t d = n_dims - 1;
    const auto before = data;
    for (int64_t i = 0; i < sizes[d]; ++i) {
      for (int k = 0; k < 3; ++k)
        if (before[k])
          data[k] = before[k] + i * strides[k][d] * static_cast<int64_t>(iter.element_size(k));
      run(here, d);
    }
    data = before;
  }

  void launch(const Here& here, int64_t n_outer) const {
    constexpr int64_t elements = 1024;
    const auto& [o, x, y] = strides;
    const int64_t outer = sizes[1] * sizes[2] * sizes[3] * sizes[4];
    const int64_t cols = std::min(pow2(sizes[0]), elements),
                  rows = std::min(pow2(outer), elements / cols);
    const auto operand = [&](int k) {
      return data[k]
                 ? std::optional(triton::Pointer{data[k], triton::dtype_of_torch(iter.dtype(k))})
                 : std::nullopt;
    };
    kernels().add[here.on(up(sizes[0], cols) * up(outer, rows), 4)](
        operand(1), operand(2), *operand(0), scalar.real, scalar.whole, alpha.real, alpha.whole,
        sizes[0], outer, x[0], y[0], o[0], sizes[1], sizes[2], sizes[3], x[1], x[2], x[3], x[4],
        y[1], y[2], y[3], y[4], o[1], o[2], o[3], o[4], n_outer,
        triton::dtype_of_torch(iter.common_dtype()), compute, is_wide, rows, cols);
  }

  at::TensorIterator& iter;
  const DType compute;
  const Number alpha;
  Number scalar;
  std::array<char*, 3> data;
  c10::SmallVector<int64_t, 8> sizes;
  std::array<c10::SmallVector<int64_t, 8>, 3> strides;
  bool is_wide = false;
};
}  // namespace

Tensor add(const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor out;
  auto iter = at::TensorIterator::binary_op(out, self, other);
  at::native::alpha_check(iter.common_dtype(), alpha);
  const auto compute = computed_in(iter.common_dtype());
  if (!compute) return at::add(self, other, alpha);  // complex numbers
  if (iter.numel() > 0) {
    const Here here(iter.tensor(0));
    Addition(iter, *compute, alpha).run(here, static_cast<size_t>(iter.ndim()));
  }
  return iter.output();
}

namespace {
// A tensor around one of its dimensions.
struct Around {
  int64_t outer = 1, n = 1, inner = 1, n_dims;
  Around(const Tensor& t, int64_t dim) {
    dim = c10::maybe_wrap_dim(dim, t.dim());
    n_dims = t.dim() - dim;
    for (int64_t d = 0; d < t.dim(); ++d) (d < dim ? outer : d == dim ? n : inner) *= t.size(d);
  }
  bool flat() const { return inner == 1; }
  // Lines that lie beside each other are read together.
  Tile tile() const {
    if (flat()) return tile_of(n, outer, 32768);
    constexpr int64_t beside = 32, elements = 8192;
    const int64_t rows = std::min(pow2(inner), beside), block = std::min(pow2(n), elements / rows);
    return {rows, block, n > block,
            static_cast<int16_t>(std::clamp<int64_t>(rows * block / 512, 1, 8))};
  }
  int64_t grid(const Tile& t) const {
    return flat() ? up(outer, t.rows) : outer * up(inner, t.rows);
  }
};
}  // namespace

Tensor softmax(const Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  Tensor y = shape::softmax(self, dim, dtype);
  if (y.numel() == 0) return y;
  // As eager: rounded to what it is computed in, unless that is wider.
  const bool widens =
      y.scalar_type() == at::kFloat && self.element_size() == 2 && self.is_floating_point();
  const Tensor given = widens ? self : self.to(y.scalar_type());
  const Around a(y, dim);
  const Lines x = a.flat() ? lines_of(given, std::min(a.n_dims, given.dim()))
                           : Lines{given.contiguous(), a.outer, a.n * a.inner, a.n * a.inner};
  const Tile t = a.tile();
  const Here here(y);
  kernels().softmax[here.on(a.grid(t), t.num_warps)](
      x.t, y, a.outer, a.inner, a.n, x.step, sums_of(y), a.flat(), t.rows, t.block, t.looped);
  return y;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                        at::ScalarType dtype) {
  Tensor dx = shape::softmax_backward(grad, output, dim, dtype);
  if (dx.numel() == 0) return dx;
  const Around a(dx, dim);
  const Tile t = a.tile();
  const Here here(dx);
  kernels().softmax_backward[here.on(a.grid(t), t.num_warps)](
      grad.contiguous(), output.contiguous(), dx, a.outer, a.inner, a.n, sums_of(output), a.flat(),
      t.rows, t.block, t.looped);
  return dx;
}

Three rms_norm(const Tensor& x, const Maybe& residual, const Maybe& weight, int64_t n_dims,
               double eps) {
  Three made = shape::rms_norm(x, residual, weight, n_dims, eps);
  const auto& [norm, sum, rstd] = made;
  if (norm.numel() == 0) return made;
  const Lines a = lines_of(x, n_dims),
              b = is_given(residual) ? lines_of(*residual, n_dims) : Lines{};
  const Tile t = tile_of(a.n, a.n_lines, 16384);
  const Here here(x);
  kernels().rms_norm[here.on(up(a.n_lines, t.rows), t.num_warps)](
      a.t, b.t, contiguous(weight), norm, b.t.defined() ? sum : Tensor(), rstd, a.n_lines, a.n,
      a.step, b.step, eps, sums_of(norm), t.rows, t.block, t.looped);
  return made;
}

Two rms_norm_backward(const Tensor& grad, const Maybe& grad_sum, const Tensor& sum,
                      const Maybe& weight, const Tensor& rstd, int64_t n_dims, double eps) {
  Two made = shape::rms_norm_backward(grad, grad_sum, sum, weight, rstd, n_dims, eps);
  const bool weighted = is_given(weight);
  if (sum.numel() == 0) {
    if (weighted) std::get<1>(made).zero_();
    return made;
  }
  const Lines s = lines_of(sum, n_dims);
  const Tile t = tile_of(s.n, s.n_lines, 16384);
  const Here here(sum);
  const int64_t grid = std::min(up(s.n_lines, t.rows), 2 * multiprocessors());
  Tensor parts;
  if (weighted) {
    const auto options = sum.options().dtype(wide(sum));
    parts = t.looped ? at::zeros({grid, s.n}, options) : at::empty({grid, s.n}, options);
  }
  kernels().rms_norm_backward[here.on(grid, t.num_warps)](
      grad.contiguous(), contiguous(grad_sum), s.t, contiguous(weight), rstd, std::get<0>(made),
      parts, s.n_lines, s.n, s.step, sums_of(sum), t.rows, t.block, t.looped);
  if (weighted)
    std::get<1>(made) = at::sum(parts, {0}, false, weight->scalar_type()).view(weight->sizes());
  return made;
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, const Maybe& offsets,
              c10::SymInt offset, bool interleaved, bool inverse) {
  Tensor out = shape::rotary(x, cos, sin, offsets, offset, interleaved, inverse);
  if (out.numel() == 0) return out;
  const Tensor given = x.stride(3) == 1 ? x : x.contiguous();
  const int64_t length = x.size(1), heads = x.size(2), dim = x.size(3), half = cos.size(1);
  const int64_t wide_half = pow2(half),
                at_once = std::clamp<int64_t>(2048 / wide_half, 1, pow2(heads));
  const int64_t rest = dim > 2 * half ? pow2(dim - 2 * half) : 0;
  const auto steps = [](const Tensor& t) {
    return std::tuple{t.stride(0), t.stride(1), t.stride(2)};
  };
  const Here here(x);
  kernels().rotary[here.on(x.size(0) * length * up(heads, at_once), 4)](
      given, cos.contiguous(), sin.contiguous(), contiguous(offsets), out, length, heads, dim, half,
      cos.size(0), offset.expect_int(), steps(given), steps(out), sums_of(x), interleaved, inverse,
      at_once, wide_half, rest);
  return out;
}

namespace {
// The sum of the weights, where rows are smoothed over them.
Maybe smoothed_over(const Tensor& x, const Maybe& weight, double label_smoothing) {
  return label_smoothing > 0 && is_given(weight) ? Maybe(at::sum(*weight, wide(x))) : Maybe();
}
}  // namespace

Three cross_entropy(const Tensor& x, const Tensor& target, const Maybe& weight, int64_t reduction,
                    c10::SymInt ignore_index, double label_smoothing) {
  constexpr int64_t most_parts = 4096;
  Three made = shape::cross_entropy(x, target, weight, reduction, ignore_index, label_smoothing);
  const auto& [loss, lse, total] = made;
  const bool each = reduction == at::Reduction::None;
  if (each && x.size(0) == 0) return made;
  const Lines rows = lines_of(x, 1);
  const Tile t = tile_of(rows.n, rows.n_lines, 8192);
  const int64_t programs = up(rows.n_lines, t.rows),
                grid = each ? programs : std::min(programs, most_parts);
  const Tensor parts = each ? Tensor() : at::empty({2, grid}, lse.options());
  const Here here(x);
  kernels().cross_entropy[here.on(grid, t.num_warps)](
      rows.t, target.contiguous(), contiguous(weight), smoothed_over(x, weight, label_smoothing),
      each ? loss : Tensor(), lse, parts, rows.n_lines, rows.n, rows.step,
      ignore_index.expect_int(), label_smoothing, sums_of(x), label_smoothing > 0, t.rows, t.block);
  if (!each)
    kernels().cross_entropy_total[here.on(1, 4)](parts, loss, total, grid,
                                                 reduction == at::Reduction::Mean, pow2(grid));
  return made;
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& x, const Tensor& target,
                              const Maybe& weight, const Tensor& lse, const Tensor& total,
                              int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
  Tensor dx = shape::cross_entropy_backward(grad, x, target, weight, lse, total, reduction,
                                            ignore_index, label_smoothing);
  if (dx.numel() == 0) return dx;
  const Lines rows = lines_of(x, 1);
  Tile t = tile_of(rows.n, rows.n_lines, 8192);
  const bool each = reduction == at::Reduction::None;
  const Here here(x);
  kernels()
      .cross_entropy_backward[here.on(up(rows.n_lines, t.rows) * up(rows.n, t.block), t.num_warps)](
          grad, rows.t, target.contiguous(), contiguous(weight),
          smoothed_over(x, weight, label_smoothing), lse,
          reduction == at::Reduction::Mean ? total : Tensor(), dx, rows.n_lines, rows.n, rows.step,
          each ? grad.stride(0) : 0, ignore_index.expect_int(), label_smoothing, sums_of(x),
          label_smoothing > 0, t.rows, t.block);
  return dx;
}

}  // namespace cuda
}  // namespace plait::ops
