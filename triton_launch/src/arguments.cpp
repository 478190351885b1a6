// triton_launch/src/arguments.cpp: values as text, and what tensors of others say of themselves.
#include "arguments.h"

#include <charconv>
#include <cmath>

namespace plait::triton {
namespace {
constexpr const char* kNames[] = {
    "",     "u1",   "i8",   "i16",  "i32",     "i64",   "u8",       "u16",     "u32",     "u64",
    "fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e5", "fp8e4b15", "fp8e4b8", "fp8e5b16"};
constexpr uint8_t kBytes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 1, 1, 1};

std::string float_text(double v) {
  if (std::isnan(v)) return "nan";
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, v, std::chars_format::general, 17).ptr;
  std::string out(text, end);
  return out.find_first_of(".ein") == out.npos ? out + ".0" : out;
}
}  // namespace

const char* name_of(DType t) {
  return static_cast<size_t>(t) < std::size(kNames) ? kNames[static_cast<size_t>(t)] : "";
}

std::optional<DType> dtype_named(std::string_view name) {
  for (size_t k = 1; k < std::size(kNames); ++k)
    if (name == kNames[k]) return static_cast<DType>(k);
  return std::nullopt;
}

uint8_t itemsize_of(DType type) { return kBytes[static_cast<size_t>(type)]; }

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
        count *= std::min(length, max_block + 1);
        if (count > max_block)
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
