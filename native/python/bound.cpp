// native/python/bound.cpp: Bound, a program with its parameters in place that checks its inputs
// itself.
//
// What the front end promised for every program input is compiled into a list of small checks once;
// a call binds the parameters, checks and binds the arguments, derives the symbols, runs, and
// unwraps a single output.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>

#include "python/epilogue.h"
#include "python/tensors.h"

namespace plait {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// One size or stride: any, an exact number, or a symbol within bounds.
struct Dim {
  enum class Kind { any, fixed, symbol } kind = Kind::any;
  int64_t value = 0;  // fixed: the number; symbol: its index
  int64_t lo = std::numeric_limits<int64_t>::min(), hi = kNoLimit;
};

struct InputSpec {
  enum class Kind { bound, tensor, symbol, integer, object, none } kind;
  Py_ssize_t arg = 0;  // tensor, integer, object: number of the user's argument
  at::Tensor tensor;   // bound
  std::string name;    // bound
  bool strided = false;
  c10::DimVector bound_sizes, bound_strides;  // bound, strided: what the program was compiled for
  std::vector<Dim> sizes, strides;
  enum class Layout { any, listed, contiguous } layout = Layout::any;
  Dim integer;  // integer, symbol
};

struct BoundState {
  Ref program;
  std::vector<InputSpec> inputs;
  std::vector<std::string> names;    // of the user's arguments
  std::vector<std::string> symbols;  // by index
  bool single = false;
  std::vector<size_t> changed;     // inputs that the program writes to
  std::vector<Produced> results;   // empty: all are the program's own; args are numbers of inputs
};

struct PyBound {
  PyObject_HEAD vectorcallfunc call;
  BoundState* state;
  PyObject* dict;
};

bool has_tensor(const InputSpec& s) {
  return s.kind == InputSpec::Kind::bound || s.kind == InputSpec::Kind::tensor;
}

// ----------------------------------------------------------------------------------------------------
// making
class BoundMaker {
 public:
  BoundMaker(BoundState& state) : b_(state), program_(*state_of(state.program.get()).program) {}

  void add(size_t position, PyObject* spec) {
    const Input& input = program_.plan().inputs[position];
    const Items items(spec, "an input is a tuple");
    require(items.n > 0, position, "has an empty description");
    const std::string kind = text(items.data[0]);
    InputSpec s{InputSpec::Kind::none};
    if (kind == "bound") {
      require(items.n == 3 && is_tensor(items.data[2]) && input.kind == Input::Kind::tensor,
              position, "does not fit ('bound', name, tensor)");
      s.kind = InputSpec::Kind::bound;
      s.name = text(items.data[1]);
      s.tensor = unpack(items.data[2]);
      if (s.tensor.layout() == c10::kStrided) {
        s.strided = true;
        s.bound_sizes = s.tensor.sizes();
        s.bound_strides = s.tensor.strides();
      }
    } else if (kind == "tensor") {
      require(items.n == 6 && input.kind == Input::Kind::tensor, position,
              "does not fit ('tensor', arg, dtype, shape, strides, device)");
      s = tensor(position, items);
    } else if (kind == "symbol") {
      require(items.n == 2, position, "does not fit ('symbol', name)");
      s.kind = InputSpec::Kind::symbol;
      s.integer = symbol(text(items.data[1]));
    } else if (kind == "int") {
      require(items.n == 4, position, "does not fit ('int', arg, name, value)");
      s.kind = InputSpec::Kind::integer;
      s.arg = argument(items.data[1]);
      if (items.data[3] != Py_None)
        s.integer = {Dim::Kind::fixed, integer(items.data[3])};
      else
        s.integer = symbol(text(items.data[2]));
    } else if (kind == "object") {
      require(items.n == 2 && input.kind == Input::Kind::opaque, position,
              "does not fit ('object', arg)");
      s.kind = InputSpec::Kind::object;
      s.arg = argument(items.data[1]);
    } else {
      require(kind == "none" && input.kind == Input::Kind::opaque, position,
              "has a description of unknown kind");
    }
    b_.inputs.push_back(std::move(s));
  }

