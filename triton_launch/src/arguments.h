// triton_launch/src/arguments.h: a call's leaves and their values, walked by index and as text.
//
// Values are written as in Python: 1, -1.5, 1e+30, nan, True, None, 'percent%20encoded', fp32 (a
// dtype), @name (a @triton.jit function), (1,2).
#pragma once

#include <plait/triton.h>

#include <vector>

namespace plait::triton {

inline constexpr int64_t max_block = 1 << 20;  // elements
const char* name_of(DType type);               // Triton's short one
std::optional<DType> dtype_named(std::string_view name);
uint8_t itemsize_of(DType type);
inline bool is_float(DType t) { return t >= DType::fp16 && t <= DType::fp64; }
std::string quoted(std::string_view text);

// Leaves with their values, walked by index.
class Arguments {
 public:
  Arguments(std::span<const Leaf> leaves, const uint8_t* states, const uint64_t* words,
            std::span<const std::string_view> strings);
  const Leaf& leaf(size_t k) const { return leaves_[k]; }
  uint8_t state(size_t k) const { return states_[k]; }
  size_t word(size_t k) const { return first_word_[k]; }
  size_t next(size_t k) const { return k + 1 + leaves_[k].n_inside; }
  size_t size() const { return leaves_.size(); }
  size_t descriptor_rank(size_t k) const { return words_[first_word_[k]] & 0xff; }
  // As text; a pointer is its type, or throws std::invalid_argument.
  std::string value(size_t k, bool pointers = false) const;

 private:
  std::span<const Leaf> leaves_;
  const uint8_t* states_;
  const uint64_t* words_;
  std::span<const std::string_view> strings_;
  std::vector<uint32_t> first_word_, first_string_;
};

}  // namespace plait::triton
