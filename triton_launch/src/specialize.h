// triton_launch/src/specialize.h: what Triton would compile for a call, and which words a launch of
// it takes.
//
// A signature comes as text: a line of options and their defaults, `num_ctas=1;num_warps=4`, then a
// line for each parameter, `name|annotation|flags|default`. annotation: Triton's type, or empty.
// Flags: c constexpr, k const, s do_not_specialize, a do_not_specialize_on_alignment. default: a
// value as below,
// `?` for one that only Python can say, or empty. Then come lines of other kinds: `#` and a hash of
// what is compiled; for each decorator, the outermost first, `@heuristics|names that it sets` or
// `@autotune|key|reset_to_zero|restore_value|flags`, and after the latter `+` and its
// configurations, as `BLOCK=128;num_warps=8`; `>` and facts that are known already. Flags: p it
// prunes, b configurations have a pre_hook, h it has hooks of its own, which are for timing.
//
// A fact is what a decorator made of some arguments: `@heuristics0 n=100 -> BLOCK=128`. The number
// is the decorator's; `@pruned1` has several configurations, with `|` between them; `@tuned1` the
// fastest; `@hook1` what a configuration's pre_hook does: `x.block_shape=(64,128);y.zero=True`. It
// holds where all that stands before the arrow does; `-` is for an argument that is not given.
// Facts of an
// @autotune know also @types, the tensors' dtypes, and @gpu.
//
// A specialization is text too, an item a parameter, with commas: a type, `i32`, `*fp32`, with `:D`
// for what is divisible by 16; `tensordesc<fp16[64,128]>`, with the block's shape; `=` and a value
// for a constant; items in parentheses for a tuple. Values are written as in Python: 1, -1.5,
// 1e+30, nan, True, None, 'percent%20encoded', fp32 (a dtype), @name (a
// @triton.jit function), (1,2).
#pragma once

#include <plait/triton.h>

namespace plait::triton {

struct Parameter {
  std::string name, annotation, fallback;
  bool constant, is_const, unspecialized, unaligned;
};

// Names with values as text.
using Settings = std::vector<std::pair<std::string, std::string>>;
Settings read_settings(std::string_view text);  // `BLOCK=128;num_warps=8`
std::string write_settings(const Settings& settings);
const std::string* find(const Settings& settings, std::string_view name);
std::vector<std::string_view> split(std::string_view text, char at);
std::string quoted(std::string_view text);

// A decorator. names: of @heuristics what it sets, of @autotune its key.
struct Layer {
  bool tunes, prunes, hooked, times_with_hooks;
  std::vector<std::string> names, reset, restore;
  std::vector<Settings> configs;
  bool sets(std::string_view name) const;
};

struct Signature {
  Signature(const std::string& function, const std::string& text);  // throws Error
  bool is_set(std::string_view parameter) const;                    // by a decorator
  std::string function, identity;
  Settings options;
  std::vector<Parameter> parameters;
  std::vector<Layer> layers;
  std::vector<std::string> facts;
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

// What was set of the options, sorted; with what of `chosen` is no parameter. Throws Error if both
// say it.
Settings options_of(const Signature& signature, const Options& options,
                    const Settings& chosen = {});
// Without those that have their defaults, as `num_warps=8;...`.
std::string options_text(const Signature& signature, Settings options);

}  // namespace plait::triton
