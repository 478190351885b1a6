// native/torch/overlap.cpp: which of a call's tensors lie in one memory.
#include "torch/overlap.h"

#include <algorithm>
#include <numeric>

namespace plait {
namespace {

// A number below n, times a stride.
struct Dim {
  int64_t n, stride;
};

// Longest strides first. The sums that two dimensions make are those of one where the shorter
// stride divides the longer one and leaves no gap before it.
std::vector<Dim> merged(std::vector<Dim> dims) {
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  std::vector<Dim> made;
  for (const Dim& d : dims) {
    Dim next = d;
    while (!made.empty() && made.back().stride % next.stride == 0 &&
           made.back().stride / next.stride <= next.n) {
      next.n += (made.back().n - 1) * (made.back().stride / next.stride);
      made.pop_back();
    }
    made.push_back(next);
  }
  return made;
}

constexpr int kMostSteps = 1 << 14;  // a few microseconds

// Whether some numbers of the dimensions from k on sum up to one from low to high.
bool reaches(const std::vector<Dim>& dims, size_t k, int64_t low, int64_t high, int& steps) {
  if (low <= 0 && high >= 0) return true;
  if (high < 0 || k == dims.size()) return false;
  int64_t rest = 0;  // what those after k sum up to at most
  for (size_t i = k + 1; i < dims.size(); ++i) rest += (dims[i].n - 1) * dims[i].stride;
  const Dim& d = dims[k];
  const int64_t missing = low - rest;
  const int64_t first = missing <= 0 ? 0 : (missing + d.stride - 1) / d.stride;
  const int64_t last = std::min(d.n - 1, high / d.stride);
  for (int64_t c = first; c <= last; ++c) {
    if (++steps > kMostSteps) return true;
    if (reaches(dims, k + 1, low - c * d.stride, high - c * d.stride, steps)) return true;
  }
  return false;
}

bool has_memory(const at::Tensor& t) {
  return t.defined() && t.layout() == c10::kStrided && t.has_storage() &&
         t.storage().device_type() != c10::kMeta && t.numel() != 0;
}

uintptr_t address_of(const at::Tensor& t) {
  const auto start = reinterpret_cast<uintptr_t>(t.storage().data());
  return start ? start + static_cast<uintptr_t>(t.storage_offset()) * t.itemsize() : 0;
}

}  // namespace

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!has_memory(a) || !has_memory(b)) return false;
  const auto a_item = static_cast<int64_t>(a.itemsize()),
             b_item = static_cast<int64_t>(b.itemsize());
  // Between an element of a and one of b lie `from` bytes and a sum over all dimensions: of b,
  // which would count downwards, the distance to the last one.
  auto from = static_cast<int64_t>(address_of(a) - address_of(b));
  std::vector<Dim> dims;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != 0) dims.push_back({a.size(d), a.stride(d) * a_item});
  for (int64_t d = 0; d < b.dim(); ++d) {
    if (b.size(d) == 1 || b.stride(d) == 0) continue;
    dims.push_back({b.size(d), b.stride(d) * b_item});
    from -= (b.size(d) - 1) * b.stride(d) * b_item;
  }
  int steps = 0;
  return reaches(merged(std::move(dims)), 0, 1 - a_item - from, b_item - 1 - from, steps);
}

Overlaps::Range Overlaps::range_of(const at::Tensor* t) {
  if (!t || !has_memory(*t)) return {};
  const uintptr_t begin = address_of(*t);
  if (!begin) return {};
  const c10::IntArrayRef sizes = t->sizes(), strides = t->strides();
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return {begin, begin + static_cast<uintptr_t>(last + 1) * t->itemsize()};
}

bool Overlaps::any(const std::vector<const at::Tensor*>& tensors) {
  bool same = true;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const Range now = range_of(tensors[i]);
    same = same && now == ranges_[i];
    ranges_[i] = now;
  }
  if (!same) find_pairs();
  return (grouped_ && moved(tensors)) ||
         std::any_of(near_.begin(), near_.end(), [&](const std::pair<size_t, size_t>& p) {
           return overlap(*tensors[p.first], *tensors[p.second]);
         });
}

// Whether a tensor has left the storage of its group, or its place there.
bool Overlaps::moved(const std::vector<const at::Tensor*>& tensors) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor* t = tensors[i];
    if (!t || !t->has_storage()) continue;
    if (offsets_[i] >= 0 && t->storage_offset() != offsets_[i]) return true;
    if (firsts_[i] == i) continue;
    const at::Tensor* first = tensors[firsts_[i]];
    if (!first || !first->has_storage() || !first->storage().is_alias_of(t->storage())) return true;
  }
  return false;
}

void Overlaps::find_pairs() {
  near_.clear();
  std::vector<size_t> order(ranges_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return ranges_[a].begin < ranges_[b].begin; });
  for (auto i = order.begin(); i != order.end(); ++i)
    for (auto j = i + 1; j != order.end() && ranges_[*j].begin < ranges_[*i].end; ++j)
      if ((written_[*i] || written_[*j]) && firsts_[*i] != firsts_[*j]) near_.emplace_back(*i, *j);
}

}  // namespace plait
