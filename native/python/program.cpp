// native/python/program.cpp: the Program object, its vectorcall, and its boxed form.
#include <Python.h>
#include <structmember.h>

#include <cstddef>

#include "python/program_object.h"
#include "python/tensors.h"
#include "torch/dispatch_guard.h"

namespace plait {

// The only element of a float64 or bool tensor, on any device.
static PyObject* number(const at::Tensor& t) {
  TORCH_CHECK(t.numel() == 1, "a number of ", t.numel(), " elements is returned");
  const DispatchGuard guard;
  const at::Tensor here = t.is_cpu() ? t : t.cpu();
  const void* data = here.const_data_ptr();
  return t.scalar_type() == c10::kDouble ? PyFloat_FromDouble(*static_cast<const double*>(data))
                                         : PyBool_FromLong(*static_cast<const bool*>(data));
}

PyObject* to_python(const ProgramState& s, Frame& f, const Output& o) {
  switch (o.kind) {
    case Output::Kind::moved_tensor:
    case Output::Kind::tensor: return wrap(take_tensor(f, o));
    case Output::Kind::opaque:
      return Py_NewRef(static_cast<PyObject*>(f.opaques[static_cast<size_t>(o.id)]));
    case Output::Kind::integer: return PyLong_FromLongLong(f.values[static_cast<size_t>(o.id)]);
    case Output::Kind::real: return PyFloat_FromDouble(o.real);
    case Output::Kind::boolean: return PyBool_FromLong(o.id);
    case Output::Kind::value: return number(*f.refs[static_cast<size_t>(o.id)]);
    case Output::Kind::none: break;
  }
  return Py_NewRef(Py_None);
}

PyObject* outputs(const ProgramState& s, Frame& f) {
  Ref tuple = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(s.outputs.size())));
  for (size_t i = 0; i < s.outputs.size(); ++i) {
    PyObject* value = to_python(s, f, s.outputs[i]);
    if (!value) throw PythonError{};
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), value);
  }
  return tuple.release();
}

namespace {

void bind_argument(Frame& f, const Input& input, PyObject* arg) {
  switch (input.kind) {
    case Input::Kind::tensor:
      if (!is_tensor(arg)) [[unlikely]]
        throw InputTypeError("input '" + f.slot(input.id).name + "': expected a tensor, got " +
                             Py_TYPE(arg)->tp_name);
      require_fit(f, input, unpack(arg));
      return bind_input(f, input, unpack(arg));
    case Input::Kind::symbol: return set_symbol(f, input.id, integer(arg));
    case Input::Kind::opaque:
      f.opaques[static_cast<size_t>(input.id)] = arg;
      if (is_tensor(arg)) f.refs[static_cast<size_t>(input.id)] = &unpack(arg);
  }
}

}  // namespace

void check_count(const Program& p, Py_ssize_t got) {
  const size_t want = p.plan().inputs.size();
  if (static_cast<size_t>(got) != want)
    throw InputTypeError("program " + p.plan().name + " takes " + std::to_string(want) +
                         " inputs, got " + std::to_string(got));
}

void bind_inputs(const Program& p, Frame& f, PyObject* const* args) {
  const std::vector<Input>& inputs = p.plan().inputs;
  for (size_t i = 0; i < inputs.size(); ++i) bind_argument(f, inputs[i], args[i]);
}

namespace {

PyObject* program_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    ProgramState& s = state_of(self);
    if (kwnames && PyTuple_GET_SIZE(kwnames) > 0)
      throw InputTypeError("a program takes no keyword arguments");
    check_count(*s.program, PyVectorcall_NARGS(nargsf));
    Call call(*s.program);
    bind_inputs(*s.program, call.frame(), args);
    s.program->run(call.frame());
    return outputs(s, call.frame());
  });
}

c10::IValue to_ivalue(void* object) {
  auto* o = static_cast<PyObject*>(object);
  if (o == Py_None) return {};
  if (PyBool_Check(o)) return o == Py_True;
  if (PyFloat_Check(o)) return PyFloat_AS_DOUBLE(o);
  if (PyLong_Check(o)) return integer(o);
  if (PyUnicode_Check(o)) return text(o);
  if (is_tensor(o)) return unpack(o);
  if (const at::Generator* g = unpack_generator(o)) return *g;
  throw InputTypeError(std::string("cannot hand a ") + Py_TYPE(o)->tp_name + " to an operator");
}

