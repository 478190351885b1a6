// native/core/parts.h: one product of matrices as several that a GPU computes at full speed.
//
// In half precision the fast kernels want rows that start at multiples of 16 bytes and are as long.
// A vocabulary of 50257 words gives them neither, and what is left is 4 to 8 times as slow. So:
//  - A length that is no multiple of 8 is cut into one that is, and what is left over.
//  - A result without gaps whose rows start anywhere is written as a batch of up to 8 matrices that
//    lie within each other: rows of equal alignment are equally far apart, and have an aligned
//    start a few columns further on than those before them.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "core/blaslt.h"

namespace plait::blaslt {

// out = a @ b + addend, numbers aside, for each of a batch. addend: of out's sizes, steps of 0
// repeat. adds: what out holds is the addend.
struct Part {
  Matrix a, b, out;
  std::optional<Matrix> addend;
  int64_t batch = 1;
  bool adds = false;
};

// In the order in which they are to be computed; none where the product is best as it is.
class Parts {
 public:
  static constexpr size_t kMost = 4;

  const Part* begin() const { return parts_.data(); }
  const Part* end() const { return parts_.data() + n_; }
  size_t size() const { return n_; }
  bool empty() const { return n_ == 0; }
  void add(Part part) { parts_[n_++] = part; }

 private:
  std::array<Part, kMost> parts_;
  size_t n_ = 0;
};

Parts parts(Type type, const Part& whole);

}  // namespace plait::blaslt