  void watch_changed() {
    for (size_t i = 0; i < b_.inputs.size(); ++i) {
      const Input& input = program_.plan().inputs[i];
      if (input.kind == Input::Kind::tensor && program_.slot(input.id).written)
        b_.changed.push_back(i);
    }
  }
  void add_results(PyObject* results, size_t n_outputs) {
    const Items given(results, "results must be a sequence");
    for (Py_ssize_t k = 0; k < given.n; ++k) {
      const Produced r = read_produced(given.data[k]);
      if (r.kind == Produced::Kind::view &&
          (r.arg < 0 || static_cast<size_t>(r.arg) >= b_.inputs.size() ||
           !has_tensor(b_.inputs[static_cast<size_t>(r.arg)])))
        throw LoadError("a result is a view of input " + std::to_string(r.arg) +
                        ", which is no tensor");
      b_.results.push_back(r);
    }
    if (given.n > 0 && static_cast<size_t>(given.n) != n_outputs)
      throw LoadError("the program has " + std::to_string(n_outputs) + " results, " +
                      std::to_string(given.n) + " were described");
  }

 private:
  void require(bool fits, size_t position, const char* what) const {
    if (!fits) throw LoadError("program input " + std::to_string(position) + " " + what);
  }
  Py_ssize_t argument(PyObject* number) const {
    const int64_t arg = integer(number);
    if (arg < 0 || static_cast<size_t>(arg) >= b_.names.size())
      throw LoadError("argument " + std::to_string(arg) + " has no name");
    return arg;
  }
  Dim symbol(const std::string& name) {
    size_t i = 0;
    while (i < b_.symbols.size() && b_.symbols[i] != name) ++i;
    if (i == b_.symbols.size()) b_.symbols.push_back(name);
    return {Dim::Kind::symbol, static_cast<int64_t>(i)};
  }
  Dim dim(PyObject* o) {
    if (o == Py_None) return {};
    if (PyUnicode_Check(o)) return symbol(text(o));
    if (PyLong_Check(o)) return {Dim::Kind::fixed, integer(o)};
    const Items items(o, "a size is an int, a name, (name, lo, hi) or None");
    if (items.n != 3) throw LoadError("a size is an int, a name, (name, lo, hi) or None");
    Dim d = symbol(text(items.data[0]));
    if (items.data[1] != Py_None) d.lo = integer(items.data[1]);
    if (items.data[2] != Py_None) d.hi = integer(items.data[2]);
    return d;
  }
  InputSpec tensor(size_t position, const Items& items) {
    InputSpec s{InputSpec::Kind::tensor};
    const Input& input = program_.plan().inputs[position];
    s.arg = argument(items.data[1]);
    require(text(items.data[2]) == dtype_name(input.dtype), position,
            "is described with another dtype than the program's");
    require(text(items.data[5]) == input.device, position,
            "is described with another device than the program's");
    const Items shape(items.data[3], "a shape is a sequence");
    for (Py_ssize_t d = 0; d < shape.n; ++d) s.sizes.push_back(dim(shape.data[d]));
    if (items.data[4] == Py_None) return s;
    s.layout = InputSpec::Layout::contiguous;
    if (PyUnicode_Check(items.data[4])) {
      require(text(items.data[4]) == "contiguous", position,
              "has strides that are neither listed nor 'contiguous'");
      return s;
    }
    s.layout = InputSpec::Layout::listed;
    const Items strides(items.data[4], "strides are a sequence");
    require(strides.n == shape.n, position, "has as many strides as sizes");
    for (Py_ssize_t d = 0; d < strides.n; ++d) s.strides.push_back(dim(strides.data[d]));
    return s;
  }

