// plait/triton.h: Triton kernels from C++ for what a bare launch costs.
//
//   auto add = plait::triton::from_pack("kernels.pack", "add_kernel");  // or jit("add.py",
//   "add_kernel") add[{blocks, stream}](x, y, out, n, plait::constexpr_<1024>); auto bound =
//   add.bind({blocks}, x, y, out, n, plait::arg<"BLOCK"> = 1024); bound(stream);
//
// Needs neither torch nor Python nor CUDA's headers. triton_launch/README.md is for users; here is
// what goes over the borders between the stages:
//
//   arguments -> leaves   Each C++ argument becomes one leaf, a tuple one more and those of its
//   elements.
//                         What the types say is a table made at compile time (Leaf); what values
//                         say is one byte a leaf (type, "is 1", "divisible by 16", "is None") and
//                         the value in 8-byte words, which are what the launch hands to the driver.
//   call -> record        A call's words are: context, options, the leaves' bytes, the values. A
//   mask that
//                         the Python signature gives (constexpr, do_not_specialize, annotations)
//                         makes them the key. The same types on the same function are a Site: its
//                         last record, then its table, are looked at without a lock. Sites, records
//                         and functions are never freed.
//   record <- provider    A key that is new becomes text, `*fp32:D,i32,=1024`: the types and
//   attributes
//                         that Triton itself would find. A Provider makes a cubin and its facts of
//                         that.
//   decorators            What @triton.heuristics and @triton.autotune add to a call is found
//   before, when
//                         the key is new: Python functions are asked of the provider,
//                         configurations timed. All values that such an answer depends on are part
//                         of the key from then on.
//
// A tensor descriptor has a word for its type and one for each of its fields; of what the compiler
// made of it, a tensor map or the fields themselves, the launch hands over what the kernel takes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/errors.h"

struct CUstream_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

namespace plait::triton {

using Stream = CUstream_st*;  // CUstream, cudaStream_t

// What went wrong with a kernel. argument: its index in the Python signature, or -1. traceback:
// Python's.
struct PLAIT_API Error : std::runtime_error {
  Error(const std::string& what, std::string kernel, std::string specialization = "",
        int argument = -1, std::string traceback = "");
  std::string kernel, specialization, traceback;
  int argument;
};

// The compiler or the device has not the room for a kernel; with other options it may have.
struct PLAIT_API Refused : Error {
  using Error::Error;
};

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

// Options of the compiler that Options does not name, such as {{"enable_fp_fusion", false}}. Equal
// sets are one: make it once and keep it.
class OptionSet;
struct Option {
  template <class T>
  Option(std::string_view name, const T& value);
  std::string name, value;
};
PLAIT_API const OptionSet* option_set(std::span<const Option> options);
inline const OptionSet* option_set(std::initializer_list<Option> options) {
  return option_set(std::span(options.begin(), options.size()));
}

// -1: as Triton has it.
struct Options {
  int16_t num_warps = -1, num_stages = -1, num_ctas = -1, maxnreg = -1;
  bool cooperative = false, pdl = false;
  const OptionSet* others = nullptr;
};

struct Grid {
  template <std::integral X, std::integral Y = int, std::integral Z = int>
  Grid(X x, Y y = 1, Z z = 1) : x(extent(x)), y(extent(y)), z(extent(z)) {}
  int64_t x, y, z;

 private:
  // Beyond int64_t, as a difference of unsigned numbers may be, it is too large, not negative.
  template <class T>
  static constexpr int64_t extent(T n) {
    if constexpr (std::is_unsigned_v<T>)
      return static_cast<int64_t>(std::min<uint64_t>(n, INT64_MAX));
    return static_cast<int64_t>(n);
  }
};

namespace detail {
struct Record;
struct Call;
}  // namespace detail

// What a grid may depend on: the kernel's parameters, those that decorators set too.
class Meta {
 public:
  Meta(const detail::Record& record, const detail::Call& call) : record_(record), call_(call) {}
  // An integer or bool among the parameters. Throws Error for anything else.
  PLAIT_API int64_t operator[](std::string_view name) const;

