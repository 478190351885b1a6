// plait/errors.h: what goes wrong when a package is loaded or called from C++.
#pragma once

#include <stdexcept>

#define PLAIT_API __attribute__((visibility("default")))

namespace plait {

// A package cannot be loaded: it is no package, of another version, truncated or damaged, or made
// for another machine; or a new weight does not fit. The message says which.
struct PLAIT_API PackageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The inputs of a call do not fit what the program was compiled for. The message names the input.
struct PLAIT_API InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace plait
