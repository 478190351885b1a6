// native/torch/overlap.h: which of a call's tensors lie in one memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace plait {

// Whether an element of a lies where one of b does. True too where that takes too long to tell.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// Looks, call by call, whether tensors share memory otherwise than they did when their program was
// made. Two threads may not ask one object at the same time.
class Overlaps {
 public:
  // written: of each tensor, whether it is; no other one may overlap it then.
  // firsts: of each, the first one of those that share a storage, and may overlap.
  // offsets: of each, where it has to begin in its storage; -1: anywhere.
  Overlaps(std::vector<bool> written, std::vector<size_t> firsts, std::vector<int64_t> offsets)
      : written_(std::move(written)),
        firsts_(std::move(firsts)),
        offsets_(std::move(offsets)),
        ranges_(written_.size()) {
    for (size_t i = 0; i < firsts_.size(); ++i)
      grouped_ = grouped_ || firsts_[i] != i || offsets_[i] >= 0;
  }

  // Whether any does. tensors: null for what is none.
  bool any(const std::vector<const at::Tensor*>& tensors);

  size_t size() const { return written_.size(); }

 private:
  struct Range {
    uintptr_t begin = 0, end = 0;
    bool operator==(const Range& r) const { return begin == r.begin && end == r.end; }
  };
  static Range range_of(const at::Tensor* t);
  bool moved(const std::vector<const at::Tensor*>& tensors) const;
  void find_pairs();

  std::vector<bool> written_;
  std::vector<size_t> firsts_;
  std::vector<int64_t> offsets_;
  bool grouped_ = false;                         // some share a storage
  std::vector<Range> ranges_;                    // of the last call
  std::vector<std::pair<size_t, size_t>> near_;  // tensors whose ranges meet, one of them written
};

}  // namespace plait
