// native/python/apart.cpp: Apart, a callable that leaves arguments to another one where they share
// memory otherwise than when they were traced.
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "python/program_object.h"
#include "python/tensors.h"
#include "torch/overlap.h"

namespace plait {
namespace {

struct PyApart {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *call, *eager;
  Overlaps overlaps;
};

PyObject* apart_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    PyApart& a = *reinterpret_cast<PyApart*>(self);
    const auto n = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
    std::vector<const at::Tensor*> tensors(a.overlaps.size());
    for (size_t i = 0; i < std::min(n, tensors.size()); ++i)
      if (is_tensor(args[i])) tensors[i] = &unpack(args[i]);
    PyObject* chosen = a.overlaps.any(tensors) ? a.eager : a.call;
    return PyObject_Vectorcall(chosen, args, nargsf, kwnames);
  });
}

// -------------------------------------------------------------------------------------------- type
PyObject* apart_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *call, *eager, *arguments;
    if (!PyArg_ParseTuple(args, "OOO!", &call, &eager, &PyTuple_Type, &arguments)) return nullptr;
    const Py_ssize_t n = PyTuple_GET_SIZE(arguments);
    std::vector<bool> written;
    std::vector<size_t> firsts;
    std::vector<int64_t> offsets;
    for (Py_ssize_t i = 0; i < n; ++i) {
      int is_written;
      Py_ssize_t first;
      long long offset;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(arguments, i), "pnL", &is_written, &first, &offset))
        return nullptr;
      if (first < 0 || first > i) throw LoadError("an argument whose group begins after it");
      written.push_back(is_written != 0);
      firsts.push_back(static_cast<size_t>(first));
      offsets.push_back(offset);
    }
    Ref self = Ref::check(type->tp_alloc(type, 0));
    auto* a = reinterpret_cast<PyApart*>(self.get());
    new (&a->overlaps) Overlaps(std::move(written), std::move(firsts), std::move(offsets));
    a->vectorcall = apart_call;
    a->call = Py_NewRef(call);
    a->eager = Py_NewRef(eager);
    return self.release();
  });
}
int apart_traverse(PyObject* self, visitproc visit, void* arg) {
  const PyApart& a = *reinterpret_cast<PyApart*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(a.call);
  Py_VISIT(a.eager);
  return 0;
}
int apart_clear(PyObject* self) {
  PyApart& a = *reinterpret_cast<PyApart*>(self);
  for (PyObject** p : {&a.call, &a.eager}) Py_XSETREF(*p, Py_NewRef(Py_None));
  return 0;
}
void apart_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  PyApart& a = *reinterpret_cast<PyApart*>(self);
  Py_XDECREF(a.call);
  Py_XDECREF(a.eager);
  a.overlaps.~Overlaps();
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* apart_name(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<PyApart*>(self)->call, "__name__");
}

PyGetSetDef apart_getset[] = {{"__name__", apart_name, nullptr, "The name of `call`.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef apart_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyApart, vectorcall), READONLY, nullptr},
    {"call", T_OBJECT, offsetof(PyApart, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot apart_slots[] = {
    {Py_tp_doc, const_cast<char*>("Apart(call, eager, arguments): call, or eager where arguments "
                                  "share memory otherwise than when they were traced; of each "
                                  "(whether it is written, the first one of those that shared "
                                  "its storage, its offset there or -1).")},
    {Py_tp_new, reinterpret_cast<void*>(apart_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(apart_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(apart_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(apart_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getset, apart_getset},
    {Py_tp_members, apart_members},
    {0, nullptr}};
}  // namespace

PyType_Spec apart_spec{"plait._native.Apart", sizeof(PyApart), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                       apart_slots};

}  // namespace plait