// Operands of a Python call. torch's own small objects (dtypes, layouts) are attributes of the
// torch module.
class PythonOperands {
 public:
  PythonOperands(Frame& f, const plait::Operands& given) : f_(f), given_(given) {}

  Ref convert(const Operand& o) {
    switch (o.kind) {
      case Operand::Kind::ref: return slot(given_.slot(o.id));
      case Operand::Kind::size: return Ref::check(PyLong_FromLongLong(given_.value(o.id)));
      case Operand::Kind::none: return Ref::borrow(Py_None);
      case Operand::Kind::boolean: return Ref::borrow(o.id ? Py_True : Py_False);
      case Operand::Kind::real: return Ref::check(PyFloat_FromDouble(o.re));
      case Operand::Kind::complex: return Ref::check(PyComplex_FromDoubles(o.re, o.im));
      case Operand::Kind::string:
        return Ref::check(
            PyUnicode_FromStringAndSize(o.text.data(), static_cast<Py_ssize_t>(o.text.size())));
      case Operand::Kind::dtype: return torch(torch_name(static_cast<DType>(o.id)));
      case Operand::Kind::device:
        return Ref::check(PyObject_CallFunction(torch("device").get(), "s", o.text.c_str()));
      case Operand::Kind::layout:
      case Operand::Kind::memory_format: return torch(o.text.c_str());
      case Operand::Kind::value:
      case Operand::Kind::list: break;
    }
    Ref list = Ref::check(PyList_New(static_cast<Py_ssize_t>(o.items.size())));
    for (size_t i = 0; i < o.items.size(); ++i)
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), convert(o.items[i]).release());
    return list;
  }

 private:
  Ref slot(SlotId s) {
    if (f_.slot(s).kind == SlotInfo::Kind::opaque)
      return Ref::borrow(static_cast<PyObject*>(f_.opaques[static_cast<size_t>(s)]));
    const at::Tensor& t = *f_.refs[static_cast<size_t>(s)];
    return Ref::check(wrap(in_arena(f_.code, s) ? t.clone() : t));  // a hook's, which may keep it
  }
  static Ref torch(const char* name) {
    const Ref module = Ref::check(PyImport_ImportModule("torch"));
    return Ref::check(PyObject_GetAttrString(module.get(), name));
  }

  Frame& f_;
  const plait::Operands& given_;
};

void call_host(Frame& f, const PythonCall& c, const plait::Operands& given) {
  ProgramState& s = *static_cast<ProgramState*>(f.code.owner);
  PythonOperands operands(f, given);
  const Ref args = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(c.args.size())));
  for (size_t i = 0; i < c.args.size(); ++i)
    PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(i), operands.convert(c.args[i]).release());
  Ref kwargs;
  if (!c.kwargs.empty()) kwargs = Ref::check(PyDict_New());
  for (const KeywordOperand& k : c.kwargs)
    if (PyDict_SetItemString(kwargs.get(), k.name.c_str(), operands.convert(k.value).get()) < 0)
      throw PythonError{};
  const Ref result = Ref::check(
      PyObject_Call(s.callables[static_cast<size_t>(c.index)].get(), args.get(), kwargs.get()));
  const bool many = PyTuple_Check(result.get()) || PyList_Check(result.get());
  PyObject* single = result.get();
  PyObject** items = many ? PySequence_Fast_ITEMS(result.get()) : &single;
  const Py_ssize_t n = many ? PySequence_Fast_GET_SIZE(result.get()) : 1;
  if (static_cast<size_t>(n) < c.outs.size() && !(n == 1 && single == Py_None))
    throw std::runtime_error(c.label + " returned " + std::to_string(n) + " values, " +
                             std::to_string(c.outs.size()) + " were expected");
  for (size_t i = 0; i < c.outs.size(); ++i) {
    PyObject* item = i < static_cast<size_t>(n) ? items[i] : Py_None;
    if (c.outs[i].kind == Result::Kind::symbol) set_symbol(f, c.outs[i].id, integer(item));
    if (c.outs[i].kind != Result::Kind::tensor) continue;
    if (item != Py_None && !is_tensor(item))
      throw std::runtime_error(c.label + " returned a " + Py_TYPE(item)->tp_name +
                               " where a tensor was expected");
    define(f, c.outs[i].id, item == Py_None ? at::Tensor() : unpack(item));
  }
}

