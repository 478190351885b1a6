// native/python/tangents.cpp: Tangents, a callable that leaves arguments with forward-mode tangents
// to another one.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "python/program_object.h"
#include "python/tensors.h"

namespace plait {
namespace {

struct PyTangents {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *call, *eager;
  PyObject *scope, *name;  // a dict, and what names in it the level of forward mode, below 0 if off
};

bool has_tangent(PyObject* const* args, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; ++i)
    if (is_tensor(args[i]) && has_forward_gradient(unpack(args[i]))) return true;
  return false;
}

PyObject* tangents_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    const PyTangents& t = *reinterpret_cast<PyTangents*>(self);
    PyObject* level = PyDict_GetItemWithError(t.scope, t.name);
    const bool on = level && PyLong_Check(level) && integer(level) >= 0;
    if (on && has_tangent(args, PyVectorcall_NARGS(nargsf))) [[unlikely]]
      return PyObject_Vectorcall(t.eager, args, nargsf, kwnames);
    const Ref call = Ref::borrow(t.call);  // it may put another in its place
    return PyObject_Vectorcall(call.get(), args, nargsf, kwnames);
  });
}

// -------------------------------------------------------------------------------------------- type
PyObject* tangents_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *call, *eager, *scope, *name;
    if (!PyArg_ParseTuple(args, "OOO!U", &call, &eager, &PyDict_Type, &scope, &name))
      return nullptr;
    Ref self = Ref::check(type->tp_alloc(type, 0));
    auto* t = reinterpret_cast<PyTangents*>(self.get());
    t->vectorcall = tangents_call;
    t->call = Py_NewRef(call);
    t->eager = Py_NewRef(eager);
    t->scope = Py_NewRef(scope);
    t->name = Py_NewRef(name);
    return self.release();
  });
}
int tangents_traverse(PyObject* self, visitproc visit, void* arg) {
  const PyTangents& t = *reinterpret_cast<PyTangents*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(t.call);
  Py_VISIT(t.eager);
  Py_VISIT(t.scope);
  return 0;
}
int tangents_clear(PyObject* self) {
  PyTangents& t = *reinterpret_cast<PyTangents*>(self);
  for (PyObject** p : {&t.call, &t.eager}) Py_XSETREF(*p, Py_NewRef(Py_None));
  return 0;
}
void tangents_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  const PyTangents& t = *reinterpret_cast<PyTangents*>(self);
  for (PyObject* p : {t.call, t.eager, t.scope, t.name}) Py_XDECREF(p);
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* tangents_name(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<PyTangents*>(self)->call, "__name__");
}

PyObject* tangents_get_call(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<PyTangents*>(self)->call);
}
int tangents_set_call(PyObject* self, PyObject* call, void*) {
  if (!call) {
    PyErr_SetString(PyExc_AttributeError, "call cannot be deleted");
    return -1;
  }
  Py_XSETREF(reinterpret_cast<PyTangents*>(self)->call, Py_NewRef(call));
  return 0;
}

PyGetSetDef tangents_getset[] = {
    {"call", tangents_get_call, tangents_set_call, "What calls are handed to.", nullptr},
    {"__name__", tangents_name, nullptr, "The name of `call`.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef tangents_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyTangents, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot tangents_slots[] = {
    {Py_tp_doc,
     const_cast<char*>("Tangents(call, eager, scope, name): call, or eager where an argument "
                       "has a forward-mode tangent; scope[name] is the level of forward mode.")},
    {Py_tp_new, reinterpret_cast<void*>(tangents_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(tangents_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(tangents_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(tangents_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getset, tangents_getset},
    {Py_tp_members, tangents_members},
    {0, nullptr}};
}  // namespace

PyType_Spec tangents_spec{"plait._native.Tangents", sizeof(PyTangents), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                          tangents_slots};

}  // namespace plait
