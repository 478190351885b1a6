// native/torch/bound.h: a program with its parameters in place that checks its inputs itself.
//
// What was promised for every program input is a list of small checks, made once; a call binds the
// parameters, checks and binds the arguments and derives the symbols. What the arguments are is the
// caller's business: a class `Arguments` with
//   const at::Tensor* tensor(int64_t arg)   null if it is none
//   std::string type_name(int64_t arg)      of its class, for errors
//   bool integer(int64_t arg, int64_t& out) false if it is none
//   void* object(int64_t arg)               an object of the host; of argument -1: its None
#pragma once

#include <atomic>
#include <functional>
#include <limits>

#include "plait/errors.h"
#include "torch/call.h"

namespace plait {

// The values that symbols have taken in this call; the few that a signature has live on the stack.
class Symbols {
 public:
  explicit Symbols(size_t n) {
    if (n > kInline) more_.resize(n), at_ = more_.data();
    std::fill(at_, at_ + n, kUnset);
  }
  Symbols(const Symbols&) = delete;
  Symbols& operator=(const Symbols&) = delete;
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

class Bound {
 public:
  // bound: the tensors of the inputs that are bound for good, by InputSpec::arg. Throws LoadError
  // where the signature does not fit the program.
  Bound(const Program& program, Signature signature, const std::vector<at::Tensor>& bound);

  const Signature& signature() const { return signature_; }

  // Called before the first call reads what is bound, and again before the next one if it throws.
  void call_first(std::function<void()> check);

  // Binds tensors in the place of those with these numbers in `bound`; they are checked as those
  // were, at every call. Returns what a call that is under way still reads, null if all are bound
  // already.
  using Numbered = std::vector<std::pair<size_t, at::Tensor>>;
  std::shared_ptr<const void> rebind(const Numbered& tensors);

  // Held during a call of a program that writes to what is bound to it, from reading it to handing
  // out results: such calls come one after another, whatever thread they come from, and a callback
  // may call the program again. Null: the program writes to nothing of its own.
  std::recursive_mutex* turn() const { return turn_.get(); }

  // Checks the arguments and binds every input of the program; throws InputError.
  template <class Arguments>
  void bind(Frame& f, const Arguments& args) const;
  bool is_view(size_t result) const {
    return !signature_.results.empty() && signature_.results[result].kind == Produced::Kind::view;
  }
  // Result number `result`, a view: of the caller's tensor, for which `like` is what the program
  // made.
  template <class Arguments>
  at::Tensor view(Frame& f, size_t result, const at::Tensor& like, const Arguments& args) const;

 private:
  // Kernels have the layout of bound tensors built in, but an assignment to `.data` may change it.
  struct BoundTensor {
    at::Tensor tensor;
    bool strided = false;
    c10::DimVector sizes, strides;  // strided: what the program was compiled for
    bool moved() const;
  };
  void check_first() const;
  void require(bool fits, size_t position, const char* what) const;
  void check_spec(size_t position, size_t n_bound) const;
  [[noreturn]] void fail(const InputSpec& s, const std::string& what) const;
  [[noreturn]] void fail_misfit(const Input& input, const InputSpec& s, const at::Tensor& t,
                                const std::string& type_name) const;
  [[noreturn]] void fail_moved(const Input& input, const InputSpec& s, const BoundTensor& b) const;
  [[noreturn]] void fail_tangent(size_t input) const;
  [[noreturn]] void fail_tensor(const InputSpec& s, const at::Tensor& t, Symbols& symbols) const;
  void check_integer(const InputSpec& s, int64_t got, Symbols& symbols) const;
  void bind_symbols(Frame& f, const Symbols& symbols) const;
  using Tensors = c10::SmallVector<const at::Tensor*, 8>;
  void check_apart(const Tensors& tensors) const;
  using Integers = c10::SmallVector<int64_t, 8>;
  void check_conditions(const Tensors& tensors, const Integers& integers) const;
  std::string misfit(const Dim& d, int64_t got, Symbols& symbols) const;
  std::string name_of(size_t input) const;

  template <class Arguments>
  const at::Tensor& tensor_of(size_t input, const Arguments& args) const {
    const InputSpec& s = signature_.inputs[input];
    return s.kind == InputSpec::Kind::bound ? (*bound_)[static_cast<size_t>(s.arg)].tensor
                                            : *args.tensor(s.arg);
  }