  BoundState& b_;
  const Program& program_;
};

// ----------------------------------------------------------------------------------------------------
// checking The values that symbols have taken in this call; the few that a signature has live on
// the stack.
class Symbols {
 public:
  explicit Symbols(size_t n) {
    if (n > kInline) more_.resize(n), at_ = more_.data();
    std::fill(at_, at_ + n, kUnset);
  }
  // True if the symbol was free or has this value already.
  bool agree(int64_t index, int64_t value) {
    int64_t& have = at_[index];
    if (have == kUnset) have = value;
    return have == value;
  }
  int64_t operator[](int64_t index) const { return at_[index]; }
  bool known(int64_t index) const { return at_[index] != kUnset; }

 private:
  static constexpr size_t kInline = 16;
  static constexpr int64_t kUnset = std::numeric_limits<int64_t>::min();
  int64_t inline_[kInline];
  std::vector<int64_t> more_;
  int64_t* at_ = inline_;
};

// Why `got` does not fit, or nothing.
std::optional<std::string> misfit(const BoundState& b, const Dim& d, int64_t got,
                                  Symbols& symbols) {
  if (d.kind == Dim::Kind::any) return {};
  if (d.kind == Dim::Kind::fixed) {
    if (got == d.value) return {};
    return std::to_string(d.value);
  }
  const std::string& name = b.symbols[static_cast<size_t>(d.value)];
  if (!symbols.agree(d.value, got))
    return std::to_string(symbols[d.value]) + " (" + name +
           ", as in an earlier input or dimension)";
  if (got < d.lo) return "at least " + std::to_string(d.lo) + " (" + name + ")";
  if (got > d.hi) return "at most " + std::to_string(d.hi) + " (" + name + ")";
  return {};
}

[[noreturn]] void fail(const BoundState& b, const InputSpec& s, const std::string& what) {
  throw InputError("input '" + b.names[static_cast<size_t>(s.arg)] + "': " + what);
}

bool dim_fits(const Dim& d, int64_t got, Symbols& symbols) {
  if (d.kind == Dim::Kind::fixed) return d.value == got;
  if (d.kind == Dim::Kind::any) return true;
  return got >= d.lo && got <= d.hi && symbols.agree(d.value, got);
}

void check_tensor(const BoundState& b, const InputSpec& s, const at::Tensor& t, Symbols& symbols) {
  const c10::IntArrayRef sizes = t.sizes(), strides = t.strides();
  if (sizes.size() != s.sizes.size()) [[unlikely]]
    fail(b, s,
         "expected " + std::to_string(s.sizes.size()) + " dimensions, got " +
             std::to_string(sizes.size()));
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (dim_fits(s.sizes[d], sizes[d], symbols)) [[likely]]
      continue;
    fail(b, s,
         "expected size " + misfit(b, s.sizes[d], sizes[d], symbols).value_or("?") +
             " in dimension " + std::to_string(d) + ", got " + std::to_string(sizes[d]));
  }
  if (s.layout == InputSpec::Layout::contiguous && !t.is_contiguous())
    fail(b, s, "expected a contiguous tensor, got strides " + at::str(strides));
  if (s.layout != InputSpec::Layout::listed || t.numel() == 0) return;
  for (size_t d = 0; d < strides.size(); ++d) {
    if (sizes[d] <= 1 || dim_fits(s.strides[d], strides[d], symbols)) [[likely]]
      continue;
    fail(b, s,
         "expected stride " + misfit(b, s.strides[d], strides[d], symbols).value_or("?") +
             " in dimension " + std::to_string(d) + ", got " + std::to_string(strides[d]));
  }
}

// What is special about a tensor that the program cannot take though its device is right.
std::string special_kind(const at::Tensor& t, PyObject* object) {
  if (t.layout() != c10::kStrided) {
    const Ref layout = Ref::check(PyObject_GetAttrString(object, "layout"));
    return "one of layout " + text(Ref::check(PyObject_Str(layout.get())).get());
  }
  if (t.is_nested()) return "a nested one";
  const Ref name = Ref::check(PyType_GetName(Py_TYPE(object)));
  return "one of class " + text(name.get());
}

