// native/torch/moved_results.cpp: where launches of operators write, see moved_results.h.
#include "moved_results.h"

#include <algorithm>
#include <cstring>

#include "code.h"
#include "run.h"

namespace plait {
namespace {
using cuda::Driver;
using cuda::GraphNode;
using cuda::NodeParams;

constexpr int kKernelNode = 0;       // CU_GRAPH_NODE_TYPE_KERNEL
constexpr unsigned kAfterThese = 1;  // CU_STREAM_SET_CAPTURE_DEPENDENCIES
constexpr size_t kMostNodes = 16;    // of a product
constexpr size_t kWord = sizeof(uint64_t);

// The nodes that follow `first` (null: from the start) up to `last`, each behind the one before it;
// nothing if they are no such chain of kernels.
std::optional<std::vector<GraphNode>> kernels_between(GraphNode first, GraphNode last) {
  const Driver& driver = Driver::machine();
  std::vector<GraphNode> found;
  for (GraphNode node = last; node != first;) {
    int type = -1;
    driver.check(driver.node_type(node, &type), "cuGraphNodeGetType");
    if (type != kKernelNode || found.size() == kMostNodes) return std::nullopt;
    found.push_back(node);
    GraphNode before[2] = {};
    uint64_t edges[2] = {};
    size_t n = 2;
    if (driver.nodes_before(node, before, edges, &n) != 0 || n > 1) return std::nullopt;
    if (n == 0 && first) return std::nullopt;
    node = n == 0 ? nullptr : before[0];
  }
  std::reverse(found.begin(), found.end());
  return found;
}

NodeParams params_of(GraphNode node) {
  NodeParams params{};
  const Driver& driver = Driver::machine();
  driver.check(driver.kernel_node(node, &params), "cuGraphKernelNodeGetParams");
  return params;
}

// How many bytes a parameter has; 0 for one behind the last.
size_t nbytes_of(const NodeParams& params, size_t index) {
  const Driver& driver = Driver::machine();
  size_t offset = 0, nbytes = 0;
  const int code = params.function
                       ? driver.parameter(params.function, index, &offset, &nbytes)
                       : driver.parameter_of_kernel(params.kernel, index, &offset, &nbytes);
  return code == 0 ? nbytes : 0;
}

bool is_same_launch(const NodeParams& a, const NodeParams& b) {
  return a.function == b.function && a.kernel == b.kernel && a.grid_x == b.grid_x &&
         a.grid_y == b.grid_y && a.grid_z == b.grid_z && a.block_x == b.block_x &&
         a.block_y == b.block_y && a.block_z == b.block_z && a.shared == b.shared && !a.extra &&
         !b.extra && a.parameters && b.parameters;
}

// Memory of a result, in one of its two places.
struct Extent {
  uint64_t first, nbytes;
  explicit Extent(const at::Tensor& t)
      : first(reinterpret_cast<uint64_t>(memory_of(t)->data())), nbytes(memory_of(t)->nbytes()) {}
  bool has(uint64_t address) const { return address - first < nbytes; }
};

// The launch of a node, with where it is told of `here`; nothing if it differs from the launch of
// `other`, which has the result `there`, in anything else.
std::optional<MovedLaunch> compare(GraphNode node, GraphNode other, Extent here, Extent there) {
  MovedLaunch made{.node = node, .params = params_of(node)};
  const NodeParams& a = made.params;
  const NodeParams b = params_of(other);
  if (!is_same_launch(a, b)) return std::nullopt;
  for (size_t k = 0; const size_t nbytes = nbytes_of(a, k); ++k) {
    made.first.push_back(made.words.size());
    made.words.resize(made.words.size() + (nbytes + kWord - 1) / kWord);
    uint64_t* words = made.words.data() + made.first.back();
    std::memcpy(words, a.parameters[k], nbytes);
    std::vector<uint64_t> others(made.words.size() - made.first.back());
    std::memcpy(others.data(), b.parameters[k], nbytes);
    for (size_t i = 0; i < others.size(); ++i) {
      const uint64_t from = here.first, at = words[i];
      const bool whole = (i + 1) * kWord <= nbytes;
      if (at == others[i]) {
        if (whole && here.has(at)) return std::nullopt;
        continue;
      }
      if (!whole || !here.has(at) || others[i] - there.first != at - from) return std::nullopt;
      made.uses.push_back({made.first.back() + i, at - from});
    }
  }
  return made;
}

// Whether all that follows step `at` with an export is a check of its strides.
bool is_checked_next(const Code& code, const PartitionInfo::Export& e, int32_t at) {
  const auto step = [&](int32_t k) -> const Step& { return code.steps[static_cast<size_t>(k)]; };
  if (e.last < at || step(e.last).kind != StepKind::instruction) return false;
  const auto* check = std::get_if<AssertSizeStride>(step(e.last).instr);
  if (!check || check->tensor != e.slot) return false;
  for (int32_t k = at + 1; k < e.last; ++k)
    if (step(k).kind != StepKind::drop && step(k).kind != StepKind::drop_input) return false;
  return true;
}

}  // namespace

int32_t MovedResults::made_by(const Frame& f, const PartitionInfo& p, int32_t at) {
  const Step& s = f.code.steps[static_cast<size_t>(at)];
  if (s.kind != StepKind::call_extern || !Driver::machine().moves_results()) return -1;
  const ExternCall& c = f.code.externs[static_cast<size_t>(s.a)];
  // Operators that allocate their result first: nothing else that they make lies where it does.
  const bool product = c.makes_result || c.name == "aten::_grouped_mm";
  if (!product || c.may_keep || c.outs.size() != 1 || c.outs[0].kind != Result::Kind::tensor)
    return -1;
  for (size_t k = 0; k < p.exports.size(); ++k) {
    const PartitionInfo::Export& made = p.exports[k];
    if (made.slot != c.outs[0].id) continue;
    const bool last = made.last == at || is_checked_next(f.code, made, at);
    return made.escapes && last ? static_cast<int32_t>(k) : -1;
  }
  return -1;
}

bool MovedResults::record(Frame& f, const Step& step, SlotId result) {
  launches_.clear();
  const Recorded before = recorded_on(f.stream);
  const bool chained = before.n_last <= 1;
  const GraphNode first = before.n_last == 1 ? before.last[0] : nullptr;
  run_step(f, step, false);
  const Recorded once = recorded_on(f.stream);
  if (!chained || once.n_last != 1) return false;
  const GraphNode last = once.last[0];
  const auto ours = kernels_between(first, last);
  if (!ours || ours->empty()) return false;
  const at::Tensor made = f.own(result);
  run_step(f, step, false);
  const at::Tensor other = std::exchange(f.own(result), made);
  if (f.slot(result).needs_pointer) patch(f, result, first_of(made));
  const Recorded again = recorded_on(f.stream);
  const auto theirs = again.n_last == 1 ? kernels_between(last, again.last[0]) : std::nullopt;
  if (!theirs) throw std::runtime_error("an operator recorded other work the second time");
  const Driver& driver = Driver::machine();
  driver.check(driver.after(f.stream, &last, 1, kAfterThese), "cuStreamUpdateCaptureDependencies");
  again_.insert(again_.end(), theirs->begin(), theirs->end());
  if (theirs->size() != ours->size()) return false;
  for (size_t k = 0; k < ours->size(); ++k) {
    auto launch = compare((*ours)[k], (*theirs)[k], Extent(made), Extent(other));
    if (!launch) {
      launches_.clear();
      return false;
    }
    if (!launch->uses.empty()) launches_.push_back(std::move(*launch));
  }
  return !launches_.empty();
}

void MovedResults::finish(cuda::GraphExec exec) const {
  const Driver& driver = Driver::machine();
  for (GraphNode node : again_)
    driver.check(driver.enable_node(exec, node, 0), "cuGraphNodeSetEnabled");
}

bool move_result(cuda::GraphExec exec, Recording::Copy& c) {
  if (c.room.get() == c.now || (!c.node && c.launches.empty())) return false;
  const Driver& driver = Driver::machine();
  if (c.node) {
    void* context = nullptr;
    driver.check(driver.current_context(&context), "cuCtxGetCurrent");
    cuda::CopyParams params = c.params;
    params.to.device = c.room.get();
    driver.check(driver.set_copy_node(exec, c.node, &params, context),
                 "cuGraphExecMemcpyNodeSetParams");
  }
  for (MovedLaunch& launch : c.launches) {
    for (const MovedLaunch::Use& use : launch.uses)
      launch.words[use.word] = reinterpret_cast<uint64_t>(c.room.get()) + use.delta;
    std::vector<void*> addresses;
    for (size_t first : launch.first) addresses.push_back(launch.words.data() + first);
    NodeParams params = launch.params;
    params.parameters = addresses.data();
    driver.check(driver.set_node(exec, launch.node, &params), "cuGraphExecKernelNodeSetParams");
  }
  c.now = c.room.get();
  return true;
}

}  // namespace plait
