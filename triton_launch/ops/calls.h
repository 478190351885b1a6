// triton_launch/ops/calls.h: calls of the primitives through the dispatcher, which picks the
// kernel.
#pragma once

#include <torch/library.h>

#include "ops.h"

// _(function, operator) of each primitive.
#define PLAIT_EACH(_)                                  \
  _(add, "add")                                        \
  _(softmax, "softmax")                                \
  _(softmax_backward, "_softmax_backward")             \
  _(rms_norm, "_rms_norm")                             \
  _(rms_norm_backward, "_rms_norm_backward")           \
  _(rotary, "rotary")                                  \
  _(cross_entropy, "_cross_entropy")                   \
  _(cross_entropy_backward, "_cross_entropy_backward") \
  _(bmm, "_bmm")

namespace plait::ops::call {

template <auto F>
auto handle(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<std::remove_pointer_t<decltype(F)>>();
}
#define PLAIT_CALL(NAME, OPERATOR, FUNCTION)                     \
  template <class... A>                                          \
  auto NAME(A&&... arguments) {                                  \
    static const auto op = handle<FUNCTION>("plait::" OPERATOR); \
    return op.call(std::forward<A>(arguments)...);               \
  }

#define PLAIT_CALL_OF(FUNCTION, OPERATOR) PLAIT_CALL(FUNCTION, OPERATOR, &reference::FUNCTION)
PLAIT_EACH(PLAIT_CALL_OF)
#undef PLAIT_CALL_OF

}  // namespace plait::ops::call
