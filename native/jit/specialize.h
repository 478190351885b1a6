// native/jit/specialize.h: what Triton would compile for a call, and which words a launch of it takes.
//
// A signature comes as text: a line of options and their defaults, `num_ctas=1;num_warps=4`, then a line
// for each parameter, `name|annotation|flags|default`. annotation: Triton's type, or empty. Flags: c
// constexpr, k const, s do_not_specialize, a do_not_specialize_on_alignment. default: a value as below,
// `?` for one that only Python can say, or empty.
//
// A specialization is text too, an item a parameter, with commas: a type, `i32`, `*fp32`, with `:D` for
// what is divisible by 16; `=` and a value for a constant; items in parentheses for a tuple. Values are
// written as in Python: 1, -1.5, 1e+30, nan, True, None, 'percent%20encoded', fp32 (a dtype), @name (a
// @triton.jit function), (1,2).
#pragma once

#include <plait/triton.h>

namespace plait::triton {

struct Parameter {
  std::string name, annotation, fallback;
  bool constant, is_const, unspecialized, unaligned;
};

struct Signature {
  Signature(const std::string& function, const std::string& text);  // throws Error
  std::string function;
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<Parameter> parameters;
};

// Leaves with their values, walked by index.
class Arguments {
 public:
  Arguments(std::span<const Leaf> leaves, const uint8_t* states, const uint64_t* words,
            std::span<const std::string_view> strings);
  const Leaf& leaf(size_t k) const { return leaves_[k]; }
  uint8_t state(size_t k) const { return states_[k]; }
  size_t word(size_t k) const { return first_word_[k]; }
  size_t next(size_t k) const { return k + 1 + leaves_[k].n_inside; }
  std::string value(size_t k) const;  // as text; throws std::invalid_argument for a pointer

 private:
  std::span<const Leaf> leaves_;
  const uint8_t* states_;
  const uint64_t* words_;
  std::span<const std::string_view> strings_;
  std::vector<uint32_t> first_word_, first_string_;
};

// How the arguments of some types meet a signature. sources: of each parameter, the leaf, or -1 for its
// default. mask: what of a call's states and values counts; none of the values if n_compared ends first.
struct Binding {
  std::vector<int> sources;
  std::vector<uint64_t> mask;
  size_t n_compared;
};
Binding bind(const Signature& signature, std::span<const Leaf> leaves);

// One parameter of the compiled kernel. word: where its value starts among the call's values, or among
// the defaults. from: as what it was given.
struct Slot {
  int parameter;
  bool is_default;
  uint32_t leaf, word;
  uint8_t nbytes;
  Kind from;
  DType to;
  bool fix;  // its words must be checked or converted first
};

struct Specialization {
  std::string text;
  std::vector<Slot> slots;
  std::vector<uint64_t> defaults;
};
Specialization specialize(const Signature& signature, const Binding& binding, const Arguments& call);

// Makes the value of a slot what the kernel takes. Throws Error if it does not fit.
void fix(const Slot& slot, const Signature& signature, uint8_t state, uint64_t* word);

// The options that differ from their defaults, sorted, as `num_warps=8;...`.
std::string options_text(const Signature& signature, const Options& options);

}  // namespace plait::triton
