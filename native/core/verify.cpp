// native/core/verify.cpp: the rules of a Plan that hold beyond its bytes.
//
// Every slot and symbol is defined once and before its uses, nothing is used after it was freed,
// ranks agree, kernels get as many arguments as they declare, constant sizes are not negative,
// constant ranges stay inside their memory, and nothing that lies in the arena, which is the
// program's only during a call, is returned or handed to an operator that may keep it.
#include <algorithm>
#include <climits>
#include <cstdlib>
#include <optional>

#include "plan.h"

namespace plait {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 48;
constexpr int64_t kMaxWorkNs = int64_t{1} << 48;

// The symbols that instructions define, one instruction after the other.
struct SymbolFinder : Walker {
  std::vector<int32_t> found;
  void symbol(int32_t s) { found.push_back(s); }
  void result(const Result& r) {
    if (r.kind == Result::Kind::symbol) found.push_back(r.id);
  }
};

class Verifier : public Walker {
 public:
  explicit Verifier(const Plan& plan)
      : plan_(plan), slots_(plan.slots.size()), symbol_ready_(plan.symbols.size(), INT_MAX) {}

  void run() {
    if (plan_.body.empty() || !std::holds_alternative<Return>(plan_.body.back()))
      fail("it does not end with Return");
    find_symbols();
    find_constants();
    for (const Input& i : plan_.inputs) input(i);
    for (at_ = 0; at_ < static_cast<int>(plan_.body.size()); ++at_) {
      const auto both = [this](const auto& i) {
        walk(i, *this);
        check(i);
      };
      std::visit(both, plan_.body[static_cast<size_t>(at_)]);
    }
  }

  // --- rules that hold for every field of a kind, whatever the instruction: see walk()
  void uses(SlotId s) { tensor(s); }
  void ends(SlotId s) { tensor(s).kind = Kind::freed; }
  void defines(SlotId s) { define(s, Kind::tensor); }
  void result(const Result& r) {
    if (r.kind == Result::Kind::tensor) define(r.id, Kind::tensor);
  }
  void arena(SlotId s) {
    if (slot(s).kind != Kind::arena) fail(name(s) + " is no arena");
  }
  void size(ExprId e) const {
    if (expr_ready_[static_cast<size_t>(e)] > at_)
      fail("an expression uses a symbol before it is defined");
  }
  void shape(const Shape& shape) const {
    for (const auto* ids : {&shape.sizes, &shape.strides})
      for (ExprId e : *ids) size(e);
  }
  void source(const Source& s) {
    if (s.kind == Source::Kind::expr)
      size(s.expr);
    else
      tensor(s.tensor);
  }
  void operand(const Operand& o) {
    if (o.kind == Operand::Kind::value) fail("a value is no operand of a call");
    if (o.kind == Operand::Kind::ref && slot(o.id).kind != Kind::opaque) tensor(o.id);
    if (o.kind == Operand::Kind::size) size(o.id);
    for (const Operand& item : o.items) operand(item);
  }
  void output(const Operand& o) {
    if (o.kind == Operand::Kind::list) fail("a list is returned");
    if (o.kind == Operand::Kind::value)
      number(o.id);
    else
      operand(o);
    refuse_arena(o);
  }

 private:
  enum class Kind { undefined, tensor, opaque, arena, freed };
  struct State {
    Kind kind = Kind::undefined;
    std::optional<int64_t>
        bytes;              // of the memory that the slot may reach, where that is a constant
    int64_t start = 0;      // of the slot inside it
    bool owned = false;     // may be reused: an Alloc or a Reuse
    bool in_arena = false;  // a Place, or a view of one
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw PlanError("damaged plan: " +
                    (at_ < 0 ? std::string() : "instruction " + std::to_string(at_) + ": ") + what);
  }
  std::string name(SlotId s) const { return "'" + plan_.slots[static_cast<size_t>(s)].name + "'"; }

  // Positions where symbols get their value; an expression is ready once all of its symbols are.
  void find_symbols() {
    const auto define = [this](int32_t symbol, int position) {
      int& ready = symbol_ready_[static_cast<size_t>(symbol)];
      if (ready != INT_MAX)
        fail("symbol '" + plan_.symbols[static_cast<size_t>(symbol)] + "' is defined twice");
      ready = position;
    };
    for (const Input& i : plan_.inputs)
      if (i.kind == Input::Kind::symbol) define(i.id, 0);
    int position = 0;
    for (const Instr& i : plan_.body) {
      ++position;
      SymbolFinder symbols;
      std::visit([&](const auto& of) { walk(of, symbols); }, i);
      for (int32_t s : symbols.found) define(s, position);
    }
    expr_ready_.reserve(plan_.exprs.size());
    for (const ExprNode& e : plan_.exprs) {
      if (e.op == ExprNode::Op::constant)
        expr_ready_.push_back(0);
      else if (e.op == ExprNode::Op::symbol)
        expr_ready_.push_back(symbol_ready_[static_cast<size_t>(e.a)]);
      else
        expr_ready_.push_back(
            std::max(expr_ready_[static_cast<size_t>(e.a)], expr_ready_[static_cast<size_t>(e.b)]));
    }
  }

