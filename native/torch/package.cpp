// native/torch/package.cpp: packages for C++ (plait/package.h), and what they share with those for
// Python.
#include "plait/package.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include <bit>
#include <cmath>
#include <charconv>

#include "torch/package.h"

namespace plait {
namespace {

[[noreturn]] void no_python() { throw std::runtime_error("a package cannot call Python"); }
// A host without Python: programs that need none run with it.
constinit const Host kNoPython{[]() -> void* { return nullptr; },
                               [](void*) {},
                               [](Frame&, const PythonCall&, const Operands&) { no_python(); },
                               [](void*) -> c10::IValue { no_python(); },
                               [](int) -> void* { no_python(); },
                               [](void*, bool) {},
                               [](void*) {},
                               [](void*) -> Host::Captured { no_python(); },
                               [](void*) {},
                               [](void*) {},
                               [](void*) {},
                               [](const std::string&, size_t, const std::string&) {}};

void retarget(std::string& text, const std::string& device) {
  if (text != "cpu" && !text.empty()) text = device;
}
void retarget(Operand& o, const std::string& device) {
  if (o.kind == Operand::Kind::device) retarget(o.text, device);
  for (Operand& item : o.items) retarget(item, device);
}
void retarget(CallExtern& call, const std::string& device) {
  for (Operand& o : call.args) retarget(o, device);
  for (KeywordOperand& o : call.kwargs) retarget(o.value, device);
}
// Everything that is on a GPU, on this one.
void retarget(Plan& plan, const std::string& device) {
  for (Input& i : plan.inputs) retarget(i.device, device);
  for (Kernel& k : plan.kernels) retarget(k.device, device);
  for (Instr& instr : plan.body) {
    if (auto* arena = std::get_if<Arena>(&instr)) retarget(arena->device, device);
    if (auto* alloc = std::get_if<Alloc>(&instr)) retarget(alloc->device, device);
    if (auto* call = std::get_if<CallExtern>(&instr)) retarget(*call, device);
  }
  for (Plan& p : plan.programs) retarget(p, device);
}

// The GPU that is asked for, or the current one; none if torch cannot use any.
std::optional<c10::Device> find_gpu(const std::string& wanted) {
  for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"})
    dlopen(name, RTLD_NOW | RTLD_GLOBAL);  // C++ programs need not have linked it
  if (!at::hasCUDA()) return {};
  at::globalContext().lazyInitDevice(c10::kCUDA);
  const c10::Device device(wanted.empty() ? "cuda" : wanted);
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

std::string architecture_of(c10::Device device) {
  const cuda::Driver& driver = cuda::Driver::machine();
  std::string name;
  driver.check(driver.architecture(driver, &name, device.index()), "the GPU's name");
  return name;
}

void require_versions(const PackageFile& file) {
  for (const auto& [program, version] : file.manifest().versions) {
    if (program != "torch") continue;
    const std::string mine =
        std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
    if (!version.starts_with(mine))
      file.fail("wrong version: it was written with torch " + version +
                ", this is torch " TORCH_VERSION);
  }
}

// places: the device of each.
std::vector<at::Storage> storages_of(const Manifest& manifest,
                                     const std::shared_ptr<Weights>& memory,
                                     const std::vector<std::string>& places) {
  std::vector<at::Storage> out;
  for (const Manifest::Storage& s : manifest.storages) {
    const std::string& device = places[out.size()];
    auto* keep = new std::shared_ptr<Weights>(memory);
    at::DataPtr data(
        s.nbytes > 0 ? memory->data() + s.offset : nullptr, keep,
        [](void* kept) { delete static_cast<std::shared_ptr<Weights>*>(kept); }, c10::kCPU);
    at::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t{}, s.nbytes, std::move(data), nullptr, false));
    if (device != "cpu") {
      verify(*memory);
      at::Tensor bytes = at::empty({0}, at::kByte).set_(storage, 0, {s.nbytes});
      storage = bytes.to(c10::Device(device)).storage();
    }
    out.push_back(std::move(storage));
  }
  return out;
}

std::vector<at::Tensor> tensors_of(const std::vector<Manifest::Tensor>& described,
                                   const std::vector<at::Storage>& storages) {
  std::vector<at::Tensor> out;
  for (const Manifest::Tensor& t : described) {
    const at::Storage& storage = storages[static_cast<size_t>(t.storage)];
    const auto options = at::TensorOptions(scalar_type(t.dtype)).device(storage.device());
    out.push_back(at::empty({0}, options).set_(storage, t.offset, t.sizes, t.strides));
  }
  return out;
}

}  // namespace

