// native/python/tensors.h: Python tensor objects <-> at::Tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

namespace plait {

bool is_tensor(PyObject* o);
const at::Tensor& unpack(PyObject* tensor);  // lives as long as the object
PyObject* wrap(at::Tensor&& t);              // a new reference; None for an undefined tensor
PyObject* wrap(const at::Tensor& t);
const at::Generator* unpack_generator(PyObject* o);  // null if it is none

}  // namespace plait
