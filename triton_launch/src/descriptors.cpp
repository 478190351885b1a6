// triton_launch/src/descriptors.cpp: what a kernel takes for its tensor descriptors.
#include "specialize.h"

#include <charconv>

namespace plait::triton {

std::vector<Recipe> read_recipes(std::string_view text) {
  std::vector<Recipe> found;
  for (const std::string_view one : split(text, ';')) {
    const auto fields = split(one, ',');
    if (fields.size() != 5) continue;
    const auto number = [](std::string_view s) {
      int v = 0;
      std::from_chars(s.data(), s.data() + s.size(), v);
      return v;
    };
    found.push_back(
        {number(fields[0]), number(fields[1]), number(fields[2]), number(fields[3]) != 0, {}});
    for (const std::string_view n : split(fields[4], 'x'))
      found.back().block.push_back(static_cast<uint32_t>(number(n)));
  }
  return found;
}

std::vector<Slot> expand(const std::vector<Slot>& slots, const std::vector<Recipe>& recipes,
                         const Arguments& call) {
  std::vector<Slot> out;
  int n = 0;
  for (const Slot& slot : slots) {
    if (slot.from != Kind::descriptor) {
      out.push_back(slot);
      continue;
    }
    const size_t rank = call.descriptor_rank(slot.leaf);
    const auto put = [&](size_t word, uint8_t nbytes, int map = -1) {
      Slot part = slot;
      part.word += static_cast<uint32_t>(word);
      part.nbytes = nbytes;
      part.map = map;
      out.push_back(part);
    };
    constexpr size_t shape = 2, strides = shape + Extents::max_rank,
                     padding = strides + Extents::max_rank;
    const bool is_map = !recipes.empty();
    if (is_map && (static_cast<size_t>(n) >= recipes.size() ||
                   recipes[static_cast<size_t>(n)].block.size() != rank))
      throw std::runtime_error("the compiled kernel has no tensor descriptor of " +
                               std::to_string(rank) + " dimensions as number " + std::to_string(n));
    if (is_map) {
      put(0, Recipe::map_nbytes, n);
    } else {
      put(1, 8);
      for (const size_t first : {shape, strides})
        for (size_t k = 0; k < rank; ++k) put(first + k, 8);
      put(padding, 1);
    }
    for (size_t k = 0; k < rank; ++k)
      put(shape + k, 4, is_map && recipes[static_cast<size_t>(n)].is_fp4 && k + 1 == rank ? n : -1);
    for (size_t k = 0; k < rank; ++k) put(strides + k, 8);
    ++n;
  }
  if (static_cast<size_t>(n) < recipes.size())
    throw std::runtime_error("the compiled kernel has " + std::to_string(recipes.size()) +
                             " tensor descriptors, not " + std::to_string(n));
  return out;
}

const char* Fields::wrong(DType dtype) const {
  const size_t n = rank();
  if (base() % 16 != 0) return "its base is not a multiple of 16";
  for (size_t k = 0; k < n; ++k)
    if (shape(k) <= 0) return "its shape is not positive";
  for (size_t k = 0; k + 1 < n; ++k)
    if (stride(k) * itemsize_of(dtype) % 16 != 0)
      return "its strides are not multiples of 16 bytes";
  if (stride(n - 1) != 1) return "its last stride is not 1";
  const bool is_floating = is_float(dtype) || dtype >= DType::fp8e4nv;
  return nan() && !is_floating ? "only floating-point elements can be padded with nan" : nullptr;
}

}  // namespace plait::triton
