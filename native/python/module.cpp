// native/python/module.cpp: plait._native: its types and functions, on the raw C API. The loaded
// kernel library lives here too.
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/arena.h"
#include "core/checksum.h"
#include "python/program_object.h"
#include "python/tensors.h"
#include "torch/call.h"

namespace plait {

namespace {

std::vector<void*> named_functions(PyObject* names) {
  const Items items(names, "names of math functions must be a sequence");
  std::vector<std::string> texts;
  for (Py_ssize_t i = 0; i < items.n; ++i) texts.push_back(text(items.data[i]));
  return math_table(texts);
}

PyObject* library_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const char* path = nullptr;
    PyObject* names = nullptr;
    if (!PyArg_ParseTuple(args, "sO", &path, &names)) return nullptr;
    auto value = std::make_shared<Library>(path, named_functions(names));
    Ref self = Ref::check(type->tp_alloc(type, 0));
    new (&reinterpret_cast<PyLibrary*>(self.get())->value)
        std::shared_ptr<Library>(std::move(value));
    return self.release();
  });
}
void library_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::destroy_at(&reinterpret_cast<PyLibrary*>(self)->value);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot library_slots[] = {
    {Py_tp_doc, const_cast<char*>("Library(path, math_names): a loaded kernel library.")},
    {Py_tp_new, reinterpret_cast<void*>(library_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(library_dealloc)},
    {0, nullptr}};
}  // namespace
PyType_Spec library_spec{"plait._native.Library", sizeof(PyLibrary), 0, Py_TPFLAGS_DEFAULT,
                         library_slots};

namespace {

// ------------------------------------------------------------------------------------------ module
PyObject* module_arena_stats(PyObject*, PyObject*) {
  return guarded([] {
    const ArenaStats s = arena_stats();
    Ref d = Ref::check(PyDict_New());
    put(d.get(), "held_bytes", PyLong_FromLongLong(s.held_bytes));
    put(d.get(), "in_use_bytes", PyLong_FromLongLong(s.in_use_bytes));
    put(d.get(), "idle_limit_bytes", PyLong_FromLongLong(s.idle_limit_bytes));
    return d.release();
  });
}
PyObject* module_trim_arenas(PyObject*, PyObject*) {
  trim_arenas();
  Py_RETURN_NONE;
}
PyObject* module_math_addresses(PyObject*, PyObject* names) {
  return guarded([&] {
    const std::vector<void*> table = named_functions(names);
    Ref out = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(table.size())));
    for (size_t i = 0; i < table.size(); ++i)
      PyTuple_SET_ITEM(out.get(), static_cast<Py_ssize_t>(i),
                       Ref::check(PyLong_FromVoidPtr(table[i])).release());
    return out.release();
  });
}

// Calls take with the bytes of each piece that Python yields, until it returns false. False: Python
// has an error. Without the GIL while there are bytes: who compiles meanwhile takes it back within
// 5 ms of each piece that asks for it.
template <class F>
bool each_piece(PyObject* pieces, F take) {
  const Ref iterator(PyObject_GetIter(pieces));
  if (!iterator.get()) return false;
  for (bool more = true; more;) {
    const Ref piece(PyIter_Next(iterator.get()));
    if (!piece.get()) break;
    Py_buffer bytes;
    if (PyObject_GetBuffer(piece.get(), &bytes, PyBUF_SIMPLE) < 0) return false;
    Py_BEGIN_ALLOW_THREADS;
    more =
        take(std::span{static_cast<const std::byte*>(bytes.buf), static_cast<size_t>(bytes.len)});
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&bytes);
  }
  return !PyErr_Occurred();
}

PyObject* module_checksum(PyObject*, PyObject* pieces) {
  Checksum sum;
  const bool done = each_piece(pieces, [&](std::span<const std::byte> bytes) {
    sum.align();
    sum.add(bytes);
    return true;
  });
  return done ? PyLong_FromUnsignedLongLong(sum.value()) : nullptr;
}

PyObject* module_write(PyObject*, PyObject* args) {
  constexpr size_t kChunk = 4 << 20;  // summed while caches still have it
  int file = 0;
  long long start = 0;
  PyObject* pieces = nullptr;
  if (!PyArg_ParseTuple(args, "iLO", &file, &start, &pieces)) return nullptr;
  PiecewiseChecksum sum;
  off_t at = start;
  int error = 0;
  const bool done = each_piece(pieces, [&](std::span<const std::byte> left) {
    sum.align();
    at = start + (at - start + kWeightAlign - 1) / kWeightAlign * kWeightAlign;
    while (error == 0 && !left.empty()) {
      const auto chunk = left.first(std::min(kChunk, left.size()));
      for (size_t written = 0; error == 0 && written < chunk.size();) {
        const ssize_t n = pwrite(file, chunk.data() + written, chunk.size() - written, at);
        if (n == 0 || (n < 0 && errno != EINTR)) error = n == 0 ? EIO : errno;
        written += static_cast<size_t>(std::max<ssize_t>(n, 0));
        at += std::max<ssize_t>(n, 0);
      }
      sum.add(chunk);
      left = left.subspan(chunk.size());
    }
    return error == 0;
  });
  if (error != 0) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  return done ? PyLong_FromUnsignedLongLong(sum.value()) : nullptr;
}

