// triton_launch/src/specialize.cpp: Triton's rules of specialization (runtime/jit.py and
// specialize.cc of 3.6).
#include "specialize.h"

#include <charconv>
#include <cmath>
#include <map>
#include <mutex>
#include <set>

namespace plait::triton {
namespace {
constexpr const char* kNames[] = {
    "",     "u1",   "i8",   "i16",  "i32",     "i64",   "u8",       "u16",     "u32",     "u64",
    "fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e5", "fp8e4b15", "fp8e4b8", "fp8e5b16"};
constexpr int64_t kMaxBlock = 1 << 20;  // elements
constexpr uint8_t kBytes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 1, 1, 1};
const char* name_of(DType t) {
  return static_cast<size_t>(t) < std::size(kNames) ? kNames[static_cast<size_t>(t)] : "";
}

std::optional<DType> dtype_named(std::string_view name) {
  for (size_t k = 1; k < std::size(kNames); ++k)
    if (name == kNames[k]) return static_cast<DType>(k);
  return std::nullopt;
}
bool is_float(DType t) { return t >= DType::fp16 && t <= DType::fp64; }
bool is_signed(DType t) { return t >= DType::i8 && t <= DType::i64; }

std::string float_text(double v) {
  if (std::isnan(v)) return "nan";
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, v, std::chars_format::general, 17).ptr;
  std::string out(text, end);
  return out.find_first_of(".ein") == out.npos ? out + ".0" : out;
}

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
      count = std::has_single_bit(length) && length <= kMaxBlock
                  ? std::min<size_t>(count * length, kMaxBlock + 1)
                  : kMaxBlock + 1;
      ++n;
    }
    const bool fits = n == rank && count <= kMaxBlock;
    return type.substr(0, type.find('[') + 1) + (fits ? block->substr(1, block->size() - 2) : "") +
           "]>";
  }

  void slot(size_t k, DType to, bool fix, size_t extra_words = 0) const {
    out.slots.push_back({parameter, is_default, static_cast<uint32_t>(k),
                         static_cast<uint32_t>(from.word(k) + extra_words),
                         kBytes[static_cast<size_t>(to)], from.leaf(k).kind, to, fix});
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
              "block's "
              "lengths are powers of two, 1048576 elements at most");
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

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == text.npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string quoted(std::string_view s) {
  constexpr char digits[] = "0123456789ABCDEF";
  std::string out = "'";
  for (const unsigned char c : s) {
    const bool plain =
        (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
        std::string_view("_.-~").find(static_cast<char>(c)) != std::string_view::npos;
    if (plain)
      out += static_cast<char>(c);
    else
      out += {'%', digits[c >> 4], digits[c & 15]};
  }
  return out + "'";
}

Settings read_settings(std::string_view text) {
  Settings found;
  for (const std::string_view item : split(text, ';')) {
    const size_t at = item.find('=');
    if (at != item.npos) found.emplace_back(item.substr(0, at), item.substr(at + 1));
  }
  return found;
}

std::string write_settings(const Settings& settings) {
  std::string text;
  for (const auto& [name, value] : settings) text += (text.empty() ? "" : ";") + name + "=" + value;
  return text;
}

const std::string* find(const Settings& settings, std::string_view name) {
  for (const auto& [known, value] : settings)
    if (known == name) return &value;
  return nullptr;
}

Error::Error(const std::string& what, std::string kernel, std::string specialization, int argument,
             std::string traceback)
    : std::runtime_error("kernel " + kernel + ": " + what +
                         (specialization.empty() ? "" : "\n  specialization: " + specialization) +
                         (traceback.empty() ? "" : "\n" + traceback)),
      kernel(std::move(kernel)),
      specialization(std::move(specialization)),
      traceback(std::move(traceback)),
      argument(argument) {}

bool Layer::sets(std::string_view name) const {
  if (!tunes) return std::find(names.begin(), names.end(), name) != names.end();
  return std::any_of(configs.begin(), configs.end(),
                     [&](const Settings& c) { return find(c, name); });
}

Signature::Signature(const std::string& function, const std::string& text) : function(function) {
  const auto lines = split(text, '\n');
  const auto names = [](std::string_view list) {
    std::vector<std::string> found;
    for (const std::string_view name : split(list, ','))
      if (!name.empty()) found.emplace_back(name);
    return found;
  };
  options = read_settings(lines[0]);
  for (size_t k = 1; k < lines.size(); ++k) {
    if (lines[k].empty()) continue;
    const char first = lines[k][0];
    const std::string_view rest = lines[k].substr(1);
    const auto fields = split(lines[k], '|');
    if (first == '#') {
      identity = rest;
    } else if (first == '>') {
      facts.emplace_back(rest);
    } else if (first == '+' && !layers.empty()) {
      layers.back().configs.push_back(read_settings(rest));
    } else if (fields[0] == "@heuristics" && fields.size() == 2) {
      layers.push_back({false, false, false, false, names(fields[1]), {}, {}, {}});
    } else if (fields[0] == "@autotune" && fields.size() == 5) {
      const auto has = [&](char flag) { return fields[4].find(flag) != std::string_view::npos; };
      layers.push_back({true,
                        has('p'),
                        has('b'),
                        has('h'),
                        names(fields[1]),
                        names(fields[2]),
                        names(fields[3]),
                        {}});
    } else if (fields.size() == 4) {
      const auto has = [&](char flag) { return fields[2].find(flag) != std::string_view::npos; };
      parameters.push_back({std::string(fields[0]), std::string(fields[1]), std::string(fields[3]),
                            has('c'), has('k'), has('s'), has('a')});
    } else {
      throw Error("its signature cannot be read", function);
    }
  }
}

bool Signature::is_set(std::string_view parameter) const {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const Layer& l) { return l.sets(parameter); });
}

