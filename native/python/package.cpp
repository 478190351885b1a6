// native/python/package.cpp: Package, a loaded package: its program as a Bound, and its weights by
// name.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "python/program_object.h"
#include "python/tensors.h"
#include "torch/package.h"

namespace plait {
namespace {

struct PyPackage {
  PyObject_HEAD PyObject *call, *names, *outputs, *weights, *folded, *python, *machine, *versions;
  std::shared_ptr<Weights>* memory;
};

PyObject* unicode(const std::string& s) {
  return PyUnicode_FromStringAndSize(s.data(), static_cast<Py_ssize_t>(s.size()));
}
PyObject* texts(const std::vector<std::string>& list) {
  Ref tuple = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(list.size())));
  for (size_t k = 0; k < list.size(); ++k)
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(k),
                     Ref::check(unicode(list[k])).release());
  return tuple.release();
}

PyObject* package_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* keywords[] = {"path", "device", "verify_weights", "machine", nullptr};
    PyObject* path = nullptr;
    const char *device = nullptr, *machine = nullptr;
    int verify_weights = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|zpz", const_cast<char**>(keywords),
                                     PyUnicode_FSConverter, &path, &device, &verify_weights,
                                     &machine))
      return nullptr;
    const Ref bytes(path);
    OpenPackage open(PyBytes_AS_STRING(path), device ? device : "", verify_weights != 0,
                     machine ? machine : "");
    const Manifest& m = open.file.manifest();
    Ref self = Ref::check(type->tp_alloc(type, 0));
    auto* p = reinterpret_cast<PyPackage*>(self.get());
    p->call = open.bind([&] {
      const Ref program =
          Ref::check(make_program(program_type, std::move(open.plan), std::move(open.kernels),
                                  std::move(open.cubins), std::move(open.constants), {}, {}));
      open.require_results(*state_of(program.get()).program);
      return Ref::check(make_bound(program.get(), std::move(open.signature), open.weights))
          .release();
    });
    bound_of(p->call).call_first([memory = open.memory] { verify(*memory); });
    p->memory = new std::shared_ptr<Weights>(open.memory);
    p->weights = Ref::check(PyDict_New()).release();
    for (size_t k = 0; k < m.weights.size(); ++k)
      put(p->weights, m.weights[k].name.c_str(), wrap(open.weights[k]));
    p->versions = Ref::check(PyDict_New()).release();
    for (const auto& [name, version] : m.versions) put(p->versions, name.c_str(), unicode(version));
    p->names = texts(m.signature.names);
    p->outputs = texts(m.outputs);
    p->folded = texts(m.folded);
    p->machine = Ref::check(unicode(open.variant->machine)).release();
    const auto python = open.file.section("python");
    p->python = Ref::check(unicode({reinterpret_cast<const char*>(python.data()), python.size()}))
                    .release();
    return self.release();
  });
}

PyObject* package_verify(PyObject* self, PyObject*) {
  return guarded([&] {
    verify(**reinterpret_cast<PyPackage*>(self)->memory);
    return Py_NewRef(Py_None);
  });
}
PyObject* package_weights(PyObject* self, void*) {
  return guarded([&] {
    const auto* p = reinterpret_cast<PyPackage*>(self);
    verify(**p->memory);
    return Py_NewRef(p->weights);
  });
}

int package_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<PyPackage*>(self)->call);
  Py_VISIT(reinterpret_cast<PyPackage*>(self)->weights);
  return 0;
}
int package_clear(PyObject* self) {
  auto* p = reinterpret_cast<PyPackage*>(self);
  for (PyObject** member : {&p->call, &p->names, &p->outputs, &p->weights, &p->folded, &p->python,
                            &p->machine, &p->versions})
    Py_CLEAR(*member);
  return 0;
}
void package_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  package_clear(self);
  delete reinterpret_cast<PyPackage*>(self)->memory;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef package_members[] = {
    {"call", T_OBJECT, offsetof(PyPackage, call), READONLY, "The program, a Bound."},
    {"names", T_OBJECT, offsetof(PyPackage, names), READONLY, "Of the caller's tensors."},
    {"outputs", T_OBJECT, offsetof(PyPackage, outputs), READONLY, "Names of the results."},
    {"folded", T_OBJECT, offsetof(PyPackage, folded), READONLY,
     "Names of weights that others were computed from."},
    {"python", T_OBJECT, offsetof(PyPackage, python), READONLY, "JSON that only Python needs."},
    {"machine", T_OBJECT, offsetof(PyPackage, machine), READONLY, "The variant that runs."},
    {"versions", T_OBJECT, offsetof(PyPackage, versions), READONLY, "Of what wrote it."},
    {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef package_attributes[] = {
    {"weights", package_weights, nullptr, "Parameters and buffers by name, verified.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef package_methods[] = {
    {"verify", package_verify, METH_NOARGS, "Raises PackageError for damaged weights."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot package_slots[] = {
    {Py_tp_doc,
     const_cast<char*>(
         "Package(path, device=None, verify_weights=True, machine=None): a loaded package.")},
    {Py_tp_new, reinterpret_cast<void*>(package_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(package_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(package_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(package_clear)},
    {Py_tp_members, package_members},
    {Py_tp_getset, package_attributes},
    {Py_tp_methods, package_methods},
    {0, nullptr}};
}  // namespace

PyType_Spec package_spec{"plait._native.Package", sizeof(PyPackage), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, package_slots};

}  // namespace plait
