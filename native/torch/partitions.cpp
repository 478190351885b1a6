// native/torch/partitions.cpp: what the partitions of a loaded program take from one another.
#include "partitions.h"

#include <algorithm>
#include <utility>

#include "code.h"

namespace plait {
namespace {

template <class Use>
void operand_slots(const Operand& o, const Use& use) {
  if (o.kind == Operand::Kind::ref) use(o.id);
  for (const Operand& item : o.items) operand_slots(item, use);
}

template <class Use>
void extern_slots(const ExternCall& c, const Use& use) {
  using Kind = ExternCall::Fill::Kind;
  const auto& arguments = c.op->schema().arguments();
  for (const ExternCall::Fill& f : c.fills) {
    const auto at = static_cast<size_t>(f.pos);
    // Seeds of attention without dropout, wherever it left them: nobody reads them.
    if (at < arguments.size() && arguments[at].name().starts_with("philox_")) continue;
    if (f.kind == Kind::tensor || f.kind == Kind::opaque) use(f.id);
    if (f.kind == Kind::tensor_list || f.kind == Kind::optional_tensor_list)
      for (int32_t id : f.ids)
        if (id != kNone) use(id);
  }
}

class PartitionLearner {
 public:
  // patches: by root, where kernels read its pointer. writes: (partition, what it writes).
  PartitionLearner(Code& code, const std::vector<std::vector<Patch>>& patches,
                   const std::vector<std::pair<int32_t, SlotId>>& writes);
  void run();

 private:
  template <class F>
  void for_steps(const F& f) {
    for (int32_t k = 0; k < n_; ++k)
      for (at_ = partition(k).first; at_ < partition(k).last; ++at_)
        f(k, p_.steps[static_cast<size_t>(at_)]);
  }
  PartitionInfo& partition(int32_t k) { return p_.partitions[static_cast<size_t>(k)]; }
  int32_t& home(SlotId s) { return home_[static_cast<size_t>(s)]; }
  // The slot whose memory this one names.
  SlotId memory(SlotId s) const {
    while (is_derived(s)) s = p_.slot(s).base;
    return s;
  }
  bool is_derived(SlotId s) const {
    return p_.slot(s).kind == SlotInfo::Kind::view || p_.slot(s).kind == SlotInfo::Kind::place;
  }
  void place(int32_t k, const Step& s);
  void make(int32_t k, SlotId s) {
    home(s) = k;
    last_[static_cast<size_t>(s)] = at_;
    partition(k).made.push_back(s);
  }
  void trace(int32_t k, const Step& s);
  void result(int32_t k, const Result& r) {
    if (r.kind == Result::Kind::tensor) make(k, r.id);
    if (r.kind == Result::Kind::symbol) find(k, r.id);
  }
  void find(int32_t k, int32_t symbol) {
    symbol_home_[static_cast<size_t>(symbol)] = k;
    const std::vector<ExprId>& nodes = p_.symbol_exprs[static_cast<size_t>(symbol)];
    partition(k).values.insert(partition(k).values.end(), nodes.begin(), nodes.end());
  }
  // Notes the symbols that a value depends on. Partitions are followed one after the other.
  void read(int32_t k, ExprId e) {
    int32_t& last = read_by_[static_cast<size_t>(e)];
    if (std::exchange(last, k) == k) return;
    const ExprNode& node = p_.plan.exprs[static_cast<size_t>(e)];
    if (node.op == ExprNode::Op::constant) return;
    if (node.op == ExprNode::Op::symbol) {
      symbols_[static_cast<size_t>(k)][static_cast<size_t>(node.a)] = true;
      return;
    }
    read(k, static_cast<ExprId>(node.a));
    read(k, static_cast<ExprId>(node.b));
  }
  void read(int32_t k, const std::vector<ExprId>& all) {
    for (ExprId e : all) read(k, e);
  }
  // The sizes of a tensor in partition k. Those of an operator's result may depend on anything.
  void read_shape(int32_t k, SlotId s) {
    const SlotInfo& i = p_.slot(s);
    if (i.kind == SlotInfo::Kind::result && home(s) < k)
      std::fill(symbols_[static_cast<size_t>(k)].begin(), symbols_[static_cast<size_t>(k)].end(),
                true);
    read(k, i.meta.ids.sizes);
    read(k, i.meta.ids.strides);
    if (i.offset != kNone && is_derived(s)) read(k, i.offset);
  }
  // The fields of an instruction that runs as it stands: what they bring into being in partition k,
  // and what they read.
  struct PlaceFields : Walker {
    void symbol(int32_t s) { learner.find(k, s); }
    void defines(SlotId s) { learner.make(k, s); }
    void result(const Result& r) { learner.result(k, r); }
    PartitionLearner& learner;
    int32_t k;
  };
  struct TraceFields : Walker {
    void uses(SlotId s) { learner.see(k, s); }
    void operand(const Operand& o) {
      if (o.kind == Operand::Kind::size) size(o.id);
      operand_slots(o, [this](SlotId s) { uses(s); });
    }
    void source(const Source& s) { s.kind == Source::Kind::expr ? size(s.expr) : uses(s.tensor); }
    void size(ExprId e) { learner.read(k, e); }
    void shape(const Shape& s) {
      learner.read(k, s.sizes);
      learner.read(k, s.strides);
    }
    PartitionLearner& learner;
    int32_t k;
  };
  template <class V>
  static void walk_fields(const Step& s, V visitor) {
    std::visit([&](const auto& i) { walk(i, visitor); }, *s.instr);
  }
  void kernel(int32_t k, Range bufs, bool fixed);
  void see(int32_t k, SlotId s);
  void bring_in(int32_t k, SlotId s, bool fixed);
  void keep(PartitionInfo& p);
  void finish(int32_t k);