void verify(Weights& weights) {
  weights.verify([](size_t n, const std::function<void(size_t)>& body) {
    at::parallel_for(0, static_cast<int64_t>(n), 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) body(static_cast<size_t>(k));
    });
  });
}

OpenPackage::OpenPackage(const std::string& path, const std::string& device, bool verify_weights,
                         const std::string& machine)
    : file(path), signature(file.manifest().signature) {
  const Manifest& m = file.manifest();
  require_versions(file);
  const bool wants_gpu = m.wants_gpu();
  if (!wants_gpu && !device.empty() && device != "cpu")
    file.fail("it was made for the CPU and is to run on " + device);
  if (wants_gpu && !device.empty() && !device.starts_with("cuda"))
    file.fail("it was made for a GPU and is to run on " + device);
  bind([&] {
    const std::optional<c10::Device> gpu = wants_gpu ? find_gpu(device) : std::nullopt;
    variant = &choose_variant(file, machine, gpu ? architecture_of(*gpu) : "");
    plan = read_plan(file.section(variant->plan));
    if (plan.n_callables > 0) throw LoadError("it calls Python");
    const std::string there = gpu ? gpu->str() : "cpu";
    retarget(plan, there);
    for (InputSpec& s : signature.inputs) retarget(s.device, there);
    const c10::InferenceMode normal(false);  // weights may be changed in any mode
    const at::NoGradGuard no_grad;
    std::vector<std::string> places;
    for (const Manifest::Storage& s : m.storages) retarget(places.emplace_back(s.device), there);
    for (size_t i = 0; i < std::min(plan.inputs.size(), signature.inputs.size()); ++i)
      if (const InputSpec& s = signature.inputs[i]; s.kind == InputSpec::Kind::bound)
        places[static_cast<size_t>(m.weights[static_cast<size_t>(s.arg)].storage)] =
            plan.inputs[i].device;
    memory = file.map_weights();
    if (!verify_weights) memory->trust();
    const std::vector<at::Storage> storages = storages_of(m, memory, places);
    weights = tensors_of(m.weights, storages);
    constants = tensors_of(m.constants, storages);
    if (!variant->kernels.empty())
      kernels = std::make_shared<Library>(file.section(variant->kernels), math_table(m.math));
    if (!variant->cubins.empty()) {
      const auto bytes = file.section(variant->cubins);
      const std::string data(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      cubins = std::make_shared<Cubins>(data, "section '" + variant->cubins + "'");
    }
  });
}

void OpenPackage::require_results(const Program& p) const {
  if (p.outputs().size() != file.manifest().outputs.size())
    file.fail("damaged: its program has " + std::to_string(p.outputs().size()) + " results, " +
              std::to_string(file.manifest().outputs.size()) + " have names");
}

// ----------------------------------------------------------------------------------------- for C++
namespace {

struct Tensors {
  at::ArrayRef<at::Tensor> args;

  const at::Tensor* tensor(int64_t arg) const {
    const at::Tensor& t = args[static_cast<size_t>(arg)];
    return t.defined() ? &t : nullptr;
  }
  std::string type_name(int64_t arg) const {
    return tensor(arg) ? "a subclass of Python's" : "an undefined tensor";
  }
  bool integer(int64_t, int64_t&) const { return false; }
  void* object(int64_t) const { return nullptr; }
};

using Value = Package::Value;

// As Python prints it.
std::string shown(const Value& v) {
  if (const auto* b = std::get_if<bool>(&v)) return *b ? "True" : "False";
  if (const auto* i = std::get_if<int64_t>(&v)) return std::to_string(*i);
  if (const auto* s = std::get_if<std::string>(&v)) return "'" + *s + "'";
  if (const auto* t = std::get_if<at::Tensor>(&v))
    return t->defined() ? "a Tensor" : "an undefined tensor";
  if (std::holds_alternative<std::monostate>(v)) return "None";
  char text[32];
  const double x = std::get<double>(v);
  const std::string digits(text, std::to_chars(text, std::end(text), x).ptr);
  return digits.find_first_not_of("-0123456789") == std::string::npos ? digits + ".0" : digits;
}

// The values that are no constants.
struct Values {
  c10::SmallVector<const Value*, 8> args;

  const Value& at(int64_t arg) const { return *args[static_cast<size_t>(arg)]; }
  const at::Tensor* tensor(int64_t arg) const {
    const auto* t = std::get_if<at::Tensor>(&at(arg));
    return t && t->defined() ? t : nullptr;
  }
  std::string type_name(int64_t arg) const {
    return tensor(arg) ? "a subclass of Python's" : shown(at(arg));
  }
  bool integer(int64_t arg, int64_t& out) const {
    const auto* i = std::get_if<int64_t>(&at(arg));
    if (i) out = *i;
    return i != nullptr;
  }
  void* object(int64_t) const { return nullptr; }
};

Value value_of(const Manifest::Fixed& f) {
  using Kind = Manifest::Fixed::Kind;
  switch (f.kind) {
    case Kind::none: return {};
    case Kind::boolean: return f.word != 0;
    case Kind::integer: return f.word;
    case Kind::real: return std::bit_cast<double>(f.word);
    default: return f.text;
  }
}

bool same(const Value& a, const Value& b) {
  if (a.index() != b.index()) return false;
  const auto equal = [&]<class T>(const T& x) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return false;
    } else if constexpr (std::is_same_v<T, double>) {  // a nan is a nan, and -0.0 is not 0.0
      const double y = std::get<double>(b);
      return x != x ? y != y : x == y && std::signbit(x) == std::signbit(y);
    } else {
      return x == std::get<T>(b);
    }
  };
  return std::visit(equal, a);
}

