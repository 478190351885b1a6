// native/core/functions.h: functions of sizes, numbered as in plait/runtime/functions.py, which has
// their meaning.
#pragma once

#include "tables.h"

namespace plait {

// Function number k of two words; false where Python raises, or where the result needs more than 64
// bits.
bool size_function(int64_t k, int64_t a, int64_t b, int64_t& out);

}  // namespace plait