PyObject* module_all_plain(PyObject*, PyObject* values) {
  return guarded([&] {
    const Items items(values, "all_plain takes a sequence");
    const auto plain = [](PyObject* o) { return !is_tensor(o) || is_plain(unpack(o)); };
    return PyBool_FromLong(std::all_of(items.data, items.data + items.n, plain));
  });
}

PyMethodDef module_methods[] = {
    {"arena_stats", module_arena_stats, METH_NOARGS,
     "Bytes that the arena pool holds, that are in use, and that may stay idle."},
    {"trim_arenas", module_trim_arenas, METH_NOARGS, "Frees every idle block of the arena pool."},
    {"math_addresses", module_math_addresses, METH_O,
     "Addresses of math functions by name, 0 where this process has none."},
    {"checksum", module_checksum, METH_O,
     "The checksum of pieces of bytes that packages use, each at the next multiple of 64: fast, "
     "not cryptographic."},
    {"write", module_write, METH_VARARGS,
     "write(file, start, pieces): writes pieces of bytes from start on, each at the next multiple "
     "of 64; their piecewise checksum."},
    {"load_cubin", module_load_cubin, METH_VARARGS,
     "load_cubin(path, name, device, n_arguments): a GPU kernel, unloaded when it is dropped."},
    {"launch_cubin", module_launch_cubin, METH_VARARGS,
     "launch_cubin(kernel, pointers, sizes, grid): puts a GPU kernel on its device's current "
     "stream."},
    {"all_plain", module_all_plain, METH_O,
     "Whether kernels can read all tensors among these values: none wraps another one or has a "
     "forward-mode tangent."},
    {"has_conditional_nodes", module_has_conditional_nodes, METH_NOARGS,
     "has_conditional_nodes(): whether CUDA graphs of this machine's driver can decide what they "
     "run; true where there is no driver."},
    {"guard_for_cuda", module_guard_for_cuda, METH_O,
     "guard_for_cuda(on): gives a torch without CUDA a guard for such devices that does nothing, "
     "or takes it "
     "away; whether it did. Tensors without values can be there then."},
    {"inspect_package", module_inspect_package, METH_VARARGS,
     "inspect_package(path, verify_weights): what is in a package, by topic: texts by name."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def{PyModuleDef_HEAD_INIT,
                       "plait._native",
                       "plait's executor: runs compiled plans. See docs/native-interface.md.",
                       -1,
                       module_methods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

PyTypeObject* add_type(PyObject* module, PyType_Spec& spec) {
  auto* type = reinterpret_cast<PyTypeObject*>(Ref::check(PyType_FromSpec(&spec)).release());
  if (PyModule_AddType(module, type) < 0) throw PythonError{};
  return type;
}

}  // namespace
}  // namespace plait

PyMODINIT_FUNC PyInit__native() {
  using namespace plait;
  return guarded([] {
    Ref module = Ref::check(PyModule_Create(&module_def));
    plan_error =
        Ref::check(PyErr_NewExceptionWithDoc("plait._native.PlanError",
                                             "Plan bytes are damaged or of another version.",
                                             PyExc_ValueError, nullptr))
            .release();
    load_error =
        Ref::check(PyErr_NewExceptionWithDoc("plait._native.LoadError",
                                             "A sound plan cannot be bound in this process.",
                                             PyExc_RuntimeError, nullptr))
            .release();
    package_error =
        Ref::check(PyErr_NewExceptionWithDoc("plait._native.PackageError",
                                             "A package cannot be loaded; the message says why.",
                                             PyExc_ValueError, nullptr))
            .release();
    if (PyModule_AddObjectRef(module.get(), "PlanError", plan_error) < 0 ||
        PyModule_AddObjectRef(module.get(), "LoadError", load_error) < 0 ||
        PyModule_AddObjectRef(module.get(), "PackageError", package_error) < 0)
      throw PythonError{};
    library_type = add_type(module.get(), library_spec);
    program_type = add_type(module.get(), program_spec);
    boxed_type = add_type(module.get(), boxed_spec);
    bound_type = add_type(module.get(), bound_spec);
    training_type = add_type(module.get(), training_spec);
    direct_type = add_type(module.get(), direct_spec);
    add_type(module.get(), tangents_spec);
    add_type(module.get(), apart_spec);
    add_type(module.get(), package_spec);
    return module.release();
  });
}
