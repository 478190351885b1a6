// native/torch/bound.cpp: the checks of a bound program.
#include "torch/bound.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

namespace plait {
namespace {

const char* layout_name(c10::Layout layout) {
  switch (layout) {
    case c10::kSparse: return "torch.sparse_coo";
    case c10::kSparseCsr: return "torch.sparse_csr";
    case c10::kSparseCsc: return "torch.sparse_csc";
    case c10::kSparseBsr: return "torch.sparse_bsr";
    case c10::kSparseBsc: return "torch.sparse_bsc";
    case c10::kMkldnn: return "torch._mkldnn";
    default: return "torch.jagged";
  }
}

// What is special about a tensor that the program cannot take though its device is right.
std::string special_kind(const at::Tensor& t, const std::string& type_name) {
  if (t.layout() != c10::kStrided) return std::string("one of layout ") + layout_name(t.layout());
  if (t.is_nested()) return "a nested one";
  if (t.key_set().has_any(c10::DispatchKeySet(
          {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize})))
    return "one of a transform of torch.func, which belongs inside of what is compiled";
  return "one of class " + type_name;
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

}  // namespace

// ------------------------------------------------------------------------------------------ making
Bound::Bound(const Program& program, Signature signature, const std::vector<at::Tensor>& bound)
    : program_(program), signature_(std::move(signature)) {
  const std::vector<Input>& inputs = program.plan().inputs;
  const size_t n_outputs = program.outputs().size();
  if (signature_.inputs.size() != inputs.size())
    throw LoadError("the program has " + std::to_string(inputs.size()) + " inputs, " +
                    std::to_string(signature_.inputs.size()) + " were described");
  if (signature_.single && n_outputs != 1)
    throw LoadError("the program has more than a single output");
  std::vector<BoundTensor> tensors;
  for (const at::Tensor& t : bound) {
    BoundTensor b{t, t.layout() == c10::kStrided};
    if (b.strided) b.sizes = t.sizes(), b.strides = t.strides();
    tensors.push_back(std::move(b));
  }
  bound_ = std::make_shared<std::vector<BoundTensor>>(std::move(tensors));
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_spec(i, bound.size());
    derives_ = derives_ || signature_.inputs[i].kind == InputSpec::Kind::symbol;
    if (inputs[i].kind == Input::Kind::tensor && program.slot(inputs[i].id).written)
      changed_.push_back(i);
  }
  for (size_t i : changed_)
    if (!turn_ && signature_.inputs[i].kind == InputSpec::Kind::bound)
      turn_ = std::make_unique<std::recursive_mutex>();
  const std::vector<Produced>& results = signature_.results;
  if (!results.empty() && results.size() != n_outputs)
    throw LoadError("the program has " + std::to_string(n_outputs) + " results, " +
                    std::to_string(results.size()) + " were described");
  for (size_t k = 0; k < results.size(); ++k) {
    if (results[k].kind != Produced::Kind::view) continue;
    const int64_t of = results[k].arg;
    if (of < 0 || static_cast<size_t>(of) >= inputs.size() ||
        !has_tensor(signature_.inputs[static_cast<size_t>(of)]))
      throw LoadError("a result is a view of input " + std::to_string(of) + ", which is no tensor");
    if (program.outputs()[k].kind != Operand::Kind::ref) throw LoadError("a view is no tensor");
  }
}

void Bound::call_first(std::function<void()> check) {
  first_check_ = std::move(check);
  unchecked_ = true;
}

void Bound::check_first() const {
  first_check_();
  unchecked_.store(false, std::memory_order_release);
}

std::shared_ptr<const void> Bound::rebind(const Numbered& tensors) {
  std::shared_ptr<std::vector<BoundTensor>> next;
  for (const auto& [number, t] : tensors) {
    if (bound_->at(number).tensor.is_same(t)) continue;
    if (!next) next = std::make_shared<std::vector<BoundTensor>>(*bound_);
    (*next)[number].tensor = t;
  }
  return next ? std::exchange(bound_, std::move(next)) : nullptr;
}

void Bound::require(bool fits, size_t position, const char* what) const {
  if (!fits) throw LoadError("program input " + std::to_string(position) + " " + what);
}

void Bound::check_spec(size_t position, size_t n_bound) const {
  using Kind = InputSpec::Kind;
  const Input& input = program_.plan().inputs[position];
  const InputSpec& s = signature_.inputs[position];
  const Input::Kind want = has_tensor(s)                                    ? Input::Kind::tensor
                           : s.kind == Kind::object || s.kind == Kind::none ? Input::Kind::opaque
                                                                            : Input::Kind::symbol;
  require(input.kind == want, position, "is described as one of another kind");
  const size_t n = s.kind == Kind::bound ? n_bound : signature_.names.size();
  if ((s.kind == Kind::bound || s.kind == Kind::tensor || s.kind == Kind::integer ||
       s.kind == Kind::object) &&
      (s.arg < 0 || static_cast<size_t>(s.arg) >= n))
    throw LoadError("argument " + std::to_string(s.arg) + " has no name");
  if (s.kind != Kind::tensor) return;
  require(s.dtype == dtype_name(input.dtype), position,
          "is described with another dtype than the program's");
  require(s.device == input.device, position,
          "is described with another device than the program's");
  require(s.layout != InputSpec::Layout::listed || s.strides.size() == s.sizes.size(), position,
          "has as many strides as sizes");
}

// ---------------------------------------------------------------------------------------- checking
// What was wanted instead of `got`, which does not fit.
std::string Bound::misfit(const Dim& d, int64_t got, Symbols& symbols) const {
  if (d.kind != Dim::Kind::symbol) return std::to_string(d.value);
  const std::string& name = signature_.symbols[static_cast<size_t>(d.value)];
  if (!symbols.agree(d.value, got))
    return std::to_string(symbols[d.value]) + " (" + name +
           ", as in an earlier input or dimension)";
  return got < d.lo ? "at least " + std::to_string(d.lo) + " (" + name + ")"
                    : "at most " + std::to_string(d.hi) + " (" + name + ")";
}

void Bound::fail(const InputSpec& s, const std::string& what) const {
  throw InputError("input '" + signature_.names[static_cast<size_t>(s.arg)] + "': " + what);
}

void Bound::fail_misfit(const Input& input, const InputSpec& s, const at::Tensor& t,
                        const std::string& type_name) const {
  if (find_misfit(program_.slot(input.id), t) == Misfit::dtype)
    fail(s, std::string("expected dtype ") + torch_name(input.dtype) + ", got " +
                torch_name(from_scalar_type(t.scalar_type())));
  if (const std::string device = t.device().str(); device != input.device)
    fail(s, "expected a plain tensor on device " + input.device + ", got one on " + device);
  fail(s, "expected a plain tensor, got " + special_kind(t, type_name));
}

void Bound::fail_tensor(const InputSpec& s, const at::Tensor& t, Symbols& symbols) const {
  const c10::IntArrayRef sizes = t.sizes(), strides = t.strides();
  if (sizes.size() != s.sizes.size())
    fail(s, "expected " + std::to_string(s.sizes.size()) + " dimensions, got " +
                std::to_string(sizes.size()));
  const auto compare = [&](const char* what, const Dim& want, size_t d, int64_t got) {
    if (!fits(want, got, symbols))
      fail(s, std::string("expected ") + what + " " + misfit(want, got, symbols) +
                  " in dimension " + std::to_string(d) + ", got " + std::to_string(got));
  };
  for (size_t d = 0; d < sizes.size(); ++d) compare("size", s.sizes[d], d, sizes[d]);
  if (s.layout == InputSpec::Layout::contiguous)
    fail(s, "expected a contiguous tensor, got strides " + at::str(strides));
  for (size_t d = 0; d < strides.size(); ++d)
    if (sizes[d] > 1) compare("stride", s.strides[d], d, strides[d]);
  fail(s, "does not fit");
}

void Bound::fail_tangent(size_t input) const {
  const bool given = signature_.inputs[input].kind == InputSpec::Kind::tensor;
  throw InputError((given ? "input " : "") + name_of(input) +
                   " carries a tangent of forward-mode differentiation, which a compiled program "
                   "drops\n  try: the function itself, or torch.compile, which runs eager there");
}

void Bound::check_integer(const InputSpec& s, int64_t got, Symbols& symbols) const {
  if (!fits(s.integer, got, symbols))
    fail(s, "expected " + misfit(s.integer, got, symbols) + ", got " + std::to_string(got));
}

void Bound::fail_moved(const Input& input, const InputSpec& s, const BoundTensor& b) const {
  const auto layout = [](c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    return " with sizes " + at::str(sizes) + " and strides " + at::str(strides);
  };
  const at::Tensor& t = b.tensor;
  const bool opaque = input.dtype == DType::kAny;
  throw InputError("parameter or buffer '" + s.name + "': its data is now " +
                   torch_name(from_scalar_type(t.scalar_type())) + " on " + t.device().str() +
                   layout(t.sizes(), t.strides()) + ", the program was compiled for " +
                   (opaque ? "this dtype" : torch_name(input.dtype)) + " on " + input.device +
                   layout(b.sizes, b.strides));
}

void Bound::bind_symbols(Frame& f, const Symbols& symbols) const {
  for (size_t i = 0; i < signature_.inputs.size(); ++i) {
    if (signature_.inputs[i].kind != InputSpec::Kind::symbol) continue;
    const int64_t index = signature_.inputs[i].integer.value;
    if (!symbols.known(index))
      throw InputError("no input defines the size '" +
                       signature_.symbols[static_cast<size_t>(index)] + "'");
    set_symbol(f, program_.plan().inputs[i].id, symbols[index]);
  }
}

std::string Bound::name_of(size_t input) const {
  const InputSpec& s = signature_.inputs[input];
  return s.kind == InputSpec::Kind::bound
             ? "parameter or buffer '" + s.name + "'"
             : "'" + signature_.names[static_cast<size_t>(s.arg)] + "'";
}

// The program was compiled for inputs that share no memory: a change of one would show in another
// or not, as kernels happen to run.
void Bound::check_apart(const Tensors& tensors) const {
  for (size_t i : changed_)
    for (size_t j = 0; j < tensors.size(); ++j)
      if (j != i && tensors[j] && share_memory(*tensors[i], *tensors[j]))
        throw InputError("inputs " + name_of(i) + " and " + name_of(j) + " share memory and " +
                         name_of(i) + " is changed in place: pass a copy of one of them");
}

void Bound::check_conditions(const Tensors& tensors, const Integers& integers) const {
  using Kind = Condition::Fact::Kind;
  const auto value_of = [&](const Condition::Fact& fact) {
    const at::Tensor* t = tensors[fact.input];
    if (fact.kind == Kind::integer) return integers[fact.input];
    if (fact.kind == Kind::offset) return t->storage_offset();
    return fact.kind == Kind::size ? t->size(fact.dim) : t->stride(fact.dim);
  };
  const auto name = [&](size_t input) -> const std::string& {
    return signature_.names[static_cast<size_t>(signature_.inputs[input].arg)];
  };
  for (const Condition& c : signature_.conditions) {
    std::vector<int64_t> values(c.nodes.size());
    bool known = true;
    for (size_t k = 0; known && k < values.size(); ++k) {
      const ExprNode& e = c.nodes[k];
      if (e.op == ExprNode::Op::symbol)
        values[k] = value_of(c.facts[static_cast<size_t>(e.a)]);
      else
        known = evaluate(e, values.data(), values[k]);
    }
    if (known && values.back() != 0) continue;
    std::string found, what = "sizes";
    for (size_t i = 0; i < tensors.size(); ++i) {
      const InputSpec& s = signature_.inputs[i];
      if (s.kind != InputSpec::Kind::tensor && s.kind != InputSpec::Kind::integer) continue;
      found += (found.empty() ? "" : ", ") + name(i) + " " +
               (tensors[i] ? at::str(tensors[i]->sizes()) : std::to_string(integers[i]));
    }
    for (const Condition::Fact& fact : c.facts) {
      if (fact.kind != Kind::stride && fact.kind != Kind::offset) continue;
      what = "strides";
      found += ", " + name(fact.input) +
               (fact.kind == Kind::offset ? ".storage_offset()"
                                          : ".stride(" + std::to_string(fact.dim) + ")") +
               " = " + std::to_string(value_of(fact));
    }
    throw InputError(what + " break a condition of the program, " + c.text + ": " + found);
  }
}

}  // namespace plait
