// native/python/program_object.h: the Python objects of a program, shared by the files of the
// binding.
#pragma once

#include <memory>
#include <vector>

#include "python/dicts.h"
#include "python/object.h"
#include "torch/bound.h"

namespace plait {

struct ProgramState {
  std::unique_ptr<Program> program;
  std::vector<Ref> callables;
  std::vector<Output> outputs;
};

struct PyProgram {
  PyObject_HEAD vectorcallfunc call;
  ProgramState* state;
};

// A tensor as it was when it was looked at: writes in place raise its version, an assignment to
// `.data` gives it other memory.
struct Looked {
  at::Tensor tensor;
  int64_t version, data;

  bool changed() const {
    return version != (tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version())) ||
           data != reinterpret_cast<intptr_t>(tensor.const_data_ptr());
  }
};

struct BoundState {
  Ref program;
  std::unique_ptr<Bound> bound;
  // Where the bound tensors come from: an object whose tensors() gives (number, tensor) as they are
  // now for those that may be replaced, and the dicts that hold them. Its `moved` is whether other
  // dicts hold them by now. None: nothing may be replaced.
  Ref owners = Ref::borrow(Py_None), dicts = Ref::borrow(Py_None);
  WatchedDicts watched;
  std::vector<Looked> sources;  // what some of the bound tensors are computed from
  int under_way = 0;            // calls
  std::vector<std::shared_ptr<const void>> retired;  // what these may still read
};

struct PyLibrary {
  PyObject_HEAD std::shared_ptr<Library> value;
};

inline ProgramState& state_of(PyObject* program) {
  return *reinterpret_cast<PyProgram*>(program)->state;
}
void check_count(const Program& p, Py_ssize_t got);                     // throws InputTypeError
void bind_inputs(const Program& p, Frame& f, PyObject* const* args);    // as many as it takes
PyObject* to_python(const ProgramState& s, Frame& f, const Output& o);  // a new reference
PyObject* outputs(const ProgramState& s, Frame& f);                     // a new tuple
Bound& bound_of(PyObject* bound);
// A new Program or Bound.
PyObject* make_program(PyTypeObject* type, Plan plan, std::shared_ptr<Library> kernels,
                       std::shared_ptr<Cubins> cubins, std::vector<at::Tensor> constants,
                       std::vector<Ref> callables, std::optional<Generated> generated);
PyObject* make_bound(PyObject* program, Signature signature, const std::vector<at::Tensor>& bound);

inline PyTypeObject *library_type, *program_type, *boxed_type, *bound_type, *training_type,
    *direct_type;
PyObject* module_load_cubin(PyObject*, PyObject* args);
PyObject* module_launch_cubin(PyObject*, PyObject* args);
PyObject* module_has_conditional_nodes(PyObject*, PyObject*);
PyObject* module_guard_for_cuda(PyObject*, PyObject* on);
PyObject* module_inspect_package(PyObject*, PyObject* args);
extern PyType_Spec library_spec, program_spec, boxed_spec, bound_spec, training_spec, direct_spec,
    tangents_spec, apart_spec, package_spec;

}  // namespace plait
