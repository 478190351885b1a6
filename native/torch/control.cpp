// native/torch/control.cpp: cond, while_loop, map, scan and calls of subgraphs, as eager runs them.
#include "torch/control.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/stack.h>

namespace plait {
namespace {

[[noreturn]] void no_python() { throw std::runtime_error("a package cannot call Python"); }

// A tensor's values with these strides; eager settles results in the same way.
at::Tensor settled(const at::Tensor& t, c10::IntArrayRef strides) {
  if (!t.defined() || t.strides() == strides) return t;
  return at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
}

void bind(const Program& p, Frame& f, const Input& input, ControlValue& v) {
  if (input.kind == Input::Kind::opaque) return;  // nothing reads it
  if (input.kind == Input::Kind::symbol) return set_symbol(f, input.id, v.integer);
  const SlotInfo& slot = p.slot(input.id);
  TORCH_CHECK(v.tensor.defined(), "'", slot.name, "' of ", p.plan().name, " is no tensor");
  require_fit(f, input, v.tensor);
  if (slot.meta.is_static && v.tensor.sizes() == slot.meta.sizes)
    v.tensor = settled(v.tensor, slot.meta.strides);
  bind_input(f, input, v.tensor);  // sizes and strides are checked by the program
}

bool is_true(const ControlValue& v) {
  return v.tensor.defined() ? v.tensor.is_nonzero() : v.integer != 0;
}

}  // namespace

constinit const Host kNoPython{[]() -> void* { return nullptr; },
                               [](void*) {},
                               [](Frame&, const PythonCall&, const Operands&) { no_python(); },
                               [](void*) -> c10::IValue { no_python(); },
                               [](int) -> void* { no_python(); },
                               [](void*, bool) {},
                               [](void*) -> Host::Captured { no_python(); },
                               [](void*) {},
                               [](void*) {},
                               [](void*) {},
                               [](const std::string&, size_t, const std::string&) {}};

Routine::Routine(std::unique_ptr<Program> program) : program_(std::move(program)) {
  if (program_->graphs()) throw LoadError("it records CUDA graphs, which takes Python");
  outputs_ = plan_outputs(*program_);
  for (const Output& o : outputs_)
    if (o.kind == Output::Kind::real || o.kind == Output::Kind::value ||
        o.kind == Output::Kind::opaque)
      throw LoadError("'" + program_->plan().name + "' returns what is no tensor and no integer");
}

ControlValues Routine::run(const ControlValues& given) {
  ControlValues held = given;
  const std::vector<Input>& inputs = program_->plan().inputs;
  Call call(*program_, Locked{frames_});
  Frame& f = call.frame();
  for (size_t i = 0; i < inputs.size(); ++i) bind(*program_, f, inputs[i], held[i]);
  program_->run(f);
  ControlValues out;
  for (const Output& o : outputs_) {
    if (o.kind == Output::Kind::integer)
      out.push_back({{}, f.values[static_cast<size_t>(o.id)]});
    else
      out.push_back({take_tensor(f, o), o.kind == Output::Kind::boolean ? o.id : 0});
  }
  return out;
}

// -------------------------------------------------------------------------------------------------
Control::Control(const Manifest::Control& what, const Routines& all) : what_(what) {
  const auto require = [](bool holds, const char* message) {
    if (!holds) throw LoadError(std::string("control flow ") + message);
  };
  for (int64_t number : what.routines) routines_.push_back(all[static_cast<size_t>(number)]);
  const size_t n_given = what.operands.size() - (what.kind == Kind::cond ? 1 : 0);
  const auto takes = [&](size_t k) { return routines_[k]->program().plan().inputs.size(); };
  const auto gives = [&](size_t k) { return routines_[k]->program().outputs().size(); };
  const auto n_carried = static_cast<size_t>(what.n_carried),
             n_scanned = static_cast<size_t>(what.n_scanned);
  const bool branches = what.kind == Kind::cond || what.kind == Kind::loop;
  require(routines_.size() == (branches ? 2 : 1), "has a wrong number of programs");
  for (size_t k = 0; k < routines_.size(); ++k)
    require(takes(k) == n_given, "has a program with other operands than it is given");
  n_results_ = gives(routines_.size() - 1);
  if (what.kind == Kind::cond) require(gives(0) == n_results_, "has branches with unlike results");
  if (what.kind == Kind::loop) {
    require(gives(0) == 1, "has a condition with several results");
    require(n_results_ == n_carried && n_carried <= n_given, "carries what it does not return");
  }
  if (what.kind == Kind::scan)
    require(n_scanned > 0 && n_carried + n_scanned <= n_given && n_carried <= n_results_,
            "has a wrong number of operands");
}

void Control::check(const CallPython& call) const {
  const auto require = [&](bool holds) {
    if (!holds) throw LoadError(call.label + " does not fit its control flow");
  };
  require(call.kwargs.empty() && call.outs.size() == n_results_ &&
          what_.strides.size() == n_results_);
  for (const Operand& o : call.args)
    require(o.kind == Operand::Kind::ref || o.kind == Operand::Kind::size);
  for (const Manifest::Control::Given& g : what_.operands)
    require(g.constant || static_cast<size_t>(g.value) < call.args.size());
}

void Control::run(Frame& f, const PythonCall& call, const Operands& o) const {
  ControlValues given;
  for (const Manifest::Control::Given& g : what_.operands) {
    if (g.constant) {
      given.push_back({{}, g.value});
      continue;
    }
    const Operand& operand = call.args[static_cast<size_t>(g.value)];
    if (operand.kind == Operand::Kind::size)
      given.push_back({{}, o.value(operand.id)});
    else
      given.push_back({o.tensor(operand.id), 0});
  }
  ControlValue condition{{}, 1};  // a call holds always
  if (what_.kind == Kind::cond) {
    condition = std::move(given.front());
    given.erase(given.begin());
  }
  const at::NoGradGuard no_grad;
  const ControlValues out = what_.kind == Kind::loop   ? loop(std::move(given))
                            : what_.kind == Kind::scan ? scan(std::move(given))
                            : is_true(condition)       ? routines_.front()->run(given)
                                                       : routines_.back()->run(given);
  for (size_t k = 0; k < call.outs.size(); ++k) {
    const Result& r = call.outs[k];
    TORCH_CHECK(r.kind != Result::Kind::symbol || !out[k].tensor.defined(), call.label,
                " returned a tensor where an integer was expected");
    if (r.kind == Result::Kind::symbol) set_symbol(f, r.id, out[k].integer);
    if (r.kind != Result::Kind::tensor) continue;
    const auto& strides = what_.strides[k];
    define(f, r.id, strides ? settled(out[k].tensor, *strides) : out[k].tensor);
  }
}

// The first operands are what the body returns, once and again while the condition holds.
ControlValues Control::loop(ControlValues given) const {
  const auto n = static_cast<size_t>(what_.n_carried);
  bool ran = false;
  for (; is_true(routines_[0]->run(given)[0]); ran = true) {
    ControlValues next = routines_[1]->run(given);
    std::move(next.begin(), next.end(), given.begin());
  }
  given.resize(n);
  if (!ran)  // results are never operands
    for (ControlValue& v : given)
      if (v.tensor.defined()) v.tensor = v.tensor.clone();
  return given;
}

// The body takes what is carried, slices, and the rest; it returns what is carried and what is
// stacked. A map carries nothing.
ControlValues Control::scan(ControlValues given) const {
  const auto carried = static_cast<size_t>(what_.n_carried),
             sliced = static_cast<size_t>(what_.n_scanned);
  const ControlValues whole(given.begin() + what_.n_carried,
                            given.begin() + what_.n_carried + what_.n_scanned);
  std::vector<std::vector<at::Tensor>> stacked(n_results_ - carried);
  for (const ControlValue& x : whole)
    TORCH_CHECK(x.tensor.defined() && x.tensor.dim() > 0 && x.tensor.size(0) > 0 &&
                    x.tensor.size(0) == whole[0].tensor.size(0),
                "a scan needs tensors with as many slices, at least one");
  for (int64_t i = 0; i < whole[0].tensor.size(0); ++i) {
    for (size_t k = 0; k < sliced; ++k)  // the body was traced with copies of slices
      given[carried + k].tensor = whole[k].tensor.select(0, i).contiguous();
    ControlValues next = routines_[0]->run(given);
    for (size_t k = carried; k < next.size(); ++k)
      stacked[k - carried].push_back(std::move(next[k].tensor));
    std::move(next.begin(), next.begin() + what_.n_carried, given.begin());
  }
  given.resize(carried);
  for (const std::vector<at::Tensor>& items : stacked)
    given.push_back({items[0].defined() ? at::stack(items) : at::Tensor(), 0});
  return given;
}

ControlFlow control_flow(const Plan& plan, const std::vector<Manifest::Control>& described,
                         const Control::Routines& routines) {
  if (described.size() != static_cast<size_t>(plan.n_callables))
    throw LoadError("'" + plan.name + "' calls " + std::to_string(plan.n_callables) +
                    " functions, " + std::to_string(described.size()) + " were described");
  if (described.empty()) return {};
  std::vector<Control> controls;
  for (const Manifest::Control& d : described) controls.emplace_back(d, routines);
  for (const Instr& i : plan.body)
    if (const auto* call = std::get_if<CallPython>(&i))
      controls[static_cast<size_t>(call->index)].check(*call);
  return [controls = std::move(controls)](Frame& f, const PythonCall& c, const Operands& o) {
    controls[static_cast<size_t>(c.index)].run(f, c, o);
  };
}

}  // namespace plait