Arguments::Arguments(std::span<const Leaf> leaves, const uint8_t* states, const uint64_t* words,
                     std::span<const std::string_view> strings)
    : leaves_(leaves), states_(states), words_(words), strings_(strings) {
  uint32_t word = 0, string = 0;
  for (const Leaf& leaf : leaves) {
    first_word_.push_back(word);
    first_string_.push_back(string);
    word += leaf.n_words();
    string += leaf.has_text();
  }
}

std::string Arguments::value(size_t k, bool pointers) const {
  const uint64_t* word = words_ + first_word_[k];
  if (states_[k] & state::none) return "None";
  switch (leaves_[k].kind) {
    case Kind::pointer:
      if (!pointers) throw std::invalid_argument("a pointer cannot be a constant");
      return "*" + std::string(name_of(state::type_of(states_[k])));
    case Kind::integer:
      return state::type_of(states_[k]) == DType::u64 ? std::to_string(*word)
                                                      : std::to_string(static_cast<int64_t>(*word));
    case Kind::floating: return float_text(std::bit_cast<double>(word[1]));
    case Kind::boolean: return *word ? "True" : "False";
    case Kind::none: return "None";
    case Kind::dtype: return name_of(state::type_of(states_[k]));
    case Kind::string: return quoted(strings_[first_string_[k]]);
    case Kind::function: return "@" + std::string(strings_[first_string_[k]]);
    case Kind::descriptor: {
      if (!pointers) throw std::invalid_argument("a tensor descriptor cannot be a constant");
      std::string lengths;
      int64_t count = 1;
      for (size_t d = 0; d < (*word & 0xff); ++d) {
        const int64_t length = int64_t{1} << (*word >> 8 * (d + 1) & 0xff);
        count *= std::min(length, kMaxBlock + 1);
        if (count > kMaxBlock)
          return "tensordesc<" + std::string(name_of(state::type_of(states_[k]))) + "[]>";
        lengths += (d ? "," : "") + std::to_string(length);
      }
      return "tensordesc<" + std::string(name_of(state::type_of(states_[k]))) + "[" + lengths +
             "]>";
    }
    case Kind::tuple: break;
  }
  std::string out = "(";
  for (size_t j = k + 1; j < next(k); j = next(j))
    out += (j == k + 1 ? "" : ",") + value(j, pointers);
  return out + ")";
}

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
    if (stride(k) * kBytes[static_cast<size_t>(dtype)] % 16 != 0)
      return "its strides are not multiples of 16 bytes";
  if (stride(n - 1) != 1) return "its last stride is not 1";
  const bool is_floating = is_float(dtype) || dtype >= DType::fp8e4nv;
  return nan() && !is_floating ? "only floating-point elements can be padded with nan" : nullptr;
}

