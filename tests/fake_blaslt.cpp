// tests/fake_blaslt.cpp: a cuBLASLt that computes on the host, element by element, from nothing but
// its descriptors. It refuses what the real one would: leading dimensions below the rows, pointers
// less aligned than the heuristics were told, a workspace that is not there.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/blaslt.h"

using plait::blaslt::Algorithm;
using plait::blaslt::Heuristic;

namespace {
constexpr int kInvalid = 7, kFailed = 13, kUnsupported = 15;
constexpr size_t kWorkspace = 4096;
using Attributes = std::map<int32_t, uint64_t>;
struct Layout {
  int32_t type;
  uint64_t rows, cols;
  int64_t ld;
  Attributes attributes;
};
struct Descriptor {
  int32_t compute;
  Attributes attributes;
};
std::atomic<int> live, queries;

uint64_t get(const Attributes& a, int32_t key, uint64_t otherwise) {
  const auto found = a.find(key);
  return found == a.end() ? otherwise : found->second;
}
int set(Attributes& a, int32_t key, const void* value, size_t n) {
  uint64_t bits = 0;
  if (n > sizeof bits) return kInvalid;
  std::memcpy(&bits, value, n);
  a[key] = bits;
  return 0;
}
template <class T>
int made(void** out, T* object) {
  *out = object;
  ++live;
  return 0;
}
template <class T>
int gone(void* object) {
  delete static_cast<T*>(object);
  --live;
  return 0;
}

// bfloat16 and half as bits.
float widen(int32_t type, const void* data, int64_t at) {
  if (type == 0) return static_cast<const float*>(data)[at];
  if (type == 2) return static_cast<float>(static_cast<const _Float16*>(data)[at]);
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[at]} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
void narrow(int32_t type, void* data, int64_t at, float value) {
  if (type == 0) {
    static_cast<float*>(data)[at] = value;
  } else if (type == 2) {
    static_cast<_Float16*>(data)[at] = static_cast<_Float16>(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    static_cast<uint16_t*>(data)[at] =
        static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

struct Matrix {
  const Layout& layout;
  const void* data;
  bool transposed;
  int64_t batch_step() const { return static_cast<int64_t>(get(layout.attributes, 6, 0)); }
  int64_t at(int64_t batch, int64_t row, int64_t col) const {
    if (transposed) std::swap(row, col);
    if (row >= static_cast<int64_t>(layout.rows) || col >= static_cast<int64_t>(layout.cols))
      throw kInvalid;
    return batch * batch_step() + row + col * layout.ld;
  }
  float value(int64_t batch, int64_t row, int64_t col) const {
    return widen(layout.type, data, at(batch, row, col));
  }
};

bool aligned(const void* pointer, uint64_t to) {
  return reinterpret_cast<uintptr_t>(pointer) % to == 0;
}
}  // namespace

extern "C" {
int fake_live() { return live; }
int fake_queries() { return queries; }

int cublasLtCreate(void** out) {  // contexts last as long as the process
  static char contexts[2], *next = contexts;
  *out = next++;
  return 0;
}
int cublasLtMatmulDescCreate(void** out, int32_t compute, int32_t scale) {
  return scale == 0 ? made(out, new Descriptor{compute, {}}) : kInvalid;
}
int cublasLtMatmulDescDestroy(void* d) { return gone<Descriptor>(d); }
int cublasLtMatmulDescSetAttribute(void* d, int32_t key, const void* value, size_t n) {
  return set(static_cast<Descriptor*>(d)->attributes, key, value, n);
}
int cublasLtMatrixLayoutCreate(void** out, int32_t type, uint64_t rows, uint64_t cols, int64_t ld) {
  if (ld < static_cast<int64_t>(rows)) return kInvalid;
  return made(out, new Layout{type, rows, cols, ld, {}});
}
int cublasLtMatrixLayoutDestroy(void* l) { return gone<Layout>(l); }
int cublasLtMatrixLayoutSetAttribute(void* l, int32_t key, const void* value, size_t n) {
  return set(static_cast<Layout*>(l)->attributes, key, value, n);
}
int cublasLtMatmulPreferenceCreate(void** out) { return made(out, new Attributes); }
int cublasLtMatmulPreferenceDestroy(void* p) { return gone<Attributes>(p); }
int cublasLtMatmulPreferenceSetAttribute(void* p, int32_t key, const void* value, size_t n) {
  return set(*static_cast<Attributes*>(p), key, value, n);
}

// No algorithm for 13 rows. Split products, which take workspace, where inner is 64 or more and
// the reduction is left free.
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void* x, void*, void*, void* d, void* wish,
                                   int wanted, Heuristic* out, int* n) {
  ++queries;
  const Attributes& a = *static_cast<Attributes*>(wish);
  *n = wanted == 1 && static_cast<Layout*>(d)->rows != 13;
  if (*n == 0) return kUnsupported;
  *out = {};
  const bool split = static_cast<Layout*>(x)->cols >= 64 && get(a, 3, 7) == 7;
  out->workspace = split && get(a, 1, 0) >= kWorkspace ? kWorkspace : 0;
  for (int k = 0; k < 4; ++k) out->algorithm.data[k] = get(a, 5 + k, 256);
  out->algorithm.data[7] = out->workspace;
  return 0;
}

int cublasLtMatmul(void*, void* product, const void* alpha, const void* x, void* lx, const void* y,
                   void* ly, const void* beta, const void* c, void* lc, void* d, void* ld,
                   const Algorithm* algorithm, void* workspace, size_t nbytes,
                   plait::cuda::Stream stream) {
  const Descriptor& how = *static_cast<Descriptor*>(product);
  const auto layout = [](void* l) -> const Layout& { return *static_cast<Layout*>(l); };
  const Matrix mx{layout(lx), x, get(how.attributes, 3, 0) == 1},
      my{layout(ly), y, get(how.attributes, 4, 0) == 1}, mc{layout(lc), c, false},
      md{layout(ld), d, false};
  const uint64_t* data = algorithm->data;
  const uint64_t epilogue = get(how.attributes, 7, 1);
  const bool biased = epilogue & 4, relu = epilogue & 2, gelu = epilogue & 32;
  const auto* bias = reinterpret_cast<const void*>(get(how.attributes, 8, 0));
  const auto bias_step = static_cast<int64_t>(get(how.attributes, 10, 0));
  if (reinterpret_cast<size_t>(stream) == 13) return kInvalid;
  if (reinterpret_cast<size_t>(stream) == 14) return kFailed;
  if (!aligned(x, data[0]) || !aligned(y, data[1]) || !aligned(c, data[2]) || !aligned(d, data[3]))
    return kInvalid;
  if (nbytes < data[7] || (data[7] && !workspace)) return kInvalid;
  if (data[7]) std::memset(workspace, 0xff, data[7]);
  const auto rows = static_cast<int64_t>(md.layout.rows),
             cols = static_cast<int64_t>(md.layout.cols),
             inner = static_cast<int64_t>(mx.transposed ? mx.layout.rows : mx.layout.cols),
             batch = static_cast<int64_t>(get(md.layout.attributes, 5, 1));
  for (const Matrix* m : {&mx, &my, &mc})
    if (static_cast<int64_t>(get(m->layout.attributes, 5, 1)) != batch) return kInvalid;
  const float by = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  try {
    std::vector<float> results;  // c may be d
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t j = 0; j < cols; ++j)
        for (int64_t i = 0; i < rows; ++i) {
          float sum = 0;
          for (int64_t k = 0; k < inner; ++k) sum += mx.value(b, i, k) * my.value(b, k, j);
          sum *= by;
          if (keep != 0) sum += keep * mc.value(b, i, j);
          if (biased) sum += widen(md.layout.type, bias, b * bias_step + i);
          if (relu) sum = std::max(sum, 0.f);
          if (gelu) sum *= 0.5f;  // no gelu, but what a test can tell
          results.push_back(sum);
        }
    const float* result = results.data();
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t j = 0; j < cols; ++j)
        for (int64_t i = 0; i < rows; ++i) narrow(md.layout.type, d, md.at(b, i, j), *result++);
  } catch (int code) {
    return code;
  }
  return 0;
}
}
