// tests/fake_aten.cpp: ATen's operators for the GPU of fake_gpu.cpp: those of the CPU, on the same
// memory.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

namespace {
at::Tensor on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                   like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return at::Tensor(std::move(impl));
}

// The tensor as one of the CPU; its memory lives as long.
at::Tensor as_cpu(const at::Tensor& t) {
  const auto drop = [](void* kept) { delete static_cast<at::Tensor*>(kept); };
  auto* first = const_cast<void*>(t.storage().data());
  c10::DataPtr data(first, new at::Tensor(t), drop, c10::Device(c10::kCPU));
  return on(c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data)),
            c10::DispatchKey::CPU, t);
}

at::Tensor copied(const at::Tensor& t, c10::DeviceType to) {
  const size_t n = t.storage().nbytes();
  c10::DataPtr data = c10::GetAllocator(to)->allocate(n);
  if (n) std::memcpy(data.get(), t.storage().data(), n);
  return on(c10::Storage(c10::Storage::use_byte_size_t(), n, std::move(data)),
            to == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU, t);
}

// Puts f of each tensor on the stack in its place.
template <class F>
void each_tensor(torch::jit::Stack& stack, size_t first, const F& f) {
  for (size_t k = first; k < stack.size(); ++k) {
    c10::IValue& v = stack[k];
    if (v.isTensor()) {
      v = f(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(f(t));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional(f(*t)) : t);
      v = list;
    }
  }
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const size_t n_arguments = op.schema().arguments().size(), first = stack->size() - n_arguments;
  std::vector<at::Tensor> given, aliases;
  c10::DeviceType results_on = c10::kCUDA;
  const auto replaced = [&](const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    given.push_back(t);
    aliases.push_back(as_cpu(t));
    return aliases.back();
  };
  each_tensor(*stack, first, replaced);
  for (size_t k = first; k < stack->size(); ++k) {
    c10::IValue& v = (*stack)[k];
    if (!v.isDevice()) continue;
    results_on = v.toDevice().type();
    v = c10::Device(c10::kCPU);
  }
  op.callBoxed(stack);
  const auto back = [&](const at::Tensor& t) {
    if (!t.defined() || results_on != c10::kCUDA) return t;
    for (size_t k = 0; k < given.size(); ++k) {
      if (t.is_same(aliases[k])) return given[k];
      if (t.storage().data() && t.storage().data() == given[k].storage().data())
        return on(given[k].storage(), c10::DispatchKey::CUDA, t);
    }
    return copied(t, c10::kCUDA);
  };
  each_tensor(*stack, stack->size() - op.schema().returns().size(), back);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"copy_", "zero_", "fill_.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_FRAGMENT(fake_gpu, m) {
  m.def("gpu(Tensor x) -> Tensor", [](const at::Tensor& x) { return copied(x, c10::kCUDA); });
  m.def("host(Tensor x) -> Tensor", [](const at::Tensor& x) { return copied(x, c10::kCPU); });
}
}  // namespace
