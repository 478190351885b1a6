// native/torch/blaslt.cpp: products of matrices on a GPU by cuBLASLt, on pointers: no dispatch, and
// everything that does not change from call to call prepared once.
//
// Types of numbers, precision and memory are those that ATen's own products would have here.
#include "core/blaslt.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>

#include <algorithm>

#include "core/parts.h"
#include "memory.h"

namespace plait {
namespace {
using blaslt::Compute;
using blaslt::Matrix;
using blaslt::Reductions;
using blaslt::Type;

// A function of torch's CUDA half, which this is not linked with. Null, with a warning, where this
// torch has none of that name.
template <class F>
F* torch_cuda(const char* symbol) {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* found = library ? dlsym(library, symbol) : nullptr;
  if (!found) TORCH_WARN("plait: libtorch_cuda has no ", symbol);
  return reinterpret_cast<F*>(found);
}

// As much memory to work in as torch gives the library that would compute this: cuBLAS, or cuBLASLt
// where a bias is added. With less, slower algorithms are found.
size_t max_workspace(bool bias) {
  static const auto size = [](const char* symbol) -> size_t {
    auto* ask = torch_cuda<size_t()>(symbol);
    return ask ? ask() : 32 << 20;
  };
  static const size_t plain = size("_ZN2at4cuda22getChosenWorkspaceSizeEv"),
                      biased = size("_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv");
  return bias ? biased : plain;
}

// Whether torch is to choose among its libraries' algorithms by measuring (torch.cuda.tunable).
bool torch_tunes() {
  static auto* const context = torch_cuda<void*()>("_ZN2at4cuda7tunable16getTuningContextEv");
  static auto* const enabled =
      torch_cuda<bool(const void*)>("_ZNK2at4cuda7tunable13TuningContext18IsTunableOpEnabledEv");
  return context && enabled && enabled(context());
}

std::optional<Type> number_type(c10::ScalarType type) {
  if (type == c10::ScalarType::Float) return Type::f32;
  if (type == c10::ScalarType::Half) return Type::f16;
  if (type == c10::ScalarType::BFloat16) return Type::bf16;
  return std::nullopt;
}

// How ATen would compute at this moment; nothing where it would do what plans do not know. Which
// library it prefers does not count: it takes cuBLAS by default too, and the two cannot be told.
struct Precision {
  Compute compute = Compute::f32;
  Reductions reductions = Reductions::any;
};
std::optional<Precision> precision(Type type) {
  const at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() || context._SMCarveout_EXPERIMENTAL() || torch_tunes())
    return std::nullopt;
  if (type == Type::f32) {
    const bool tf32 = context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
                      at::Float32Precision::TF32;
    return Precision{tf32 ? Compute::tf32 : Compute::f32};
  }
  if (type == Type::f16 && context.allowFP16AccumulationCuBLAS()) return std::nullopt;
  switch (type == Type::f16 ? context.allowFP16ReductionCuBLAS()
                            : context.allowBF16ReductionCuBLAS()) {
    case at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK: return Precision{};
    case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
      return Precision{Compute::f32, Reductions::in_compute_type};
    default: return Precision{Compute::f32, Reductions::none};
  }
}

// The last two dimensions of t as a matrix of these sizes; a dimension of size 1 repeats.
Matrix matrix(const c10::TensorImpl& t, const void* data, int64_t rows, int64_t cols) {
  const c10::IntArrayRef sizes = t.sizes(), strides = t.strides();
  const size_t rank = sizes.size();
  const auto step = [&](size_t from_end, int64_t want) -> int64_t {
    if (rank < from_end || sizes[rank - from_end] != want) return 0;
    return strides[rank - from_end];
  };
  return {data,          rows,          cols,
          step(2, rows), step(1, cols), rank == 3 && sizes[0] != 1 ? strides[0] : 0};
}
// Whether `sizes` can be repeated to these.
bool expands(c10::IntArrayRef sizes, int64_t batch, int64_t rows, int64_t cols) {
  const int64_t want[] = {batch, rows, cols};
  if (sizes.size() > 3) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t to = want[3 - sizes.size() + d];
    if (sizes[d] != to && sizes[d] != 1) return false;
  }
  return true;
}

// Products that follow each other, each with its plan.
class Products {
 public:
  Products(const Accelerator& gpu, Type type, Precision how)
      : type_(type), how_(how), plans_(blaslt_library()->plans(gpu.device().index())) {}

