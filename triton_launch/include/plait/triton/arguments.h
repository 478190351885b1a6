// plait/triton/arguments.h: what C++ may pass to a Triton kernel, and what becomes of it.
//
// Each argument becomes one leaf, a tuple one more and those of its elements. What the types say is
// a table made at compile time (Leaf); what values say is one byte a leaf (type, "is 1", "divisible
// by 16", "is None") and the value in 8-byte words, which are what a launch hands to the driver. A
// tensor descriptor has a word for its type and one for each of its fields.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "plait/errors.h"

namespace plait::triton {

enum class DType : uint8_t {
  u1 = 1,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  fp16,
  bf16,
  fp32,
  fp64,
  fp8e4nv,
  fp8e5,
  fp8e4b15,
  fp8e4b8,
  fp8e5b16,
};

// The element type that a pointer to T has for Triton. Specialize it for types of your own.
template <class T>
inline constexpr auto dtype_of = nullptr;
template <>
inline constexpr DType dtype_of<bool> = DType::u1;
template <>
inline constexpr DType dtype_of<float> = DType::fp32;
template <>
inline constexpr DType dtype_of<double> = DType::fp64;
template <std::integral T>
  requires(!std::same_as<T, bool>)
inline constexpr DType dtype_of<T> = static_cast<DType>(
    static_cast<int>(std::is_signed_v<T> ? DType::i8 : DType::u8) + std::countr_zero(sizeof(T)));

// Device memory whose element type is known at run time only. nbytes: its length, which
// @triton.autotune wants of tensors that it resets or restores; 0: unknown.
struct Pointer {
  const void* data;
  DType dtype;
  uint64_t nbytes = 0;
};

// Up to five numbers; more of them are an error of the call.
struct Extents {
  static constexpr size_t max_rank = 5;
  Extents(std::initializer_list<int64_t> v) : Extents(v.begin(), v.size()) {}
  template <std::ranges::contiguous_range R>
  Extents(const R& v) : Extents(std::ranges::data(v), std::ranges::size(v)) {}
  template <std::integral T>
  Extents(const T* v, size_t n) : rank(static_cast<uint8_t>(std::min<size_t>(n, 0xff))) {
    for (size_t k = 0; k < std::min(n, max_rank); ++k) at[k] = static_cast<int64_t>(v[k]);
  }
  std::array<int64_t, max_rank> at{};
  uint8_t rank;
};

enum class Padding : uint8_t { zero, nan };

// What Python calls triton.tools.tensor_descriptor.TensorDescriptor. Strides count elements.
struct TensorDescriptor {
  const void* base;
  DType dtype;
  Extents shape, strides, block_shape;
  Padding padding = Padding::zero;
};

// Another @triton.jit function, by the name that it has in the kernel's file: always a constant.
struct Callee {
  std::string_view name;
};

// A value that is a constant of the compiled kernel, whatever the signature says of its parameter.
template <class T>
struct Constant {
  T value;
};

// An argument of Kernel::prepare that stands for all values that make another kernel: 1, multiples
// of 16, others; aligned memory, other memory.
template <class T>
struct Varying {
  const T& value;
};

enum class Kind : uint8_t {
  pointer,
  integer,
  floating,
  boolean,
  none,
  dtype,
  string,
  function,
  tuple,
  descriptor
};

// What is known of an argument when its call is compiled.
struct Leaf {
  Kind kind;
  bool constant = false;       // made by constexpr_
  bool varies = false;         // made by vary
  uint16_t n_inside = 0;       // of a tuple: leaves that follow and belong to it
  const char* name = nullptr;  // of a keyword argument
  constexpr uint16_t n_words() const {
    switch (kind) {
      case Kind::tuple: return 0;
      case Kind::floating: return 2;  // as fp32, as fp64
      case Kind::descriptor:
        return 3 + 2 * Extents::max_rank;  // type, base, shape, strides, padding
      default: return 1;
    }
  }
  constexpr bool has_text() const { return kind == Kind::string || kind == Kind::function; }
};

// What is known of a leaf when it is called, in one byte. What cannot be passed is written all the
// same: the call that meets it first says which argument it is.
namespace state {
inline constexpr DType unknown{0}, not_on_gpu{31};  // what a pointer's or dtype's type is then
inline constexpr uint8_t aligned = 1, one = 2, none = 0x80, type = 0x7c;
constexpr uint8_t of(DType t) { return static_cast<uint8_t>(static_cast<int>(t) << 2); }
constexpr DType type_of(uint8_t byte) { return static_cast<DType>((byte & type) >> 2); }
}  // namespace state

// Where the leaves of a call are written to.
struct Writer {
  uint8_t* states;
  uint64_t* words;
  std::string_view* strings;
  void put(uint8_t byte, uint64_t word) {
    *states++ = byte;
    *words++ = word;
  }
};

// How a type is passed: its leaves, `write`, and perhaps `nbytes` as Pointer has it. Specialize it
// for types of your own.
template <class T>
struct Traits {
  static_assert(sizeof(T) == 0,
                "plait::triton cannot pass this type to a kernel: specialize Traits for it");
  // So that nothing else is said of it.
  static constexpr std::array<Leaf, 1> leaves{};
  static void write(Writer&, const T&) {}
};

template <class T>
using TraitsOf = Traits<std::remove_cvref_t<T>>;

namespace detail {
template <class... A>
consteval auto concatenate(const A&... arrays) {
  std::array<Leaf, (0 + ... + std::tuple_size_v<A>)> all{};
  [[maybe_unused]] size_t at = 0;
  ((std::copy(arrays.begin(), arrays.end(), all.begin() + at), at += arrays.size()), ...);
  return all;
}
template <Kind K>
struct One {
  static constexpr std::array<Leaf, 1> leaves{Leaf{K}};
};
inline uint64_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
inline void put_pointer(Writer& w, const void* p, DType t) {
  const uint64_t a = address(p);
  w.put(state::of(t) | (a % 16 == 0 ? state::aligned : 0), a);
}
// Also what dlpack.h declares, and anything that has its fields.
template <class T>
concept DlTensor = requires(const T& t) {
  { t.data } -> std::convertible_to<const void*>;
  t.byte_offset;
  t.dtype.code;
  t.dtype.bits;
  t.dtype.lanes;
};
PLAIT_API DType dtype_of_dlpack(unsigned code, unsigned bits, unsigned lanes);  // or state::unknown
// Where there is no telling, it is on the GPU. Pinned memory is as good.
template <DlTensor T>
constexpr DType dtype_of_tensor(const T& t) {
  if constexpr (requires { t.device.device_type; }) {
    constexpr int cuda = 2, pinned = 3, managed = 13;
    const auto on = static_cast<int>(t.device.device_type);
    if (on != cuda && on != pinned && on != managed) return state::not_on_gpu;
  }
  return dtype_of_dlpack(t.dtype.code, t.dtype.bits, t.dtype.lanes);
}
// Bytes of a tensor; 0 if there are others between its elements.
PLAIT_API uint64_t dense_nbytes(int n, const int64_t* shape, const int64_t* strides,
                                size_t itemsize);
}  // namespace detail

template <std::integral T>
  requires(sizeof(T) <= 8)
struct Traits<T> : detail::One<Kind::integer> {
  // Python's integers have no width: the smallest of i32, i64, u64 that holds the value.
  static void write(Writer& w, T v) {
    const std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t> wide = v;
    DType type = DType::i32;
    if (!std::in_range<int32_t>(wide))
      type = std::in_range<int64_t>(wide) ? DType::i64 : DType::u64;
    w.put(state::of(type) | (v == 1 ? state::one : 0) | (v % 16 == 0 ? state::aligned : 0),
          static_cast<uint64_t>(wide));
  }
};

template <>
struct Traits<bool> : detail::One<Kind::boolean> {
  static void write(Writer& w, bool v) { w.put(state::of(DType::u1), v); }
};

template <std::floating_point T>
  requires(sizeof(T) <= 8)
struct Traits<T> : detail::One<Kind::floating> {
  static void write(Writer& w, T v) {
    w.put(state::of(DType::fp32), std::bit_cast<uint32_t>(static_cast<float>(v)));
    *w.words++ = std::bit_cast<uint64_t>(static_cast<double>(v));
  }
};

template <class T>
  requires(!detail::DlTensor<T> && !std::same_as<std::remove_const_t<T>, char>)
struct Traits<T*> : detail::One<Kind::pointer> {
  static constexpr auto type = dtype_of<std::remove_const_t<T>>;
  static constexpr bool known = std::same_as<std::remove_const_t<decltype(type)>, DType>;
  static_assert(
      known,
      "plait::triton knows no element type for this pointer: pass plait::triton::Pointer{p, dtype} "
      "or specialize dtype_of");
  static void write(Writer& w, const T* p) {
    if constexpr (known) detail::put_pointer(w, p, type);
  }
};
// An array is a pointer to its first element, as for any function.
template <class T, size_t N>
  requires(!detail::DlTensor<T> && !std::same_as<T, char>)
struct Traits<T[N]> : Traits<std::remove_all_extents_t<T>*> {
  using Element = std::remove_all_extents_t<T>;
  static void write(Writer& w, const T (&a)[N]) {
    Traits<Element*>::write(w, reinterpret_cast<const Element*>(&a));
  }
  static uint64_t nbytes(const T (&a)[N]) { return sizeof(a); }
};

template <>
struct Traits<Pointer> : detail::One<Kind::pointer> {
  static void write(Writer& w, Pointer p) { detail::put_pointer(w, p.data, p.dtype); }
  static uint64_t nbytes(Pointer p) { return p.nbytes; }
};

template <detail::DlTensor T>
struct Traits<T> : detail::One<Kind::pointer> {
  static void write(Writer& w, const T& t) {
    detail::put_pointer(w, static_cast<const char*>(t.data) + t.byte_offset,
                        detail::dtype_of_tensor(t));
  }
  static uint64_t nbytes(const T& t)
    requires requires { detail::dense_nbytes(t.ndim, t.shape, t.strides, 1); }
  {
    return detail::dense_nbytes(t.ndim, t.shape, t.strides, t.dtype.bits / 8);
  }
};
template <detail::DlTensor T>
struct Traits<T*> : Traits<std::remove_const_t<T>> {
  using Pointed = Traits<std::remove_const_t<T>>;
  static void write(Writer& w, const T* t) { Pointed::write(w, *t); }
  static uint64_t nbytes(const T* t)
    requires requires { Pointed::nbytes(*t); }
  {
    return Pointed::nbytes(*t);
  }
};

template <>
struct Traits<TensorDescriptor> : detail::One<Kind::descriptor> {
  // Its type: rank and block shape, a byte each. Of what is no descriptor, 0.
  static uint64_t type_of(const TensorDescriptor& d) {
    const size_t rank = d.block_shape.rank;
    if (rank > Extents::max_rank || d.shape.rank != rank || d.strides.rank != rank) return 0;
    uint64_t type = rank;
    for (size_t k = 0; k < rank; ++k) {
      const auto length = static_cast<uint64_t>(d.block_shape.at[k]);
      if (!std::has_single_bit(length)) return 0;
      type |= static_cast<uint64_t>(std::countr_zero(length)) << 8 * (k + 1);
    }
    return type;
  }
  static void write(Writer& w, const TensorDescriptor& d) {
    w.put(state::of(d.dtype), type_of(d));
    *w.words++ = detail::address(d.base);
    for (const Extents* e : {&d.shape, &d.strides})
      for (const int64_t v : e->at) *w.words++ = static_cast<uint64_t>(v);
    *w.words++ = d.padding == Padding::nan;
  }
};

template <detail::DlTensor T>
TensorDescriptor descriptor(const T& t, Extents block_shape, Padding padding = Padding::zero) {
  const auto n = static_cast<size_t>(t.ndim);
  Extents shape(t.shape, n), strides(shape);
  if (t.strides)
    strides = Extents(t.strides, n);
  else
    for (size_t k = std::min(n, Extents::max_rank), step = 1; k-- > 0;
         step *= static_cast<size_t>(shape.at[k]))
      strides.at[k] = static_cast<int64_t>(step);
  return {static_cast<const char*>(t.data) + t.byte_offset,
          detail::dtype_of_tensor(t),
          shape,
          strides,
          block_shape,
          padding};
}

template <>
struct Traits<std::nullopt_t> : detail::One<Kind::none> {
  static void write(Writer& w, std::nullopt_t) { w.put(state::none, 0); }
};
template <>
struct Traits<std::nullptr_t> : Traits<std::nullopt_t> {
  static void write(Writer& w, std::nullptr_t) { w.put(state::none, 0); }
};

template <class T>
struct Traits<std::optional<T>> {
  static constexpr auto leaves = Traits<T>::leaves;
  static_assert(leaves.size() == 1, "an optional tuple has no Triton type of its own");
  static void write(Writer& w, const std::optional<T>& v) {
    if (v) return Traits<T>::write(w, *v);
    w.put(state::none, 0);
    for (uint16_t k = 1; k < leaves[0].n_words(); ++k) *w.words++ = 0;
    if constexpr (leaves[0].has_text()) *w.strings++ = {};
  }
  static uint64_t nbytes(const std::optional<T>& v)
    requires requires { Traits<T>::nbytes(*v); }
  {
    return v ? Traits<T>::nbytes(*v) : 0;
  }
};

template <>
struct Traits<DType> : detail::One<Kind::dtype> {
  static void write(Writer& w, DType t) { w.put(state::of(t), static_cast<uint64_t>(t)); }
};

template <>
struct Traits<std::string_view> : detail::One<Kind::string> {
  static void write(Writer& w, std::string_view s) {
    w.put(0, s.size());
    *w.strings++ = s;
  }
};
template <>
struct Traits<std::string> : Traits<std::string_view> {};
template <>
struct Traits<const char*> : Traits<std::optional<std::string_view>> {
  static void write(Writer& w, const char* s) {
    Traits<std::optional<std::string_view>>::write(
        w, s ? std::optional(std::string_view(s)) : std::nullopt);
  }
};
template <>
struct Traits<char*> : Traits<const char*> {};
template <size_t N>
struct Traits<char[N]> : Traits<std::string_view> {};

template <>
struct Traits<Callee> {
  static constexpr std::array<Leaf, 1> leaves{Leaf{Kind::function, true}};
  static void write(Writer& w, Callee c) { Traits<std::string_view>::write(w, c.name); }
};

template <class... T>
struct Traits<std::tuple<T...>> {
  static constexpr auto leaves = [] {
    constexpr auto inside = detail::concatenate(TraitsOf<T>::leaves...);
    return detail::concatenate(std::array{Leaf{.kind = Kind::tuple, .n_inside = inside.size()}},
                               inside);
  }();
  static void write(Writer& w, const std::tuple<T...>& t) {
    *w.states++ = 0;
    std::apply([&](const T&... v) { (TraitsOf<T>::write(w, v), ...); }, t);
  }
};
template <class A, class B>
struct Traits<std::pair<A, B>> : Traits<std::tuple<A, B>> {};

template <class T>
struct Traits<Constant<T>> {
  static constexpr auto leaves = [] {
    auto all = Traits<T>::leaves;
    for (Leaf& leaf : all) leaf.constant = true;
    return all;
  }();
  static void write(Writer& w, const Constant<T>& c) { Traits<T>::write(w, c.value); }
};

template <class T>
struct Traits<Varying<T>> {
  static constexpr auto leaves = [] {
    auto all = TraitsOf<T>::leaves;
    for (Leaf& leaf : all) leaf.varies = true;
    return all;
  }();
  static void write(Writer& w, const Varying<T>& v) { TraitsOf<T>::write(w, v.value); }
};

namespace detail {
template <size_t N>
struct Name {
  char text[N];
  consteval Name(const char (&s)[N]) { std::copy_n(s, N, text); }
};
template <Name N, class T>
struct Named {
  const T& value;
};
template <Name N>
struct Keyword {
  template <class T>
  constexpr Named<N, T> operator=(const T& value) const {
    return {value};
  }
};
}  // namespace detail

template <detail::Name N, class T>
struct Traits<detail::Named<N, T>> {
  static constexpr auto name = N;
  static constexpr auto leaves = [] {
    auto all = Traits<T>::leaves;
    all[0].name = name.text;
    return all;
  }();
  static void write(Writer& w, const detail::Named<N, T>& n) { Traits<T>::write(w, n.value); }
  static uint64_t nbytes(const detail::Named<N, T>& n)
    requires requires { Traits<T>::nbytes(n.value); }
  {
    return Traits<T>::nbytes(n.value);
  }
};

}  // namespace plait::triton
