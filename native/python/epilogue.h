// native/python/epilogue.h: what remains to be done after a program has run, so that its callable
// can stand where AOTAutograd's runtime wrapper would: results that are inputs or views of them,
// marks of dynamic dimensions.
#pragma once

#include <vector>

#include "python/program_object.h"

namespace plait {

// Dynamo wants to know which dimensions of a result are dynamic.
struct Mark {
  Py_ssize_t result;
  Ref attribute, dims;
};

struct Epilogue {
  std::vector<Produced> results;
  std::vector<Mark> marks;
};

// results: ("program",) | ("input", arg) | ("view", arg, requires_grad, offset | None); marks:
// (result, attribute, dims).
Epilogue read_epilogue(PyObject* results, PyObject* marks);
std::vector<Mark> read_marks(PyObject* marks, size_t n_results);
Produced read_produced(PyObject* result);
void apply_marks(const std::vector<Mark>& marks, PyObject* results);

}  // namespace plait