  Code& p_;
  const std::vector<std::pair<int32_t, SlotId>>& writes_;
  const int32_t n_;
  std::vector<int32_t> home_;  // by slot: where its memory, or a view's pointer, is made; -1: given
  std::vector<int32_t> last_;  // by slot: the step of its home that touches its memory last
  int32_t at_ = 0;             // the step that is looked at
  std::vector<std::vector<int32_t>> made_;  // by slot: the steps that make a view
  std::vector<bool> exported_, escaping_;
  std::vector<int32_t> symbol_home_;
  std::vector<int32_t> read_by_;            // by expression: the partition that read it last
  std::vector<std::vector<bool>> symbols_;  // by partition: symbols that it reads
};

PartitionLearner::PartitionLearner(Code& code, const std::vector<std::vector<Patch>>& patches,
                                   const std::vector<std::pair<int32_t, SlotId>>& writes)
    : p_(code),
      writes_(writes),
      n_(static_cast<int32_t>(p_.partitions.size())),
      home_(p_.slots.size(), -1),
      last_(p_.slots.size(), -1),
      made_(p_.slots.size()),
      exported_(p_.slots.size(), false),
      escaping_(p_.slots.size(), false),
      symbol_home_(p_.plan.symbols.size(), -1),
      read_by_(p_.plan.exprs.size(), -1),
      symbols_(static_cast<size_t>(n_), std::vector<bool>(p_.plan.symbols.size(), false)) {
  p_.buf_roots.resize(static_cast<size_t>(p_.n_bufs));
  for (size_t s = 0; s < patches.size(); ++s)
    for (const Patch& patch : patches[s])
      p_.buf_roots[static_cast<size_t>(patch.buf)] = {static_cast<int32_t>(s), patch.delta};
}

void PartitionLearner::run() {
  for_steps([this](int32_t k, const Step& s) { place(k, s); });
  for_steps([this](int32_t k, const Step& s) { trace(k, s); });
  const std::vector<Operand>& outputs = *p_.outputs;
  const int32_t n_results = p_.plan.n_results;
  for (size_t at = 0; at < outputs.size(); ++at) {
    const Operand& o = outputs[at];
    if (o.kind != Operand::Kind::ref && o.kind != Operand::Kind::value) continue;
    see(n_, o.id);
    if (n_results == kNone || at < static_cast<size_t>(n_results))
      escaping_[static_cast<size_t>(memory(o.id))] = true;
  }
  for (const auto& [k, slot] : writes_)
    if (k >= 0)
      for (PartitionInfo::Import& i : partition(k).imports) i.written |= i.slot == memory(slot);
  for (int32_t k = 0; k < n_; ++k) finish(k);
}

// Notes what comes into being in partition k.
void PartitionLearner::place(int32_t k, const Step& s) {
  PartitionInfo& p = partition(k);
  const auto results = [&](const std::vector<Result>& outs) {
    for (const Result& r : outs) result(k, r);
  };
  switch (s.kind) {
    case StepKind::arena: home(s.a) = k; return;
    case StepKind::alloc: return make(k, s.a);
    case StepKind::pointer:
    case StepKind::header:
      make(k, s.a);
      made_[static_cast<size_t>(s.a)].push_back(at_);
      return;
    case StepKind::call_extern: {
      const ExternCall& c = p_.externs[static_cast<size_t>(s.a)];
      results(c.outs);
      p.random |= !c.builtin || c.op->hasTag(at::Tag::nondeterministic_seeded);
      p.waits |= c.name != "plait::seed";
      return;
    }
    case StepKind::call_python: return results(p_.pythons[static_cast<size_t>(s.a)].outs);
    case StepKind::call_programs: return results(p_.programs_calls[static_cast<size_t>(s.a)].outs);
    case StepKind::define:
      symbol_home_[static_cast<size_t>(s.a)] = k;
      p.after.push_back(at_);
      return;
    case StepKind::eval: p.after.push_back(at_); return;
    case StepKind::region: p.waits = true; return;
    case StepKind::bump: p.bumps.push_back(s.a); return;
    case StepKind::instruction:
      p.waits |= s.a == true;
      if (const auto* copy = std::get_if<Copy>(s.instr); copy && copy->bump)
        p.bumps.push_back(copy->dst);
      return walk_fields(s, PlaceFields{{}, *this, k});
    default: return;
  }
}

// Follows what a step of partition k reads and writes to where that comes from.
void PartitionLearner::trace(int32_t k, const Step& s) {
  const auto use = [&](SlotId t) { see(k, t); };
  switch (s.kind) {
    case StepKind::define: return read(k, s.b);
    case StepKind::arena: return read(k, s.b);
    case StepKind::alloc: return read_shape(k, s.a);
    case StepKind::call_extern: {
      const ExternCall& c = p_.externs[static_cast<size_t>(s.a)];
      for (const ExternCall::Fill& f : c.fills) {
        using Kind = ExternCall::Fill::Kind;
        if (f.kind == Kind::int_list) read(k, f.ids);
        if (f.kind == Kind::integer || f.kind == Kind::real || f.kind == Kind::number_tensor)
          read(k, f.id);
      }
      return extern_slots(c, use);
    }
    case StepKind::call_python: {
      const PythonCall& c = p_.pythons[static_cast<size_t>(s.a)];
      for (const Operand& o : c.args) operand_slots(o, use);
      for (const KeywordOperand& o : c.kwargs) operand_slots(o.value, use);
      return;
    }
    case StepKind::call_programs:
      for (const Operand& o : p_.programs_calls[static_cast<size_t>(s.a)].args) {
        if (o.kind == Operand::Kind::size) read(k, o.id);
        operand_slots(o, use);
      }
      return;
    case StepKind::bump: return use(s.a);
    case StepKind::instruction: return walk_fields(s, TraceFields{{}, *this, k});
    // A header is made again where it is needed; a pointer at a distance that is known at the call
    // is not.
    case StepKind::header:
      read_shape(k, s.a);
      if (home(memory(s.a)) != k) bring_in(k, memory(s.a), false);
      return;
    case StepKind::pointer:
      read_shape(k, s.a);
      if (home(memory(s.a)) != k) bring_in(k, memory(s.a), true);
      return;
    case StepKind::launch: {
      const GridLaunch& l = p_.grid_launches[static_cast<size_t>(s.a)];
      read(k, l.grid);
      read(k, l.size_ids);
      return kernel(k, l.args, false);
    }
    case StepKind::region: {
      const RegionInfo& r = p_.regions[static_cast<size_t>(s.a)];
      for (int32_t i = r.first; i < r.first + r.n; ++i)
        kernel(k, p_.launches[static_cast<size_t>(i)].args, true);
      return;
    }
    default: return;
  }
}

// The arguments of a kernel in partition k.
void PartitionLearner::kernel(int32_t k, Range bufs, bool fixed) {
  for (int32_t b = bufs.first; b < bufs.first + bufs.n; ++b) {
    const SlotId root = p_.buf_roots[static_cast<size_t>(b)].buf;
    if (!is_derived(root))
      bring_in(k, root, fixed);
    else if (home(root) != k)
      see(k, root);
    else
      bring_in(k, memory(root), true);
  }
}

// A tensor that operators or the caller see in partition k (n_: after the last).
void PartitionLearner::see(int32_t k, SlotId s) {
  const SlotInfo& i = p_.slot(s);
  if (i.kind == SlotInfo::Kind::none || i.kind == SlotInfo::Kind::opaque) return;
  bring_in(k, memory(s), true);
  if (k < n_) read_shape(k, s);
  if (!is_derived(s)) return;
  const int32_t at = home(s);
  const std::vector<int32_t>& made = made_[static_cast<size_t>(s)];
  const auto add = [&](std::vector<int32_t>& steps) {
    steps.insert(steps.end(), made.begin(), made.end());
  };
  if (at >= 0 && at < k && partition(at).recorded) add(partition(at).after);
  if (at < k && k < n_) add(partition(k).names);
  if (i.base != kNone && i.kind == SlotInfo::Kind::view) see(k, i.base);
}

void PartitionLearner::bring_in(int32_t k, SlotId s, bool fixed) {
  if (p_.slot(s).kind == SlotInfo::Kind::constant) return;
  if (home(s) == k) {
    last_[static_cast<size_t>(s)] = at_;
    return;
  }
  if (p_.slot(s).kind == SlotInfo::Kind::arena)  // a replay would not bring it to others
    throw LoadError("two partitions share the arena '" + p_.slot(s).name + "'");
  if (home(s) >= 0) exported_[static_cast<size_t>(s)] = true;
  if (k == n_) return;
  for (PartitionInfo::Import& i : partition(k).imports) {
    if (i.slot != s) continue;
    i.fixed |= fixed;
    return;
  }
  partition(k).imports.push_back({s, fixed, false});
}

// Finds the steps that make what the partition leaves in memory of its own. An operator that may
// return its operands makes none of it.
void PartitionLearner::keep(PartitionInfo& p) {
  std::vector<bool> kept(p_.slots.size(), false);
  for (const PartitionInfo::Export& e : p.exports) kept[static_cast<size_t>(e.slot)] = !e.escapes;
  for (int32_t at = p.last - 1; at >= p.first; --at) {
    const Step& s = p_.steps[static_cast<size_t>(at)];
    if (s.kind == StepKind::alloc && kept[static_cast<size_t>(s.a)]) p.kept.push_back(at);
    if (s.kind == StepKind::instruction) {  // it may copy the tensor
      const auto* a = std::get_if<AssertSizeStride>(s.instr);
      if (a && a->copies && kept[static_cast<size_t>(a->tensor)]) p.kept.push_back(at);
    }
    if (s.kind != StepKind::call_extern) continue;
    const ExternCall& c = p_.externs[static_cast<size_t>(s.a)];
    if (std::none_of(c.outs.begin(), c.outs.end(), [&](const Result& r) {
          return r.kind == Result::Kind::tensor && kept[static_cast<size_t>(r.id)];
        }))
      continue;
    p.kept.push_back(at);
    if (c.may_keep) extern_slots(c, [&](SlotId t) { kept[static_cast<size_t>(memory(t))] = true; });
  }
}

void PartitionLearner::finish(int32_t k) {
  PartitionInfo& p = partition(k);
  for (int32_t at = p.first; at < p.last; ++at) {
    const Step& s = p_.steps[static_cast<size_t>(at)];
    if (s.kind == StepKind::drop_input || (s.kind == StepKind::drop && home(s.a) != k))
      p.dropped.push_back(s.a);
  }
  for (std::vector<int32_t>* steps : {&p.after, &p.names}) {
    std::sort(steps->begin(), steps->end());
    steps->erase(std::unique(steps->begin(), steps->end()), steps->end());
  }
  for (size_t s = 0; s < exported_.size(); ++s) {
    if (home_[s] != k || !exported_[s]) continue;
    const SlotInfo::Kind kind = p_.slots[s].kind;
    if (kind == SlotInfo::Kind::alloc || kind == SlotInfo::Kind::result)
      p.exports.push_back({static_cast<int32_t>(s), escaping_[s], last_[s], {}});
  }
  keep(p);
  for (size_t s = 0; s < p_.slots.size(); ++s)
    if (p_.slots[s].kind == SlotInfo::Kind::view && !p_.slots[s].relative)
      for (PartitionInfo::Import& i : p.imports)
        i.stored |= i.slot == memory(static_cast<SlotId>(s));
  for (SlotId v : p.made)
    for (PartitionInfo::Export& e : p.exports)
      if (is_derived(v) && memory(v) == e.slot) e.views.push_back(v);
  for (const PartitionInfo::Import& i : p.imports)
    p.n_direct += i.written && !i.fixed && escaping_[static_cast<size_t>(i.slot)] &&
                  p_.slot(i.slot).kind == SlotInfo::Kind::alloc;
  for (size_t s = 0; s < symbol_home_.size(); ++s) {
    const int32_t at = symbol_home_[s];
    if (at < k && !p_.symbol_exprs[s].empty() && symbols_[static_cast<size_t>(k)][s])
      p.key.push_back(p_.symbol_exprs[s].front());
  }
  p.waits &= !p.recorded;
}

}  // namespace

void learn_partitions(Code& code, const std::vector<std::vector<Patch>>& patches,
                      const std::vector<std::pair<int32_t, SlotId>>& writes) {
  PartitionLearner(code, patches, writes).run();
}

}  // namespace plait
