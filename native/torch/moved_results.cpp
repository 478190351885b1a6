// native/torch/moved_results.cpp: where operators of a recording write, see moved_results.h.
#include "moved_results.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>

#include "code.h"
#include "run.h"

namespace plait {
namespace {
using cuda::Driver;
using cuda::GraphNode;

constexpr unsigned kAfterThese = 1;    // CU_STREAM_SET_CAPTURE_DEPENDENCIES
constexpr size_t kMostNodes = 32;      // of an operator
constexpr int kMostAgain = 3;          // that an operator is recorded, after the first time
constexpr unsigned kMostShifted = 16;  // bits that an address may lose where it is packed
// The allocator keeps what has more bytes apart from what has fewer.
constexpr int64_t kSmallNbytes = 1 << 20;

}  // namespace

struct Extent {
  uint64_t first, nbytes;
  bool has(uint64_t address) const { return address - first < nbytes; }
  bool meets(const Extent& other) const { return has(other.first) || other.has(first); }
};

// One recording of an operator: its memory, in the order in which it asked, and its nodes.
struct RecordedCall {
  std::vector<Extent> blocks;
  std::optional<std::vector<ToldNode>> nodes;
};

namespace {
Extent extent_of(const at::Tensor& t) {
  return {reinterpret_cast<uint64_t>(memory_of(t)->data()), memory_of(t)->nbytes()};
}

// What torch's allocator gives to this thread while a guard has it stand for a profiler.
class Given : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* at, int64_t nbytes, size_t, size_t, c10::Device device) override {
    if (nbytes > 0 && !device.is_cpu())
      blocks.push_back({reinterpret_cast<uint64_t>(at), static_cast<uint64_t>(nbytes)});
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::vector<Extent> blocks;
};
// Whether a profiler stands there, or may look for one.
bool is_profiled() {
  return at::hasCallbacks() ||
         c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
}

// The nodes that follow `first` up to `last`, each behind the one before it; nothing if they are no
// such chain, or one cannot be told anything.
std::optional<std::vector<ToldNode>> chain(GraphNode first, GraphNode last) {
  const Driver& driver = Driver::machine();
  std::vector<ToldNode> found;
  for (GraphNode node = last; node != first;) {
    std::optional<ToldNode> told = ToldNode::read(node);
    if (!told || found.size() == kMostNodes) return std::nullopt;
    found.push_back(std::move(*told));
    GraphNode before[2] = {};
    uint64_t edges[2] = {};
    size_t n = 2;
    if (driver.nodes_before(node, before, edges, &n) != 0 || n != 1) return std::nullopt;
    node = before[0];
  }
  std::reverse(found.begin(), found.end());
  return found;
}

RecordedCall record_call(Frame& f, const Step& step, GraphNode first) {
  const auto given = std::make_shared<Given>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, given);
    run_step(f, step, false);
  }
  const Recorded after = recorded_on(f.stream);
  RecordedCall made{.blocks = std::move(given->blocks), .nodes = {}};
  if (after.n_last == 1 && after.last[0] != first) made.nodes = chain(first, after.last[0]);
  return made;
}

// The number of the block that is this memory and shares no byte with others; -1: there is none.
int32_t block_of(const std::vector<Extent>& blocks, const Extent& memory) {
  int32_t found = -1;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].meets(memory)) continue;
    if (found >= 0 || blocks[i].first != memory.first || blocks[i].nbytes < memory.nbytes)
      return -1;
    found = static_cast<int32_t>(i);
  }
  return found;
}

// Whether a kernel could read memory there.
bool is_address(uint64_t a) {
  constexpr int kMemoryType = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  unsigned type = 0;
  return Driver::machine().pointer_attribute(&type, kMemoryType, a) == 0;
}

// Whether two numbers that the nodes of one operator get are as far apart as the places of its
// result, or that distance shifted: they may hold where it lies in a way that is not known here.
bool may_hold_place(uint64_t a, uint64_t b, uint64_t distance) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  for (unsigned shift = 0; shift <= kMostShifted; ++shift) {
    const uint32_t moved = low(distance >> shift);
    if (moved && (low(b) - low(a) == moved || low(b >> 32) - low(a >> 32) == moved)) return true;
  }
  return false;
}

}  // namespace

// A result of an operator that was recorded twice: here, where it runs, and there.
class MovedResult {
 public:
  // tolerant: what else differs is no table that says where the result lies.
  MovedResult(const RecordedCall& here, const RecordedCall& there, const at::Tensor& own,
              const at::Tensor& other, bool tolerant)
      : here_(here),
        there_(there),
        own_(extent_of(own)),
        other_(extent_of(other)),
        block_(block_of(here.blocks, own_)),
        tolerant_(tolerant) {
    why = find_nodes();
  }

  std::string why;               // it cannot move; empty: it can
  std::vector<MovedNode> nodes;  // that write it
  bool again = false;            // it may once more is known