 private:
  const detail::Record& record_;
  const detail::Call& call_;
};

// A grid as a function, such as [&](const Meta& meta) { return cdiv(n, meta["BLOCK"]); }.
template <class F>
concept GridRule = std::is_invocable_r_v<Grid, const F&, const Meta&>;
struct Rule {
  static constexpr size_t n_captured = 64;
  Grid (*call)(const void*, const Meta&) = nullptr;
  alignas(8) std::byte captured[n_captured];
};

struct Launch {
  Launch(Grid grid, Stream stream = nullptr, Options options = {})
      : grid(grid), stream(stream), options(options) {}
  template <GridRule F>
  Launch(F f, Stream stream = nullptr, Options options = {})
      : grid(1), stream(stream), options(options) {
    static_assert(
        std::is_trivially_copyable_v<F> && sizeof(F) <= Rule::n_captured && alignof(F) <= 8,
        "a grid's function may capture 64 bytes of plain data: capture the rest by one reference");
    rule.call = [](const void* captured, const Meta& meta) -> Grid {
      return (*static_cast<const F*>(captured))(meta);
    };
    new (rule.captured) F(f);
  }
  template <std::integral X, std::integral Y>
  Launch(X x, Y y) : grid(x, y) {}
  template <std::integral X, std::integral Y, std::integral Z>
  Launch(X x, Y y, Z z) : grid(x, y, z) {}
  Grid grid;
  Stream stream = nullptr;
  Options options;
  Rule rule;  // instead of the grid, if there is one
};

constexpr int64_t cdiv(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A compiled kernel and what its launch must respect, as Triton's metadata has it.
struct Binary {
  std::string image, symbol;
  uint32_t num_warps = 4, num_ctas = 1, shared = 0;
  int64_t global_scratch = 0, global_alignment = 1, profile_scratch = 0, profile_alignment = 1;
  bool cooperative = false, pdl = false;
  std::string
      descriptors;  // what the kernel takes for them, as triton_launch/src/specialize.h says
};

struct Request {
  std::string file, function, specialization, options;
  int capability;  // such as 90
};

// What a decorator's Python function is asked. kind: `heuristics` or `pruned`, and the decorator's
// number. arguments: names with values or types, `x=*fp32;n=100`; after an item `*`, those given by
// name.
struct Question {
  std::string file, function, kind, arguments;
};

// Where kernels come from. Its functions may be called by several threads.
class PLAIT_API Provider {
 public:
  virtual ~Provider() = default;
  // Names that the answer depends on, with commas; a newline; and the answer, as
  // triton_launch/src/specialize.h has facts. Asked only where there are decorators.
  virtual std::string evaluate(const Question& question);
  // How many kernels it compiles at once.
  virtual unsigned concurrency() const { return 1; }
  // Locks what may be locked while it is asked. One that takes another lock then says here how to
  // wait.
  virtual std::unique_lock<std::mutex> hold(std::mutex& mutex) const {
    return std::unique_lock(mutex);
  }
  // The function's parameters, a line each; triton_launch/src/specialize.h says how.
  virtual std::string describe(const std::string& file, const std::string& function) = 0;
  virtual Binary compile(const Request& request) = 0;
};
// A file that `python -m plait.tools.pack` wrote.
PLAIT_API std::shared_ptr<Provider> open_pack(const std::string& path);
// A Python process, started when first asked, that has plait and Triton on its path.
PLAIT_API std::shared_ptr<Provider> worker(const std::string& python = "python3");

// The Python that runs in this process, which must find plait and Triton.
PLAIT_API std::shared_ptr<Provider> embedded();

// What is told of a launch; see set_hooks.
struct Launched {
  std::string_view kernel, symbol, specialization;
  uint32_t num_warps, num_ctas, shared;
  Grid grid;
  Stream stream;
};
struct Hooks {
  void (*enter)(void* user, const Launched&) = nullptr;
  void (*exit)(void* user, const Launched&) = nullptr;
  void* user = nullptr;
};
// Called around every launch from now on; nullptr: no more. What it points to must stay.
PLAIT_API void set_hooks(const Hooks* hooks);

// Scratch memory of kernels that want some, ordered as the stream is. Without one, the driver's
// cuMemAllocAsync serves. free may be null.
struct Scratch {
  void* (*allocate)(void* user, size_t nbytes, size_t alignment, Stream stream);
  void (*free)(void* user, void* memory, Stream stream);
  void* user = nullptr;
};
PLAIT_API void set_scratch(const Scratch* scratch);

// What happens to a call of an @triton.autotune function whose key was not met before. tune: its
// configurations are timed. first: it gets the first one.
enum class Miss : uint8_t { tune, first, error };
// folder: where choices are kept; null: $PLAIT_CACHE_DIR/tuned or ~/.cache/plait/tuned; "":
// nowhere.
struct Tuning {
  Miss on_miss = Miss::tune;
  const char* folder = nullptr;
};
// What it points to must stay; null: as by default.
PLAIT_API void set_tuning(const Tuning* tuning);

namespace detail {
class Function;
struct Site;
struct Plan;

// The functions that were called with the same types at one place of the program's code.
struct Sites {
  static constexpr size_t n_quick = 8;
  std::atomic<Site*> quick[n_quick]{};
  std::atomic<Site*> all{};
};

// words: context, options, other options, the leaves' states, their values.
inline constexpr size_t n_head_words = 3;
constexpr size_t n_state_words(size_t n_leaves) { return (n_leaves + 7) / 8; }
struct Call {
  const Function* function;
  const Launch& launch;
  std::span<const Leaf> leaves;
  std::span<uint64_t> words;
  std::span<const std::string_view> strings;
  std::span<const uint64_t> nbytes = {};  // of each argument
};

template <class T>
uint64_t nbytes_of(const T& v) {
  if constexpr (requires { TraitsOf<T>::nbytes(v); }) return TraitsOf<T>::nbytes(v);
  return 0;
}

template <class... A>
struct Frame {
  static constexpr auto leaves = concatenate(TraitsOf<A>::leaves...);
  static constexpr size_t n_values = [] {
    size_t n = 0;
    for (const Leaf& leaf : leaves) n += leaf.n_words();
    return n;
  }();
  static constexpr size_t n_strings =
      std::count_if(leaves.begin(), leaves.end(), [](const Leaf& leaf) { return leaf.has_text(); });
  static constexpr size_t first_value = n_head_words + n_state_words(leaves.size());

  explicit Frame(const A&... arguments) {
    if constexpr (!leaves.empty()) words[first_value - 1] = 0;  // the bytes beyond the last leaf's
    [[maybe_unused]] Writer w{reinterpret_cast<uint8_t*>(words.data() + n_head_words),
                              words.data() + first_value, strings.data()};
    (TraitsOf<A>::write(w, arguments), ...);
  }
  Call call(const Function* function, const Launch& launch) {
    return {function, launch, leaves, words, strings};
  }

  // Leaves and words before those of argument n.
  static consteval std::pair<size_t, size_t> before(size_t n) {
    constexpr std::array<size_t, sizeof...(A)> n_leaves{TraitsOf<A>::leaves.size()...};
    std::pair<size_t, size_t> at;
    for (size_t k = 0; k < n; ++k)
      for (size_t j = 0; j < n_leaves[k]; ++j) at.second += leaves[at.first++].n_words();
    return at;
  }

  std::array<uint64_t, first_value + n_values> words;
  std::array<std::string_view, n_strings> strings;
};

// These two return false and null if they must know how long the arguments are.
PLAIT_API bool launch(Sites& sites, const Call& call);
PLAIT_API Plan* bind(Sites& sites, const Call& call);
PLAIT_API void launch(const Plan& plan, Stream stream);
PLAIT_API void change(Plan& plan, size_t leaf, std::span<const uint8_t> states, size_t word,
                      std::span<const uint64_t> words);
PLAIT_API CUgraphNode_st* add_node(const Plan& plan, CUgraph_st* graph,
                                   std::span<CUgraphNode_st* const> dependencies);
PLAIT_API void update_node(const Plan& plan, CUgraphExec_st* graph, CUgraphNode_st* node);
PLAIT_API size_t prepare(Sites& sites, const Call& call);
PLAIT_API void destroy(Plan* plan);
PLAIT_API std::string value_text(std::span<const Leaf> leaves, std::span<const uint64_t> words,
                                 std::span<const std::string_view> strings);
}  // namespace detail

template <class T>
Option::Option(std::string_view name, const T& value) : name(name) {
  const detail::Frame<T> frame(value);
  this->value = detail::value_text(frame.leaves, frame.words, frame.strings);
}

// A launch that is resolved: kernel, arguments and grid are fixed. Threads may share it. Belongs to
// the context that was current when it was bound: a thread that has none gets this one, in another
// one it is an error.
class Bound {
 public:
  explicit Bound(detail::Plan* plan) : plan_(plan, detail::destroy) {}
  void operator()(Stream stream) const { detail::launch(*plan_, stream); }

  // A node of a graph that launches it.
  CUgraphNode_st* add_to(CUgraph_st* graph,
                         std::span<CUgraphNode_st* const> dependencies = {}) const {
    return detail::add_node(*plan_, graph, dependencies);
  }
  // Makes such a node, or one that capturing it made, launch it as it is now.
  void update(CUgraphExec_st* graph, CUgraphNode_st* node) const {
    detail::update_node(*plan_, graph, node);
  }

 protected:
  std::unique_ptr<detail::Plan, void (*)(detail::Plan*)> plan_;
};

// The same, and its arguments may be changed.
template <class... A>
class BoundTo : public Bound {
 public:
  using Bound::Bound;

  // Gives argument I another value; no thread may launch it meanwhile. A value that another kernel
  // is compiled for is looked up, and that one compiled if need be. A grid's function is asked
  // again.
  template <size_t I, class T>
  void set(const T& value) {
    using Given = std::tuple_element_t<I, std::tuple<TraitsOf<A>...>>;
    constexpr auto& leaves = TraitsOf<T>::leaves;
    constexpr bool fits =
        std::equal(leaves.begin(), leaves.end(), Given::leaves.begin(), Given::leaves.end(),
                   [](const Leaf& a, const Leaf& b) {
                     return a.kind == b.kind && a.constant == b.constant && !a.has_text();
                   });
    static_assert(fits,
                  "a bound argument may only be set to a value of its own kind, and to no string: "
                  "bind again");
    constexpr std::pair<size_t, size_t> at = detail::Frame<A...>::before(I),
                                        n = detail::Frame<T>::before(1);
    std::array<uint8_t, n.first> states;
    std::array<uint64_t, n.second> words;
    Writer w{states.data(), words.data(), nullptr};
    TraitsOf<T>::write(w, value);
    detail::change(*plan_, at.first, states, at.second, words);
  }
};

// A Triton function: a name that may be copied and used by any thread.
class Kernel {
 public:
  explicit Kernel(const detail::Function* function) : function_(function) {}

  struct Launcher {
    template <class... A>
    void operator()(const A&... arguments) const {
      static constinit detail::Sites sites;
      detail::Frame<A...> frame(arguments...);
      detail::Call call = frame.call(function, launch);
      if (detail::launch(sites, call)) [[likely]]
        return;
      const std::array<uint64_t, sizeof...(A)> nbytes{detail::nbytes_of(arguments)...};
      call.nbytes = nbytes;
      detail::launch(sites, call);
    }
    const detail::Function* function;
    Launch launch;
  };
  Launcher operator[](const Launch& launch) const { return {function_, launch}; }

  template <class... A>
  BoundTo<A...> bind(const Launch& launch, const A&... arguments) const {
    static constinit detail::Sites sites;
    detail::Frame<A...> frame(arguments...);
    detail::Call call = frame.call(function_, launch);
    detail::Plan* plan = detail::bind(sites, call);
    const std::array<uint64_t, sizeof...(A)> nbytes{plan ? 0 : detail::nbytes_of(arguments)...};
    call.nbytes = nbytes;
    return BoundTo<A...>(plan ? plan : detail::bind(sites, call));
  }

  // Compiles and loads what such a call launches, for all kinds of values of the arguments that
  // plait::vary marks. Says how many kernels that are.
  template <class... A>
  size_t prepare(const Launch& launch, const A&... arguments) const {
    static constinit detail::Sites sites;
    detail::Frame<A...> frame(arguments...);
    return detail::prepare(sites, frame.call(function_, launch));
  }

 private:
  const detail::Function* function_;
};

// The same file and function of the same provider are one kernel. Nothing is compiled yet.
PLAIT_API Kernel jit(const std::string& file, const std::string& function,
                     std::shared_ptr<Provider> provider = worker());
PLAIT_API Kernel from_pack(std::shared_ptr<Provider> pack, const std::string& function);
// A path is opened once.
PLAIT_API Kernel from_pack(const std::string& path, const std::string& function);

// What is compiled or was found in packs so far, a signature each as `python -m plait.tools.pack`
// takes it: a warmed program's list makes the pack that it needs; what decorators decided is in it,
// too.
PLAIT_API std::vector<std::string> signatures();
// The same, line by line to a file as it happens; $PLAIT_TRITON_RECORD is one from the start. "":
// no more.
PLAIT_API void record_to(const std::string& path);

// What calls of this process met. hits: counted from count_hits(true) on. misses: calls whose key
// was new to their place in the program. last_miss: the kernel and its specialization, and that of
// the call before it.
struct Stats {
  uint64_t hits, misses, compiled, loaded, tuned;
  std::string last_miss;
};
PLAIT_API Stats stats();
PLAIT_API void count_hits(bool on);

}  // namespace plait::triton

namespace plait {
template <auto V>
inline constexpr triton::Constant<std::remove_const_t<decltype(V)>> constexpr_{V};
template <class T>
triton::Constant<T> constexpr_value(T value) {
  return {std::move(value)};
}
template <triton::detail::Name N>
inline constexpr triton::detail::Keyword<N> arg{};
template <class T>
triton::Varying<T> vary(const T& value) {
  return {value};
}
}  // namespace plait
