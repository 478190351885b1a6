// native/torch/told_node.h: what a node of a graph is told, as words that can be compared and told
// anew: a kernel's parameters, or what a copy or a fill gets.
#pragma once

#include <optional>
#include <vector>

#include "core/cuda.h"

namespace plait {

struct ToldNode {
  enum class Kind : int { kernel = 0, copy = 1, fill = 2 };  // as CUgraphNodeType
  // Nothing for nodes of other kinds, and copies from the host.
  static std::optional<ToldNode> read(cuda::GraphNode node);
  // Whether the other one does the same with other words.
  bool is_like(const ToldNode& other) const;
  // From its next launch on, a recording does with these words what it did with others.
  void tell(cuda::GraphExec exec);

  cuda::GraphNode node = nullptr;
  Kind kind = Kind::kernel;
  std::vector<uint64_t> words;

 private:
  void read_kernel();
  void append(const void* data, size_t nbytes);

  cuda::NodeParams params_{};  // of a kernel
  std::vector<size_t> first_;  // word, by parameter
  size_t nbytes_ = 0;          // of all parameters, where they are one block
};

}  // namespace plait
