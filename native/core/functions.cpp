// native/core/functions.cpp: functions of sizes as Python computes them. A float is the bits of its
// double.
#include "functions.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

namespace plait {
namespace {

using Word = int64_t;
using Function = bool (*)(Word a, Word b, Word& out);

double real(Word word) { return std::bit_cast<double>(word); }
bool give(double x, Word& out) { return out = std::bit_cast<Word>(x), true; }

// Python raises where the result of finite operands is not finite, and where an operand is outside
// of the domain.
bool checked(double x, bool finite, bool nan, Word& out) {
  if ((std::isnan(x) && !nan) || (std::isinf(x) && finite)) return false;
  return give(x, out);
}
template <double (*f)(double)>
bool of_one(Word a, Word, Word& out) {
  const double x = real(a);
  return checked(f(x), std::isfinite(x), std::isnan(x), out);
}
template <bool (*f)(double, double)>
bool compare(Word a, Word b, Word& out) {
  return out = f(real(a), real(b)), true;
}
template <double (*f)(double)>
bool to_integer(Word a, Word, Word& out) {
  const double x = f(real(a));
  if (!(x >= -0x1p63 && x < 0x1p63)) return false;  // not a number either
  return out = static_cast<Word>(x), true;
}

bool shift_left(Word a, Word b, Word& out) {
  if (b < 0) return false;
  if (a == 0) return out = 0, true;
  if (a == -1 && b == 63) return out = INT64_MIN, true;
  return b < 63 && !__builtin_mul_overflow(a, Word{1} << b, &out);
}
bool shift_right(Word a, Word b, Word& out) {
  return b >= 0 && (out = a >> (b < 63 ? b : 63), true);
}
bool power(Word a, Word b, Word& out) {
  if (b < 0) return false;
  Word base = a;
  out = 1;
  while (b > 0) {
    if ((b & 1) && __builtin_mul_overflow(out, base, &out)) return false;
    b >>= 1;
    if (b > 0 && __builtin_mul_overflow(base, base, &base))
      return false;  // of a factor that is used: |base| > 1
  }
  return true;
}
// Rounded once, as Python does: a quotient of 64 bits or more with a last bit that says whether
// there is a remainder.
bool true_div(Word a, Word b, Word& out) {
  if (b == 0) return false;
  const bool negative = (a < 0) != (b < 0);
  const auto magnitude = [](Word v) {
    return v < 0 ? 0 - static_cast<uint64_t>(v) : static_cast<uint64_t>(v);
  };
  const uint64_t p = magnitude(a), q = magnitude(b);
  if (p == 0) return give(negative ? -0.0 : 0.0, out);
  if (p <= (uint64_t{1} << 53) && q <= (uint64_t{1} << 53))
    return give(static_cast<double>(a) / static_cast<double>(b), out);
  const int shift = 64 + std::countl_zero(p) - 1;  // the dividend has 127 bits then
  const unsigned __int128 dividend = static_cast<unsigned __int128>(p) << shift;
  unsigned __int128 quotient = dividend / q;
  if (dividend % q != 0) quotient |= 1;
  int down = 0;
  for (; quotient >> 62; ++down) quotient = (quotient >> 1) | (quotient & 1);
  const double x = std::ldexp(static_cast<double>(static_cast<Word>(quotient)), down - shift);
  return give(negative ? -x : x, out);
}
bool real_power(Word a, Word b, Word& out) {
  const double x = real(a), y = real(b);
  if (x == 0 && y < 0 && std::isfinite(y)) return false;
  return checked(std::pow(x, y), std::isfinite(x) && std::isfinite(y),
                 std::isnan(x) || std::isnan(y), out);
}
// printf rounds the exact value, and ties to even, as Python does.
bool real_round(Word a, Word digits, Word& out) {
  const double x = real(a);
  if (digits < 0) return false;
  if (!std::isfinite(x) || digits > 323) return give(x, out);
  std::string text(
      static_cast<size_t>(std::snprintf(nullptr, 0, "%.*f", static_cast<int>(digits), x)) + 1,
      '\0');
  std::snprintf(text.data(), text.size(), "%.*f", static_cast<int>(digits), x);
  return give(std::strtod(text.c_str(), nullptr), out);
}
double logarithm(double x) { return x <= 0 ? std::nan("") : std::log(x); }
double logarithm2(double x) { return x <= 0 ? std::nan("") : std::log2(x); }
double magnitude(double x) { return std::fabs(x); }
double whole(double x) { return std::trunc(x) + 0.0; }  // an integer on the way knows no -0.0

constexpr Function kFunctions[] = {
    [](Word a, Word b, Word& out) { return out = a & b, true; },
    [](Word a, Word b, Word& out) { return out = a | b, true; },
    [](Word a, Word b, Word& out) { return out = a ^ b, true; },
    shift_left,
    shift_right,
    power,
    [](Word a, Word, Word& out) { return give(static_cast<double>(a), out); },
    true_div,
    of_one<std::sqrt>,
    of_one<std::exp>,
    of_one<logarithm>,
    of_one<logarithm2>,
    of_one<std::sin>,
    of_one<std::cos>,
    of_one<std::tan>,
    of_one<std::asin>,
    of_one<std::acos>,
    of_one<std::atan>,
    of_one<std::sinh>,
    of_one<std::cosh>,
    of_one<std::tanh>,
    of_one<std::asinh>,
    [](Word a, Word, Word& out) { return give(magnitude(real(a)), out); },
    [](Word a, Word, Word& out) { return std::isfinite(real(a)) && give(whole(real(a)), out); },
    [](Word a, Word b, Word& out) { return give(real(a) + real(b), out); },
    [](Word a, Word b, Word& out) { return give(real(a) * real(b), out); },
    [](Word a, Word b, Word& out) { return real(b) != 0 && give(real(a) / real(b), out); },
    real_power,
    [](Word a, Word b, Word& out) { return out = real(b) < real(a) ? b : a, true; },
    [](Word a, Word b, Word& out) { return out = real(b) > real(a) ? b : a, true; },
    real_round,
    to_integer<std::floor>,
    to_integer<std::ceil>,
    to_integer<std::trunc>,
    to_integer<std::nearbyint>,
    compare<[](double a, double b) { return a == b; }>,
    compare<[](double a, double b) { return a != b; }>,
    compare<[](double a, double b) { return a < b; }>,
    compare<[](double a, double b) { return a <= b; }>,
};
static_assert(std::size(kFunctions) == kSizeFunctions);

}  // namespace

bool size_function(int64_t k, int64_t a, int64_t b, int64_t& out) {
  return k >= 0 && k < kSizeFunctions && kFunctions[k](a, b, out);
}

}  // namespace plait
