// native/torch/node.h: PlaitBackward, the autograd node of a compiled training graph.
//
// The forward call (python/training.cpp) makes one node, gives it edges to the inputs that want a
// gradient, sets it as the history of the results and hands it what the backward program reads:
// sizes and saved tensors. The node keeps those the way that torch's own nodes do, so hooks on
// saved tensors, version checks and the error of a second backward pass are torch's. It knows no
// Python: the host runs the backward program.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>  // node.h since 2.13
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <vector>

namespace plait {

// A shared_ptr before torch 2.13, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

// How a gradient that comes in must lie in memory, as the backward graph was traced.
struct Tangent {
  std::optional<c10::MemoryFormat> format;  // or else:
  c10::DimVector sizes, strides;
};

// One run of the backward program. The host empties the lists of tensors.
struct BackwardRun {
  const std::vector<int64_t>* sizes;
  std::vector<at::Tensor> saved, tangents;
  bool may_overwrite;  // nobody reads the saved tensors after this run
};

struct NodeHost {
  // One gradient an edge; undefined where there is none. Takes the GIL.
  torch::autograd::variable_list (*run)(void* owner, BackwardRun& run);
  // The same operator by operator, for tangents that kernels cannot read. Takes the GIL.
  torch::autograd::variable_list (*interpret)(void* owner, BackwardRun& run);
  void (*refuse)(const char* why);  // throws an error of plait's; takes the GIL
  void (*retain)(void* owner);      // takes the GIL, as release does
  void (*release)(void* owner);
};

// What all nodes of one graph share; the owner keeps it.
struct BackwardFacts {
  std::vector<Tangent> tangents;
  // Of each gradient, the tangents that it comes from. Where none of them is defined, eager makes
  // no gradient (a program makes zeros).
  std::vector<std::vector<size_t>> sources;
  bool nondeterministic = false;  // compiled while deterministic algorithms were not asked for
};

class PlaitBackward final : public torch::autograd::Node {
 public:
  // owner: one reference, released by the destructor.
  PlaitBackward(torch::autograd::edge_list&& edges, const BackwardFacts& facts,
                const NodeHost& host, void* owner);
  ~PlaitBackward() override;

  void save(const at::Tensor& t, bool is_output);
  std::vector<int64_t>& sizes() { return sizes_; }
  std::string name() const override { return "PlaitBackward"; }
  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads,
      torch::dynamo::autograd::SwapSavedVariables& saved) override;

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

 private:
  struct Traced;
  using PackedStrides = std::vector<std::pair<size_t, c10::DimVector>>;

  void unpack(BackwardRun& run);
  // What a hook gives back has the values, but not always the strides that kernels read by.
  static void restore_strides(torch::autograd::variable_list& saved, const PackedStrides& strides);
  // results: metadata of the results that have gradients.
  static torch::autograd::variable_list run_backward(
      const BackwardFacts& facts, const NodeHost& host, void* owner, BackwardRun& run,
      torch::autograd::variable_list grads, c10::ArrayRef<torch::autograd::InputMetadata> results);

  const BackwardFacts& facts_;
  const NodeHost& host_;
  void* owner_;
  std::vector<torch::autograd::SavedVariable> saved_;
  PackedStrides packed_strides_;  // of the saved tensors that hooks took
  std::vector<int64_t> sizes_;
};

// Makes `node` the history of t, a fresh result.
void set_history(const at::Tensor& t, const NodePtr& node);
torch::autograd::Edge gradient_edge(const at::Tensor& t);  // invalid if t wants no gradient
// Whether a call in this thread is seen by autograd alone: gradients on, no mode or transform of
// functorch, no dispatch mode.
bool plain_autograd();

template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    // Unqualified: torch's deleter, found by its argument, unrolls deep graphs.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...),
                              [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

}  // namespace plait