 private:
  std::string find_nodes() {
    const bool same_requests = here_.blocks.size() == there_.blocks.size();
    if (block_ < 0 || !same_requests || block_ != block_of(there_.blocks, other_) ||
        own_.first == other_.first) {
      again = !same_requests;  // a library took memory that it keeps
      return "it lies in memory that serves others";
    }
    for (size_t k = 0; k < here_.nodes->size(); ++k) {
      const ToldNode &ours = (*here_.nodes)[k], &theirs = (*there_.nodes)[k];
      if (!ours.is_like(theirs)) return "its kernels depend on where it lies";
      MovedNode node{.told = ours, .uses = {}};
      for (size_t i = 0; i < ours.words.size(); ++i) {
        const uint64_t a = ours.words[i], b = theirs.words[i];
        if (own_.has(a) && b - other_.first == a - own_.first)
          node.uses.push_back({i, a - own_.first});
        else if (is_elsewhere(a, b) && b - a == other_.first - own_.first)
          again = true;  // that memory, or just behind the result
        else if (!is_elsewhere(a, b) && may_depend(a, b))
          return "what its kernels are told is not known to be an address: word " +
                 std::to_string(i) + " of node " + std::to_string(k);
      }
      if (!node.uses.empty()) nodes.push_back(std::move(node));
    }
    if (again) return "other memory lies at the same distance from it each time";
    return nodes.empty() ? "no node is told where it lies" : "";
  }

  // Whether a word may say where the result lies, though not as an address in it: in another way,
  // or by what lies at its address.
  bool may_depend(uint64_t a, uint64_t b) const {
    if (own_.has(a) || other_.has(b)) return true;
    if (a == b) return false;
    return may_hold_place(a, b, other_.first - own_.first) ||
           (!tolerant_ && (is_address(a) || is_address(b)));
  }
  // Whether it is an address in other memory that the operator asked for.
  bool is_elsewhere(uint64_t a, uint64_t b) const {
    for (size_t i = 0; i < here_.blocks.size(); ++i) {
      const Extent &ours = here_.blocks[i], &theirs = there_.blocks[i];
      if (static_cast<int32_t>(i) != block_ && ours.has(a) && theirs.has(b) &&
          a - ours.first == b - theirs.first)
        return true;
    }
    return false;
  }

  const RecordedCall &here_, &there_;
  Extent own_, other_;
  int32_t block_;
  bool tolerant_;
};

namespace {

// Makes room for the results of a second call that no memory follows which it may be given as well,
// at an odd multiple of what the allocator counts in.
void keep_apart(const Frame& f, const std::vector<at::Tensor>& results,
                std::vector<at::DataPtr>& between) {
  std::vector<at::DataPtr> rooms;
  for (const at::Tensor& t : results) {
    const auto nbytes = static_cast<int64_t>(memory_of(t)->nbytes());
    const int64_t gap = nbytes <= kSmallNbytes ? 512 : kSmallNbytes + 512;
    between.push_back(f.code.gpu->allocate(gap));
    rooms.push_back(f.code.gpu->allocate(nbytes));
    between.push_back(f.code.gpu->allocate(gap));
  }
}

std::vector<at::Tensor> made_of(Frame& f, const PartitionInfo& p,
                                const std::vector<size_t>& exports) {
  std::vector<at::Tensor> made;
  for (size_t k : exports) made.push_back(f.own(p.exports[k].slot));
  return made;
}

// Whether all that follows step `at` with an export is a check of its strides, behind those of
// other results.
bool is_checked_next(const Code& code, const PartitionInfo::Export& e, int32_t at) {
  const auto step = [&](int32_t k) -> const Step& { return code.steps[static_cast<size_t>(k)]; };
  const auto checked = [&](int32_t k) {
    const auto* check = step(k).kind == StepKind::instruction
                            ? std::get_if<AssertSizeStride>(step(k).instr)
                            : nullptr;
    return check ? check->tensor : kNone;
  };
  if (e.last < at || checked(e.last) != e.slot) return false;
  for (int32_t k = at + 1; k < e.last; ++k)
    if (step(k).kind != StepKind::drop && step(k).kind != StepKind::drop_input &&
        checked(k) == kNone)
      return false;
  return true;
}

// Whether an operator computes the same twice and changes nothing but what it returns.
bool is_pure(const ExternCall& c) {
  return c.builtin && !c.may_keep && !c.forks && !c.has_lists && c.written.empty() &&
         !c.op->schema().is_mutable() && !c.op->hasTag(at::Tag::nondeterministic_seeded) &&
         std::none_of(c.outs.begin(), c.outs.end(),
                      [](const Result& r) { return r.kind == Result::Kind::symbol; });
}

// Products tell their kernels addresses one by one, and no table of them that lies elsewhere.
bool is_product(const ExternCall& c) { return c.makes_result || c.name == "aten::_grouped_mm"; }

}  // namespace

