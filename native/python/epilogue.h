// native/python/epilogue.h: what remains to be done after a program has run, so that its callable
// can stand where AOTAutograd's runtime wrapper would: results that are inputs or views of them,
// marks of dynamic dimensions.
#pragma once

#include <optional>
#include <vector>

#include "python/program_object.h"

namespace plait {

// A result, at its place among the user's results.
struct Produced {
  enum class Kind { program, input, view } kind = Kind::program;
  Py_ssize_t arg = 0;          // input, view: of which argument
  bool requires_grad = false;  // view
  // view: elements from the argument's first one to its own; if unknown, the program's tensor tells
  std::optional<int64_t> offset;
};

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
// A view of base as eager makes it, with its base, version counter and lazy bits, in the caller's
// gradient and inference mode. `like`, what the program made of `bound`, the base as it saw it, has
// its sizes and strides.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& bound, const at::Tensor& like,
                   const Produced& r);
// The tensor that the program was given as input number `arg`.
const at::Tensor& input_at(const ProgramState& s, const Frame& f, Py_ssize_t arg);
at::Tensor take_tensor(const ProgramState& s, Frame& f, size_t output);
void apply_marks(const std::vector<Mark>& marks, PyObject* results);

}  // namespace plait
