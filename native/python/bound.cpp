// native/python/bound.cpp: Bound, a program with its parameters in place that checks its inputs
// itself: torch/bound.h for Python's arguments.
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "python/epilogue.h"
#include "python/tensors.h"

namespace plait {
namespace {

struct PyBound {
  PyObject_HEAD vectorcallfunc call;
  BoundState* state;
  PyObject* dict;
};

// ------------------------------------------------------------------------------------------ making
class SignatureReader {
 public:
  SignatureReader(PyObject* names, bool single) {
    const Items given(names, "names must be a sequence");
    for (Py_ssize_t i = 0; i < given.n; ++i) signature.names.push_back(text(given.data[i]));
    signature.single = single;
  }

  void add(size_t position, PyObject* spec) {
    const Items items(spec, "an input is a tuple");
    const std::string kind = items.n > 0 ? text(items.data[0]) : "";
    InputSpec s;
    const auto require = [&](bool fits, const char* what) {
      if (!fits) throw LoadError("program input " + std::to_string(position) + " " + what);
    };
    if (kind == "bound") {
      require(items.n == 3 && is_tensor(items.data[2]), "does not fit ('bound', name, tensor)");
      s.kind = InputSpec::Kind::bound;
      s.name = text(items.data[1]);
      s.arg = static_cast<int64_t>(bound.size());
      bound.push_back(unpack(items.data[2]));
    } else if (kind == "tensor") {
      require(items.n == 6, "does not fit ('tensor', arg, dtype, shape, strides, device)");
      s = tensor(items);
    } else if (kind == "symbol") {
      require(items.n == 2, "does not fit ('symbol', name)");
      s.kind = InputSpec::Kind::symbol;
      s.integer = signature.symbol(text(items.data[1]));
    } else if (kind == "int") {
      require(items.n == 3, "does not fit ('int', arg, size)");
      s.kind = InputSpec::Kind::integer;
      s.arg = integer(items.data[1]);
      s.integer = dim(items.data[2]);
    } else if (kind == "object") {
      require(items.n == 2, "does not fit ('object', arg)");
      s.kind = InputSpec::Kind::object;
      s.arg = integer(items.data[1]);
    } else {
      require(kind == "none", "has a description of unknown kind");
    }
    signature.inputs.push_back(std::move(s));
  }

  Signature signature;
  std::vector<at::Tensor> bound;

 private:
  Dim dim(PyObject* o) {
    if (o == Py_None) return {};
    if (PyUnicode_Check(o)) return signature.symbol(text(o));
    if (PyLong_Check(o)) return {Dim::Kind::fixed, integer(o)};
    const Items items(o, "a size is an int, a name, (name, lo, hi) or None");
    if (items.n != 3) throw LoadError("a size is an int, a name, (name, lo, hi) or None");
    Dim d = signature.symbol(text(items.data[0]));
    if (items.data[1] != Py_None) d.lo = integer(items.data[1]);
    if (items.data[2] != Py_None) d.hi = integer(items.data[2]);
    return d;
  }
  InputSpec tensor(const Items& items) {
    InputSpec s;
    s.kind = InputSpec::Kind::tensor;
    s.arg = integer(items.data[1]);
    s.dtype = text(items.data[2]);
    s.device = text(items.data[5]);
    const Items shape(items.data[3], "a shape is a sequence");
    for (Py_ssize_t d = 0; d < shape.n; ++d) s.sizes.push_back(dim(shape.data[d]));
    if (items.data[4] == Py_None) return s;
    s.layout = InputSpec::Layout::contiguous;
    if (PyUnicode_Check(items.data[4])) {
      if (text(items.data[4]) != "contiguous")
        throw LoadError("strides are neither listed nor 'contiguous'");
      return s;
    }
    s.layout = InputSpec::Layout::listed;
    const Items strides(items.data[4], "strides are a sequence");
    for (Py_ssize_t d = 0; d < strides.n; ++d) s.strides.push_back(dim(strides.data[d]));
    return s;
  }
};

// ----------------------------------------------------------------------------------------- calling
struct Arguments {
  PyObject* const* args;

