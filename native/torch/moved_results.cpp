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
constexpr unsigned kMostShifted = 16;  // bits that an address may lose where it is packed
void* const kEnd = nullptr;            // CU_LAUNCH_PARAM_END
void* const kBlock = reinterpret_cast<void*>(1);        // CU_LAUNCH_PARAM_BUFFER_POINTER
void* const kBlockNbytes = reinterpret_cast<void*>(2);  // CU_LAUNCH_PARAM_BUFFER_SIZE

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

struct Bytes {
  const void* data;
  size_t nbytes;
};

// What a launch gets: each parameter, or all of them in one block.
std::vector<Bytes> given(const NodeParams& params) {
  std::vector<Bytes> found;
  if (params.parameters) {
    for (size_t k = 0; const size_t nbytes = nbytes_of(params, k); ++k)
      found.push_back({params.parameters[k], nbytes});
    return found;
  }
  Bytes block{};
  for (void** at = params.extra; at && *at != kEnd; at += 2) {
    if (at[0] == kBlock) block.data = at[1];
    if (at[0] == kBlockNbytes) block.nbytes = *static_cast<const size_t*>(at[1]);
  }
  if (block.data) found.push_back(block);
  return found;
}

bool is_same_launch(const NodeParams& a, const NodeParams& b) {
  return a.function == b.function && a.kernel == b.kernel && a.grid_x == b.grid_x &&
         a.grid_y == b.grid_y && a.grid_z == b.grid_z && a.block_x == b.block_x &&
         a.block_y == b.block_y && a.block_z == b.block_z && a.shared == b.shared &&
         !a.parameters == !b.parameters;
}

// Memory of a result, in one of its two places.
struct Extent {
  uint64_t first, nbytes;
  explicit Extent(const at::Tensor& t)
      : first(reinterpret_cast<uint64_t>(memory_of(t)->data())), nbytes(memory_of(t)->nbytes()) {}
  bool has(uint64_t address) const { return address - first < nbytes; }
};

// Whether two numbers that the launches of one product get are as far apart as the places of its
// result, or that distance shifted: they may hold where it lies in a way that is not known here.
bool may_hold_place(uint64_t a, uint64_t b, uint64_t distance) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  for (unsigned shift = 0; shift <= kMostShifted; ++shift) {
    const uint32_t moved = low(distance >> shift);
    if (moved && (low(b) - low(a) == moved || low(b >> 32) - low(a >> 32) == moved)) return true;
  }
  return false;
}

// The launch of a node, with where it is told of `here`; nothing if the launch of `other`, which
// has the result `there`, is told of it in a way that is not known. What else differs (where
// temporary memory or something of the host's lies) stays as it was recorded.
std::optional<MovedLaunch> compare(GraphNode node, GraphNode other, Extent here, Extent there) {
  MovedLaunch made{.node = node, .params = params_of(node)};
  const NodeParams theirs = params_of(other);
  const std::vector<Bytes> ours = given(made.params), others = given(theirs);
  if (!is_same_launch(made.params, theirs) || ours.size() != others.size()) return std::nullopt;
  for (size_t k = 0; k < ours.size(); ++k) {
    const size_t nbytes = ours[k].nbytes, first = made.words.size();
    if (nbytes != others[k].nbytes) return std::nullopt;
    made.first.push_back(first);
    made.words.resize(first + (nbytes + kWord - 1) / kWord);
    std::memcpy(made.words.data() + first, ours[k].data, nbytes);
    std::vector<uint64_t> words(made.words.size() - first);
    std::memcpy(words.data(), others[k].data, nbytes);
    for (size_t i = 0; i < words.size(); ++i) {
      const uint64_t a = made.words[first + i], b = words[i];
      if (a == b && !here.has(a)) continue;
      if (here.has(a) && b - there.first == a - here.first)
        made.uses.push_back({first + i, a - here.first});
      else if (here.has(a) || there.has(b) || may_hold_place(a, b, there.first - here.first))
        return std::nullopt;
    }
  }
  made.nbytes = made.params.parameters || ours.empty() ? 0 : ours[0].nbytes;
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
    void* block[] = {kBlock, launch.words.data(), kBlockNbytes, &launch.nbytes, kEnd};
    NodeParams params = launch.params;
    (launch.nbytes ? params.extra : params.parameters) = launch.nbytes ? block : addresses.data();
    driver.check(driver.set_node(exec, launch.node, &params), "cuGraphExecKernelNodeSetParams");
  }
  c.now = c.room.get();
  return true;
}

}  // namespace plait