  void find_constants() {
    std::vector<int64_t> values(plan_.exprs.size());
    constant_.resize(plan_.exprs.size());
    for (size_t i = 0; i < plan_.exprs.size(); ++i) {
      const ExprNode& e = plan_.exprs[i];
      const bool leaf = e.op == ExprNode::Op::constant;
      if (e.op == ExprNode::Op::symbol ||
          (!leaf && (!constant_[static_cast<size_t>(e.a)] || !constant_[static_cast<size_t>(e.b)])))
        continue;
      if (!evaluate(e, values.data(), values[i]))
        fail("a constant expression overflows or divides by zero");
      constant_[i] = values[i];
    }
  }

  const std::optional<int64_t>& constant(ExprId e) const {
    return constant_[static_cast<size_t>(e)];
  }

  State& slot(SlotId s) { return slots_[static_cast<size_t>(s)]; }
  const State& slot(SlotId s) const { return slots_[static_cast<size_t>(s)]; }
  State& tensor(SlotId s) {
    State& state = slot(s);
    if (state.kind == Kind::freed) fail(name(s) + " is used after it was freed");
    if (state.kind != Kind::tensor) fail(name(s) + " is no tensor here");
    return state;
  }
  void define(SlotId s, Kind kind) {
    if (slot(s).kind != Kind::undefined) fail(name(s) + " is defined twice");
    slot(s).kind = kind;
  }
  int64_t item(SlotId s) const {
    const int64_t size = element_size(plan_.slots[static_cast<size_t>(s)].dtype);
    if (size == 0) fail(name(s) + " has no element type");
    return size;
  }

  // Bytes from the first to past the last element where that is a constant (0 for an empty tensor).
  // Negative sizes fail.
  std::optional<int64_t> extent(const Shape& shape, int64_t element) const {
    int64_t span = 1, numel = 1;
    bool known = true, empty = false;
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      const auto& size = constant(shape.sizes[d]);
      const auto& stride = constant(shape.strides[d]);
      if (size && *size < 0) fail("a size is negative");
      if (stride && *stride < 0) fail("a stride is negative");
      if (size && *size == 0) empty = true;
      if (size && *size > 0 && __builtin_mul_overflow(numel, *size, &numel))
        fail("a tensor is too large");
      int64_t step = 0;
      if (!size || !stride)
        known = false;
      else if (*size > 0 && (__builtin_mul_overflow(*size - 1, *stride, &step) ||
                             __builtin_add_overflow(span, step, &span) || span > kMaxBytes))
        fail("a tensor is too large");
    }
    if (empty) return 0;
    if (!known) return std::nullopt;
    return span * element;
  }

  void input(const Input& i) {
    if (i.kind == Input::Kind::symbol) return;
    define(i.id, i.kind == Input::Kind::tensor ? Kind::tensor : Kind::opaque);
    if (i.kind != Input::Kind::tensor) return;
    item(i.id);          // it has an element type
    extent(i.shape, 1);  // symbols of a signature are defined by the body
  }

  // A slot of known memory: [start, start + extent) has to lie in the memory. Nothing lies
  // anywhere.
  void inside(State& state, const Shape& shape, SlotId s) {
    const auto span = extent(shape, item(s));
    if (!state.bytes) return;
    if (state.start < 0 ||
        (span && *span > 0 && (state.start > *state.bytes || *span > *state.bytes - state.start)))
      fail(name(s) + " reaches beyond its memory");
  }