// The text of the Python error that is set, which is set no longer.
std::string take_python_error() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Ref keep[] = {Ref(type), Ref(value), Ref(trace)};
  const Ref words(value ? PyObject_Str(value) : nullptr);
  if (!words.get()) {
    PyErr_Clear();
    return "unknown error";
  }
  return text(words.get());
}
// A method of plait.runtime.graphs.Capture, its Python error as a C++ one.
Ref capture_method(void* capture, const char* method) {
  Ref result(PyObject_CallMethod(static_cast<PyObject*>(capture), method, nullptr));
  if (!result.get()) throw std::runtime_error(take_python_error());
  return result;
}
void* begin_capture(int device) {
  const Ref module(PyImport_ImportModule("plait.runtime.graphs"));
  if (!module.get()) throw std::runtime_error(take_python_error());
  Ref capture(PyObject_CallMethod(module.get(), "Capture", "i", device));
  if (!capture.get()) throw std::runtime_error(take_python_error());
  return capture.release();
}
Host::Captured end_capture(void* capture) {
  const Ref made = capture_method(capture, "end");
  unsigned long long exec = 0;
  long long nbytes = 0, shared = 0, limit = 0;
  if (!PyArg_ParseTuple(made.get(), "KLLL", &exec, &nbytes, &shared, &limit))
    throw std::runtime_error(take_python_error());
  return {reinterpret_cast<cuda::GraphExec>(exec), nbytes, shared, limit};
}
void keep_allocations(void* capture, bool kept) {
  const Ref done(
      PyObject_CallMethod(static_cast<PyObject*>(capture), "keep", "O", kept ? Py_True : Py_False));
  if (!done.get()) throw std::runtime_error(take_python_error());
}
void refused(const std::string& program, size_t partition, const std::string& why) {
  const Ref module(PyImport_ImportModule("plait.runtime.graphs"));
  const Ref done(module.get() ? PyObject_CallMethod(module.get(), "refused", "sns", program.c_str(),
                                                    static_cast<Py_ssize_t>(partition), why.c_str())
                              : nullptr);
  if (!done.get()) PyErr_WriteUnraisable(nullptr);
}
void abort_capture(void* capture) {
  capture_method(capture, "abort");
  Py_DECREF(static_cast<PyObject*>(capture));
}

constexpr Host kHost{[]() -> void* { return PyEval_SaveThread(); },
                     [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); },
                     call_host,
                     to_ivalue,
                     begin_capture,
                     keep_allocations,
                     [](void* capture) { capture_method(capture, "stop"); },
                     end_capture,
                     abort_capture,
                     [](void* capture) { capture_method(capture, "replay"); },
                     [](void* object) { Py_DECREF(static_cast<PyObject*>(object)); },
                     refused};

PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    Py_buffer bytes;
    PyObject *library = nullptr, *constants = nullptr, *callables = nullptr;
    const char *cubins_path = nullptr, *generated_path = nullptr, *entry = "plait_run";
    if (!PyArg_ParseTuple(args, "y*OOO|zzs", &bytes, &library, &constants, &callables, &cubins_path,
                          &generated_path, &entry))
      return nullptr;
    const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> release(&bytes, PyBuffer_Release);
    Plan plan =
        read_plan({static_cast<const std::byte*>(bytes.buf), static_cast<size_t>(bytes.len)});
    std::shared_ptr<Library> kernels;
    if (library != Py_None) {
      if (!PyObject_TypeCheck(library, library_type))
        throw InputTypeError("library must be a Library or None");
      kernels = reinterpret_cast<PyLibrary*>(library)->value;
    }
    std::shared_ptr<Cubins> cubins;
    if (cubins_path) cubins = std::make_shared<Cubins>(Cubins::read(cubins_path));
    std::optional<Generated> generated;
    if (generated_path) generated.emplace(generated_path, entry);
    std::vector<at::Tensor> tensors;
    const Items given(constants, "constants must be a sequence of tensors");
    for (Py_ssize_t i = 0; i < given.n; ++i) {
      if (!is_tensor(given.data[i])) throw InputTypeError("constants must be tensors");
      tensors.push_back(unpack(given.data[i]));
    }
    std::vector<Ref> called;
    const Items calls(callables, "callables must be a sequence");
    for (Py_ssize_t i = 0; i < calls.n; ++i) called.push_back(Ref::borrow(calls.data[i]));
    return make_program(type, std::move(plan), std::move(kernels), std::move(cubins),
                        std::move(tensors), std::move(called), std::move(generated));
  });
}
int program_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (reinterpret_cast<PyProgram*>(self)->state)
    for (const Ref& c : state_of(self).callables) Py_VISIT(c.get());
  return 0;
}
int program_clear(PyObject* self) {
  if (reinterpret_cast<PyProgram*>(self)->state)
    for (Ref& c : state_of(self).callables) c = Ref::borrow(Py_None);
  return 0;
}
void program_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<PyProgram*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* program_name(PyObject* self, void*) {
  return PyUnicode_FromString(state_of(self).program->plan().name.c_str());
}