at::Tensor result(Frame& f, const Output& o) {
  using Kind = Output::Kind;
  switch (o.kind) {
    case Kind::integer: return at::scalar_tensor(f.values[static_cast<size_t>(o.id)], at::kLong);
    case Kind::real: return at::scalar_tensor(o.real, at::kDouble);
    case Kind::boolean: return at::scalar_tensor(o.id != 0, at::kBool);
    case Kind::value: return *f.refs[static_cast<size_t>(o.id)];
    default: return take_tensor(f, o);
  }
}

// Why a tensor cannot be copied into a weight, "" if it can.
std::string special_kind(const at::Tensor& t) {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet kStandIns(
      {K::Python, K::FuncTorchBatched, K::FuncTorchGradWrapper, K::Functionalize});
  if (t.layout() != c10::kStrided) return "of layout " + c10::str(t.layout());
  if (t.is_nested()) return "that is nested";
  if (t.key_set().has_any(kStandIns)) return "that stands for another";
  if (t.is_meta()) return "without values, on the device meta";
  const size_t needed = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(),
                                                         static_cast<size_t>(t.storage_offset()));
  return t.numel() > 0 && t.storage().nbytes() < needed ? "whose memory was freed" : "";
}

// Copies value over weight, which may be where value lies, too. A dimension of stride 0 has one
// element in memory. Throws LoadError where value has several for it.
void copy_over(const at::Tensor& weight, const at::Tensor& value) {
  const c10::InferenceMode plain;  // takes neither gradients nor tangents of value over
  at::Tensor to = weight, from = value.is_alias_of(weight) ? value.clone() : value;
  for (int64_t d = 0; d < weight.dim(); ++d)
    if (weight.stride(d) == 0 && weight.size(d) > 1)
      to = to.narrow(d, 0, 1), from = from.narrow(d, 0, 1);
  if (to.numel() < weight.numel() && !from.expand_as(value).equal(value))
    throw LoadError("has elements that share memory, and cannot be set to different ones");
  to.copy_(from);
}

}  // namespace

