// native/python/training.cpp: Training, the forward and backward program of a graph as one
// differentiable callable.
//
// A call runs the forward program, tells its outputs apart (the user's results, saved tensors,
// saved sizes) and makes a PlaitBackward node of them. The backward program is asked for when the
// first backward pass needs it; a pass whose tangents are not plain tensors runs the backward graph
// operator by operator. In a state that the node does not serve, the call goes to AOTAutograd's own
// callable.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "python/epilogue.h"
#include "python/tensors.h"
#include "torch/node.h"

namespace plait {
namespace {
namespace ag = torch::autograd;

struct TrainingState {
  Ref forward, wrapper, compile_backward, interpret;
  Ref backward[2];                     // reads its inputs; may overwrite them
  std::vector<bool> differentiable;    // of the user's results
  size_t n_saved = 0, n_sizes = 0;     // outputs behind the results
  std::vector<Py_ssize_t> wants_grad;  // inputs with a gradient
  std::vector<int32_t> saved_result;   // of each saved tensor: the result that it is, or kNone
  std::vector<std::pair<Ref, Ref>> switches;  // (dict, name) of variables that are true where
                                              // the node does not serve
  std::vector<Mark> marks;
  BackwardFacts facts;
  bool wrapper_first = false;  // the first call goes to the wrapper, which checks custom operators
};

struct PyTraining {
  PyObject_HEAD vectorcallfunc call;
  TrainingState* state;
};

TrainingState& training_of(void* self) { return *static_cast<PyTraining*>(self)->state; }

// ---------------------------------------------------------------------------------------- backward
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// The program of a backward pass, compiled by the first pass that needs it.
PyObject* backward_program(TrainingState& t, bool may_overwrite) {
  if (!t.backward[may_overwrite]) {
    Ref made = Ref::check(PyObject_CallFunctionObjArgs(
        t.compile_backward.get(), may_overwrite ? Py_True : Py_False, nullptr));
    if (!PyObject_TypeCheck(made.get(), program_type))
      throw InputTypeError("a backward pass was compiled to something that is no Program");
    const size_t want = t.n_sizes + t.n_saved + t.facts.tangents.size();
    const std::vector<Input>& inputs = state_of(made.get()).program->plan().inputs;
    if (inputs.size() != want)
      throw LoadError("the backward program takes " + std::to_string(inputs.size()) + " inputs, " +
                      std::to_string(want) + " were expected");
    for (size_t k = 0; k < want; ++k)
      if ((inputs[k].kind == Input::Kind::tensor) != (k >= t.n_sizes))
        throw LoadError("input " + std::to_string(k) +
                        " of the backward program is of another kind");
    t.backward[may_overwrite] = std::move(made);
  }
  return t.backward[may_overwrite].get();
}

ag::variable_list run_backward(TrainingState& t, BackwardRun& run) {
  const Ref keep = Ref::borrow(backward_program(t, run.may_overwrite));
  ProgramState& s = state_of(keep.get());
  const Program& p = *s.program;
  const std::vector<Input>& inputs = p.plan().inputs;
  Call call(*s.program);
  Frame& f = call.frame();
  f.owns_inputs = true;
  size_t k = 0;
  for (int64_t size : *run.sizes) {
    // A size that tracing found to be constant is an input that nothing reads.
    if (inputs[k].kind == Input::Kind::symbol) set_symbol(f, inputs[k].id, size);
    ++k;
  }
  for (auto* tensors : {&run.saved, &run.tangents}) {
    for (const at::Tensor& tensor : *tensors) {
      require_fit(f, inputs[k], tensor);
      bind_input(f, inputs[k++], tensor);
    }
    tensors->clear();
  }
  s.program->run(f);
  ag::variable_list grads;
  grads.reserve(t.wants_grad.size());
  for (Py_ssize_t input : t.wants_grad)
    grads.push_back(take_tensor(f, s.outputs[static_cast<size_t>(input)]));
  return grads;
}

// Gives the graph's inputs in a list, which `interpret` empties.
ag::variable_list interpret_backward(TrainingState& t, BackwardRun& run) {
  Ref args = Ref::check(PyList_New(0));
  const auto append = [&](PyObject* owned) {
    const Ref value = Ref::check(owned);
    if (PyList_Append(args.get(), value.get()) < 0) throw PythonError{};
  };
  for (int64_t size : *run.sizes) append(PyLong_FromLongLong(size));
  for (auto* tensors : {&run.saved, &run.tangents}) {
    for (at::Tensor& tensor : *tensors) append(wrap(std::move(tensor)));
    tensors->clear();
  }
  const Ref results = Ref::check(PyObject_CallOneArg(t.interpret.get(), args.get()));
  const Items found(results.get(), "gradients are a sequence");
  ag::variable_list grads;
  grads.reserve(t.wants_grad.size());
  for (Py_ssize_t input : t.wants_grad) {
    if (input >= found.n) throw LoadError("a backward graph has too few results");
    PyObject* value = found.data[input];
    grads.push_back(is_tensor(value) ? unpack(value) : at::Tensor());
  }
  return grads;
}

template <ag::variable_list (*run_graph)(TrainingState&, BackwardRun&)>
ag::variable_list hosted(void* owner, BackwardRun& run) {
  const Gil gil;
  try {
    return run_graph(training_of(owner), run);
  } catch (const PythonError&) {
    throw_python_error();
  } catch (const LoadError& e) {
    set_plait_error("InternalError", e.what());
    throw_python_error();
  }
}

constexpr NodeHost kNodeHost{hosted<run_backward>, hosted<interpret_backward>,
                             [](const char* what) {
                               const Gil gil;
                               set_plait_error("GradientError", what);
                               throw_python_error();
                             },
                             [](void* owner) {
                               const Gil gil;
                               Py_INCREF(static_cast<PyObject*>(owner));
                             },
                             [](void* owner) {
                               if (!Py_IsInitialized()) return;
                               const Gil gil;
                               Py_DECREF(static_cast<PyObject*>(owner));
                             }};

// ----------------------------------------------------------------------------------------- forward
// Whether the node serves a call with these arguments in this thread's state.
bool serves(const TrainingState& t, const Program& p, PyObject* const* args, Py_ssize_t n) {
  const std::vector<Input>& inputs = p.plan().inputs;
  for (const auto& [scope, name] : t.switches)
    if (PyDict_GetItemWithError(scope.get(), name.get()) == Py_True) return false;
  if (static_cast<size_t>(n) != inputs.size() || !plain_autograd()) return false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].kind != Input::Kind::tensor) continue;
    if (!is_tensor(args[i])) return false;
    const at::Tensor& t = unpack(args[i]);
    if (find_misfit(p.slot(inputs[i].id), t) != Misfit::none) return false;
  }
  return true;
}