  // --- rules of single instructions
  template <class I>
  void check(const I&) {}
  void check(const AssertSizeStride& i) { extent(i.shape, 1); }
  void check(const AssertAlignment& i) {
    if (i.nbytes < 1) fail("an alignment is not positive");
  }
  void check(const Arena& i) {
    const auto& bytes = constant(i.nbytes);
    if (bytes && (*bytes < 0 || *bytes > kMaxBytes))
      fail("an arena of " + std::to_string(*bytes) + " bytes");
    if (has_arena_) fail("a second arena");
    has_arena_ = true;
    slot(i.slot).kind = Kind::arena;
    slot(i.slot).bytes = bytes;
  }
  void check(const Place& i) {
    State& state = slot(i.slot);
    state.in_arena = true;
    if (const auto& offset = constant(i.offset)) {
      if (*offset < 0 || *offset > kMaxBytes || *offset % item(i.slot) != 0)
        fail(name(i.slot) + " has a wrong offset");
      state.start = *offset;
      state.bytes = slot(i.arena).bytes;
    }
    inside(state, i.shape, i.slot);
  }
  void check(const Alloc& i) {
    State& state = slot(i.slot);
    state.bytes = extent(i.shape, item(i.slot));
    state.owned = true;
  }
  void check(const Reuse& i) {
    State& old = tensor(i.old);
    if (!old.owned) fail(name(i.old) + " was not allocated by this program");
    State& state = slot(i.slot);
    state.bytes = old.bytes;
    state.owned = true;
    inside(state, i.shape, i.slot);
    old.owned = false;
  }
  void check(const View& i) {
    const State base = tensor(i.base);
    State& state = slot(i.slot);
    state.in_arena = base.in_arena;
    if (const auto& offset = constant(i.offset)) {
      int64_t delta = 0;
      if (__builtin_mul_overflow(*offset, item(i.slot), &delta) || std::abs(delta) > kMaxBytes)
        fail(name(i.slot) + " has a wrong offset");
      state.start = i.relative ? base.start + delta : delta;
      if (std::abs(state.start) > kMaxBytes) fail(name(i.slot) + " has a wrong offset");
      state.bytes = base.bytes;
    }
    inside(state, i.shape, i.slot);
  }
  void check(const Launch& i) {
    const Kernel& k = plan_.kernels[static_cast<size_t>(i.kernel)];
    if (static_cast<size_t>(k.n_args) != i.args.size() ||
        static_cast<size_t>(k.n_sizes) != i.sizes.size())
      fail("kernel '" + k.name + "' gets a wrong number of arguments");
    if (const auto& ns = constant(i.work_ns); ns && (*ns < 0 || *ns > kMaxWorkNs))
      fail("a launch takes " + std::to_string(*ns) + " ns");
  }
  void check(const CallExtern& i) {
    const bool builtin = i.op.starts_with("aten::") || i.op.starts_with("prims::");
    if (i.may_keep || !builtin) {
      for (const Operand& o : i.args) refuse_arena(o);
      for (const KeywordOperand& o : i.kwargs) refuse_arena(o.value);
    }
  }
  void check(const CallPrograms& i) {
    using Kind = ControlKind;
    const auto require = [&](bool holds, const char* what) {
      if (!holds) fail(std::string("control flow ") + what);
    };
    const bool loops = i.kind == Kind::loop || i.kind == Kind::rounds;
    require(i.programs.size() == (loops || i.kind == Kind::cond ? 2 : 1),
            "has a wrong number of programs");
    for (const Operand& o : i.args) {
      require(o.kind == Operand::Kind::ref || o.kind == Operand::Kind::size,
              "is given what is no tensor and no integer");
      refuse_arena(o);
    }
    require(i.kind != Kind::cond || !i.args.empty(), "has no condition");
    const auto n_given = static_cast<int64_t>(i.args.size()) - (i.kind == Kind::cond ? 1 : 0),
               n_results = static_cast<int64_t>(i.outs.size());
    std::vector<int64_t> results;
    for (int32_t k : i.programs) {
      require(static_cast<size_t>(k) < plan_.programs.size(), "runs a program that is not there");
      const Plan& p = plan_.programs[static_cast<size_t>(k)];
      require(static_cast<int64_t>(p.inputs.size()) == n_given,
              "has a program with other operands than it is given");
      results.push_back(static_cast<int64_t>(std::get<Return>(p.body.back()).values.size()));
    }
    require(results.back() == n_results && (i.kind != Kind::cond || results[0] == n_results),
            "has a program with other results than it gives");
    const bool repeats = loops || i.kind == Kind::scan;
    require(i.carried >= 0 && i.scanned >= 0 && (repeats || i.carried == 0) &&
                (i.kind == Kind::scan || i.scanned == 0) && i.carried <= n_given &&
                i.scanned <= n_given - i.carried,
            "carries or scans more than it is given");
    if (loops)
      require(results[0] == 1 && results[1] == i.carried,
              "is a loop that gives not what it carries");
    if (i.kind == Kind::scan)
      require(i.scanned > 0 && i.carried <= n_results, "is a scan that gives not what it carries");
  }
  void refuse_arena(const Operand& o) const {
    if (o.kind == Operand::Kind::ref && slot(o.id).in_arena)
      fail(name(o.id) + " lies in the arena and may be kept");
    for (const Operand& item : o.items) refuse_arena(item);
  }
  void check(const Return&) {
    if (at_ + 1 != static_cast<int>(plan_.body.size())) fail("Return is not the last instruction");
  }

  // One element that is returned as a Python float or bool.
  void number(SlotId s) {
    tensor(s);
    const DType dtype = plan_.slots[static_cast<size_t>(s)].dtype;
    if (dtype != DType::f64 && dtype != DType::b1) fail(name(s) + " is no float and no bool");
  }

  const Plan& plan_;
  std::vector<State> slots_;
  std::vector<int> symbol_ready_, expr_ready_;
  std::vector<std::optional<int64_t>> constant_;
  bool has_arena_ = false;
  int at_ = -1;
};

}  // namespace

void verify(const Plan& plan) { Verifier(plan).run(); }

}  // namespace plait
