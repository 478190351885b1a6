// triton_launch/tests/native_specialize.cpp: a shared library that specializes arguments which a
// Python test describes.
//
// An argument is a line "TYPE VALUE"; "const " before it makes a constant, "NAME=" a keyword
// argument; a tuple is "(", its elements, ")". The answer: the specialization, a newline, the key's
// words in hex. Or "error: " and why not.
#include <cstdlib>
#include <iterator>
#include <sstream>

#include "../src/specialize.h"

using namespace plait::triton;

namespace {
struct Dynamic {
  std::vector<Leaf> leaves;
  std::vector<uint8_t> states;
  std::vector<uint64_t> words;
  std::vector<std::string_view> strings;

  template <class T>
  void add(const T& value) {
    detail::Frame<T> frame(value);
    leaves.insert(leaves.end(), frame.leaves.begin(), frame.leaves.end());
    const auto* bytes = reinterpret_cast<const uint8_t*>(&frame.words[detail::n_head_words]);
    states.insert(states.end(), bytes, bytes + frame.leaves.size());
    words.insert(words.end(), frame.words.begin() + frame.first_value, frame.words.end());
    strings.insert(strings.end(), frame.strings.begin(), frame.strings.end());
  }
};

// What dlpack.h declares.
struct Tensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

template <class T>
T parsed(const std::string& value) {
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(std::strtod(value.c_str(), nullptr));
  else if constexpr (std::is_signed_v<T>)
    return static_cast<T>(std::strtoll(value.c_str(), nullptr, 0));
  else
    return static_cast<T>(std::strtoull(value.c_str(), nullptr, 0));
}

void read(std::istream& in, Dynamic& out, std::string_view until) {
  static std::vector<std::string> names;
  static std::vector<std::unique_ptr<std::string>> texts;
  for (std::string type; in >> type && type != until;) {
    const size_t at = out.leaves.size();
    const bool constant = type == "const";
    if (constant) in >> type;
    const char* name = nullptr;
    if (type.back() == '=') {
      texts.push_back(std::make_unique<std::string>(type.substr(0, type.size() - 1)));
      name = texts.back()->c_str();
      in >> type;
    }
    if (type == "(") {
      out.add(std::tuple<>());
      read(in, out, ")");
      out.leaves[at].n_inside = static_cast<uint16_t>(out.leaves.size() - at - 1);
    } else {
      std::string v;
      in >> v;
      if (type == "i8")
        out.add(parsed<int8_t>(v));
      else if (type == "i16")
        out.add(parsed<int16_t>(v));
      else if (type == "i32")
        out.add(parsed<int32_t>(v));
      else if (type == "i64")
        out.add(parsed<int64_t>(v));
      else if (type == "u8")
        out.add(parsed<uint8_t>(v));
      else if (type == "u16")
        out.add(parsed<uint16_t>(v));
      else if (type == "u32")
        out.add(parsed<uint32_t>(v));
      else if (type == "u64")
        out.add(parsed<uint64_t>(v));
      else if (type == "f32")
        out.add(parsed<float>(v));
      else if (type == "f64")
        out.add(parsed<double>(v));
      else if (type == "bool")
        out.add(v == "1");
      else if (type == "none")
        out.add(nullptr);
      else if (type == "maybe")
        out.add(v == "none" ? std::optional<int64_t>() : parsed<int64_t>(v));
      else if (type == "dtype")
        out.add(static_cast<DType>(parsed<int>(v)));
      else if (type == "str") {
        texts.push_back(std::make_unique<std::string>(v == "-" ? "" : v));
        out.add(std::string_view(*texts.back()));
      } else if (type == "callee")
        out.add(Callee{"twice"});
      else if (type == "desc") {  // dtype, block's lengths with x between them
        std::vector<int64_t> block;
        std::string lengths, length;
        in >> lengths;
        for (std::istringstream all(lengths); std::getline(all, length, 'x');)
          block.push_back(std::stoll(length));
        const std::vector<int64_t> shape(block.size(), 64);
        out.add(TensorDescriptor{nullptr, static_cast<DType>(parsed<int>(v)), shape, shape, block});
      } else if (type == "float*")
        out.add(reinterpret_cast<float*>(parsed<uintptr_t>(v)));
      else if (type == "int64*")
        out.add(reinterpret_cast<const int64_t*>(parsed<uintptr_t>(v)));
      else if (type == "bool*")
        out.add(reinterpret_cast<const bool*>(parsed<uintptr_t>(v)));
      else if (type == "bf16*")
        out.add(Pointer{reinterpret_cast<void*>(parsed<uintptr_t>(v)), DType::bf16});
      else if (type == "dlpack") {  // code, bits; with half of the address as an offset
        const uintptr_t address = parsed<uintptr_t>(v);
        int code, bits;
        in >> code >> bits;
        out.add(Tensor{reinterpret_cast<void*>(address / 2),
                       {2, 0},
                       0,
                       {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1},
                       nullptr,
                       nullptr,
                       address - address / 2});
      } else
        throw std::invalid_argument("no type " + type);
    }
    for (size_t k = at; constant && k < out.leaves.size(); ++k) out.leaves[k].constant = true;
    out.leaves[at].name = name;
  }
}
}  // namespace

extern "C" const char* plait_specialize(const char* signature_text, const char* arguments) {
  static std::string answer;
  try {
    const Signature signature("f", signature_text);
    Dynamic call;
    std::istringstream in(arguments);
    read(in, call, "");
    const Binding binding = bind(signature, call.leaves);
    answer = specialize(signature, binding,
                        Arguments(call.leaves, call.states.data(), call.words.data(), call.strings))
                 .text;
    std::vector<uint64_t> words(detail::n_state_words(call.leaves.size()));
    std::copy(call.states.begin(), call.states.end(), reinterpret_cast<uint8_t*>(words.data()));
    words.insert(words.end(), call.words.begin(), call.words.end());
    std::ostringstream key;
    for (size_t k = 0; k < binding.n_compared; ++k)
      key << ' ' << std::hex << (words[k] & binding.mask[k]);
    for (const std::string_view s : call.strings) key << " '" << s << "'";
    answer += "\n" + key.str();
  } catch (const std::exception& error) {
    answer = std::string("error: ") + error.what();
  }
  return answer.c_str();
}

// The word that a launch takes for `value` (an f64, or an i64) given to a parameter annotated as a
// float.
extern "C" uint64_t plait_fixed(const char* signature_text, double real, int64_t whole,
                                bool is_whole) {
  const Signature signature("f", signature_text);
  Dynamic call;
  is_whole ? call.add(whole) : call.add(real);
  const Binding binding = bind(signature, call.leaves);
  const Slot slot = specialize(signature, binding,
                               Arguments(call.leaves, call.states.data(), call.words.data(), {}))
                        .slots[0];
  fix(slot, signature, call.states[0], &call.words[slot.word]);
  return call.words[slot.word];
}