using NodeRef = decltype(make_node<PlaitBackward>(ag::edge_list(), std::declval<BackwardFacts&>(),
                                                  kNodeHost, nullptr));

NodeRef new_node(PyObject* self, const TrainingState& t, PyObject* const* args) {
  ag::edge_list edges;
  edges.reserve(t.wants_grad.size());
  for (Py_ssize_t i : t.wants_grad) edges.push_back(gradient_edge(unpack(args[i])));
  return make_node<PlaitBackward>(std::move(edges), t.facts, kNodeHost, Py_NewRef(self));
}

// What the program left in its frame: results get their history, the node what it saves.
Ref finish(const TrainingState& t, const ProgramState& s, Frame& f, const NodeRef& node) {
  const size_t n_results = t.differentiable.size();
  std::vector<at::Tensor> results(n_results);
  Ref tuple = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(n_results)));
  for (size_t i = 0; i < n_results; ++i) {
    results[i] = take_tensor(f, s.outputs[i]);
    if (t.differentiable[i] && results[i].defined()) set_history(results[i], node);
    PyObject* value = results[i].defined() ? wrap(results[i]) : to_python(s, f, s.outputs[i]);
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), Ref::check(value).release());
  }
  for (size_t k = 0; k < t.n_saved; ++k) {
    const int32_t result = t.saved_result[k];
    if (result == kNone)
      node->save(take_tensor(f, s.outputs[n_results + k]), false);
    else
      node->save(results[static_cast<size_t>(result)],
                 t.differentiable[static_cast<size_t>(result)]);
  }
  node->sizes().reserve(t.n_sizes);
  for (size_t k = 0; k < t.n_sizes; ++k)
    node->sizes().push_back(f.values[static_cast<size_t>(s.outputs[n_results + t.n_saved + k].id)]);
  return tuple;
}

