// native/torch/load/steps.cpp: the walk that emits steps: expressions before what needs them,
// regions of launches, and drops of what is dead.
#include <algorithm>

#include "walks.h"

namespace plait {
namespace {

// Memory that dies inside a region and is worth ending it for, if an allocation follows.
constexpr int64_t kRegionBreakBytes = 1 << 20;

}  // namespace

void StepEmitter::run() {
  const std::vector<Instr>& body = code.plan.body;
  for (size_t e = 0; e < evaluated_.size(); ++e)  // symbols are written when they are defined
    evaluated_[e] = constants[e] || code.plan.exprs[e].op == ExprNode::Op::symbol;
  drops_.resize(body.size());
  for (size_t s = 0; s < code.slots.size(); ++s) plan_drop(static_cast<SlotId>(s));
  for (const Instr& i : body) {
    ++at;
    std::visit([this](const auto& of) { emit(*this, of); }, i);
    for (const Step& drop : drops_[static_cast<size_t>(at)])
      (region.empty() ? code.steps : pending_drops_).push_back(drop);
  }
  if (!code.partitions.empty())
    code.partitions.back().last = static_cast<int32_t>(code.steps.size());
  flatten_patches();
}

void StepEmitter::need(const std::vector<ExprId>& ids) {
  std::vector<ExprId> todo = ids, found;
  while (!todo.empty()) {
    const auto e = static_cast<size_t>(todo.back());
    todo.pop_back();
    if (evaluated_[e]) continue;
    evaluated_[e] = true;
    found.push_back(static_cast<ExprId>(e));
    todo.push_back(static_cast<ExprId>(code.plan.exprs[e].a));
    todo.push_back(static_cast<ExprId>(code.plan.exprs[e].b));
  }
  if (found.empty()) return;
  std::sort(found.begin(), found.end());  // operands stand before their users
  push(StepKind::eval, static_cast<int32_t>(code.evals.size()), static_cast<int32_t>(found.size()));
  code.evals.insert(code.evals.end(), found.begin(), found.end());
}

void StepEmitter::operand(const Operand& o) {
  if (o.kind == Operand::Kind::size) size(o.id);
  for (const Operand& item : o.items) operand(item);
}

void StepEmitter::mark_written(SlotId s) {
  for (; s != kNone; s = info(s).base) info(s).written = true;
}

void StepEmitter::write(SlotId s) {
  writes.emplace_back(static_cast<int32_t>(code.partitions.size()) - 1, s);
  mark_written(s);
}

void StepEmitter::plan_drop(SlotId s) {
  const SlotInfo& i = info(s);
  const int last = last_use_[static_cast<size_t>(s)];
  using Kind = SlotInfo::Kind;
  const bool owned = i.kind == Kind::alloc || i.kind == Kind::result ||
                     ((i.kind == Kind::view || i.kind == Kind::place) && i.header);
  if (owned) code.owned.push_back(s);
  if (i.kind == Kind::place) return;  // its header is kept from call to call and owns nothing
  if (last + 1 == static_cast<int>(drops_.size()) || (!owned && i.kind != Kind::input)) return;
  const Step drop{i.kind == Kind::input ? StepKind::drop_input : StepKind::drop, s, kNone};
  (last < 0 ? code.steps : drops_[static_cast<size_t>(last)]).push_back(drop);
}

void StepEmitter::close_region() {
  if (region.empty()) return;
  RegionInfo r{static_cast<int32_t>(code.launches.size()), static_cast<int32_t>(region.size())};
  for (LaunchInfo& l : region) {
    const auto& work = constant(l.work_ns);
    r.is_static = r.is_static && work.has_value();
    if (work) r.work_ns += *work;
    if (work && l.parallel && *work >= kSplitTaskNs) r.split_ns += *work;
    code.launches.push_back(std::move(l));
  }
  push(StepKind::region, static_cast<int32_t>(code.regions.size()));
  code.regions.push_back(r);
  region.clear();
  code.steps.insert(code.steps.end(), pending_drops_.begin(), pending_drops_.end());
  pending_drops_.clear();
}

void StepEmitter::close_before_alloc() {
  for (const Step& d : pending_drops_) {
    const SlotInfo& i = info(d.a);
    if (i.kind != SlotInfo::Kind::view && (!i.meta.is_static || i.kind == SlotInfo::Kind::result ||
                                           i.meta.nbytes >= kRegionBreakBytes))
      return close_region();
  }
}

int32_t StepEmitter::add_buf(SlotId s) {
  patches[static_cast<size_t>(info(s).root)].push_back(
      {static_cast<int32_t>(code.n_bufs), info(s).delta});
  return static_cast<int32_t>(code.n_bufs++);
}

void StepEmitter::flatten_patches() {
  for (size_t s = 0; s < code.slots.size(); ++s) {
    const SlotInfo& i = code.slots[s];
    const bool derived = i.kind == SlotInfo::Kind::view || i.kind == SlotInfo::Kind::place;
    if (!derived || (!i.header && i.folded)) continue;
    mark_pointer(static_cast<SlotId>(s));
    if (i.base != kNone) mark_pointer(i.base);
  }
  for (size_t s = 0; s < code.slots.size(); ++s) {
    SlotInfo& i = code.slots[s];
    i.patches = {static_cast<int32_t>(code.patches.size()),
                 static_cast<int32_t>(patches[s].size())};
    i.needs_pointer = i.needs_pointer || !patches[s].empty();
    code.patches.insert(code.patches.end(), patches[s].begin(), patches[s].end());
  }
}

}  // namespace plait
