// native/python/direct.cpp: Direct, an inference program with the epilogue that eager's semantics
// want: what Dynamo is handed in place of AOTAutograd's runtime wrapper.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "python/epilogue.h"
#include "python/tensors.h"

namespace plait {
namespace {

struct DirectState {
  Ref program, wrapper;
  Epilogue epilogue;
  bool wrapper_first = false;  // the first call goes to the wrapper, which checks custom operators
};

struct PyDirect {
  PyObject_HEAD vectorcallfunc call;
  DirectState* state;
};

DirectState& direct_of(PyObject* self) { return *reinterpret_cast<PyDirect*>(self)->state; }

PyObject* direct_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    DirectState& d = direct_of(self);
    const Epilogue& e = d.epilogue;
    ProgramState& s = state_of(d.program.get());
    if (kwnames && PyTuple_GET_SIZE(kwnames) > 0)
      throw InputTypeError("a program takes no keyword arguments");
    check_count(*s.program, PyVectorcall_NARGS(nargsf));
    if (d.wrapper_first) [[unlikely]] {
      Ref result = Ref::check(PyObject_Vectorcall(d.wrapper.get(), args, nargsf, nullptr));
      d.wrapper_first = false;
      return result.release();
    }
    Call call(*s.program);
    Frame& f = call.frame();
    bind_inputs(*s.program, f, args);
    s.program->run(f);
    Ref results = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(e.results.size())));
    for (size_t i = 0; i < e.results.size(); ++i) {
      const Produced& r = e.results[i];
      PyObject* value = nullptr;
      switch (r.kind) {
        case Produced::Kind::program: value = to_python(s, f, s.outputs[i]); break;
        case Produced::Kind::input: value = Py_NewRef(args[r.arg]); break;
        case Produced::Kind::view:
          value = wrap(view_of(unpack(args[r.arg]), input_at(*s.program, f, r.arg),
                               take_tensor(f, s.outputs[i]), r));
      }
      PyTuple_SET_ITEM(results.get(), static_cast<Py_ssize_t>(i), Ref::check(value).release());
    }
    apply_marks(e.marks, results.get());
    return results.release();
  });
}

// -------------------------------------------------------------------------------------------- type
void check_epilogue(const Epilogue& e, const ProgramState& s) {
  const std::vector<Input>& inputs = s.program->plan().inputs;
  const size_t n_outputs = e.results.size();
  if (s.outputs.size() != n_outputs)
    throw LoadError("the program has " + std::to_string(s.outputs.size()) +
                    " outputs, described were " + std::to_string(n_outputs));
  const auto require = [&](int64_t arg, size_t output) {
    const Output::Kind kind = s.outputs[output].kind;
    if (arg < 0 || static_cast<size_t>(arg) >= inputs.size() ||
        inputs[static_cast<size_t>(arg)].kind != Input::Kind::tensor ||
        (kind != Output::Kind::tensor && kind != Output::Kind::moved_tensor))
      throw LoadError("output " + std::to_string(output) + " and argument " + std::to_string(arg) +
                      " must be tensors");
  };
  for (size_t i = 0; i < e.results.size(); ++i)
    if (e.results[i].kind != Produced::Kind::program) require(e.results[i].arg, i);
}

PyObject* direct_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *program, *wrapper, *results, *marks;
    int wrapper_first = 0;
    if (!PyArg_ParseTuple(args, "O!OOOp", program_type, &program, &wrapper, &results, &marks,
                          &wrapper_first))
      return nullptr;
    auto d = std::make_unique<DirectState>();
    d->program = Ref::borrow(program);
    d->wrapper = Ref::borrow(wrapper);
    d->wrapper_first = wrapper_first != 0;
    d->epilogue = read_epilogue(results, marks);
    check_epilogue(d->epilogue, state_of(program));
    Ref self = Ref::check(type->tp_alloc(type, 0));
    reinterpret_cast<PyDirect*>(self.get())->call = direct_call;
    reinterpret_cast<PyDirect*>(self.get())->state = d.release();
    return self.release();
  });
}
int direct_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!reinterpret_cast<PyDirect*>(self)->state) return 0;
  Py_VISIT(direct_of(self).program.get());
  Py_VISIT(direct_of(self).wrapper.get());
  return 0;
}
int direct_clear(PyObject* self) {
  direct_of(self).wrapper = Ref::borrow(Py_None);
  return 0;
}
void direct_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<PyDirect*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* direct_name(PyObject* self, void*) {
  return PyObject_GetAttrString(direct_of(self).program.get(), "__name__");
}
PyObject* direct_program(PyObject* self, void*) { return Py_NewRef(direct_of(self).program.get()); }

PyGetSetDef direct_getset[] = {
    {"program", direct_program, nullptr, "The program that a call runs.", nullptr},
    {"__name__", direct_name, nullptr, "The program's name.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef direct_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyDirect, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot direct_slots[] = {
    {Py_tp_doc, const_cast<char*>("Direct(program, wrapper, results, marks, wrapper_first): a "
                                  "program and what eager's semantics want done after it.")},
    {Py_tp_new, reinterpret_cast<void*>(direct_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(direct_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(direct_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(direct_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getset, direct_getset},
    {Py_tp_members, direct_members},
    {0, nullptr}};
}  // namespace

PyType_Spec direct_spec{"plait._native.Direct", sizeof(PyDirect), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                        direct_slots};

}  // namespace plait
