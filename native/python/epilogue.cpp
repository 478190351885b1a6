// native/python/epilogue.cpp: reads the description of an epilogue, and marks results.
#include "python/epilogue.h"

namespace plait {

Produced read_produced(PyObject* o) {
  const Items items(o, "a result is a tuple");
  const std::string kind = items.n > 0 ? text(items.data[0]) : "";
  if (kind == "program" && items.n == 1) return {};
  if (kind == "input" && items.n == 2) return {Produced::Kind::input, integer(items.data[1])};
  if (kind == "view" && items.n == 4)
    return {Produced::Kind::view, integer(items.data[1]), PyObject_IsTrue(items.data[2]) == 1,
            items.data[3] == Py_None ? std::optional<int64_t>() : integer(items.data[3])};
  throw LoadError(
      "a result is ('program',), ('input', arg) or ('view', arg, requires_grad, offset)");
}

Epilogue read_epilogue(PyObject* results, PyObject* marks) {
  Epilogue e;
  const Items wanted(results, "results must be a sequence");
  for (Py_ssize_t i = 0; i < wanted.n; ++i) e.results.push_back(read_produced(wanted.data[i]));
  e.marks = read_marks(marks, e.results.size());
  return e;
}

std::vector<Mark> read_marks(PyObject* marks, size_t n_results) {
  std::vector<Mark> out;
  const Items given(marks, "marks must be a sequence");
  for (Py_ssize_t i = 0; i < given.n; ++i) {
    const Items mark(given.data[i], "a mark is (result, attribute, dims)");
    if (mark.n != 3) throw LoadError("a mark is (result, attribute, dims)");
    const int64_t result = integer(mark.data[0]);
    if (result < 0 || static_cast<size_t>(result) >= n_results)
      throw LoadError("result " + std::to_string(result) + " to be marked does not exist");
    out.push_back({result, Ref::borrow(mark.data[1]), Ref::borrow(mark.data[2])});
  }
  return out;
}

void apply_marks(const std::vector<Mark>& marks, PyObject* results) {
  for (const Mark& m : marks) {
    PyObject* tensor = PyTuple_GET_ITEM(results, m.result);
    Ref dims(PyObject_GetAttr(tensor, m.attribute.get()));  // of an input that is returned
    if (dims) {
      dims = Ref::check(PyNumber_Or(dims.get(), m.dims.get()));
    } else {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw PythonError{};
      PyErr_Clear();
      dims = Ref::check(PySet_New(m.dims.get()));
    }
    if (PyObject_SetAttr(tensor, m.attribute.get(), dims.get()) < 0) throw PythonError{};
  }
}

}  // namespace plait