std::vector<size_t> MovedResults::made_by(const Frame& f, const PartitionInfo& p, int32_t at) {
  const Step& s = f.code.steps[static_cast<size_t>(at)];
  if (s.kind != StepKind::call_extern || !Driver::machine().moves_results()) return {};
  const ExternCall& c = f.code.externs[static_cast<size_t>(s.a)];
  if (!is_pure(c)) return {};
  std::vector<size_t> found;
  for (size_t k = 0; k < p.exports.size(); ++k) {
    const PartitionInfo::Export& made = p.exports[k];
    const bool is_result = std::any_of(c.outs.begin(), c.outs.end(), [&](const Result& r) {
      return r.kind == Result::Kind::tensor && r.id == made.slot;
    });
    if (is_result && made.escapes && (made.last == at || is_checked_next(f.code, made, at)))
      found.push_back(k);
  }
  return found;
}

void MovedResults::record(Frame& f, const PartitionInfo& p, int32_t at,
                          const std::vector<size_t>& exports) {
  moved_.clear();
  const Step& step = f.code.steps[static_cast<size_t>(at)];
  const ExternCall& c = f.code.externs[static_cast<size_t>(step.a)];
  const auto copy_all = [&](const char* why) {
    copied_[c.name + ": " + why] += static_cast<int64_t>(exports.size());
  };
  const Recorded before = recorded_on(f.stream);
  if (before.n_last != 1 || is_profiled()) {
    run_step(f, step, false);
    return copy_all("it is profiled, or does not follow one node");
  }
  const GraphNode first = before.last[0];
  RecordedCall there = record_call(f, step, first);
  std::vector<at::Tensor> away = made_of(f, p, exports);
  if (!there.nodes || !std::all_of(away.begin(), away.end(), is_on_gpu))
    return copy_all("its nodes cannot all be told where it lies");  // they run as they are
  std::vector<at::DataPtr> between;
  for (int again = 1;; ++again) {
    for (const Result& r : c.outs)
      if (r.kind == Result::Kind::tensor) f.own(r.id).reset();
    leave(there, first, f.stream);
    keep_apart(f, away, between);
    RecordedCall here = record_call(f, step, first);
    // What runs may need what ran the first time alone, which never runs.
    if (!here.nodes || here.nodes->size() != there.nodes->size())
      throw std::runtime_error("operator " + c.name + " recorded other work the second time");
    std::vector<at::Tensor> own = made_of(f, p, exports);
    std::vector<MovedResult> results;
    for (size_t i = 0; i < exports.size(); ++i)
      results.emplace_back(here, there, own[i], away[i], is_product(c));
    const bool unsure =
        std::any_of(results.begin(), results.end(), [](const MovedResult& r) { return r.again; });
    if (!unsure || again == kMostAgain) return settle(c, exports, results);
    there = std::move(here);
    away = std::move(own);
  }
}

// What was recorded never runs: what comes next follows what it followed.
void MovedResults::leave(const RecordedCall& call, GraphNode first, cuda::Stream stream) {
  for (const ToldNode& node : *call.nodes) away_.push_back(node.node);
  const Driver& driver = Driver::machine();
  driver.check(driver.after(stream, &first, 1, kAfterThese), "cuStreamUpdateCaptureDependencies");
}

void MovedResults::settle(const ExternCall& c, const std::vector<size_t>& exports,
                          std::vector<MovedResult>& results) {
  std::vector<GraphNode> told;
  const auto is_told = [&](const MovedNode& n) {
    return std::find(told.begin(), told.end(), n.told.node) != told.end();
  };
  for (size_t i = 0; i < exports.size(); ++i) {
    MovedResult& r = results[i];
    if (r.why.empty() && std::any_of(r.nodes.begin(), r.nodes.end(), is_told))
      r.why = "a node writes another result as well";  // it would forget one of the places
    if (!r.why.empty()) {
      ++copied_[c.name + ": " + r.why];
      continue;
    }
    for (const MovedNode& n : r.nodes) told.push_back(n.told.node);
    moved_.emplace(exports[i], std::move(r.nodes));
  }
}

std::vector<MovedNode> MovedResults::take(size_t an_export) {
  const auto found = moved_.find(an_export);
  if (found == moved_.end()) return {};
  std::vector<MovedNode> nodes = std::move(found->second);
  moved_.erase(found);
  return nodes;
}

void MovedResults::leave_out() const {
  const Driver& driver = Driver::machine();
  for (GraphNode node : away_) driver.check(driver.destroy_node(node), "cuGraphDestroyNode");
}

bool move_result(cuda::GraphExec exec, Recording::Copy& c) {
  if (c.room.get() == c.now || (!c.node && c.moved.empty())) return false;
  if (c.node) {
    const Driver& driver = Driver::machine();
    cuda::CopyParams params = c.params;
    params.to.device = c.room.get();
    driver.check(driver.set_copy_node(exec, c.node, &params, driver.context()),
                 "cuGraphExecMemcpyNodeSetParams");
  }
  for (MovedNode& node : c.moved) {
    for (const MovedNode::Use& use : node.uses)
      node.told.words[use.word] = reinterpret_cast<uint64_t>(c.room.get()) + use.delta;
    node.told.tell(exec);
  }
  c.now = c.room.get();
  return true;
}

}  // namespace plait
