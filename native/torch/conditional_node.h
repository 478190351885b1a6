// native/torch/conditional_node.h: what a CUDA graph decides while it runs: conditional nodes.
//
// A ConditionalNode stands in the graph that the current stream is recorded into (graphs.h). The
// node's body is recorded on a stream of its own, torch's current one meanwhile: one stream for
// each depth of bodies within bodies, because torch's allocator hands freed memory out again on the
// stream that it was made for. Nodes of bodies are never patched. The GIL guards all of it.
#pragma once

#include <functional>

#include "accelerator.h"

namespace plait {

class ConditionalNode {
 public:
  // depth: how many bodies the node is in. Throws std::runtime_error where the driver has no
  // conditional nodes.
  ConditionalNode(const Accelerator& gpu, size_t depth);
  // From here on in the graph its condition holds if a tensor of one element is not zero, or, if
  // `inverted`, is zero.
  void decide(const at::Tensor& predicate, bool inverted = false) const;
  // Adds the node: what `body` puts on the current stream runs once if the condition holds, or
  // again for as long as it does.
  void record(cuda::ConditionalParams::Kind kind, const std::function<void()>& body) const;

 private:
  const Accelerator& gpu_;
  c10::Stream stream_;  // of the body
  uint64_t handle_ = 0;
};

}  // namespace plait
