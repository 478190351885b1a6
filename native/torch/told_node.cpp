// native/torch/told_node.cpp: what nodes of graphs are told, see told_node.h.
#include "told_node.h"

#include <cstring>

namespace plait {
namespace {
using cuda::Driver;
using cuda::NodeParams;

constexpr size_t kWord = sizeof(uint64_t);
constexpr int kOnDevice = 2;                            // CU_MEMORYTYPE_DEVICE
void* const kEnd = nullptr;                             // CU_LAUNCH_PARAM_END
void* const kBlock = reinterpret_cast<void*>(1);        // CU_LAUNCH_PARAM_BUFFER_POINTER
void* const kBlockNbytes = reinterpret_cast<void*>(2);  // CU_LAUNCH_PARAM_BUFFER_SIZE

// How many bytes a parameter has; 0 for one behind the last.
size_t nbytes_of(const NodeParams& params, size_t index) {
  const Driver& driver = Driver::machine();
  size_t offset = 0, nbytes = 0;
  const int code = params.function
                       ? driver.parameter(params.function, index, &offset, &nbytes)
                       : driver.parameter_of_kernel(params.kernel, index, &offset, &nbytes);
  return code == 0 ? nbytes : 0;
}

template <class Params>
Params params_in(const std::vector<uint64_t>& words) {
  Params params{};
  std::memcpy(&params, words.data(), sizeof params);
  return params;
}

}  // namespace

void ToldNode::append(const void* data, size_t nbytes) {
  const size_t first = words.size();
  words.resize(first + (nbytes + kWord - 1) / kWord);
  std::memcpy(words.data() + first, data, nbytes);
}

// A kernel gets each parameter, or all of them in one block.
void ToldNode::read_kernel() {
  if (params_.parameters) {
    for (size_t k = 0; const size_t nbytes = nbytes_of(params_, k); ++k) {
      first_.push_back(words.size());
      append(params_.parameters[k], nbytes);
    }
    return;
  }
  const void* block = nullptr;
  for (void** at = params_.extra; at && *at != kEnd; at += 2) {
    if (at[0] == kBlock) block = at[1];
    if (at[0] == kBlockNbytes) nbytes_ = *static_cast<const size_t*>(at[1]);
  }
  if (block) append(block, nbytes_);
}

std::optional<ToldNode> ToldNode::read(cuda::GraphNode node) {
  const Driver& driver = Driver::machine();
  int type = -1;
  driver.check(driver.node_type(node, &type), "cuGraphNodeGetType");
  ToldNode told;
  told.node = node;
  told.kind = static_cast<Kind>(type);
  switch (told.kind) {
    case Kind::kernel:
      driver.check(driver.kernel_node(node, &told.params_), "cuGraphKernelNodeGetParams");
      told.read_kernel();
      return told;
    case Kind::copy: {
      cuda::CopyParams params{};
      // What lies on the host may be a table of addresses.
      if (driver.copy_node(node, &params) != 0 || params.from.memory_type != kOnDevice)
        return std::nullopt;
      told.append(&params, sizeof params);
      return told;
    }
    case Kind::fill: {
      cuda::FillParams params{};
      if (driver.fill_node(node, &params) != 0) return std::nullopt;
      told.append(&params, sizeof params);
      return told;
    }
  }
  return std::nullopt;
}

bool ToldNode::is_like(const ToldNode& other) const {
  const NodeParams &a = params_, &b = other.params_;
  return kind == other.kind && words.size() == other.words.size() && first_ == other.first_ &&
         nbytes_ == other.nbytes_ && a.function == b.function && a.kernel == b.kernel &&
         a.grid_x == b.grid_x && a.grid_y == b.grid_y && a.grid_z == b.grid_z &&
         a.block_x == b.block_x && a.block_y == b.block_y && a.block_z == b.block_z &&
         a.shared == b.shared && !a.parameters == !b.parameters;
}

void ToldNode::tell(cuda::GraphExec exec) {
  const Driver& driver = Driver::machine();
  if (kind == Kind::copy) {
    const auto params = params_in<cuda::CopyParams>(words);
    driver.check(driver.set_copy_node(exec, node, &params, driver.context()),
                 "cuGraphExecMemcpyNodeSetParams");
    return;
  }
  if (kind == Kind::fill) {
    const auto params = params_in<cuda::FillParams>(words);
    driver.check(driver.set_fill_node(exec, node, &params, driver.context()),
                 "cuGraphExecMemsetNodeSetParams");
    return;
  }
  std::vector<void*> addresses;
  for (size_t first : first_) addresses.push_back(words.data() + first);
  void* block[] = {kBlock, words.data(), kBlockNbytes, &nbytes_, kEnd};
  NodeParams params = params_;
  (nbytes_ ? params.extra : params.parameters) = nbytes_ ? block : addresses.data();
  driver.check(driver.set_node(exec, node, &params), "cuGraphExecKernelNodeSetParams");
}

}  // namespace plait
