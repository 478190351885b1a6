// native/torch/control.cpp: cond, while_loop, map, scan and calls of graphs, as eager runs them.
#include "control.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/stack.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <mutex>

#include "call.h"
#include "conditional_node.h"
#include "recordings.h"

namespace plait {

// A tensor, or an integer where it is undefined (None, which no program reads, is one too).
struct ControlValue {
  at::Tensor tensor;
  int64_t integer = 0;
};
using ControlValues = std::vector<ControlValue>;

class Subprogram {
 public:
  explicit Subprogram(Code code) : program_(std::move(code)), outputs_(plan_outputs(program_)) {
    if (program_.graphs()) throw LoadError("a subprogram records CUDA graphs");
    for (const Output& o : outputs_)
      if (o.kind == Output::Kind::real || o.kind == Output::Kind::value ||
          o.kind == Output::Kind::opaque)
        throw LoadError("'" + program_.plan().name + "' returns what is no tensor and no integer");
  }

  ControlValues run(Frame& caller, const ControlValues& given) {
    Call call(program_, Locked{frames_});
    Frame& f = call.frame();
    f.owns_inputs = true;
    const std::vector<Input>& inputs = program_.plan().inputs;
    for (size_t i = 0; i < inputs.size(); ++i) bind(f, inputs[i], given[i]);
    program_.run_within(f, caller);
    ControlValues out;
    for (const Output& o : outputs_) {
      if (o.kind == Output::Kind::integer)
        out.push_back({{}, f.values[static_cast<size_t>(o.id)]});
      else
        out.push_back({take_tensor(f, o), o.kind == Output::Kind::boolean ? o.id : 0});
    }
    return out;
  }

 private:
  void bind(Frame& f, const Input& input, const ControlValue& v) const {
    if (input.kind == Input::Kind::opaque) return;  // nothing reads it
    if (input.kind == Input::Kind::symbol) return set_symbol(f, input.id, v.integer);
    TORCH_CHECK(v.tensor.defined(), "'", f.slot(input.id).name, "' of ", program_.plan().name,
                " is no tensor");
    require_fit(f, input, v.tensor);
    bind_input(f, input, v.tensor);  // sizes and strides are checked by the program
  }