  // False where the library cannot do it.
  bool add(const blaslt::Part& p, float alpha, float beta,
           blaslt::Activation activation = blaslt::Activation::none) {
    const Matrix* addend = p.adds ? &p.out : p.addend ? &*p.addend : nullptr;
    const std::optional<blaslt::Product> product =
        blaslt::make_product(type_, how_.compute, how_.reductions, p.a, p.b, addend, p.out, p.batch,
                             alpha, p.adds ? 1 : beta, activation);
    if (!product || !plans_) return false;
    std::shared_ptr<const blaslt::Plan> plan =
        plans_->find(*product, max_workspace(product->problem.bias));
    if (!plan) return false;
    workspace_ = std::max(workspace_, plan->workspace());
    planned_.push_back({*product, std::move(plan)});
    return true;
  }

  int64_t workspace() const { return static_cast<int64_t>(workspace_); }
  // False where the library refuses: the whole has to be computed in another way.
  bool run(cuda::Stream stream, void* workspace) const {
    for (const Planned& p : planned_)
      if (!p.plan->run(p.product, workspace, stream)) return false;
    return true;
  }

 private:
  struct Planned {
    blaslt::Product product;
    std::shared_ptr<const blaslt::Plan> plan;
  };

  Type type_;
  Precision how_;
  blaslt::Plans* plans_;
  c10::SmallVector<Planned, 1> planned_;
  size_t workspace_ = 0;
};
}  // namespace

const blaslt::Library* blaslt_library() {
  static const auto* const used = blaslt::Library::used_by("libtorch_cuda.so").release();
  return used;
}

bool call_blaslt(Frame& f, const ExternCall& c, const Operands& o) {
  const size_t first = c.tensors.size() - 3;  // an addend may stand before the factors
  const auto impl = [&](size_t i) -> const c10::TensorImpl& {
    return *o.tensor(c.tensors[i]).unsafeGetTensorImpl();
  };
  const c10::TensorImpl &a = impl(first), &b = impl(first + 1);
  const c10::ScalarType scalar = a.dtype().toScalarType();
  const std::optional<Type> type = number_type(scalar);
  const size_t rank = a.sizes().size();
  if (!type || rank < 2 || rank > 3 || b.sizes().size() != rank) return false;
  const size_t n_given = c.tensors.size() - (c.makes_result ? 1 : 0);
  for (size_t i = 0; i < n_given; ++i)
    if (impl(i).dtype().toScalarType() != scalar ||
        !impl(i).key_set().has(c10::DispatchKey::CUDA) || impl(i).device() != f.code.gpu->device())
      return false;
  const std::optional<Precision> how = precision(*type);
  if (!how) return false;
  const int64_t batch = rank == 3 ? a.sizes()[0] : 1, m = a.sizes()[rank - 2],
                k = a.sizes()[rank - 1], n = b.sizes()[rank - 1];
  if (b.sizes()[rank - 2] != k || (rank == 3 && b.sizes()[0] != batch)) return false;
  if (first == 1 && !expands(impl(0).sizes(), batch, m, n)) return false;

  const int64_t sizes[] = {batch, m, n};
  const c10::IntArrayRef want(sizes + 3 - rank, rank);
  at::Tensor made;
  if (c.makes_result) {
    const int64_t nbytes = batch * m * n * static_cast<int64_t>(c10::elementSize(scalar));
    made = new_tensor(f, f.code.gpu->device(), nbytes, scalar);
    made.unsafeGetTensorImpl()->set_sizes_contiguous(want);
  }
  c10::TensorImpl& out =
      c.makes_result ? *made.unsafeGetTensorImpl() : const_cast<c10::TensorImpl&>(impl(first + 2));
  if (out.sizes() != want) return false;
  const Matrix addend = first == 1 ? matrix(impl(0), impl(0).data(), m, n) : Matrix{};
  const blaslt::Part whole{matrix(a, a.data(), m, k), matrix(b, b.data(), k, n),
                           matrix(out, out.mutable_data(), m, n),
                           first == 1 && c.beta != 0 ? std::optional(addend) : std::nullopt, batch};
  Products products(*f.code.gpu, *type, *how);
  const auto alpha = static_cast<float>(c.alpha), beta = static_cast<float>(c.beta);
  const blaslt::Parts parts = blaslt::parts(*type, whole);
  if (!parts.empty() && c.activation != blaslt::Activation::none)
    return false;  // of sums, not parts
  for (const blaslt::Part& part : parts)
    if (!products.add(part, alpha, beta)) return false;
  if (parts.empty() && !products.add(whole, alpha, beta, c.activation)) return false;
  RECORD_FUNCTION(c.op->operator_name().name, std::vector<c10::IValue>());
  // The allocator hands memory out in the order of the stream: it may go back at once.
  at::DataPtr workspace;
  if (products.workspace() > 0)
    workspace = memory_on(f, f.code.gpu->device(), products.workspace());
  if (!products.run(f.stream, workspace.get())) return false;
  if (c.makes_result) define(f, c.tensors.back(), std::move(made));
  return true;
}

}  // namespace plait