  const Program& program_;
  Signature signature_;
  std::shared_ptr<const std::vector<BoundTensor>> bound_;
  std::vector<size_t> changed_;  // inputs that the program writes to
  std::unique_ptr<std::recursive_mutex> turn_;
  bool derives_ = false;  // some inputs are symbols
  std::function<void()> first_check_;
  mutable std::atomic<bool> unchecked_ = false;
};

inline bool has_tensor(const InputSpec& s) {
  return s.kind == InputSpec::Kind::bound || s.kind == InputSpec::Kind::tensor;
}

inline bool Bound::BoundTensor::moved() const {
  const c10::IntArrayRef now = tensor.sizes(), steps = tensor.strides();
  const size_t rank = sizes.size();
  if (now.size() != rank) return true;
  bool same_sizes = true, same_strides = true;
  for (size_t d = 0; d < rank; ++d) {
    same_sizes &= now[d] == sizes[d];
    same_strides &= steps[d] == strides[d] || now[d] == 1;
  }
  return !same_sizes || !(same_strides || tensor.numel() == 0);
}

inline bool fits(const Dim& d, int64_t got, Symbols& symbols) {
  if (d.kind == Dim::Kind::fixed) return d.value == got;
  if (d.kind == Dim::Kind::any) return true;
  return got >= d.lo && got <= d.hi && symbols.agree(d.value, got);
}

inline bool fits(const InputSpec& s, const at::Tensor& t, Symbols& symbols) {
  const c10::IntArrayRef sizes = t.sizes(), strides = t.strides();
  if (sizes.size() != s.sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (!fits(s.sizes[d], sizes[d], symbols)) return false;
  if (s.layout == InputSpec::Layout::contiguous) return t.is_contiguous();
  if (s.layout == InputSpec::Layout::any || t.numel() == 0) return true;
  for (size_t d = 0; d < strides.size(); ++d)
    if (sizes[d] > 1 && !fits(s.strides[d], strides[d], symbols)) return false;
  return true;
}

template <class Arguments>
void Bound::bind(Frame& f, const Arguments& args) const {
  const std::vector<Input>& inputs = program_.plan().inputs;
  const std::vector<BoundTensor>& bound = *bound_;
  if (unchecked_.load(std::memory_order_acquire)) [[unlikely]]
    check_first();
  Symbols symbols(signature_.symbols.size());
  ForwardMode forward_mode;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputSpec& spec = signature_.inputs[i];
    switch (spec.kind) {
      case InputSpec::Kind::bound: {
        const BoundTensor& b = bound[static_cast<size_t>(spec.arg)];
        if (!b.strided) [[unlikely]]
          require_fit(f, inputs[i], b.tensor);
        else if (find_misfit(f.slot(inputs[i].id), b.tensor) != Misfit::none || b.moved())
          fail_moved(inputs[i], spec, b);
        if (forward_mode.reaches(b.tensor)) [[unlikely]]
          fail_tangent(i);
        bind_input(f, inputs[i], b.tensor);
        break;
      }
      case InputSpec::Kind::tensor: {
        const at::Tensor* t = args.tensor(spec.arg);
        if (!t) [[unlikely]]
          fail(spec, "expected a tensor, got " + args.type_name(spec.arg));
        if (find_misfit(f.slot(inputs[i].id), *t) != Misfit::none) [[unlikely]]
          fail_misfit(inputs[i], spec, *t, args.type_name(spec.arg));
        if (!fits(spec, *t, symbols)) [[unlikely]]
          fail_tensor(spec, *t, symbols);
        if (forward_mode.reaches(*t)) [[unlikely]]
          fail_tangent(i);
        bind_input(f, inputs[i], *t);
        break;
      }
      case InputSpec::Kind::integer: {
        int64_t value = 0;
        if (!args.integer(spec.arg, value))
          fail(spec, "expected an int, got " + args.type_name(spec.arg));
        check_integer(spec, value, symbols);
        set_symbol(f, inputs[i].id, value);
        break;
      }
      case InputSpec::Kind::object:
      case InputSpec::Kind::none:
        f.opaques[static_cast<size_t>(inputs[i].id)] =
            args.object(spec.kind == InputSpec::Kind::none ? -1 : spec.arg);
        break;
      case InputSpec::Kind::symbol: break;
    }
  }
  if (derives_) bind_symbols(f, symbols);
  if (changed_.empty() && signature_.conditions.empty()) [[likely]]
    return;
  Tensors tensors;
  Integers integers(inputs.size(), 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputSpec& spec = signature_.inputs[i];
    tensors.push_back(has_tensor(spec) ? &tensor_of(i, args) : nullptr);
    if (spec.kind == InputSpec::Kind::integer) args.integer(spec.arg, integers[i]);
  }
  check_apart(tensors);
  check_conditions(tensors, integers);
}

template <class Arguments>
at::Tensor Bound::view(Frame& f, size_t result, const at::Tensor& like,
                       const Arguments& args) const {
  const Produced& r = signature_.results[result];
  return view_of(tensor_of(static_cast<size_t>(r.arg), args), input_at(program_, f, r.arg), like,
                 r);
}

}  // namespace plait
