// native/torch/control.h: control flow of a package. What a plan calls as Python, in a package is a
// Control: it runs other programs of the package, without Python.
#pragma once

#include <mutex>

#include "core/package.h"
#include "torch/call.h"

namespace plait {

// A host without Python: programs that need none run with it.
extern const Host kNoPython;

// A tensor, or an integer where it is undefined (None, which no program reads, is one too).
struct ControlValue {
  at::Tensor tensor;
  int64_t integer = 0;
};
using ControlValues = std::vector<ControlValue>;

// A program that others call. Threads may.
class Routine {
 public:
  explicit Routine(std::unique_ptr<Program> program);
  ControlValues run(const ControlValues& given);
  const Program& program() const { return *program_; }

 private:
  std::unique_ptr<Program> program_;
  std::vector<Output> outputs_;
  std::mutex frames_;
};

class Control {
 public:
  using Routines = std::vector<std::shared_ptr<Routine>>;
  Control(const Manifest::Control& what, const Routines& all);
  // Throws LoadError unless the call has the operands that this takes, and its results.
  void check(const CallPython& call) const;
  void run(Frame& f, const PythonCall& call, const Operands& o) const;

 private:
  using Kind = Manifest::Control::Kind;
  ControlValues loop(ControlValues given) const;
  ControlValues scan(ControlValues given) const;

  Manifest::Control what_;
  Routines routines_;
  size_t n_results_ = 0;
};

// What runs in the place of a plan's calls of Python; null where there are none. Throws LoadError
// where they do not fit.
ControlFlow control_flow(const Plan& plan, const std::vector<Manifest::Control>& described,
                         const Control::Routines& routines);

}  // namespace plait
