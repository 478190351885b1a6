// triton_launch/src/signature.h: what a function and its decorators say of its calls.
//
// A signature comes as text: a line of options and their defaults, `num_ctas=1;num_warps=4`, then a
// line for each parameter, `name|annotation|flags|default`. annotation: Triton's type, or empty.
// Flags: c constexpr, k const, s do_not_specialize, a do_not_specialize_on_alignment. default: a
// value (arguments.h), `?` for one that only Python can say, or empty. Then come lines of other
// kinds: `#` and a hash of what is compiled; for each decorator, the outermost first,
// `@heuristics|names that it sets` or
// `@autotune|key|reset_to_zero|restore_value|flags`, and after the latter `+` and its
// configurations, as `BLOCK=128;num_warps=8`; `>` and facts that are known already. Flags: p it
// prunes, b configurations have a pre_hook, h it has hooks of its own, which are for timing.
//
// A fact is what a decorator made of some arguments: `@heuristics0 n=100 -> BLOCK=128`. The number
// is the decorator's; `@pruned1` has several configurations, with `|` between them; `@tuned1` the
// fastest; `@hook1` what a configuration's pre_hook does: `x.block_shape=(64,128);y.zero=True`. It
// holds where all that stands before the arrow does; `-` is for an argument that is not given.
// Facts of an @autotune know also @types, the tensors' dtypes, and @gpu.
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

// What was set of the options, sorted; with what of `chosen` is no parameter. Throws Error if both
// say it.
Settings options_of(const Signature& signature, const Options& options,
                    const Settings& chosen = {});
// Without those that have their defaults, as `num_warps=8;...`.
std::string options_text(const Signature& signature, Settings options);

}  // namespace plait::triton