void bind_tensor(const BoundState& b, const Program& p, Frame& f, const Input& input,
                 const InputSpec& s, PyObject* arg, Symbols& symbols) {
  if (!is_tensor(arg)) [[unlikely]]
    fail(b, s, std::string("expected a tensor, got ") + Py_TYPE(arg)->tp_name);
  const at::Tensor& t = unpack(arg);
  if (const Program::Misfit what = p.misfit(input, t); what != Program::Misfit::none) [[unlikely]] {
    if (what == Program::Misfit::dtype)
      fail(b, s,
           std::string("expected dtype ") + torch_name(input.dtype) + ", got " +
               torch_name(from_scalar_type(t.scalar_type())));
    if (const std::string device = t.device().str(); device != input.device)
      fail(b, s, "expected a plain tensor on device " + input.device + ", got one on " + device);
    fail(b, s, "expected a plain tensor, got " + special_kind(t, arg));
  }
  check_tensor(b, s, t, symbols);
  p.bind(f, input, t);
}

// Kernels have the layout of bound tensors built in, but an assignment to `.data` may change it.
[[noreturn, gnu::cold]] void fail_moved(const Input& input, const InputSpec& s) {
  const at::Tensor& t = s.tensor;
  const auto layout = [](c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    return " with sizes " + at::str(sizes) + " and strides " + at::str(strides);
  };
  const bool opaque = input.dtype == DType::kAny;
  throw InputError("parameter or buffer '" + s.name + "': its data is now " +
                   torch_name(from_scalar_type(t.scalar_type())) + " on " + t.device().str() +
                   layout(t.sizes(), t.strides()) + ", the program was compiled for " +
                   (opaque ? "this dtype" : torch_name(input.dtype)) + " on " + input.device +
                   layout(s.bound_sizes, s.bound_strides));
}

bool has_layout(const InputSpec& s) {
  const c10::IntArrayRef sizes = s.tensor.sizes(), strides = s.tensor.strides();
  const size_t rank = s.bound_sizes.size();
  if (sizes.size() != rank) return false;
  bool same_sizes = true, same_strides = true;
  for (size_t d = 0; d < rank; ++d) {
    same_sizes &= sizes[d] == s.bound_sizes[d];
    same_strides &= strides[d] == s.bound_strides[d] || sizes[d] == 1;
  }
  return same_sizes && (same_strides || s.tensor.numel() == 0);
}

void bind_bound(const Program& p, Frame& f, const Input& input, const InputSpec& s) {
  if (!s.strided)
    p.require_fit(input, s.tensor);
  else if (p.misfit(input, s.tensor) != Program::Misfit::none || !has_layout(s)) [[unlikely]]
    fail_moved(input, s);
  p.bind(f, input, s.tensor);
}

int64_t check_integer(const BoundState& b, const InputSpec& s, PyObject* arg, Symbols& symbols) {
  if (!PyLong_Check(arg)) fail(b, s, std::string("expected an int, got ") + Py_TYPE(arg)->tp_name);
  const int64_t value = integer(arg);
  if (const auto want = misfit(b, s.integer, value, symbols))
    fail(b, s, "expected " + *want + ", got " + std::to_string(value));
  return value;
}

// Positional arguments, then keywords by name, in the order of the signature.
void sort_arguments(const BoundState& b, PyObject* const* args, Py_ssize_t n, PyObject* kwnames,
                    std::vector<PyObject*>& out) {
  out.assign(b.names.size(), nullptr);
  const auto expected = [&] {
    return "expected " + std::to_string(b.names.size()) + " inputs, got " + std::to_string(n);
  };
  if (static_cast<size_t>(n) > b.names.size()) throw InputError(expected());
  std::copy(args, args + n, out.begin());
  for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); ++k) {
    const std::string name = text(PyTuple_GET_ITEM(kwnames, k));
    size_t i = 0;
    while (i < b.names.size() && b.names[i] != name) ++i;
    if (i == b.names.size()) throw InputError("there is no input '" + name + "'");
    if (out[i]) throw InputError("input '" + name + "' was given twice");
    out[i] = args[n + k];
  }
  for (size_t i = 0; i < out.size(); ++i)
    if (!out[i]) throw InputError("input '" + b.names[i] + "' is missing");
}