struct Package::State {
  std::vector<Package::Input> inputs;
  std::vector<std::string> constants;  // by input: a constant as Python prints it
  size_t n_tensors = 0;
  std::string integer;  // the first input that is one
  std::vector<std::string> outputs;
  std::shared_ptr<Weights> memory;
  std::vector<std::pair<std::string, at::Tensor>> weights;
  std::vector<std::string> folded;
  std::string path, machine;
  std::unique_ptr<Program> program;
  std::vector<Output> results;
  std::unique_ptr<Bound> bound;
  std::mutex frames;

  State(const std::string& file, const Options& options) {
    OpenPackage open(file, options.device, options.verify_weights, options.machine);
    const Manifest& m = open.file.manifest();
    open.bind([&] {
      program = std::make_unique<Program>(Code{std::move(open.plan), std::move(open.kernels),
                                               std::move(open.cubins), std::move(open.constants),
                                               kNoPython, nullptr});
      if (program->graphs()) throw LoadError("it records CUDA graphs, which takes Python");
      open.require_results(*program);
      results = plan_outputs(*program);
      describe_inputs(open.signature, m);
      bound = std::make_unique<Bound>(*program, std::move(open.signature), open.weights);
    });
    memory = open.memory;
    bound->call_first([memory = memory] { plait::verify(*memory); });
    for (size_t k = 0; k < m.weights.size(); ++k)
      weights.emplace_back(m.weights[k].name, open.weights[k]);
    outputs = m.outputs;
    folded = m.folded;
    path = file;
    machine = open.variant->machine;
  }

  void describe_inputs(const Signature& s, const Manifest& m) {
    using Kind = Package::Input::Kind;
    inputs.resize(s.names.size() + m.fixed.size());
    constants.resize(inputs.size());
    for (const Manifest::Fixed& f : m.fixed) {
      const auto k = static_cast<size_t>(f.position);
      inputs[k] = {f.name, at::ScalarType::Undefined, "", {}, Kind::constant, value_of(f)};
      constants[k] = f.shown;
    }
    std::vector<Package::Input*> varying;
    for (Package::Input& input : inputs)
      if (input.kind != Kind::constant) varying.push_back(&input);
    for (size_t k = 0; k < s.names.size(); ++k) varying[k]->name = s.names[k];
    n_tensors = varying.size();
    for (size_t i = 0; i < s.inputs.size(); ++i) {
      const InputSpec::Kind kind = s.inputs[i].kind;
      if (kind != InputSpec::Kind::tensor && kind != InputSpec::Kind::integer) continue;
      Package::Input& input = *varying[static_cast<size_t>(s.inputs[i].arg)];
      if (kind == InputSpec::Kind::integer) {
        input.kind = Kind::integer;
        input.dtype = at::ScalarType::Long;
        input.sizes = {integer_bounds(s, s.inputs[i].integer)};
        if (integer.empty()) integer = input.name;
        continue;
      }
      input.dtype = program->slot(program->plan().inputs[i].id).scalar;
      input.device = s.inputs[i].device;
      for (const Dim& d : s.inputs[i].sizes) input.sizes.push_back(size(s, d));
    }
  }
  static Package::Size integer_bounds(const Signature& s, const Dim& d) {
    if (d.kind == Dim::Kind::fixed) return {d.value, d.value, ""};
    return {d.lo, d.hi, d.kind == Dim::Kind::any ? "" : s.symbols[static_cast<size_t>(d.value)]};
  }
  static Package::Size size(const Signature& s, const Dim& d) {
    Package::Size found = integer_bounds(s, d);
    found.lowest = std::max<int64_t>(found.lowest, 0);
    return found;
  }

