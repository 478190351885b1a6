// plait/triton/launch.h: what stands in brackets: a grid or a function of one, stream and options.
#pragma once

#include <cstddef>
#include <new>

#include "plait/triton/arguments.h"

struct CUstream_st;

namespace plait::triton {

using Stream = CUstream_st*;  // CUstream, cudaStream_t

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

}  // namespace plait::triton