Ref graph_stats(const Graphs& g) {
  Ref d = Ref::check(PyDict_New());
  const GraphCounts& c = g.counts;
  for (const auto& [name, n] : {std::pair{"recorded", c.recorded},
                                {"replayed", c.replayed},
                                {"patched", c.patched},
                                {"copied", c.copied},
                                {"results_copied", c.results_copied},
                                {"results_direct", c.results_direct},
                                {"bypassed", c.bypassed}})
    put(d.get(), name, PyLong_FromLongLong(n));
  Ref why = Ref::check(PyDict_New());
  for (const auto& [reason, n] : c.why_copied)
    put(why.get(), reason.c_str(), PyLong_FromLongLong(n));
  put(d.get(), "why_copied", why.release());
  Ref refused = Ref::check(PyDict_New());
  for (size_t k = 0; k < g.partitions.size(); ++k) {
    std::string why = g.partitions[k].refused;
    for (const auto& [sizes, at] : g.partitions[k].by_size)
      if (why.empty()) why = at.refused;
    if (!why.empty())
      put(refused.get(), std::to_string(k).c_str(), PyUnicode_FromString(why.c_str()));
  }
  put(d.get(), "refused", refused.release());
  return d;
}

PyObject* program_stats(PyObject* self, PyObject*) {
  return guarded([&] {
    const Program& p = *state_of(self).program;
    Ref d = Ref::check(PyDict_New());
    put(d.get(), "name", PyUnicode_FromString(p.plan().name.c_str()));
    put(d.get(), "launches", PyLong_FromSize_t(p.code().launches.size()));
    put(d.get(), "regions", PyLong_FromSize_t(p.code().regions.size()));
    put(d.get(), "steps", PyLong_FromSize_t(p.code().steps.size()));
    put(d.get(), "arena_bytes", PyLong_FromLongLong(p.code().arena_bytes));
    Ref externs = Ref::check(PyDict_New());
    const auto count = [&](const std::string& name) {
      PyObject* have = PyDict_GetItemString(externs.get(), name.c_str());
      put(externs.get(), name.c_str(), PyLong_FromLongLong((have ? integer(have) : 0) + 1));
    };
    for (const ExternCall& c : p.code().externs) count(c.name);
    for (const PythonCall& c : p.code().pythons) count(c.label);
    for (const ProgramsCall& c : p.code().programs_calls) count(c.label);
    put(d.get(), "externs", externs.release());
    if (p.graphs()) put(d.get(), "graphs", graph_stats(*p.graphs()).release());
    return d.release();
  });
}

// ------------------------------------------------------------------------------------------- boxed
struct PyBoxed {
  PyObject_HEAD vectorcallfunc call;
  PyObject* program;
};