  const at::Tensor* tensor(int64_t arg) const {
    return is_tensor(args[arg]) ? &unpack(args[arg]) : nullptr;
  }
  std::string type_name(int64_t arg) const { return Py_TYPE(args[arg])->tp_name; }
  bool integer(int64_t arg, int64_t& out) const {
    if (!PyLong_Check(args[arg]) || PyBool_Check(args[arg])) return false;
    out = plait::integer(args[arg]);
    return true;
  }
  void* object(int64_t arg) const { return arg < 0 ? Py_None : args[arg]; }
};

// Positional arguments, then keywords by name, in the order of the signature.
void sort_arguments(const std::vector<std::string>& names, PyObject* const* args, Py_ssize_t n,
                    PyObject* kwnames, std::vector<PyObject*>& out) {
  out.assign(names.size(), nullptr);
  if (static_cast<size_t>(n) > names.size())
    throw InputError("expected " + std::to_string(names.size()) + " inputs, got " +
                     std::to_string(n));
  std::copy(args, args + n, out.begin());
  for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); ++k) {
    const std::string name = text(PyTuple_GET_ITEM(kwnames, k));
    size_t i = 0;
    while (i < names.size() && names[i] != name) ++i;
    if (i == names.size()) throw InputError("there is no input '" + name + "'");
    if (out[i]) throw InputError("input '" + name + "' was given twice");
    out[i] = args[n + k];
  }
  for (size_t i = 0; i < out.size(); ++i)
    if (!out[i]) throw InputError("input '" + names[i] + "' is missing");
}

PyObject* bound_result(const Bound& b, const ProgramState& s, Frame& f, size_t k,
                       const Arguments& args) {
  if (!b.is_view(k)) return to_python(s, f, s.outputs[k]);
  const at::NoGradGuard no_grad;
  return wrap(b.view(f, k, take_tensor(f, s.outputs[k]), args));
}

PyObject* bound_results(const Bound& b, const ProgramState& s, Frame& f, const Arguments& args) {
  if (b.signature().single) return bound_result(b, s, f, 0, args);
  if (b.signature().results.empty()) return outputs(s, f);
  Ref tuple = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(s.outputs.size())));
  for (size_t k = 0; k < s.outputs.size(); ++k)
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(k),
                     Ref::check(bound_result(b, s, f, k, args)).release());
  return tuple.release();
}

// Waits for its turn without the GIL, which the thread whose turn it is may need.
class Turn {
 public:
  explicit Turn(std::recursive_mutex* turn) : turn_(turn) {
    if (!turn_ || turn_->try_lock()) return;
    PyThreadState* state = PyEval_SaveThread();
    turn_->lock();
    PyEval_RestoreThread(state);
  }
  ~Turn() {
    if (turn_) turn_->unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::recursive_mutex* turn_;
};

// Takes over what owners say of the tensors that some of the bound ones are computed from, if there
// are any: (tensor, version, address) as they were then.
void look_at_sources(BoundState& state) {
  state.sources.clear();
  const Ref found{PyObject_GetAttrString(state.owners.get(), "sources")};
  if (!found) return PyErr_Clear();
  const Items looked(found.get(), "sources is a sequence");
  for (Py_ssize_t i = 0; i < looked.n; ++i) {
    const Items one(looked.data[i], "sources has (tensor, version, address)");
    if (one.n != 3 || !is_tensor(one.data[0]))
      throw LoadError("sources has (tensor, version, address)");
    state.sources.push_back({unpack(one.data[0]), integer(one.data[1]), integer(one.data[2])});
  }
}

bool is_changed(const BoundState& state) {
  if (state.watched.changed()) return true;
  for (const Looked& s : state.sources)
    if (s.changed()) return true;
  return false;
}

// Binds what is now in the place of bound tensors, or computed of what is there now. Another thread
// may do the same meanwhile.
void rebind_replaced(BoundState& state) {
  WatchedDicts::Versions seen = state.watched.versions();
  const Ref found = Ref::check(PyObject_CallMethod(state.owners.get(), "tensors", nullptr));
  const Items pairs(found.get(), "tensors() gives a sequence");
  Bound::Numbered tensors;
  for (Py_ssize_t i = 0; i < pairs.n; ++i) {
    const Items pair(pairs.data[i], "tensors() gives (number, tensor)");
    if (pair.n != 2 || !is_tensor(pair.data[1]))
      throw LoadError("tensors() gives (number, tensor)");
    tensors.emplace_back(static_cast<size_t>(integer(pair.data[0])), unpack(pair.data[1]));
  }
  if (auto old = state.bound->rebind(tensors)) state.retired.push_back(std::move(old));
  look_at_sources(state);
  const Ref moved = Ref::check(PyObject_GetAttrString(state.owners.get(), "moved"));
  if (moved.get() != Py_True) state.watched.settle(std::move(seen));
}

// A call that is under way, which may let other threads run.
class UnderWay {
 public:
  explicit UnderWay(BoundState& state) : state_(state) { ++state_.under_way; }
  ~UnderWay() {
    if (--state_.under_way > 0 || state_.retired.empty()) return;
    const auto dropped = std::exchange(state_.retired, {});
  }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  BoundState& state_;
};

PyObject* bound_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    BoundState& state = *reinterpret_cast<PyBound*>(self)->state;
    const Bound& b = *state.bound;
    const std::vector<std::string>& names = b.signature().names;
    ProgramState& s = state_of(state.program.get());
    const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    std::vector<PyObject*> sorted;
    if (kwnames || static_cast<size_t>(n) != names.size()) [[unlikely]] {
      sort_arguments(names, args, n, kwnames, sorted);
      args = sorted.data();
    }
    const Arguments given{args};
    const UnderWay under_way(state);
    const Turn turn(b.turn());
    if (is_changed(state)) [[unlikely]]
      rebind_replaced(state);
    Call call(*s.program);
    b.bind(call.frame(), given);
    s.program->run(call.frame());
    return bound_results(b, s, call.frame(), given);
  });
}