PyObject* training_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    TrainingState& t = training_of(self);
    ProgramState& s = state_of(t.forward.get());
    const Program& p = *s.program;
    if (t.wrapper_first) [[unlikely]] {
      Ref results = Ref::check(PyObject_Vectorcall(t.wrapper.get(), args, nargsf, kwnames));
      t.wrapper_first = false;
      return results.release();
    }
    if (kwnames || !serves(t, p, args, PyVectorcall_NARGS(nargsf))) [[unlikely]]
      return PyObject_Vectorcall(t.wrapper.get(), args, nargsf, kwnames);
    const std::vector<Input>& inputs = p.plan().inputs;
    Call call(*s.program);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].kind == Input::Kind::tensor)
        bind_input(call.frame(), inputs[i], unpack(args[i]));
      else if (inputs[i].kind == Input::Kind::symbol)
        set_symbol(call.frame(), inputs[i].id, integer(args[i]));
      else
        call.frame().opaques[static_cast<size_t>(inputs[i].id)] = args[i];
    }
    s.program->run(call.frame());
    const NodeRef node = new_node(self, t, args);
    Ref results = finish(t, s, call.frame(), node);
    apply_marks(t.marks, results.get());
    return results.release();
  });
}

// -------------------------------------------------------------------------------------------- type
c10::MemoryFormat memory_format(const std::string& name) {
  if (name == "contiguous_format") return c10::MemoryFormat::Contiguous;
  if (name == "channels_last") return c10::MemoryFormat::ChannelsLast;
  if (name == "channels_last_3d") return c10::MemoryFormat::ChannelsLast3d;
  throw LoadError("a gradient cannot be brought to the memory format '" + name + "'");
}

// A memory format's name, or (sizes, strides).
Tangent tangent(PyObject* o) {
  Tangent t;
  if (PyUnicode_Check(o)) {
    t.format = memory_format(text(o));
    return t;
  }
  const Items both(o, "a tangent is a memory format's name or (sizes, strides)");
  if (both.n != 2) throw LoadError("a tangent is a memory format's name or (sizes, strides)");
  const Items sizes(both.data[0], "sizes are a sequence"), strides(both.data[1], "so are strides");
  if (sizes.n != strides.n) throw LoadError("a tangent has as many strides as sizes");
  for (Py_ssize_t d = 0; d < sizes.n; ++d) {
    t.sizes.push_back(integer(sizes.data[d]));
    t.strides.push_back(integer(strides.data[d]));
  }
  return t;
}

// Outputs are results, saved tensors, saved sizes, in this order.
void check_outputs(TrainingState& t, const ProgramState& s) {
  const size_t n_results = t.differentiable.size();
  if (s.outputs.size() != n_results + t.n_saved + t.n_sizes)
    throw LoadError("the forward program has " + std::to_string(s.outputs.size()) +
                    " outputs, described were " +
                    std::to_string(n_results + t.n_saved + t.n_sizes));
  const auto is_tensor_output = [&](size_t k) {
    return s.outputs[k].kind == Output::Kind::tensor ||
           s.outputs[k].kind == Output::Kind::moved_tensor;
  };
  size_t n_differentiable = 0;
  for (size_t i = 0; i < n_results; ++i) {
    n_differentiable += t.differentiable[i];
    if (t.differentiable[i] && !is_tensor_output(i))
      throw LoadError("result " + std::to_string(i) + " wants gradients and is no tensor");
  }
  if (n_differentiable != t.facts.tangents.size())
    throw LoadError("the graph has as many tangents as differentiable results");
  for (size_t k = 0; k < t.n_saved; ++k) {
    if (!is_tensor_output(n_results + k)) throw LoadError("a saved tensor is no tensor");
    int32_t same = kNone;
    for (size_t i = 0; i < n_results; ++i)
      if (is_tensor_output(i) && s.outputs[i].id == s.outputs[n_results + k].id)
        same = static_cast<int32_t>(i);
    t.saved_result.push_back(same);
  }
  for (size_t k = n_results + t.n_saved; k < s.outputs.size(); ++k)
    if (s.outputs[k].kind != Output::Kind::integer) throw LoadError("a saved size is no integer");
  for (Py_ssize_t i : t.wants_grad)
    if (i < 0 || static_cast<size_t>(i) >= s.program->plan().inputs.size() ||
        s.program->plan().inputs[static_cast<size_t>(i)].kind != Input::Kind::tensor)
      throw LoadError("input " + std::to_string(i) + " cannot have a gradient");
  for (const std::vector<size_t>& sources : t.facts.sources)
    for (size_t i : sources)
      if (i >= n_differentiable) throw LoadError("there is no tangent " + std::to_string(i));
}

