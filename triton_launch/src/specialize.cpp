// triton_launch/src/specialize.cpp: Triton's rules of specialization (runtime/jit.py and
// specialize.cc of 3.6).
#include "specialize.h"

#include <charconv>
#include <cmath>

namespace plait::triton {
namespace {
bool is_signed(DType t) { return t >= DType::i8 && t <= DType::i64; }

// Leaves and their values, made from text.
struct Literal {
  std::vector<Leaf> leaves;
  std::vector<uint8_t> states;
  std::vector<uint64_t> words;

  template <class T>
  void add(const T& value) {
    detail::Frame<T> frame(value);
    leaves.insert(leaves.end(), frame.leaves.begin(), frame.leaves.end());
    const auto* bytes = reinterpret_cast<const uint8_t*>(&frame.words[detail::n_head_words]);
    states.insert(states.end(), bytes, bytes + frame.leaves.size());
    words.insert(words.end(), frame.words.begin() + frame.first_value, frame.words.end());
  }

  // Reads one value from the front of the text; false if it is none that a launch could take.
  bool read(std::string_view& text) {
    if (text.starts_with("(")) {
      const size_t at = leaves.size();
      add(std::tuple<>());
      text.remove_prefix(1);
      while (!text.empty() && text[0] != ')') {
        if (!read(text)) return false;
        if (text.starts_with(",")) text.remove_prefix(1);
      }
      if (text.empty()) return false;
      text.remove_prefix(1);
      leaves[at].n_inside = static_cast<uint16_t>(leaves.size() - at - 1);
      return true;
    }
    const std::string_view word = text.substr(0, text.find_first_of(",)"));
    text.remove_prefix(word.size());
    if (word == "None") return add(std::nullopt), true;
    if (word == "True" || word == "False") return add(word == "True"), true;
    const auto number = [&](auto value) {
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      const bool all = error == std::errc() && end == word.data() + word.size();
      if (all) add(value);
      return all;
    };
    return number(int64_t{}) || number(uint64_t{}) || number(double{});
  }
};

struct Rules {
  std::string annotation;
  bool constant = false, is_const = false, specialize = true, align = true;
};
Rules rules_of(const Parameter& p) {
  Rules r{p.annotation, p.constant, p.is_const, !p.unspecialized, !p.unaligned};
  // An annotated bool or float is never specialized.
  if (r.annotation == "u1" || r.annotation.starts_with("fp") || r.annotation.starts_with("bf"))
    r.specialize = false;
  return r;
}

// One parameter's part of a specialization.
struct Item {
  const Signature& signature;
  const Arguments& from;
  int parameter;
  bool is_default;
  Specialization& out;
  const std::string* block = nullptr;  // of a descriptor, if a hook set it

  [[noreturn]] void refuse(const std::string& why) const {
    const std::string& name = signature.parameters[static_cast<size_t>(parameter)].name;
    throw Error("argument " + std::to_string(parameter) + " (" + name + "): " + why,
                signature.function, out.text, parameter);
  }

  void constant(size_t k) const {
    try {
      out.text += "=" + from.value(k);
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    }
  }

  // A descriptor's type with the block that a hook set.
  std::string with_block(const std::string& type, size_t rank) const {
    if (!block) return type;
    size_t n = 0, count = 1;
    for (const std::string_view one :
         split(std::string_view(*block).substr(1, block->size() - 2), ',')) {
      size_t length = 0;
      std::from_chars(one.data(), one.data() + one.size(), length);
      count = std::has_single_bit(length) && length <= max_block
                  ? std::min<size_t>(count * length, max_block + 1)
                  : max_block + 1;
      ++n;
    }
    const bool fits = n == rank && count <= max_block;
    return type.substr(0, type.find('[') + 1) + (fits ? block->substr(1, block->size() - 2) : "") +
           "]>";
  }