const at::Tensor& tensor_of(const InputSpec& s, PyObject* const* args) {
  return s.kind == InputSpec::Kind::bound ? s.tensor : unpack(args[s.arg]);
}
std::string name_of(const BoundState& b, size_t input) {
  const InputSpec& s = b.inputs[input];
  return s.kind == InputSpec::Kind::bound ? "parameter or buffer '" + s.name + "'"
                                          : "'" + b.names[static_cast<size_t>(s.arg)] + "'";
}

// The bytes of t's storage that its elements occupy.
at::Tensor bytes_of(const at::Tensor& storage_bytes, const at::Tensor& t) {
  const auto size = static_cast<int64_t>(t.element_size());
  c10::DimVector sizes(t.sizes()), strides(t.strides());
  for (int64_t& s : strides) s *= size;
  sizes.push_back(size);
  strides.push_back(1);
  return storage_bytes.as_strided(sizes, strides, t.storage_offset() * size);
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage() || a.numel() == 0 || b.numel() == 0) return false;
  if (!a.storage().is_alias_of(b.storage())) return false;
  const at::NoGradGuard no_grad;
  const at::Tensor bytes =
      at::zeros({static_cast<int64_t>(a.storage().nbytes())}, at::TensorOptions(at::kByte));
  bytes_of(bytes, a).fill_(1);
  return bytes_of(bytes, b).any().item<bool>();
}

// The program was compiled for inputs that share no memory: a change of one would show in another
// or not, as kernels happen to run.
void check_apart(const BoundState& b, PyObject* const* args) {
  for (size_t i : b.changed) {
    const at::Tensor& mine = tensor_of(b.inputs[i], args);
    for (size_t j = 0; j < b.inputs.size(); ++j) {
      if (j == i || !has_tensor(b.inputs[j])) continue;
      if (share_memory(mine, tensor_of(b.inputs[j], args)))
        throw InputError("inputs " + name_of(b, i) + " and " + name_of(b, j) +
                         " share memory and " + name_of(b, i) +
                         " is changed in place: pass a copy of one of them");
    }
  }
}

PyObject* bound_result(const BoundState& b, const ProgramState& s, Frame& f, size_t k,
                       PyObject* const* args) {
  if (b.results.empty() || b.results[k].kind != Produced::Kind::view)
    return to_python(s, f, s.outputs[k]);
  const at::NoGradGuard no_grad;
  const Produced& r = b.results[k];
  const InputSpec& base = b.inputs[static_cast<size_t>(r.arg)];
  return wrap(view_of(tensor_of(base, args), input_at(s, f, r.arg), take_tensor(s, f, k), r));
}

PyObject* bound_results(const BoundState& b, const ProgramState& s, Frame& f,
                        PyObject* const* args) {
  if (b.single) return bound_result(b, s, f, 0, args);
  if (b.results.empty()) return outputs(s, f);
  Ref tuple = Ref::check(PyTuple_New(static_cast<Py_ssize_t>(s.outputs.size())));
  for (size_t k = 0; k < s.outputs.size(); ++k)
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(k),
                     Ref::check(bound_result(b, s, f, k, args)).release());
  return tuple.release();
}

