// native/core/parts.cpp: which products are cut, where, and whether it pays.
#include "core/parts.h"

#include <algorithm>
#include <numeric>

namespace plait::blaslt {
namespace {
constexpr int64_t kUnit = 8, kWidth = 2;  // 16 bytes of numbers of 2 bytes

// What an H200 reaches, per second: operations and bytes with aligned rows, and with others; and
// what a product costs beside them, and one of a few lines, seconds. Other GPUs have such ratios.
constexpr double kFastOps = 6e14, kSlowOps = 9.5e13, kFastBytes = 3e12, kSlowBytes = 7.5e11;
constexpr double kLaunch = 4e-6, kEdge = 2e-5;
constexpr double kWorthwhile = 0.8;

bool aligned(int64_t n) { return n % kUnit == 0; }
bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % (kUnit * kWidth) == 0; }
bool along_rows(const Matrix& m) { return m.col_step == 1 && m.cols > 1; }
bool along_cols(const Matrix& m) { return m.row_step == 1 && m.rows > 1 && !along_rows(m); }

// Whether lines of m without gaps all start aligned.
bool has_aligned_lines(const Matrix& m, int64_t batch) {
  const int64_t step = along_rows(m) ? m.row_step : m.col_step;
  const int64_t lines = along_rows(m) ? m.rows : m.cols;
  return aligned(m.data) && (along_rows(m) || along_cols(m)) && (lines == 1 || aligned(step)) &&
         (batch == 1 || aligned(m.batch_step));
}

Matrix block(const Matrix& m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  const int64_t first = row * m.row_step + col * m.col_step;
  Matrix part = m;
  part.data = static_cast<const char*>(m.data) + first * kWidth;
  part.rows = rows;
  part.cols = cols;
  return part;
}

Part cut(const Part& w, int64_t row, int64_t rows, int64_t at, int64_t inner, int64_t col,
         int64_t cols) {
  Part p{block(w.a, row, rows, at, inner), block(w.b, at, inner, col, cols),
         block(w.out, row, rows, col, cols), std::nullopt, w.batch};
  if (w.addend) p.addend = block(*w.addend, row, rows, col, cols);
  return p;
}

double seconds(const Part& p, double ops, double bytes) {
  const auto m = static_cast<double>(p.out.rows), n = static_cast<double>(p.out.cols),
             k = static_cast<double>(p.a.cols);
  return static_cast<double>(p.batch) *
         std::max(2 * m * n * k / ops, (m * k + k * n + m * n) * kWidth / bytes);
}
double slow(const Part& p) { return seconds(p, kSlowOps, kSlowBytes); }
double fast(const Part& p) { return kLaunch + seconds(p, kFastOps, kFastBytes); }

// Lines are aligned, but a length is not.
Parts cut_lengths(const Part& w) {
  const int64_t m = w.out.rows, n = w.out.cols, k = w.a.cols;
  const auto kept = [](bool counts, int64_t length) {
    return counts ? length / kUnit * kUnit : length;
  };
  const int64_t m8 = kept(along_cols(w.a) || along_cols(w.out), m),
                n8 = kept(along_rows(w.b) || along_rows(w.out), n),
                k8 = kept(along_rows(w.a) || along_cols(w.b), k);
  // What is left of k adds little: rounding that loses nothing. With an addend it would.
  if ((m8 == m && n8 == n && k8 == k) || !m8 || !n8 || !k8 || (k8 < k && w.addend)) return {};
  Parts parts;
  if (m8 < m) parts.add(cut(w, m8, m - m8, 0, k, 0, n));
  if (n8 < n) parts.add(cut(w, 0, m8, 0, k, n8, n - n8));
  if (k8 < k) parts.add(cut(w, 0, m8, k8, k - k8, 0, n8));
  const double edges = kEdge * static_cast<double>(parts.size());
  Part most = cut(w, 0, m8, 0, k8, 0, n8);
  most.adds = k8 < k;
  const bool pays = edges + fast(most) < kWorthwhile * slow(w);
  parts.add(most);
  return pays ? parts : Parts{};
}

// Rows of the result start anywhere: `kinds` of them differ in alignment, and each kind's columns
// begin `further` columns behind those of the row before. What lies before and behind the columns
// of all kinds, two strips of equal width, comes first and is partly written over.
Parts cut_rows(const Part& w) {
  const int64_t step = w.out.row_step, kinds = kUnit / std::gcd(step, kUnit);
  const int64_t m = w.out.rows, n = w.out.cols, k = w.a.cols;
  const auto start = reinterpret_cast<uintptr_t>(w.out.data) / kWidth;
  const auto first = static_cast<int64_t>(-start % kUnit);
  const int64_t further = (kUnit - step % kUnit) % kUnit, last = first + (kinds - 1) * further;
  const int64_t middle = (n - last) / kUnit * kUnit, strip = std::max(last, n - first - middle);
  if (m < kinds || middle <= 0 || 2 * strip > n) return {};
  Parts parts;
  Part ends = cut(w, 0, m, 0, k, 0, strip);
  ends.batch = 2;
  ends.b.batch_step = (n - strip) * w.b.col_step;
  ends.out.batch_step = n - strip;
  parts.add(ends);
  double time = kEdge;
  const auto add = [&](int64_t kind, int64_t batch, int64_t rows) {
    if (!batch) return;
    Part p = cut(w, kind, rows, 0, k, first + kind * further, middle);
    p.batch = batch;
    p.a.batch_step = w.a.row_step;
    p.b.batch_step = further * w.b.col_step;
    p.out.batch_step = step + further;
    p.a.row_step *= kinds;
    p.out.row_step *= kinds;
    parts.add(p);
    time += fast(p);
  };
  add(0, m % kinds, m / kinds + 1);
  add(m % kinds, kinds - m % kinds, m / kinds);
  return time < kWorthwhile * slow(w) ? parts : Parts{};
}
}  // namespace

Parts parts(Type type, const Part& w) {
  if (type == Type::f32 || w.out.rows <= 0 || w.out.cols <= 0 || w.a.cols <= 0 || w.batch <= 0)
    return {};
  if (!has_aligned_lines(w.a, w.batch) || !has_aligned_lines(w.b, w.batch)) return {};
  if (has_aligned_lines(w.out, w.batch)) return cut_lengths(w);
  // Factors are read from any row or column on: it must be theirs that lie apart.
  const bool fits = along_rows(w.a) && along_cols(w.b) && along_rows(w.out) && aligned(w.a.cols);
  return fits && w.batch == 1 && !w.addend ? cut_rows(w) : Parts{};
}

}  // namespace plait::blaslt