// Sets of options by their text; they stay for good.
class OptionSet {
 public:
  std::vector<std::pair<std::string, std::string>> options;
};

const OptionSet* option_set(std::span<const Option> options) {
  static std::mutex mutex;
  static auto* all = new std::map<std::vector<std::pair<std::string, std::string>>, OptionSet>;
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const Option& o : options) pairs.emplace_back(o.name, o.value);
  std::sort(pairs.begin(), pairs.end());
  const std::scoped_lock lock(mutex);
  return &all->try_emplace(pairs, OptionSet{pairs}).first->second;
}

Settings options_of(const Signature& signature, const Options& o, const Settings& chosen) {
  std::map<std::string, std::string> set;
  const auto number = [&](const char* name, int16_t value) {
    if (value >= 0) set[name] = std::to_string(value);
  };
  number("num_warps", o.num_warps);
  number("num_stages", o.num_stages);
  number("num_ctas", o.num_ctas);
  number("maxnreg", o.maxnreg);
  if (o.cooperative) set["launch_cooperative_grid"] = "True";
  if (o.pdl) set["launch_pdl"] = "True";
  if (o.others)
    for (const auto& [name, value] : o.others->options)
      if (!set.try_emplace(name, value).second)
        throw Error("two values for option " + name, signature.function);
  const auto& parameters = signature.parameters;
  for (const auto& [name, value] : chosen) {
    if (std::any_of(parameters.begin(), parameters.end(),
                    [&](const Parameter& p) { return p.name == name; }))
      continue;
    if (name.find('.') != name.npos) continue;  // a parameter's block shape
    if (!set.try_emplace(name, value).second)
      throw Error("option " + name + " is set by a decorator", signature.function);
  }
  return {set.begin(), set.end()};
}

std::string options_text(const Signature& signature, Settings options) {
  std::erase_if(options, [&](const auto& option) {
    const std::string* fallback = find(signature.options, option.first);
    return fallback && *fallback == option.second;
  });
  return write_settings(options);
}

DType detail::dtype_of_dlpack(unsigned code, unsigned bits, unsigned lanes) {
  static constexpr struct {
    unsigned code, bits;
    DType dtype;
  } known[] = {{2, 32, DType::fp32},  {4, 16, DType::bf16},    {2, 16, DType::fp16},
               {2, 64, DType::fp64},  {0, 32, DType::i32},     {0, 64, DType::i64},
               {0, 8, DType::i8},     {0, 16, DType::i16},     {1, 8, DType::u8},
               {1, 16, DType::u16},   {1, 32, DType::u32},     {1, 64, DType::u64},
               {6, 8, DType::u1},     {10, 8, DType::fp8e4nv}, {11, 8, DType::fp8e4b8},
               {12, 8, DType::fp8e5}, {13, 8, DType::fp8e5b16}};
  for (const auto& k : known)
    if (k.code == code && k.bits == bits && lanes == 1) return k.dtype;
  return state::unknown;
}

uint64_t detail::dense_nbytes(int n, const int64_t* shape, const int64_t* strides,
                              size_t itemsize) {
  uint64_t count = 1;
  for (int k = 0; k < n; ++k) count *= static_cast<uint64_t>(shape[k]);
  uint64_t inside = 1;  // elements of the innermost dimensions found so far
  const auto is_next = [&](int k) {
    return shape[k] > 1 && static_cast<uint64_t>(strides[k]) == inside;
  };
  for (int found = 0; strides && count > inside; found = 0) {
    for (int k = 0; k < n && !found; ++k)
      if (is_next(k)) found = k + 1;
    if (!found) return 0;
    inside *= static_cast<uint64_t>(shape[found - 1]);
  }
  return count * itemsize;
}

std::string detail::value_text(std::span<const Leaf> leaves, std::span<const uint64_t> words,
                               std::span<const std::string_view> strings) {
  const uint64_t* values = &words[n_head_words + n_state_words(leaves.size())];
  return Arguments(leaves, reinterpret_cast<const uint8_t*>(&words[n_head_words]), values, strings)
      .value(0);
}

}  // namespace plait::triton