  void slot(size_t k, DType to, bool fix, size_t extra_words = 0) const {
    out.slots.push_back({parameter, is_default, static_cast<uint32_t>(k),
                         static_cast<uint32_t>(from.word(k) + extra_words), itemsize_of(to),
                         from.leaf(k).kind, to, fix});
  }

  void add(size_t k, const Rules& rules) const {
    const Leaf& leaf = from.leaf(k);
    const uint8_t state = from.state(k);
    const std::string& annotation = rules.annotation;
    if (rules.constant || (annotation.empty() && (leaf.constant || state & state::none)))
      return constant(k);
    const bool divisible = rules.specialize && rules.align && state & state::aligned;
    const auto type = [&](const std::string& inferred, bool attributes) {
      out.text += annotation.empty() ? inferred : annotation;
      if (attributes && divisible) out.text += ":D";
    };
    const bool to_pointer = annotation.starts_with("*");
    const DType to = dtype_named(annotation).value_or(DType::u64);
    if (state & state::none) {  // a null pointer
      if (!to_pointer) refuse("None for a parameter annotated " + annotation);
      return type("", true), slot(k, DType::u64, false);
    }
    switch (leaf.kind) {
      case Kind::pointer:
        if (!annotation.empty() && !to_pointer)
          refuse("a pointer for a parameter annotated " + annotation);
        type((rules.is_const ? "*k" : "*") + std::string(name_of(state::type_of(state))), true);
        return slot(k, DType::u64, false);
      case Kind::integer: {
        if (annotation.empty() && rules.specialize && state & state::one) return constant(k);
        const DType found = state::type_of(state);
        type(name_of(found), true);
        return slot(k, annotation.empty() ? found : to, !annotation.empty() && !to_pointer);
      }
      case Kind::boolean:
        if (to_pointer) refuse("a bool for a parameter annotated " + annotation);
        type("u1", false);
        return slot(k, annotation.empty() ? DType::u1 : to, is_float(to));
      case Kind::floating:
        if (!annotation.empty() && !is_float(to))
          refuse("a float for a parameter annotated " + annotation);
        type("fp32", false);
        return slot(k, annotation.empty() ? DType::fp32 : to,
                    to == DType::fp16 || to == DType::bf16, to == DType::fp64);
      case Kind::tuple:
        if (!annotation.empty()) refuse("a tuple for a parameter annotated " + annotation);
        out.text += "(";
        for (size_t j = k + 1; j < from.next(k); j = from.next(j)) {
          if (j != k + 1) out.text += ",";
          if (from.leaf(j).kind == Kind::descriptor) refuse("a tensor descriptor in a tuple");
          add(j, Rules());
        }
        out.text += ")";
        return;
      case Kind::descriptor:
        if (!annotation.empty())
          refuse("a tensor descriptor for a parameter annotated " + annotation);
        type(with_block(from.value(k, true), from.descriptor_rank(k)), false);
        if (out.text.ends_with("[]>"))
          refuse(
              "a descriptor's shape, strides and block shape have the same 1 to 5 dimensions, a "
              "block's lengths are powers of two, 1048576 elements at most");
        return slot(k, state::type_of(state), false);
      case Kind::none:
      case Kind::dtype:
      case Kind::string:
      case Kind::function:
        refuse("a string, dtype or function is passed only to a tl.constexpr parameter");
    }
  }
};

// IEEE half of a double, rounded to the nearest, ties to even.
uint16_t half_of(double v) {
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  v = std::fabs(v);
  if (v == 0) return sign;
  if (std::isnan(v)) return sign | 0x7e00;
  if (v >= 65520) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(v, &exponent);
  const int unit = std::max(exponent - 11, -24);  // of the last place
  const auto steps = static_cast<uint16_t>(std::nearbyint(std::ldexp(v, -unit)));
  // Counted from 2^-24, halves with one exponent are 1024 steps; what rounds up carries into the
  // next.
  return static_cast<uint16_t>(sign | (((unit + 24) << 10) + steps));
}

void count_words(Binding& b) {
  b.n_compared = b.mask.size();
  while (b.n_compared > 0 && b.mask[b.n_compared - 1] == 0) --b.n_compared;
}

void mark(std::span<const Leaf> leaves, size_t k, const Rules& rules, uint8_t* states,
          uint64_t* words, const std::vector<size_t>& first_word) {
  const Leaf& leaf = leaves[k];
  const bool constant = rules.constant || (leaf.constant && rules.annotation.empty());
  uint8_t mask = 0xff;
  if (!constant) {
    // Of memory the type counts even so: it may be one that cannot be passed.
    if (!rules.annotation.empty() && leaf.kind != Kind::pointer)
      mask = state::none | state::aligned;
    if (!rules.specialize) mask &= static_cast<uint8_t>(~(state::one | state::aligned));
    if (!rules.align) mask &= static_cast<uint8_t>(~state::aligned);
  }
  states[k] = mask;
  if (leaf.kind == Kind::descriptor) words[first_word[k]] = ~uint64_t{0};  // its type
  for (size_t w = 0; constant && w < leaf.n_words(); ++w) words[first_word[k] + w] = ~uint64_t{0};
  Rules inside;
  inside.constant = constant;
  for (size_t j = k + 1; j < k + 1 + leaf.n_inside; j += 1 + leaves[j].n_inside)
    mark(leaves, j, inside, states, words, first_word);
}
}  // namespace

Binding bind(const Signature& signature, std::span<const Leaf> leaves) {
  const std::vector<Parameter>& parameters = signature.parameters;
  Binding b;
  b.sources.assign(parameters.size(), -1);
  std::vector<size_t> first_word;
  size_t n_words = 0;
  for (const Leaf& leaf : leaves) {
    first_word.push_back(n_words);
    n_words += leaf.n_words();
  }
  const size_t n_states = detail::n_state_words(leaves.size());
  b.mask.assign(n_states + n_words, 0);
  auto* states = reinterpret_cast<uint8_t*>(b.mask.data());
  size_t position = 0;
  for (size_t k = 0; k < leaves.size(); k += 1 + leaves[k].n_inside) {
    size_t p = position++;
    if (leaves[k].name) {
      for (p = 0; p < parameters.size() && parameters[p].name != leaves[k].name;) ++p;
      if (p == parameters.size())
        throw Error(std::string("there is no parameter ") + leaves[k].name, signature.function);
    }
    if (p >= parameters.size())
      throw Error("it takes " + std::to_string(parameters.size()) + " arguments",
                  signature.function);
    if (b.sources[p] != -1)
      throw Error("two values for argument " + std::to_string(p) + " (" + parameters[p].name + ")",
                  signature.function, "", static_cast<int>(p));
    if (signature.is_set(parameters[p].name))
      throw Error(
          "argument " + std::to_string(p) + " (" + parameters[p].name + ") is set by a decorator",
          signature.function, "", static_cast<int>(p));
    b.sources[p] = static_cast<int>(k);
    mark(leaves, k, rules_of(parameters[p]), states, b.mask.data() + n_states, first_word);
  }
  for (size_t p = 0; p < parameters.size(); ++p)
    if (b.sources[p] == -1 && parameters[p].fallback.empty() &&
        !signature.is_set(parameters[p].name))
      throw Error("argument " + std::to_string(p) + " (" + parameters[p].name + ") is missing",
                  signature.function, "", static_cast<int>(p));
  for (size_t k = 0; k < leaves.size() && !signature.layers.empty(); ++k)
    states[k] |= state::type | state::none;  // decorators know a tensor's dtype
  count_words(b);
  return b;
}

void widen(Binding& b, const Signature& signature, std::span<const Leaf> leaves,
           std::span<const std::string> names) {
  auto* states = reinterpret_cast<uint8_t*>(b.mask.data());
  size_t word = detail::n_state_words(leaves.size()), end = 0;
  for (size_t k = 0, p = 0; k < leaves.size(); word += leaves[k++].n_words()) {
    if (k >= end) {
      end = k + 1 + leaves[k].n_inside;
      p = static_cast<size_t>(std::find(b.sources.begin(), b.sources.end(), static_cast<int>(k)) -
                              b.sources.begin());
    }
    if (std::find(names.begin(), names.end(), signature.parameters[p].name) == names.end())
      continue;
    states[k] = 0xff;
    const bool is_memory = leaves[k].kind == Kind::pointer || leaves[k].kind == Kind::descriptor;
    for (size_t w = 0; !is_memory && w < leaves[k].n_words(); ++w) b.mask[word + w] = ~uint64_t{0};
  }
  count_words(b);
}

Specialization specialize(const Signature& signature, const Binding& binding, const Arguments& call,
                          const Settings& chosen) {
  Specialization out;
  for (size_t p = 0; p < signature.parameters.size(); ++p) {
    const Parameter& parameter = signature.parameters[p];
    if (p) out.text += ",";
    const int source = binding.sources[p], index = static_cast<int>(p);
    const std::string* set = find(chosen, parameter.name);
    const std::string& fallback = set ? *set : parameter.fallback;
    if (source >= 0) {
      Item{signature, call, index, false, out, find(chosen, parameter.name + ".block_shape")}.add(
          static_cast<size_t>(source), rules_of(parameter));
    } else if (fallback.empty()) {
      throw Error("argument " + std::to_string(p) + " (" + parameter.name + ") is missing",
                  signature.function, out.text, index);
    } else if (parameter.constant) {
      out.text += "=" + fallback;
    } else {
      Literal values;
      std::string_view text = fallback;
      const bool known = values.read(text);
      const Arguments from(values.leaves, values.states.data(), values.words.data(), {});
      const Item item{signature, from, index, true, out};
      if (!known) item.refuse("its default " + fallback + " cannot be passed to a kernel");
      const size_t before = out.slots.size();
      item.add(0, rules_of(parameter));
      for (size_t k = before; k < out.slots.size(); ++k) {
        Slot& slot = out.slots[k];
        fix(slot, signature, values.states[slot.leaf], &values.words[slot.word]);
        slot.word += static_cast<uint32_t>(out.defaults.size());
      }
      out.defaults.insert(out.defaults.end(), values.words.begin(), values.words.end());
    }
  }
  return out;
}

void fix(const Slot& slot, const Signature& signature, uint8_t state, uint64_t* word) {
  if (!slot.fix) return;
  const bool is_unsigned = state::type_of(state) == DType::u64;
  double v = 0;
  if (slot.from == Kind::floating) {
    v = std::bit_cast<double>(word[1]);
  } else {
    const auto whole = static_cast<int64_t>(*word);
    if (is_signed(slot.to)) {
      const int64_t most = std::numeric_limits<int64_t>::max() >> (64 - 8 * slot.nbytes);
      if (is_unsigned || whole > most || whole < -most - 1) {
        const Parameter& p = signature.parameters[static_cast<size_t>(slot.parameter)];
        throw Error("argument " + std::to_string(slot.parameter) + " (" + p.name +
                        "): a value that is annotated " + p.annotation + " does not fit",
                    signature.function, "", slot.parameter);
      }
    }
    v = is_unsigned ? static_cast<double>(*word) : static_cast<double>(whole);
  }
  const auto single = std::bit_cast<uint32_t>(static_cast<float>(v));
  if (slot.to == DType::fp16) *word = half_of(v);
  if (slot.to == DType::bf16) *word = single >> 16;  // cut off, as Triton's launcher does
  if (slot.to == DType::fp32) *word = single;
  if (slot.to == DType::fp64) *word = std::bit_cast<uint64_t>(v);
}

}  // namespace plait::triton
