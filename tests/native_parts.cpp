// tests/native_parts.cpp: every element of a product gets all of its sum, from the right rows and
// columns, however it is cut. No memory is touched: addresses tell.
#include <cstdio>
#include <random>
#include <vector>

#include "core/parts.h"

using namespace plait::blaslt;

namespace {
int failed = 0;

#define CHECK(x)                                                              \
  do {                                                                        \
    if (!(x)) {                                                               \
      if (++failed < 20) std::printf("line %d: %s is false\n", __LINE__, #x); \
    }                                                                         \
  } while (0)

constexpr int64_t kWidth = 2;

const void* address(uintptr_t at) { return reinterpret_cast<const void*>(at); }

// Where an element of part lies in whole.
struct Place {
  int64_t row, col;
};
Place place(const Matrix& whole, const void* at) {
  const int64_t far = reinterpret_cast<intptr_t>(at) - reinterpret_cast<intptr_t>(whole.data);
  CHECK(far % kWidth == 0);
  const int64_t n = far / kWidth;
  if (whole.col_step == 1) return {n / whole.row_step, n % whole.row_step};
  return {n % whole.col_step, n / whole.col_step};
}
const void* at(const Matrix& m, int64_t row, int64_t col) {
  return static_cast<const char*>(m.data) + (row * m.row_step + col * m.col_step) * kWidth;
}
Matrix of_batch(Matrix m, int64_t number) {
  m.data = static_cast<const char*>(m.data) + number * m.batch_step * kWidth;
  return m;
}
bool is_aligned(const Matrix& m) {
  const int64_t step = m.col_step == 1 ? m.row_step : m.col_step;
  const int64_t length = m.col_step == 1 ? m.cols : m.rows;
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && step % 8 == 0 && length % 8 == 0;
}

// How the product was cut; 0: not at all.
size_t check(const Part& whole) {
  const Parts parts = plait::blaslt::parts(Type::bf16, whole);
  if (parts.empty()) return 0;
  const int64_t m = whole.out.rows, n = whole.out.cols, k = whole.a.cols;
  std::vector<int32_t> sums(static_cast<size_t>(m * n));
  int64_t fast = 0;
  for (const Part& part : parts) {
    std::vector<bool> written(sums.size());  // by this part: its batches run at once
    for (int64_t number = 0; number < part.batch; ++number) {
      const Part p{of_batch(part.a, number),
                   of_batch(part.b, number),
                   of_batch(part.out, number),
                   part.addend,
                   1,
                   part.adds};
      const int64_t rows = p.out.rows, cols = p.out.cols, inner = p.a.cols;
      CHECK(rows > 0 && cols > 0 && inner > 0);
      CHECK(p.a.rows == rows && p.b.cols == cols && p.b.rows == inner);
      const Place first = place(whole.out, p.out.data);
      const Place last = place(whole.out, at(p.out, rows - 1, cols - 1));
      const int64_t step = rows > 1 ? (last.row - first.row) / (rows - 1) : 1;
      CHECK(first.row >= 0 && last.row < m && first.col >= 0 && last.col < n);
      CHECK(last.row - first.row == step * (rows - 1) && last.col - first.col == cols - 1);
      const Place a_first = place(whole.a, p.a.data), b_first = place(whole.b, p.b.data);
      const Place a_last = place(whole.a, at(p.a, rows - 1, inner - 1)),
                  b_last = place(whole.b, at(p.b, inner - 1, cols - 1));
      CHECK(a_first.row == first.row && a_last.row == last.row);
      CHECK(b_first.col == first.col && b_last.col == last.col);
      CHECK(a_first.col == b_first.row && a_last.col == b_last.row);
      CHECK(a_last.col - a_first.col == inner - 1);
      CHECK(p.addend.has_value() == whole.addend.has_value());
      if (p.addend) CHECK(p.addend->data == at(*whole.addend, first.row, first.col));
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
          const auto here = static_cast<size_t>((first.row + i * step) * n + first.col + j);
          CHECK(!written[here]);
          written[here] = true;
          int32_t& sum = sums[here];
          sum = (p.adds ? sum : 0) + static_cast<int32_t>(inner);
        }
      if (is_aligned(p.a) && is_aligned(p.b) && is_aligned(p.out)) fast += rows * cols * inner;
    }
  }
  for (int32_t sum : sums) CHECK(sum == k);
  CHECK(static_cast<double>(fast) > 0.9 * static_cast<double>(m * n * k));
  return parts.size();
}

Matrix stored(int64_t rows, int64_t cols, bool by_rows, int64_t step, uintptr_t start) {
  return {address(start), rows, cols, by_rows ? step : 1, by_rows ? 1 : step, 0};
}
}  // namespace

int main() {
  std::mt19937 random(7);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto round_up = [](int64_t n) { return (n + 7) / 8 * 8; };
  constexpr uintptr_t kA = 1ull << 40, kB = 2ull << 40, kOut = 3ull << 40, kAddend = 4ull << 40;
  int cut_in[Parts::kMost + 1] = {};
  for (int n = 0; n < 250; ++n) {
    const bool dense = draw(0, 1), head = dense && draw(0, 1);  // an output head
    const int64_t m = draw(300, 2100), cols = draw(500, 2100);
    const int64_t k = head ? 8 * draw(500, 2000) : draw(4000, 16000);
    const bool a_rows = head || draw(0, 1), b_rows = !head && draw(0, 1);
    const int64_t a_step = round_up(a_rows ? k : m), b_step = round_up(b_rows ? cols : k);
    const uintptr_t start = kOut + static_cast<uintptr_t>(dense ? 2 * draw(0, 8) : 0);
    Part whole{stored(m, k, a_rows, a_step, kA),
               stored(k, cols, b_rows, b_step, kB),
               stored(m, cols, true, dense ? cols : round_up(cols), start),
               {}};
    if (!draw(0, 3)) whole.addend = Matrix{address(kAddend), m, cols, 0, 1, 0};
    ++cut_in[check(whole)];
  }
  // An output head as it is asked for: aligned rows, and rows without gaps.
  const Matrix x = stored(2048, 768, true, 768, kA), w = stored(768, 50257, false, 768, kB);
  CHECK(check({x, w, stored(2048, 50257, true, 50264, kOut), {}}) == 2);
  CHECK(check({x, w, stored(2048, 50257, true, 50257, kOut), {}}) == 2);
  CHECK(check({stored(2047, 768, true, 768, kA), w, stored(2047, 50257, true, 50257, kOut), {}}) ==
        3);
  // Nothing is gained: all aligned, small, unaligned factors, float32.
  CHECK(
      check({x, stored(768, 50264, false, 768, kB), stored(2048, 50264, true, 50264, kOut), {}}) ==
      0);
  CHECK(check({stored(8, 64, true, 64, kA),
               stored(64, 33, false, 64, kB),
               stored(8, 33, true, 33, kOut),
               {}}) == 0);
  CHECK(check({stored(2048, 768, true, 769, kA), w, stored(2048, 50257, true, 50264, kOut), {}}) ==
        0);
  CHECK(parts(Type::f32, {x, w, stored(2048, 50257, true, 50264, kOut), {}}).empty());
  for (size_t n : {0, 2, 3, 4}) CHECK(cut_in[n] > 5);
  for (int n : cut_in) std::printf("%d ", n);
  std::printf("times cut in 0, 1, ... parts\n");
  return failed ? 1 : 0;
}