  Program program_;
  std::vector<Output> outputs_;
  std::mutex frames_;
};

namespace {

bool is_true(const ControlValue& v) {
  return v.tensor.defined() ? v.tensor.is_nonzero() : v.integer != 0;
}

// --- In a recording: the device decides, and what leaves a body lies in memory of its own. ---

// Memory that lies as t does, where nothing of t overlaps, made on the stream outside of a body.
at::Tensor room_like(const at::Tensor& t, const c10::Stream& outside) {
  const c10::StreamGuard on_stream(outside);
  const bool dense = t.is_non_overlapping_and_dense();
  return dense ? at::empty_strided(t.sizes(), t.strides(), t.options())
               : at::empty(t.sizes(), t.options());
}

c10::Stream current_stream(const Frame& f) {
  const c10::impl::VirtualGuardImpl streams(f.code.gpu->device().type());
  return streams.getStream(f.code.gpu->device());
}

void fill_room(const ControlValue& room, const ControlValue& v, const std::string& label) {
  const at::Tensor &to = room.tensor, &from = v.tensor;
  const bool same = to.defined() == from.defined() && room.integer == v.integer;
  if (!same || (to.defined() && (to.sizes() != from.sizes() || to.dtype() != from.dtype())))
    throw std::runtime_error("what " + label + " gives has not always the same size and type");
  if (to.defined()) to.copy_(from);
}

// Both branches leave their results in the same rooms.
ControlValues recorded_cond(Frame& f, const ProgramsCall& c, const at::Tensor& predicate,
                            const ControlValues& given) {
  const c10::Stream outside = current_stream(f);
  std::optional<ControlValues> rooms;
  for (const bool otherwise : {false, true}) {
    const ConditionalNode holds(*f.code.gpu, f.recorded - 1);
    holds.decide(predicate, otherwise);
    holds.record(cuda::ConditionalParams::once, [&] {
      ++f.recorded;
      const ControlValues made = c.programs[otherwise ? 1 : 0]->run(f, given);
      --f.recorded;
      if (!rooms) {
        rooms = made;
        for (ControlValue& v : *rooms)
          if (v.tensor.defined()) v.tensor = room_like(v.tensor, outside);
      }
      for (size_t k = 0; k < made.size(); ++k) fill_room((*rooms)[k], made[k], c.label);
    });
  }
  return *rooms;
}

// What is carried has rooms that every round reads and then fills.
ControlValues recorded_loop(Frame& f, const ProgramsCall& c, ControlValues given,
                            const at::Tensor& predicate) {
  const c10::Stream outside = current_stream(f);
  for (size_t k = 0; k < c.carried; ++k)
    if (at::Tensor& t = given[k].tensor; t.defined()) {
      const at::Tensor room = room_like(t, outside);
      t = room.copy_(t);
    }
  const ConditionalNode holds(*f.code.gpu, f.recorded - 1);
  holds.decide(predicate);
  holds.record(cuda::ConditionalParams::again, [&] {
    ++f.recorded;
    ControlValues next = c.programs[1]->run(f, given);
    for (ControlValue& v : next)  // one may be another's room
      for (size_t k = 0; k < c.carried && v.tensor.defined(); ++k)
        if (given[k].tensor.defined() && v.tensor.is_alias_of(given[k].tensor)) {
          v.tensor = v.tensor.clone();
          break;
        }
    for (size_t k = 0; k < next.size(); ++k) fill_room(given[k], next[k], c.label);
    const ControlValue again = c.programs[0]->run(f, given)[0];
    --f.recorded;
    if (!again.tensor.defined()) throw std::runtime_error("the host decides on " + c.label);
    holds.decide(again.tensor);
  });
  given.resize(c.carried);
  return given;
}

// --- As the host decides. ---

// The first operands are what the body returns, once and again while the condition holds.
ControlValues loop(Frame& f, const ProgramsCall& c, ControlValues given) {
  ControlValue first = c.programs[0]->run(f, given)[0];
  if (f.recorded && first.tensor.defined())
    return recorded_loop(f, c, std::move(given), first.tensor);
  bool ran = false;
  for (ControlValue holds = std::move(first); is_true(holds); ran = true) {
    ControlValues next = c.programs[1]->run(f, given);
    std::move(next.begin(), next.end(), given.begin());
    holds = c.programs[0]->run(f, given)[0];
  }
  given.resize(c.carried);
  if (!ran)  // results are never operands
    for (ControlValue& v : given)
      if (v.tensor.defined()) v.tensor = v.tensor.clone();
  return given;
}

// The same; results are what each round returned, stacked. Integers, which nobody stacks, are those
// of the last one.
ControlValues rounds(Frame& f, const ProgramsCall& c, ControlValues given) {
  std::vector<std::vector<at::Tensor>> made(c.carried);
  const auto keep = [&] {
    for (size_t k = 0; k < c.carried; ++k)
      if (given[k].tensor.defined()) made[k].push_back(given[k].tensor);
  };
  while (is_true(c.programs[0]->run(f, given)[0])) {
    ControlValues next = c.programs[1]->run(f, given);
    std::move(next.begin(), next.end(), given.begin());
    keep();
  }
  if (std::all_of(made.begin(), made.end(), [](const auto& m) { return m.empty(); })) keep();
  given.resize(c.carried);
  for (size_t k = 0; k < c.carried; ++k)
    if (!made[k].empty()) given[k].tensor = at::stack(made[k]);
  return given;
}

// The body takes what is carried, slices, and the rest; it returns what is carried and what is
// stacked. A map carries nothing.
ControlValues scan(Frame& f, const ProgramsCall& c, ControlValues given) {
  const auto carried = static_cast<std::ptrdiff_t>(c.carried),
             scanned = static_cast<std::ptrdiff_t>(c.scanned);
  const ControlValues whole(given.begin() + carried, given.begin() + carried + scanned);
  std::vector<std::vector<at::Tensor>> stacked(c.outs.size() - c.carried);
  for (const ControlValue& x : whole)
    TORCH_CHECK(x.tensor.defined() && x.tensor.dim() > 0 && x.tensor.size(0) > 0 &&
                    x.tensor.size(0) == whole[0].tensor.size(0),
                "a scan needs tensors with as many slices, at least one");
  for (int64_t i = 0; i < whole[0].tensor.size(0); ++i) {
    for (size_t k = 0; k < c.scanned; ++k)  // the body was traced with copies of slices
      given[c.carried + k].tensor = whole[k].tensor.select(0, i).contiguous();
    ControlValues next = c.programs[0]->run(f, given);
    for (size_t k = c.carried; k < next.size(); ++k)
      stacked[k - c.carried].push_back(std::move(next[k].tensor));
    std::move(next.begin(), next.begin() + carried, given.begin());
  }
  given.resize(c.carried);
  for (const std::vector<at::Tensor>& items : stacked)
    given.push_back({items[0].defined() ? at::stack(items) : at::Tensor(), 0});
  return given;
}

ControlValues chosen(Frame& f, const ProgramsCall& c, ControlValues given) {
  switch (c.kind) {
    case ControlKind::call: break;
    case ControlKind::loop: return loop(f, c, std::move(given));
    case ControlKind::rounds: return rounds(f, c, std::move(given));
    case ControlKind::scan: return scan(f, c, std::move(given));
    case ControlKind::cond: {
      const ControlValue predicate = std::move(given.front());
      given.erase(given.begin());
      if (f.recorded && predicate.tensor.defined())
        return recorded_cond(f, c, predicate.tensor, given);
      return c.programs[is_true(predicate) ? 0 : 1]->run(f, given);
    }
  }
  return c.programs[0]->run(f, given);
}

}  // namespace

void load_programs(Code& code) {
  for (Plan& p : code.plan.programs) {
    const auto n = static_cast<size_t>(p.n_constants);
    if (n > code.constants.size() || p.n_callables > code.plan.n_callables)
      throw LoadError("'" + p.name + "' has larger tables than the program that runs it");
    std::vector<at::Tensor> constants(code.constants.begin(),
                                      code.constants.begin() + static_cast<std::ptrdiff_t>(n));
    code.programs.push_back(std::make_shared<Subprogram>(Code{
        std::move(p), code.library, code.cubins, std::move(constants), code.host, code.owner}));
  }
}

void run_programs(Frame& f, const ProgramsCall& c, const Operands& o) {
  ControlValues given;
  for (const Operand& operand : c.args) {
    if (operand.kind == Operand::Kind::size)
      given.push_back({{}, o.value(operand.id)});
    else
      given.push_back({o.tensor(operand.id), 0});
  }
  const at::NoGradGuard no_grad;
  const ControlValues out = chosen(f, c, std::move(given));
  for (size_t k = 0; k < c.outs.size(); ++k) {
    const Result& r = c.outs[k];
    TORCH_CHECK(r.kind != Result::Kind::symbol || !out[k].tensor.defined(), c.label,
                " returned a tensor where an integer was expected");
    if (r.kind == Result::Kind::symbol) set_symbol(f, r.id, out[k].integer);
    if (r.kind == Result::Kind::tensor) define(f, r.id, out[k].tensor);
  }
}

}  // namespace plait
