// native/torch/node_compiled.cpp: PlaitBackward under torch's compiled autograd: one call in the
// graph that it traces, which Dynamo does not look into.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "torch/node.h"

namespace plait {
namespace ag = torch::autograd;
namespace ca = torch::dynamo::autograd;

// What the call takes besides tensors. A traced graph is used again for nodes with an equal key,
// and may outlive all of them.
struct PlaitBackward::Traced {
  const BackwardFacts& facts;
  const NodeHost& host;
  std::shared_ptr<void> owner;
  std::vector<int64_t> sizes;
  std::vector<ag::InputMetadata> results;
  std::vector<std::pair<size_t, c10::DimVector>> packed_strides;

  // rest: the list of saved tensors.
  ag::variable_list operator()(const ag::variable_list& grads,
                               const std::vector<c10::IValue>& rest) const {
    const at::NoGradGuard no_grad;
    BackwardRun run{&sizes, rest.at(0).toTensorVector(), {}, false};
    restore_strides(run.saved, packed_strides);
    return run_backward(facts, host, owner.get(), run, grads, results);
  }
};

// Sizes are part of the key, the saved tensors become inputs of the traced graph.
void PlaitBackward::compiled_args(ca::CompiledNodeArgs& args) const {
  args.collect(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(owner_)));
  args.collect(sizes_);
  for (uint32_t i = 0; i < num_inputs(); ++i)
    args.collect(C10_AS_INTARRAYREF_SLOW(input_metadata(i).shape_as_dim_vector()));
  args.collect(saved_, true);
}

ag::variable_list PlaitBackward::apply_with_saved(const ag::variable_list& grads,
                                                  ca::SwapSavedVariables& saved) {
  host_.retain(owner_);
  Traced traced{facts_, host_, {owner_, host_.release}, sizes_, {}, packed_strides_};
  for (uint32_t i = 0; i < num_inputs(); ++i) traced.results.push_back(input_metadata(i));
  saved.before(saved_);
  ag::variable_list tensors;
  for (const ag::SavedVariable& s : saved_) tensors.push_back(s.unpack());
  const std::vector<c10::IValue> rest{c10::IValue(std::move(tensors))};
  const auto& compiler = ca::getPyCompilerInterface();
  const std::string function =
      compiler->bind_function(saved.get_py_compiler(), name(), std::move(traced), {rest[0].type()},
                              /*is_custom_function=*/true, /*is_traceable=*/false);
  using Metadata = ca::IValuePacker<std::vector<std::optional<ag::InputMetadata>>>;
  ag::variable_list results =
      compiler->call_function(saved.get_py_compiler(), "apply_functional", function, grads, rest,
                              Metadata::pack(ca::get_input_metadata(next_edges())));
  saved.after(saved_);
  return results;
}

}  // namespace plait