PyObject* boxed_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    ProgramState& s = state_of(reinterpret_cast<PyBoxed*>(self)->program);
    if (PyVectorcall_NARGS(nargsf) != 1 || kwnames || !PyList_Check(args[0]))
      throw InputTypeError("a boxed program takes one list");
    PyObject* list = args[0];
    check_count(*s.program, PyList_GET_SIZE(list));
    const std::vector<Input>& inputs = s.program->plan().inputs;
    std::vector<Ref> objects;  // what is no tensor has to outlive the list
    Call call(*s.program);
    call.frame().owns_inputs = true;
    for (size_t i = 0; i < inputs.size(); ++i) {
      PyObject* arg = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i));
      bind_argument(call.frame(), inputs[i], arg);
      if (inputs[i].kind == Input::Kind::opaque) objects.push_back(Ref::borrow(arg));
    }
    if (PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr) < 0) throw PythonError{};
    s.program->run(call.frame());
    return outputs(s, call.frame());
  });
}
PyObject* program_boxed(PyObject* self, void*) {
  auto* boxed = reinterpret_cast<PyBoxed*>(boxed_type->tp_alloc(boxed_type, 0));
  if (!boxed) return nullptr;
  boxed->call = boxed_call;
  boxed->program = Py_NewRef(self);
  return reinterpret_cast<PyObject*>(boxed);
}
int boxed_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<PyBoxed*>(self)->program);
  return 0;
}
void boxed_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_XDECREF(reinterpret_cast<PyBoxed*>(self)->program);
  type->tp_free(self);
  Py_DECREF(type);
}
PyObject* boxed_name(PyObject* self, void* closure) {
  return program_name(reinterpret_cast<PyBoxed*>(self)->program, closure);
}
PyObject* always_true(PyObject*, void*) { Py_RETURN_TRUE; }

PyMethodDef program_methods[] = {{"stats", program_stats, METH_NOARGS,
                                  "What the program does at a call: launches, regions, externs, "
                                  "arena_bytes, steps; graphs: how often "
                                  "partitions were recorded and replayed, nodes patched and inputs "
                                  "copied, how many results recordings "
                                  "copy or write where they belong, how many calls went by them, "
                                  "and why partitions (by number) are not "
                                  "recorded."},
                                 {nullptr, nullptr, 0, nullptr}};
PyGetSetDef program_getset[] = {
    {"boxed", program_boxed, nullptr, "The program as a callable of one list, which it clears.",
     nullptr},
    {"__name__", program_name, nullptr, "The program's name.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef program_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyProgram, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot program_slots[] = {
    {Py_tp_doc,
     const_cast<char*>(
         "Program(plan, library, constants, callables, cubins=None, generated=None, "
         "entry='plait_run'): a compiled program, called with its inputs, returns a tuple. "
         "generated: a library that wrapper/cpp.py made; its function `entry`, which is the "
         "same program, runs instead.")},
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(program_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(program_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, program_methods},
    {Py_tp_getset, program_getset},
    {Py_tp_members, program_members},
    {0, nullptr}};
}  // namespace
PyObject* make_program(PyTypeObject* type, Plan plan, std::shared_ptr<Library> kernels,
                       std::shared_ptr<Cubins> cubins, std::vector<at::Tensor> constants,
                       std::vector<Ref> callables, std::optional<Generated> generated) {
  if (callables.size() != static_cast<size_t>(plan.n_callables))
    throw LoadError("the program wants " + std::to_string(plan.n_callables) +
                    " callables and got " + std::to_string(callables.size()));
  auto state = std::make_unique<ProgramState>();
  state->callables = std::move(callables);
  state->program =
      std::make_unique<Program>(Code{std::move(plan), std::move(kernels), std::move(cubins),
                                     std::move(constants), kHost, state.get()},
                                std::move(generated));
  state->outputs = plan_outputs(*state->program);
  Ref self = Ref::check(type->tp_alloc(type, 0));
  reinterpret_cast<PyProgram*>(self.get())->call = program_call;
  reinterpret_cast<PyProgram*>(self.get())->state = state.release();
  return self.release();
}

PyType_Spec program_spec{"plait._native.Program", sizeof(PyProgram), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                         program_slots};

namespace {
PyGetSetDef boxed_getset[] = {
    {"_boxed_call", always_true, nullptr, "True: takes one list and clears it.", nullptr},
    {"__name__", boxed_name, nullptr, "The program's name.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef boxed_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyBoxed, call), READONLY, nullptr},
    {"program", T_OBJECT, offsetof(PyBoxed, program), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot boxed_slots[] = {
    {Py_tp_doc, const_cast<char*>("A program that takes one list of inputs and clears it.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(boxed_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(boxed_traverse)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getset, boxed_getset},
    {Py_tp_members, boxed_members},
    {0, nullptr}};
}  // namespace
PyType_Spec boxed_spec{"plait._native.Boxed", sizeof(PyBoxed), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                           Py_TPFLAGS_DISALLOW_INSTANTIATION,
                       boxed_slots};

}  // namespace plait