  static void require_count(size_t want, size_t got) {
    if (got != want)
      throw InputError("expected " + std::to_string(want) + " inputs, got " + std::to_string(got));
  }
  template <class Arguments>
  std::vector<at::Tensor> run(const Arguments& args) {
    std::unique_lock<std::recursive_mutex> turn;
    if (bound->turn()) turn = std::unique_lock(*bound->turn());
    Call call(*program, Locked{frames});
    Frame& f = call.frame();
    bound->bind(f, args);
    program->run(f);
    std::vector<at::Tensor> out;
    out.reserve(results.size());
    for (size_t k = 0; k < results.size(); ++k) {
      out.push_back(result(f, results[k]));
      if (!bound->is_view(k)) continue;
      const at::NoGradGuard no_grad;
      out.back() = bound->view(f, k, out.back(), args);
    }
    return out;
  }
};

Package::Package(std::shared_ptr<State> state) : state_(std::move(state)) {}

Package Package::load(const std::string& path) { return load(path, Options()); }

Package Package::load(const std::string& path, const Options& options) {
  return Package(std::make_shared<State>(path, options));
}

std::vector<at::Tensor> Package::run(at::ArrayRef<at::Tensor> tensors) const {
  State& s = *state_;
  if (!s.integer.empty())
    throw InputError("input '" + s.integer + "' is an int: give all inputs to run_values");
  State::require_count(s.n_tensors, tensors.size());
  return s.run(Tensors{tensors});
}

std::vector<at::Tensor> Package::run_values(at::ArrayRef<Value> inputs) const {
  State& s = *state_;
  State::require_count(s.inputs.size(), inputs.size());
  Values given;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Input& input = s.inputs[k];
    if (input.kind != Input::Kind::constant)
      given.args.push_back(&inputs[k]);
    else if (!same(input.value, inputs[k]))
      throw InputError("input '" + input.name + "': the program was compiled for " +
                       s.constants[k] + ", got " + shown(inputs[k]));
  }
  return s.run(given);
}

const std::vector<Package::Input>& Package::inputs() const { return state_->inputs; }
const std::vector<std::string>& Package::outputs() const { return state_->outputs; }
void Package::verify() const { plait::verify(*state_->memory); }
const std::vector<std::pair<std::string, at::Tensor>>& Package::weights() const {
  verify();
  return state_->weights;
}
const std::string& Package::machine() const { return state_->machine; }

void Package::set_weight(const std::string& name, const at::Tensor& value) {
  const auto fail = [&](const std::string& what) {
    throw PackageError(state_->path + ": weight '" + name + "' " + what);
  };
  for (const std::string& folded : state_->folded)
    if (folded == name)
      fail("cannot be changed: others were computed from it when the package was written");
  for (const auto& [have, tensor] : state_->weights) {
    if (have != name) continue;
    if (const std::string kind = value.defined() ? special_kind(value) : ""; !kind.empty())
      fail("is a plain tensor, and cannot be set to one " + kind);
    if (!value.defined() || value.scalar_type() != tensor.scalar_type() ||
        value.sizes() != tensor.sizes())
      fail(std::string("is ") + torch_name(from_scalar_type(tensor.scalar_type())) +
           " with sizes " + at::str(tensor.sizes()) + ", and cannot be set to " +
           (value.defined() ? torch_name(from_scalar_type(value.scalar_type())) +
                                  std::string(" with sizes ") + at::str(value.sizes())
                            : "an undefined tensor"));
    verify();
    try {
      copy_over(tensor, value);
    } catch (const LoadError& e) {
      fail(e.what());
    } catch (const c10::Error& e) {
      fail(std::string("cannot be set: ") + e.what_without_backtrace());
    }
    return;
  }
  fail("does not exist");
}

}  // namespace plait