PyObject* training_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *forward, *wrapper, *compile, *interpret, *differentiable, *tangents, *wants_grad;
    Py_ssize_t n_saved = 0, n_sizes = 0;
    int nondeterministic = 0, wrapper_first = 0;
    PyObject *marks, *switches;
    if (!PyArg_ParseTuple(args, "O!OOOOnnOOpOOp", program_type, &forward, &wrapper, &compile,
                          &interpret, &differentiable, &n_saved, &n_sizes, &tangents, &wants_grad,
                          &nondeterministic, &marks, &switches, &wrapper_first))
      return nullptr;
    auto t = std::make_unique<TrainingState>();
    t->forward = Ref::borrow(forward);
    t->wrapper = Ref::borrow(wrapper);
    t->compile_backward = Ref::borrow(compile);
    t->interpret = Ref::borrow(interpret);
    t->n_saved = static_cast<size_t>(n_saved);
    t->n_sizes = static_cast<size_t>(n_sizes);
    t->facts.nondeterministic = nondeterministic != 0;
    t->wrapper_first = wrapper_first != 0;
    const Items flags(differentiable, "differentiable must be a sequence");
    for (Py_ssize_t i = 0; i < flags.n; ++i)
      t->differentiable.push_back(PyObject_IsTrue(flags.data[i]) == 1);
    const Items layouts(tangents, "tangents must be a sequence");
    for (Py_ssize_t i = 0; i < layouts.n; ++i)
      t->facts.tangents.push_back(tangent(layouts.data[i]));
    const Items wanted(wants_grad, "wants_grad must be a sequence");
    for (Py_ssize_t i = 0; i < wanted.n; ++i) {
      const Items pair(wanted.data[i], "a gradient is (input, tangents)");
      if (pair.n != 2) throw LoadError("a gradient is (input, tangents)");
      const Items from(pair.data[1], "tangents are a sequence");
      t->wants_grad.push_back(integer(pair.data[0]));
      std::vector<size_t>& sources = t->facts.sources.emplace_back();
      for (Py_ssize_t k = 0; k < from.n; ++k)
        sources.push_back(static_cast<size_t>(integer(from.data[k])));
    }
    t->marks = read_marks(marks, t->differentiable.size());
    const Items pairs(switches, "switches must be a sequence");
    for (Py_ssize_t i = 0; i < pairs.n; ++i) {
      const Items pair(pairs.data[i], "a switch is (dict, name)");
      if (pair.n != 2 || !PyDict_Check(pair.data[0])) throw LoadError("a switch is (dict, name)");
      t->switches.emplace_back(Ref::borrow(pair.data[0]), Ref::borrow(pair.data[1]));
    }
    check_outputs(*t, state_of(forward));
    Ref self = Ref::check(type->tp_alloc(type, 0));
    reinterpret_cast<PyTraining*>(self.get())->call = training_call;
    reinterpret_cast<PyTraining*>(self.get())->state = t.release();
    return self.release();
  });
}
int training_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!reinterpret_cast<PyTraining*>(self)->state) return 0;
  const TrainingState& t = training_of(self);
  for (const Ref* r :
       {&t.forward, &t.wrapper, &t.compile_backward, &t.interpret, &t.backward[0], &t.backward[1]})
    Py_VISIT(r->get());
  return 0;
}
int training_clear(PyObject* self) {
  TrainingState& t = training_of(self);
  for (Ref* r : {&t.wrapper, &t.compile_backward, &t.interpret}) *r = Ref::borrow(Py_None);
  return 0;
}
void training_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<PyTraining*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* training_name(PyObject* self, void*) {
  return PyObject_GetAttrString(training_of(self).forward.get(), "__name__");
}
PyObject* training_forward(PyObject* self, void*) {
  return Py_NewRef(training_of(self).forward.get());
}

PyGetSetDef training_getset[] = {
    {"forward", training_forward, nullptr, "The forward program.", nullptr},
    {"__name__", training_name, nullptr, "The forward program's name.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef training_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyTraining, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot training_slots[] = {
    {Py_tp_doc,
     const_cast<char*>("Training(forward, wrapper, compile_backward, interpret, differentiable, "
                       "n_saved, n_sizes, tangents, wants_grad, nondeterministic, marks, switches, "
                       "wrapper_first): a forward program whose results have a backward program.")},
    {Py_tp_new, reinterpret_cast<void*>(training_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(training_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(training_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(training_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getset, training_getset},
    {Py_tp_members, training_members},
    {0, nullptr}};
}  // namespace

PyType_Spec training_spec{"plait._native.Training", sizeof(PyTraining), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                          training_slots};

}  // namespace plait
