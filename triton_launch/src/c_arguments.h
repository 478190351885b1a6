// triton_launch/src/c_arguments.h: the arguments of plait/triton_c.h as leaves and words of
// plait/triton.h. What a template is there, a list of types at one place of the program, is a Shape
// here: found by comparing.
#pragma once

#include <cstring>
#include <deque>

#include "plait/triton.h"
#include "plait/triton_c.h"

namespace plait::triton::c {
using Given = std::span<const plait_triton_argument>;

static_assert(sizeof(plait_triton_argument) == 32 && sizeof(plait_triton_config) == 72 &&
              sizeof(plait_triton_descriptor) == 136);
static_assert(PLAIT_TRITON_FP8E5B16 == static_cast<int>(DType::fp8e5b16));

// The call of a function of the interface is wrong.
struct Invalid : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
inline void need(bool right, const char* what) {
  if (!right) [[unlikely]]
    throw Invalid(what);
}

inline Kind kind_of(uint8_t kind) {
  switch (kind) {
    case PLAIT_TRITON_NONE: return Kind::none;
    case PLAIT_TRITON_POINTER: return Kind::pointer;
    case PLAIT_TRITON_INTEGER:
    case PLAIT_TRITON_NATURAL: return Kind::integer;
    case PLAIT_TRITON_NUMBER: return Kind::floating;
    case PLAIT_TRITON_BOOLEAN: return Kind::boolean;
    case PLAIT_TRITON_DTYPE: return Kind::dtype;
    case PLAIT_TRITON_STRING: return Kind::string;
    case PLAIT_TRITON_FUNCTION: return Kind::function;
    case PLAIT_TRITON_TUPLE: return Kind::tuple;
    case PLAIT_TRITON_DESCRIPTOR: return Kind::descriptor;
  }
  throw Invalid("an argument is of no known kind");
}

inline DType dtype_of(uint8_t dtype) {
  need(dtype >= PLAIT_TRITON_U1 && dtype <= PLAIT_TRITON_FP8E5B16,
       "an argument has no known dtype");
  return static_cast<DType>(dtype);
}

inline TensorDescriptor descriptor_of(const plait_triton_descriptor* d) {
  static constexpr uint8_t zeros[sizeof d->reserved] = {};
  need(d && d->rank <= Extents::max_rank && d->nan <= 1 &&
           std::memcmp(d->reserved, zeros, sizeof zeros) == 0,
       "a descriptor is NULL, or has a field that means nothing");
  return {d->base,
          dtype_of(d->dtype),
          {d->shape, d->rank},
          {d->strides, d->rank},
          {d->block_shape, d->rank},
          d->nan ? Padding::nan : Padding::zero};
}

// By value: a Writer whose address is known lives in memory, and each argument would wait for the
// one before.
inline Writer put(Writer w, const plait_triton_argument& a) {
  switch (a.kind) {
    case PLAIT_TRITON_NONE: Traits<std::nullopt_t>::write(w, std::nullopt); break;
    case PLAIT_TRITON_POINTER:
      Traits<Pointer>::write(w, {a.value.pointer, dtype_of(a.dtype)});
      break;
    case PLAIT_TRITON_INTEGER: Traits<int64_t>::write(w, a.value.integer); break;
    case PLAIT_TRITON_NATURAL: Traits<uint64_t>::write(w, a.value.natural); break;
    case PLAIT_TRITON_NUMBER: Traits<double>::write(w, a.value.number); break;
    case PLAIT_TRITON_BOOLEAN: Traits<bool>::write(w, a.value.integer != 0); break;
    case PLAIT_TRITON_DTYPE: Traits<DType>::write(w, dtype_of(a.dtype)); break;
    case PLAIT_TRITON_STRING:
    case PLAIT_TRITON_FUNCTION:
      need(a.value.string || a.n == 0, "an argument's text is NULL");
      Traits<std::string_view>::write(w, {a.value.string, a.n});
      break;
    case PLAIT_TRITON_DESCRIPTOR:
      Traits<TensorDescriptor>::write(w, descriptor_of(a.value.descriptor));
      break;
    default: Traits<std::tuple<>>::write(w, {});  // its elements follow
  }
  return w;
}

// The 8 bytes before an argument's name; all but its dtype are of its kind.
inline constexpr uint64_t kHead = ~uint64_t{0xff00};
inline uint64_t head_of(const plait_triton_argument& a) {
  uint64_t head;
  std::memcpy(&head, &a, sizeof head);
  return head;
}

inline bool is_named(const char* a, const char* b) {
  return a == b || (a && b && std::strcmp(a, b) == 0);
}

// The kinds of one list of arguments, and what was launched with them. They are never freed.
struct Shape {
  explicit Shape(Given arguments) {
    std::vector<size_t> ends;  // of the tuples that an argument is in
    for (size_t k = 0; k < arguments.size(); ++k) {
      while (!ends.empty() && ends.back() == k) ends.pop_back();
      const plait_triton_argument& a = arguments[k];
      Leaf leaf{kind_of(a.kind), a.constant != 0 || a.kind == PLAIT_TRITON_FUNCTION, a.varies != 0};
      need(a.constant <= 1 && a.varies <= 1 && (head_of(a) >> 32) == 0,
           "an argument has a field that means nothing");
      need(a.name == nullptr || ends.empty(), "an argument inside a tuple has a name");
      if (a.name) leaf.name = names.emplace_back(a.name).c_str();
      if (leaf.kind == Kind::tuple) {
        need(a.n < (ends.empty() ? arguments.size() : ends.back()) - k,
             "a tuple has more elements than follow it");
        leaf.n_inside = static_cast<uint16_t>(a.n);
        ends.push_back(k + 1 + a.n);
      }
      heads.push_back(head_of(a) & kHead);
      n_values += leaf.n_words();
      n_strings += leaf.has_text();
      leaves.push_back(leaf);
    }
  }

  // Writes what they are; false if they are not of these kinds.
  bool write(Given arguments, const Writer& to) const {
    if (arguments.size() != heads.size()) return false;
    uint64_t* words = to.words;
    std::string_view* strings = to.strings;
    // What is written could be these pointers, for all the compiler knows.
    const uint64_t* const known = heads.data();
    const Leaf* const leaf = leaves.data();
    for (size_t k = 0; k < arguments.size(); ++k) {
      const plait_triton_argument& a = arguments[k];
      Writer w{to.states + k, words, strings};
      if ((head_of(a) & kHead) != known[k] || !is_named(a.name, leaf[k].name)) return false;
      if (a.kind == PLAIT_TRITON_POINTER)  // these two here: 2 ns less for each
        Traits<Pointer>::write(w, {a.value.pointer, dtype_of(a.dtype)});
      else if (a.kind == PLAIT_TRITON_INTEGER)
        Traits<int64_t>::write(w, a.value.integer);
      else if (a.kind != PLAIT_TRITON_TUPLE || a.n == leaf[k].n_inside)
        strings = (w = put(w, a)).strings;
      else
        return false;
      words = w.words;
    }
    return true;
  }

  std::vector<uint64_t> heads;
  std::deque<std::string> names;
  std::vector<Leaf> leaves;
  size_t n_values = 0, n_strings = 0;
  detail::Sites sites;
  Shape* next = nullptr;
};

}  // namespace plait::triton::c