PyObject* bound_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return guarded([&] {
    const BoundState& b = *reinterpret_cast<PyBound*>(self)->state;
    ProgramState& s = state_of(b.program.get());
    const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    std::vector<PyObject*> sorted;
    if (kwnames || static_cast<size_t>(n) != b.names.size()) [[unlikely]] {
      sort_arguments(b, args, n, kwnames, sorted);
      args = sorted.data();
    }
    Program& p = *s.program;
    const std::vector<Input>& inputs = p.plan().inputs;
    Call call(p);
    Symbols symbols(b.symbols.size());
    bool derived = false;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const InputSpec& spec = b.inputs[i];
      switch (spec.kind) {
        case InputSpec::Kind::bound:
          bind_bound(p, call.frame(), inputs[i], spec);
          break;
        case InputSpec::Kind::tensor:
          bind_tensor(b, p, call.frame(), inputs[i], spec, args[spec.arg], symbols);
          break;
        case InputSpec::Kind::integer: {
          const int64_t value = check_integer(b, spec, args[spec.arg], symbols);
          if (inputs[i].kind == Input::Kind::symbol)
            p.set_symbol(call.frame(), inputs[i].id, value);
          else
            call.frame().opaques[static_cast<size_t>(inputs[i].id)] = args[spec.arg];
          break;
        }
        case InputSpec::Kind::object:
          call.frame().opaques[static_cast<size_t>(inputs[i].id)] = args[spec.arg];
          break;
        case InputSpec::Kind::none:
          call.frame().opaques[static_cast<size_t>(inputs[i].id)] = Py_None;
          break;
        case InputSpec::Kind::symbol: derived = true;
      }
    }
    for (size_t i = 0; derived && i < inputs.size(); ++i) {
      if (b.inputs[i].kind != InputSpec::Kind::symbol) continue;
      const int64_t index = b.inputs[i].integer.value;
      if (!symbols.known(index))
        throw InputError("no input defines the size '" + b.symbols[static_cast<size_t>(index)] +
                         "'");
      p.set_symbol(call.frame(), inputs[i].id, symbols[index]);
    }
    if (!b.changed.empty()) check_apart(b, args);
    p.run(call.frame());
    return bound_results(b, s, call.frame(), args);
  });
}

// ----------------------------------------------------------------------------------------------------
// type
PyObject* bound_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *program = nullptr, *inputs = nullptr, *names = nullptr, *results = nullptr;
    int single = 0;
    if (!PyArg_ParseTuple(args, "O!OOp|O", program_type, &program, &inputs, &names, &single,
                          &results))
      return nullptr;
    auto state = std::make_unique<BoundState>();
    state->program = Ref::borrow(program);
    state->single = single != 0;
    const Items given_names(names, "names must be a sequence");
    for (Py_ssize_t i = 0; i < given_names.n; ++i)
      state->names.push_back(text(given_names.data[i]));
    const Items given(inputs, "inputs must be a sequence");
    const size_t want = state_of(program).program->plan().inputs.size();
    if (static_cast<size_t>(given.n) != want)
      throw LoadError("the program has " + std::to_string(want) + " inputs, " +
                      std::to_string(given.n) + " were described");
    if (single && state_of(program).outputs.size() != 1)
      throw LoadError("the program has more than a single output");
    BoundMaker maker(*state);
    for (size_t i = 0; i < want; ++i) maker.add(i, given.data[i]);
    maker.watch_changed();
    if (results) maker.add_results(results, state_of(program).outputs.size());
    Ref self = Ref::check(type->tp_alloc(type, 0));
    reinterpret_cast<PyBound*>(self.get())->call = bound_call;
    reinterpret_cast<PyBound*>(self.get())->state = state.release();
    return self.release();
  });
}
int bound_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (reinterpret_cast<PyBound*>(self)->state)
    Py_VISIT(reinterpret_cast<PyBound*>(self)->state->program.get());
  Py_VISIT(reinterpret_cast<PyBound*>(self)->dict);
  return 0;
}
int bound_clear(PyObject* self) {
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
    {Py_tp_doc, const_cast<char*>("Bound(program, inputs, names, single): a program with its "
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

PyType_Spec bound_spec{"plait._native.Bound", sizeof(PyBound), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                       bound_slots};

}  // namespace plait
