// native/torch/node.cpp: what a node of a compiled training graph keeps and how it is applied.
#include "torch/node.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "torch/call.h"

namespace plait {
namespace ag = torch::autograd;
namespace {

// What gradients come from, for those who want to differentiate them.
class NoSecondBackward final : public ag::Node {
 public:
  NoSecondBackward(ag::edge_list&& edges, const NodeHost& host)
      : Node(std::move(edges)), host_(host) {}
  std::string name() const override { return "NoSecondBackward"; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse(); }

 private:
  ag::variable_list apply(ag::variable_list&&) override {
    refuse();
    return {};
  }
  void refuse() const {
    host_.refuse(
        "a graph compiled by plait cannot be differentiated twice (double backward): its gradients "
        "have no gradients\n  try: torch.func.grad inside the compiled function for the first "
        "derivative, or the function outside of torch.compile");
  }

  const NodeHost& host_;
};

// A copy with these strides; dimensions of stride 0 are written once.
at::Tensor restrided(const at::Tensor& t, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  at::Tensor result = at::empty_strided(sizes, strides, t.options());
  at::Tensor from = t, to = result;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (strides[d] == 0 && sizes[d] > 1) from = from.narrow(d, 0, 1), to = to.narrow(d, 0, 1);
  to.copy_(from);
  return result;
}

bool same_strides(const at::Tensor& t, c10::IntArrayRef strides) {
  for (size_t d = 0; d < strides.size(); ++d)
    if (t.sizes()[d] > 1 && t.strides()[d] != strides[d]) return false;
  return true;
}

// The dimensions of a tangent from the outermost in memory to the innermost.
c10::DimVector memory_order(const Tangent& want, int64_t n_dims) {
  c10::DimVector order(static_cast<size_t>(n_dims));
  std::iota(order.begin(), order.end(), 0);
  if (!want.format)
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return want.strides[static_cast<size_t>(a)] > want.strides[static_cast<size_t>(b)];
    });
  else if (*want.format != c10::MemoryFormat::Contiguous)
    std::rotate(order.begin() + 1, order.begin() + 2, order.end());  // channels are the innermost
  return order;
}

// A tangent that is not plain, brought to the wanted order by operators that have batching rules.
// The traced graph holds views that rely on this order.
at::Tensor reordered(const at::Tensor& grad, const Tangent& want) {
  const c10::DimVector order = memory_order(want, grad.dim());
  c10::DimVector back(order.size());
  for (size_t d = 0; d < order.size(); ++d)
    back[static_cast<size_t>(order[d])] = static_cast<int64_t>(d);
  return grad.permute(order).contiguous().permute(back);
}

at::Tensor tangent(at::Tensor grad, const Tangent& want, const ag::InputMetadata& result,
                   bool plain) {
  if (!grad.defined()) grad = result.zeros_like();
  if (grad.dtype() != result.options().dtype()) grad = grad.to(result.options().dtype());
  if (!plain) [[unlikely]]
    return reordered(grad, want);
  if (want.format)
    return grad.is_contiguous(*want.format) ? std::move(grad) : grad.contiguous(*want.format);
  if (grad.sizes() == want.sizes && grad.strides() == want.strides) return grad;
  return restrided(grad, want.sizes, want.strides);
}

// What torch.func wraps has a history at each of its levels: an operator gives it one, where its
// argument `zero` has one. x + -0.0 is x for every x.
at::Tensor with_history(const at::Tensor& wrapped, const NodePtr& node) {
  using c10::DispatchKey;
  at::Tensor zero;
  {
    const c10::impl::ExcludeDispatchKeyGuard outside_of_transforms(c10::DispatchKeySet(
        {DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode}));
    zero = at::full({}, -0.0, at::TensorOptions(wrapped.scalar_type()).device(wrapped.device()));
  }
  set_history(zero, node);
  const at::AutoGradMode recorded(true);
  return at::add(wrapped, zero);
}

// The gradients, as results of a node that refuses to be applied. Its edges lead where the
// backward pass went, so that whoever differentiates them comes upon it.
void forbid_second(ag::variable_list& grads, const ag::Node& first,
                   const ag::variable_list& tangents, const NodeHost& host) {
  ag::edge_list edges = first.next_edges();
  for (const at::Tensor& t : tangents)
    if (t.defined() && t.requires_grad()) edges.push_back(ag::impl::gradient_edge(t));
  const NodePtr error = make_node<NoSecondBackward>(std::move(edges), host);
  for (at::Tensor& g : grads) {
    if (!g.defined()) continue;
    const c10::DispatchKeySet keys = g.key_set();
    const bool levels = keys.has(c10::DispatchKey::FuncTorchGradWrapper);
    const bool batched =
        keys.has(c10::DispatchKey::Batched) || keys.has(c10::DispatchKey::FuncTorchBatched);
    g = levels || batched ? with_history(g, error) : g.detach();
    if (!batched) set_history(g, error);
  }
}

