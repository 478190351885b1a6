// native/python/object.h: owned Python references, errors as C++ exceptions, small conversions.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>

#include "plait/errors.h"

namespace plait {

// A Python error is set; unwinds to the entry point, which returns NULL.
struct PythonError {};

// An owned reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : p_(owned) {}  // steals; NULL means that an error is set
  static Ref borrow(PyObject* p) { return Ref(Py_XNewRef(p)); }
  // Steals the result of a C API call, throws if it failed.
  static Ref check(PyObject* owned) {
    if (!owned) throw PythonError{};
    return Ref(owned);
  }
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  Ref(const Ref& o) : p_(Py_XNewRef(o.p_)) {}
  Ref& operator=(Ref o) noexcept {
    std::swap(p_, o.p_);
    return *this;
  }
  ~Ref() { Py_XDECREF(p_); }

  PyObject* get() const { return p_; }
  PyObject* release() { return std::exchange(p_, nullptr); }
  explicit operator bool() const { return p_ != nullptr; }

 private:
  PyObject* p_ = nullptr;
};

// The items of a tuple or list, borrowed from `keep`.
struct Items {
  Ref keep;
  PyObject** data;
  Py_ssize_t n;
  Items(PyObject* o, const char* what)
      : keep(Ref::check(PySequence_Fast(o, what))),
        data(PySequence_Fast_ITEMS(keep.get())),
        n(PySequence_Fast_GET_SIZE(keep.get())) {}
};

std::string text(PyObject* o);
int64_t integer(PyObject* o);
void put(PyObject* dict, const char* key, PyObject* owned);  // steals `owned`

// The exceptions of the module, made once by PyInit__native.
inline PyObject *plan_error, *load_error, *package_error;
void set_error();  // sets the Python error for the exception in flight
void set_plait_error(const char* type, const char* what);  // one of plait.errors
// Throws the Python error that is set in a form that may travel to another thread.
[[noreturn]] void throw_python_error();

// Runs the body of an entry point: no C++ exception gets through.
template <class F>
PyObject* guarded(F&& body) noexcept {
  try {
    return body();
  } catch (...) {
    set_error();
    return nullptr;
  }
}

}  // namespace plait
