// native/python/program_object.h: the Python objects of a program, shared by the files of the
// binding.
#pragma once

#include <memory>
#include <vector>

#include "python/object.h"
#include "torch/program.h"

namespace plait {

// What a returned value is, decided once.
struct Output {
  enum class Kind { tensor, moved_tensor, opaque, integer, none, real, boolean, value } kind;
  int32_t id = kNone;
  double real = 0;
};

struct ProgramState {
  std::unique_ptr<Program> program;
  std::vector<Ref> callables;
  std::vector<Output> outputs;
};

struct PyProgram {
  PyObject_HEAD vectorcallfunc call;
  ProgramState* state;
};

struct PyLibrary {
  PyObject_HEAD std::shared_ptr<Library> value;
};

// A frame for a call; dropped tensors and the arena go back whatever happens.
class Call {
 public:
  explicit Call(Program& p) : program_(p), frame_(p.take_frame()) {}
  ~Call() {
    program_.reset(*frame_);
    program_.give_frame(std::move(frame_));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  Frame& frame() { return *frame_; }

 private:
  Program& program_;
  std::unique_ptr<Frame> frame_;
};

inline ProgramState& state_of(PyObject* program) {
  return *reinterpret_cast<PyProgram*>(program)->state;
}
void check_count(const Program& p, Py_ssize_t got);                     // throws InputTypeError
void bind_inputs(const Program& p, Frame& f, PyObject* const* args);    // as many as it takes
PyObject* to_python(const ProgramState& s, Frame& f, const Output& o);  // a new reference
PyObject* outputs(const ProgramState& s, Frame& f);                     // a new tuple

inline PyTypeObject *library_type, *program_type, *boxed_type, *bound_type, *training_type,
    *direct_type;
PyObject* module_load_cubin(PyObject*, PyObject* args);
PyObject* module_launch_cubin(PyObject*, PyObject* args);
extern PyType_Spec library_spec, program_spec, boxed_spec, bound_spec, training_spec, direct_spec;
std::vector<void*> math_table(PyObject* names);

}  // namespace plait
