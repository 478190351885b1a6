// triton_launch/src/specialize.h: what Triton would compile for a call, and which words a launch of
// it takes.
//
// A specialization is text, an item a parameter, with commas: a type, `i32`, `*fp32`, with `:D`
// for what is divisible by 16; `tensordesc<fp16[64,128]>`, with the block's shape; `=` and a value
// for a constant; items in parentheses for a tuple. Values are as arguments.h has them.
#pragma once

#include "arguments.h"
#include "signature.h"

namespace plait::triton {

// How the arguments of some types meet a signature. sources: of each parameter, the leaf, or -1 for
// its default. mask: what of a call's states and values counts; none of the values if n_compared
// ends first.
struct Binding {
  std::vector<int> sources;
  std::vector<uint64_t> mask;
  size_t n_compared;
};
Binding bind(const Signature& signature, std::span<const Leaf> leaves);
// Makes the values of these parameters count.
void widen(Binding& binding, const Signature& signature, std::span<const Leaf> leaves,
           std::span<const std::string> names);

// One parameter of the compiled kernel. word: where its value starts among the call's values, or
// among the defaults. from: as what it was given.
struct Slot {
  int parameter;
  bool is_default;
  uint32_t leaf, word;
  uint8_t nbytes;
  Kind from;
  DType to;
  bool fix;      // its words must be checked or converted first
  int map = -1;  // it is not among the call's values but made of this descriptor
};

// What a kernel takes for a tensor descriptor: `swizzle,element bytes,element type,is_fp4,64x128`,
// for cuTensorMapEncodeTiled, and then shape and strides; or if nothing is said of any: pointer,
// shape, strides, padding, shape, strides.
struct Recipe {
  static constexpr size_t map_nbytes = 128;
  int swizzle, nbytes, type;
  bool is_fp4;
  std::vector<uint32_t> block;
};
std::vector<Recipe> read_recipes(std::string_view text);
// Slots as the kernel has them.
std::vector<Slot> expand(const std::vector<Slot>& slots, const std::vector<Recipe>& recipes,
                         const Arguments& call);
// A descriptor's fields among the call's words.
struct Fields {
  explicit Fields(const uint64_t* words) : words(words) {}
  size_t rank() const { return words[0] & 0xff; }
  uint64_t base() const { return words[1]; }
  int64_t shape(size_t k) const { return static_cast<int64_t>(words[2 + k]); }
  int64_t stride(size_t k) const { return static_cast<int64_t>(words[2 + Extents::max_rank + k]); }
  bool nan() const { return words[2 + 2 * Extents::max_rank] != 0; }
  const char* wrong(DType dtype) const;  // null: nothing
  const uint64_t* words;
};

struct Specialization {
  std::string text;
  std::vector<Slot> slots;
  std::vector<uint64_t> defaults;
};
// chosen: by decorators.
Specialization specialize(const Signature& signature, const Binding& binding, const Arguments& call,
                          const Settings& chosen = {});

// Makes the value of a slot what the kernel takes. Throws Error if it does not fit.
void fix(const Slot& slot, const Signature& signature, uint8_t state, uint64_t* word);

}  // namespace plait::triton