// -------------------------------------------------------------------------------------------- type
void watch(BoundState& state, PyObject* owners) {
  state.owners = Ref::borrow(owners);
  state.dicts = Ref::check(PyObject_GetAttrString(owners, "dicts"));
  if (!PyTuple_Check(state.dicts.get())) throw LoadError("dicts must be a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(state.dicts.get()); ++i) {
    PyObject* dict = PyTuple_GET_ITEM(state.dicts.get(), i);
    if (!PyDict_Check(dict)) throw LoadError("what holds bound tensors is a dict");
    state.watched.add(dict);
  }
}

PyObject* bound_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *program = nullptr, *inputs = nullptr, *names = nullptr, *results = nullptr;
    PyObject* owners = Py_None;
    int single = 0;
    if (!PyArg_ParseTuple(args, "O!OOp|OO", program_type, &program, &inputs, &names, &single,
                          &results, &owners))
      return nullptr;
    SignatureReader reader(names, single != 0);
    const Items given(inputs, "inputs must be a sequence");
    for (Py_ssize_t i = 0; i < given.n; ++i) reader.add(static_cast<size_t>(i), given.data[i]);
    if (results) {
      const Items produced(results, "results must be a sequence");
      for (Py_ssize_t k = 0; k < produced.n; ++k)
        reader.signature.results.push_back(read_produced(produced.data[k]));
    }
    Ref self = Ref::check(make_bound(program, std::move(reader.signature), reader.bound));
    if (owners != Py_None) watch(*reinterpret_cast<PyBound*>(self.get())->state, owners);
    return self.release();
  });
}
int bound_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (const BoundState* state = reinterpret_cast<PyBound*>(self)->state) {
    Py_VISIT(state->program.get());
    Py_VISIT(state->owners.get());
    Py_VISIT(state->dicts.get());
  }
  Py_VISIT(reinterpret_cast<PyBound*>(self)->dict);
  return 0;
}
int bound_clear(PyObject* self) {
  if (BoundState* state = reinterpret_cast<PyBound*>(self)->state) {
    state->watched.clear();
    state->owners = state->dicts = Ref::borrow(Py_None);
  }
  Py_CLEAR(reinterpret_cast<PyBound*>(self)->dict);
  return 0;
}
void bound_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  bound_clear(self);
  delete reinterpret_cast<PyBound*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* bound_name(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<PyBound*>(self)->state->program.get(), "__name__");
}
PyObject* bound_program(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<PyBound*>(self)->state->program.get());
}

PyGetSetDef bound_getset[] = {
    {"program", bound_program, nullptr, "The program that a call runs.", nullptr},
    {"__name__", bound_name, nullptr, "The program's name.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyBound, call), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(PyBound, dict), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot bound_slots[] = {
    {Py_tp_doc,
     const_cast<char*>("Bound(program, inputs, names, single, results, owners): a program with its "
                       "parameters, which checks its inputs.")},
    {Py_tp_new, reinterpret_cast<void*>(bound_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(bound_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(bound_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(bound_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getset, bound_getset},
    {Py_tp_members, bound_members},
    {0, nullptr}};
}  // namespace

Bound& bound_of(PyObject* bound) { return *reinterpret_cast<PyBound*>(bound)->state->bound; }

PyObject* make_bound(PyObject* program, Signature signature, const std::vector<at::Tensor>& bound) {
  auto state = std::make_unique<BoundState>();
  state->program = Ref::borrow(program);
  state->bound = std::make_unique<Bound>(*state_of(program).program, std::move(signature), bound);
  Ref self = Ref::check(bound_type->tp_alloc(bound_type, 0));
  reinterpret_cast<PyBound*>(self.get())->call = bound_call;
  reinterpret_cast<PyBound*>(self.get())->state = state.release();
  return self.release();
}

PyType_Spec bound_spec{"plait._native.Bound", sizeof(PyBound), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                       bound_slots};

}  // namespace plait
