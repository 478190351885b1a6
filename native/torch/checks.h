// native/torch/checks.h: what a program asserts of its values while it runs. Each throws what eager
// would, or an error that names the slot and where it was made.
#pragma once

#include "frame.h"

namespace plait {

// What a tensor should be.
struct Layout {
  DType dtype;  // opaque: any
  c10::IntArrayRef sizes, strides;
};

bool has_layout(const Frame& f, SlotId s, const Layout& want);
// A tensor that is not what it should be: a copy takes its place if that mends it.
void mend_layout(Frame& f, SlotId s, const Layout& want, const char* origin, bool copies);
void check_alignment(const Frame& f, SlotId s, const char* pointer, int64_t nbytes);
void check_finite(const Frame& f, SlotId s, const char* origin, bool infinities);
[[noreturn]] void fail_size();  // an expression overflowed

// An AssertScalar that failed. what() ends at the first zero byte, text does not.
struct AssertError : std::runtime_error {
  explicit AssertError(std::string message)
      : std::runtime_error(message), text(std::move(message)) {}
  std::string text;
};
// Throws AssertError or c10::IndexError. values: what the first marks {} of message stand for.
[[noreturn]] void fail_assert(Check::Error error, std::string message, c10::IntArrayRef values);

}  // namespace plait