std::vector<size_t> gradients_of_nothing(const BackwardFacts& facts,
                                         const ag::variable_list& grads) {
  std::vector<size_t> found;
  const auto undefined = [&](size_t i) { return !grads[i].defined(); };
  for (size_t k = 0; k < facts.sources.size(); ++k) {
    const std::vector<size_t>& from = facts.sources[k];
    if (!from.empty() && std::all_of(from.begin(), from.end(), undefined)) found.push_back(k);
  }
  return found;
}

}  // namespace

PlaitBackward::PlaitBackward(ag::edge_list&& edges, const BackwardFacts& facts,
                             const NodeHost& host, void* owner)
    : Node(std::move(edges)), facts_(facts), host_(host), owner_(owner) {}

PlaitBackward::~PlaitBackward() { host_.release(owner_); }

void PlaitBackward::save(const at::Tensor& t, bool is_output) {
  saved_.emplace_back(t, is_output);
  if (saved_.back().has_hooks()) packed_strides_.emplace_back(saved_.size() - 1, t.strides());
}

void PlaitBackward::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (ag::SavedVariable& s : saved_) s.reset_data();
}

void PlaitBackward::restore_strides(ag::variable_list& saved, const PackedStrides& packed) {
  for (const auto& [k, strides] : packed)
    if (!same_strides(saved[k], strides)) saved[k] = restrided(saved[k], saved[k].sizes(), strides);
}

// Taken before the GIL is: hooks of saved tensors take it themselves.
void PlaitBackward::unpack(BackwardRun& run) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool once = !ag::get_current_graph_task_keep_graph();
  run.may_overwrite = once && packed_strides_.empty();
  run.saved.reserve(saved_.size());
  for (const ag::SavedVariable& s : saved_) run.saved.push_back(s.unpack(getptr()));
  restore_strides(run.saved, packed_strides_);
  if (!once) return;
  for (ag::SavedVariable& s : saved_) s.reset_data();  // they die during the run
}

ag::variable_list PlaitBackward::run_backward(const BackwardFacts& facts, const NodeHost& host,
                                              void* owner, BackwardRun& run,
                                              ag::variable_list grads,
                                              c10::ArrayRef<ag::InputMetadata> results) {
  TORCH_CHECK(!facts.nondeterministic || !at::globalContext().deterministicAlgorithms(),
              "this backward pass was compiled while torch.use_deterministic_algorithms was off "
              "and is run while it is on");
  bool plain = true;
  for (const at::Tensor& g : grads) plain = plain && (!g.defined() || is_plain(g));
  run.tangents.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i)
    run.tangents.push_back(tangent(std::move(grads[i]), facts.tangents[i], results[i], plain));
  return plain ? host.run(owner, run) : host.interpret(owner, run);
}

ag::variable_list PlaitBackward::apply(ag::variable_list&& grads) {
  const bool create_graph = c10::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  BackwardRun run{&sizes_};
  unpack(run);
  const ag::variable_list given = create_graph ? grads : ag::variable_list();
  const std::vector<size_t> absent = gradients_of_nothing(facts_, grads);
  ag::variable_list results = run_backward(facts_, host_, owner_, run, std::move(grads),
                                           {&input_metadata(0), num_inputs()});
  for (size_t k : absent) results[k] = at::Tensor();
  if (create_graph) forbid_second(results, *this, given, host_);
  return results;
}

void set_history(const at::Tensor& t, const NodePtr& node) {
  const uint32_t output = node->add_input_metadata(t);
  ag::impl::set_gradient_edge(t, {node, output});
}

ag::Edge gradient_edge(const at::Tensor& t) {
  return t.requires_grad() ? ag::impl::gradient_edge(t) : ag::Edge();
}

namespace {
bool holds_forward_gradient(const at::TensorImpl* impl) {
  const auto* meta = static_cast<const ag::AutogradMeta*>(impl->autograd_meta());
  return meta && meta->fw_grad_ && !meta->fw_grad_->empty();
}
}  // namespace

bool has_forward_gradient(const at::Tensor& t) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (!impl->autograd_meta()) return false;
  if (holds_forward_gradient(impl)) return true;
  // A view of a tensor that has one gets its own when somebody asks.
  if (!static_cast<const ag::AutogradMeta*>(impl->autograd_meta())->is_view_) return false;
  const auto& view = *static_cast<const ag::DifferentiableViewMeta*>(impl->autograd_meta());
  return view.has_fw_view() &&
         holds_forward_gradient(view.get_forward_view().base_.unsafeGetTensorImpl());
}

bool is_plain(const at::Tensor& t) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet wrappers(
      {DispatchKey::Python, DispatchKey::Batched, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize});
  return !t.key_set().has_any(wrappers) && !has_forward_gradient(t);
}

bool ForwardMode::is_on() { return ag::ForwardADLevel::try_get_by_idx(0) != nullptr; }

bool plain_autograd() {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet watched(
      {DispatchKey::Python, DispatchKey::PythonDispatcher, DispatchKey::Functionalize,
       DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});
  return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         !c10::impl::tls_local_dispatch_key_set().included_.has_any(watched);
}

}  // namespace plait
