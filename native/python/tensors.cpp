// native/python/tensors.cpp: the one file that includes python_variable.h (13 s to compile), and
// the translation of errors.
#include "python/tensors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include "core/plan.h"
#include "python/object.h"
#include "torch/checks.h"

namespace plait {

bool is_tensor(PyObject* o) { return THPVariable_Check(o); }
const at::Tensor& unpack(PyObject* tensor) { return THPVariable_Unpack(tensor); }
PyObject* wrap(at::Tensor&& t) { return THPVariable_Wrap(std::move(t)); }
PyObject* wrap(const at::Tensor& t) { return THPVariable_Wrap(t); }
const at::Generator* unpack_generator(PyObject* o) {
  return THPGenerator_Check(o) ? &reinterpret_cast<THPGenerator*>(o)->cdata : nullptr;
}

std::string text(PyObject* o) {
  Py_ssize_t n = 0;
  const char* s = PyUnicode_AsUTF8AndSize(o, &n);
  if (!s) throw PythonError{};
  return {s, static_cast<size_t>(n)};
}
int64_t integer(PyObject* o) {
  const long long v = PyLong_AsLongLong(o);
  if (v == -1 && PyErr_Occurred()) throw PythonError{};
  return v;
}
void put(PyObject* dict, const char* key, PyObject* owned) {
  const Ref value = Ref::check(owned);
  if (PyDict_SetItemString(dict, key, value.get()) < 0) throw PythonError{};
}

void set_plait_error(const char* type, const char* what) {
  const Ref errors(PyImport_ImportModule("plait.errors"));
  if (!errors) return;
  const Ref found(PyObject_GetAttrString(errors.get(), type));
  if (found) PyErr_SetString(found.get(), what);
}

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

void set_error() {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (python_error& e) {
    e.restore();
  } catch (const PlanError& e) {
    PyErr_SetString(plan_error, e.what());
  } catch (const LoadError& e) {
    PyErr_SetString(load_error, e.what());
  } catch (const PackageError& e) {
    PyErr_SetString(package_error, e.what());
  } catch (const InputError& e) {
    set_plait_error("InputError", e.what());
  } catch (const InputTypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (const AssertError& e) {
    const Ref message(
        PyUnicode_FromStringAndSize(e.text.data(), static_cast<Py_ssize_t>(e.text.size())));
    if (message) PyErr_SetObject(PyExc_RuntimeError, message.get());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

}  // namespace plait
