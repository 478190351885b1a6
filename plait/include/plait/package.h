// plait/package.h: runs packages, which plait.package wrote, in C++. No Python is in the process.
//
//   find_package(plait REQUIRED)  # -DCMAKE_PREFIX_PATH=$(python -m plait --cmake-dir)
//   target_link_libraries(serve PRIVATE plait::torch)
//
//   const plait::Package model = plait::Package::load("model.plait");
//   std::vector<at::Tensor> results = model.run({ids, mask});
//
// Arguments may be nested in Python; here they are laid flat, in the order of inputs().
//
// A package is code: load only what you trust. Nothing in it runs before it was verified against
// damage, its weights when they are first used; nobody is kept from making one that does harm. The
// file must not be changed while it is loaded: replace it by a rename.
//
// Threads may run one Package at once. A Package is a handle: copies are the same program with the
// same weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "plait/errors.h"

namespace plait {

class PLAIT_API Package {
 public:
  struct Options {
    // Such as "cuda:1", for a package with GPU kernels; "": the current one.
    std::string device;
    // One of its variants, such as "avx2"; "": the best that this machine can run.
    std::string machine;
    // false: the checksum of the weights is never checked, so that only what is used is read.
    bool verify_weights = true;
  };
  // A size of an input: inclusive bounds, and the name of a size that may vary, which all its
  // occurrences share.
  struct Size {
    int64_t lowest = 0, highest = 0;
    std::string symbol;
  };
  // What a call takes. None is std::monostate; a constant of Python that is no None, bool, int,
  // float or str is the text that Python prints of it, such as "torch.float16".
  using Value = std::variant<std::monostate, at::Tensor, int64_t, double, bool, std::string>;
  struct Input {
    std::string name;  // with the path inside a nested argument: "x['a'][0]"
    at::ScalarType dtype;
    std::string device;
    std::vector<Size> sizes;  // of an integer one, its own bounds
    enum class Kind { tensor, integer, constant } kind = Kind::tensor;
    Value value;  // of a constant, which is built into the program: what it has to be
  };

  // Throws PackageError. Weights are verified before the first call, weights() or set_weight(),
  // which throws it for damaged ones; those of a GPU here.
  static Package load(const std::string& path);
  static Package load(const std::string& path, const Options& options);

  // Runs the program on its tensors, in the order of inputs(); constants among these are as they
  // have to be. A result that is no tensor comes as one without dimensions, None as an undefined
  // one. No gradients are taken. Throws InputError for inputs that do not fit, and what torch
  // throws (c10::Error) where an operator or a check of a kernel fails. On a GPU the work is put on
  // torch's current stream.
  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> tensors) const;
  // The same on all inputs. Throws InputError too for a constant that is another.
  std::vector<at::Tensor> run_values(at::ArrayRef<Value> inputs) const;

  const std::vector<Input>& inputs() const;
  const std::vector<std::string>& outputs() const;

  // Verifies the weights now, by ATen's threads. Throws PackageError.
  void verify() const;
  // Parameters and buffers. Writing to one changes the program's own copy in memory, never the
  // file.
  const std::vector<std::pair<std::string, at::Tensor>>& weights() const;
  // Copies value into a weight, in place: a call that is under way may see some of both values.
  // Throws PackageError where there is no such weight, or dtype or sizes differ.
  void set_weight(const std::string& name, const at::Tensor& value);

  const std::string& machine() const;  // the variant that runs, such as "avx512"

 private:
  struct State;
  explicit Package(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace plait
