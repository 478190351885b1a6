// triton_launch/ops/products.cpp: products of matrices on CUDA: which of the kernels takes one, and
// how its work is cut.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <numeric>

#include "launching.h"

namespace plait::ops::cuda {
namespace {
// A batch of matrices as the hardware copies tiles of it; turned: they are transposed in memory.
struct Tiled {
  triton::TensorDescriptor descriptor;
  bool turned;
};
std::optional<Tiled> tiled(const Tensor& t) {
  const bool turned = t.stride(2) != 1;
  const auto fits = [&](int64_t size, int64_t stride) {
    return size < std::numeric_limits<int32_t>::max() && stride > 0 &&
           stride * t.element_size() % 16 == 0;
  };
  const int64_t inner = turned ? 1 : 2, outer = 3 - inner;
  const bool batched = t.size(0) > 1;
  if (t.stride(inner) != 1 || t.size(inner) > std::numeric_limits<int32_t>::max() ||
      !fits(t.size(outer), t.stride(outer)) || (batched && !fits(t.size(0), t.stride(0))) ||
      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0)
    return std::nullopt;
  triton::TensorDescriptor d{t.data_ptr(),
                             triton::dtype_of_torch(t.scalar_type()),
                             {t.size(outer), t.size(inner)},
                             {t.stride(outer), 1},
                             {1, 1}};  // a configuration has the blocks
  if (batched) {
    d.shape = {t.size(0), t.size(outer), t.size(inner)};
    d.strides = {t.stride(0), t.stride(outer), 1};
    d.block_shape = {1, 1, 1};
  }
  return Tiled{d, turned};
}

// With tensor maps, where both matrices have regular rows and fill the smallest tiles.
bool bmm_by_maps(const Tensor& a, const Tensor& b, const Tensor& out, const Here& here) {
  constexpr int64_t small = 32;
  const int64_t batches = a.size(0), m = a.size(1), n = b.size(2), k = a.size(2);
  if (a.element_size() != 2 || m <= small || n <= small || !has_tensor_maps()) return false;
  const auto x = tiled(a), y = tiled(b), z = tiled(out);
  if (!x || !y || !z || z->turned) return false;
  const auto grid = [batches, m, n, most = multiprocessors()](const triton::Meta& meta) {
    return triton::Grid(std::min(batches * up(m, meta["BM"]) * up(n, meta["BN"]), most));
  };
  kernels().bmm_tma[{grid, reinterpret_cast<triton::Stream>(here.stream)}](
      x->descriptor, y->descriptor, z->descriptor, batches, m, n, k, pow2(m), pow2(n), pow2(k),
      x->turned, y->turned, batches > 1);
  return true;
}

// How many elements are loaded at once where Triton does not see it, of sizes and strides that
// `common` divides: whole vectors or single ones, as smaller vectors would be kernels more for
// sizes that are alike.
int64_t unit_of(const Tensor& t, int64_t common) {
  const int64_t vector = 16 / t.element_size();
  return common % 16 != 0 && common % vector == 0 ? vector : 1;
}

// Of a matrix and a vector, where the matrix is contiguous along K, or has numbers of 4 bytes or
// more and is along the other dimension. (For smaller ones tensor cores are sooner there.)
bool bmm_of_vector(const Tensor& a, const Tensor& b, const Tensor& out, const Here& here) {
  const bool first = a.size(1) == 1;  // which one is the vector
  if (!first && b.size(2) != 1) return false;
  const Tensor &x = first ? b : a, &v = first ? a : b;
  const int64_t along = first ? 1 : 2, row = 3 - along;
  const bool turned = x.stride(along) != 1;
  if (turned && (x.stride(row) != 1 || x.element_size() < 4)) return false;
  const int64_t batches = a.size(0), rows = x.size(row), k = a.size(2),
                line = x.stride(turned ? along : row);
  const int64_t x_batch = batches > 1 ? x.stride(0) : 0, v_batch = batches > 1 ? v.stride(0) : 0;
  const int64_t unit = unit_of(x, std::gcd(std::gcd(turned ? rows : k, line), x_batch));
  const auto grid = [batches, rows](const triton::Meta& meta) {
    return triton::Grid(batches * up(rows, meta["ROWS"]));
  };
  kernels().matvec[{grid, reinterpret_cast<triton::Stream>(here.stream)}](
      x, v, out, rows, k, pow2(rows), pow2(k), x_batch, line, v_batch, v.stride(row), sums_of(x),
      turned, unit);
  return true;
}

// How many programs share the K of a tile: 1, or where tiles are few, as many as keep the device
// busy and have something to do each. It is no part of tuning, which does not time what adds their
// sums.
int64_t parts_of(int64_t batches, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t tile = 64, least = 512, most = 64, worth_it = 4;
  const int64_t n_tiles = pow2(batches) * up(pow2(m), tile) * up(pow2(n), tile);
  const int64_t parts = std::min({multiprocessors() / n_tiles, pow2(k) / least, most});
  return parts < worth_it ? 1 : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(parts)));
}
}  // namespace

Tensor bmm(const Tensor& a, const Tensor& b) {
  Tensor out = shape::bmm(a, b);
  if (out.numel() == 0) return out;
  const int64_t batches = a.size(0), m = a.size(1), n = b.size(2), k = a.size(2);
  if (k == 0) return out.zero_();
  const Here here(a);
  const int64_t parts = parts_of(batches, m, n, k);
  if ((parts == 1 || batches * m * n >= multiprocessors()) && bmm_of_vector(a, b, out, here))
    return out;
  if (parts == 1 && bmm_by_maps(a, b, out, here)) return out;

  const bool is_float = a.scalar_type() == at::kFloat;
  const char* precision = !is_float                               ? "ieee"
                          : at::globalContext().allowTF32CuBLAS() ? "tf32"
                                                                  : "tf32x3";
  const bool a_turned = a.stride(2) != 1, b_turned = b.stride(2) != 1;
  int64_t common = std::gcd(n, k);
  for (const int64_t v : {a_turned ? m : 0, a.stride(a_turned ? 2 : 1), b.stride(b_turned ? 2 : 1),
                          a.stride(0), b.stride(0)})
    common = std::gcd(common, v);
  const bool regular = a.stride(a_turned ? 1 : 2) == 1 && b.stride(b_turned ? 1 : 2) == 1;
  const int64_t unit = regular ? unit_of(a, common) : 1;
  const Tensor sums =
      parts > 1 ? at::empty({parts, batches, m, n}, out.options().dtype(wide(a))) : out;
  const auto grid = [batches, m, n, parts](const triton::Meta& meta) {
    return triton::Grid(batches * up(m, meta["BM"]) * up(n, meta["BN"]), parts);
  };
  kernels().bmm[{grid, reinterpret_cast<triton::Stream>(here.stream)}](
      a, b, sums, m, n, k, pow2(m), pow2(n), pow2(k), a.stride(0), a.stride(1), a.stride(2),
      b.stride(0), b.stride(1), b.stride(2), sums_of(a), precision, a_turned, b_turned, unit,
      parts);
  if (parts > 1) {
    constexpr int64_t block = 256;
    kernels().total[here.on(up(out.numel(), block), 4)](sums, out, out.numel(), parts, block);
  }
  return out;
}

}  // namespace plait::ops::cuda
