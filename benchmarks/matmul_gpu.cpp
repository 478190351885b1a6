// benchmarks/matmul_gpu.cpp: nanoseconds of CPU time a call of an operator on a GPU, by every road:
// the dispatcher's boxed call, ATen's typed function, its CUDA function without dispatch, a plan of
// cuBLASLt (bare: the library's call alone, all else done before). No call waits for the device.
// Prints a line of JSON a case.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/cudnn_convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/randn.h>
#include <c10/core/Allocator.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/blaslt.h"

namespace {
using Clock = std::chrono::steady_clock;
using c10::IValue;
using plait::blaslt::Matrix;
using plait::blaslt::Type;
using Roads = std::map<std::string, std::function<void()>>;

constexpr int kBatch = 100, kRounds = 40;  // a batch is less than the driver queues

void synchronize() {
  static const auto wait =
      reinterpret_cast<int (*)()>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxSynchronize"));
  if (wait() != 0) std::abort();
}

void race(const std::string& name, const Roads& roads) {
  std::map<std::string, double> best;
  for (const auto& [road, call] : roads) {
    for (int i = 0; i < 3; ++i) call();
    best[road] = 1e12;
  }
  for (int r = 0; r < kRounds; ++r)
    for (const auto& [road, call] : roads) {
      synchronize();
      const auto start = Clock::now();
      for (int i = 0; i < kBatch; ++i) call();
      const std::chrono::duration<double, std::nano> took = Clock::now() - start;
      best[road] = std::min(best[road], took.count() / kBatch);
    }
  std::printf("{\"case\": \"%s\"", name.c_str());
  for (const auto& [road, ns] : best) std::printf(", \"%s\": %.0f", road.c_str(), ns);
  std::printf("}\n");
  std::fflush(stdout);
}

std::function<void()> boxed(const char* name, const char* overload, std::vector<IValue> operands) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  return [op, operands, stack = std::vector<IValue>()]() mutable {
    stack.assign(operands.begin(), operands.end());
    op.callBoxed(&stack);
    stack.clear();
  };
}

template <class F>
F direct(const char* symbol) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, symbol));
}

at::Tensor make(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, at::TensorOptions().device(at::kCUDA).dtype(dtype));
}

Matrix matrix(const at::Tensor& t) {
  const auto d = t.dim();
  return {t.data_ptr(),    t.size(d - 2),   t.size(d - 1),
          t.stride(d - 2), t.stride(d - 1), d == 3 ? t.stride(0) : 0};
}

Type type_of(const at::Tensor& t) {
  if (t.scalar_type() == at::kFloat) return Type::f32;
  return t.scalar_type() == at::kHalf ? Type::f16 : Type::bf16;
}

const plait::blaslt::Library* blaslt_library() {
  static const auto* const used =
      plait::blaslt::Library::used_by("libtorch_cuda.so").release();  // plans refer to it
  return used;
}

// As a program calls it: the plan is looked up, memory to work in comes from the allocator, as much
// as torch would give.
void add_plans(Roads& roads, const at::Tensor& a, const at::Tensor& b, const at::Tensor& out,
               const at::Tensor& bias, std::string& note) {
  static const size_t plain = direct<size_t (*)()>("_ZN2at4cuda22getChosenWorkspaceSizeEv")(),
                      biased = direct<size_t (*)()>("_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv")();
  const size_t room = bias.defined() ? biased : plain;
  const auto plans = std::make_shared<plait::blaslt::Plans>(*blaslt_library(), 0);
  const auto made = [=] {
    Matrix added{};
    if (bias.defined()) added = {bias.data_ptr(), out.size(-2), out.size(-1), 0, 1, 0};
    return *plait::blaslt::make_product(type_of(a), plait::blaslt::Compute::f32,
                                        plait::blaslt::Reductions::any, matrix(a), matrix(b),
                                        bias.defined() ? &added : nullptr, matrix(out),
                                        a.dim() == 3 ? a.size(0) : 1, 1, bias.defined() ? 1 : 0);
  };
  const auto run = [](const auto& plan, const auto& p, const c10::DataPtr& memory) {
    if (!plan || !plan->run(p, memory.get(), nullptr)) std::abort();
  };
  const auto allocate = [](size_t nbytes) {
    return nbytes ? c10::GetAllocator(c10::kCUDA)->allocate(nbytes) : c10::DataPtr();
  };
  roads["plan"] = [=] {
    const auto p = made();
    const auto plan = plans->find(p, room);
    run(plan, p, allocate(plan->workspace()));
  };
  const auto product = made();
  const auto plan = plans->find(product, room);
  const auto memory = std::make_shared<c10::DataPtr>(allocate(plan->workspace()));
  roads["bare"] = [=] { run(plan, product, *memory); };
  note = " (works in " + std::to_string(plan->workspace() >> 10) + " KiB)";
}

std::string by(std::initializer_list<int64_t> sizes) {
  std::string text;
  for (int64_t n : sizes) text += (text.empty() ? " " : "x") + std::to_string(n);
  return text;
}

void products(at::ScalarType dtype) {
  using at::Tensor;
  const std::string kind = dtype == at::kFloat ? "f32" : dtype == at::kHalf ? "f16" : "bf16";
  const auto mm_out = direct<Tensor& (*)(Tensor&, const Tensor&, const Tensor&)>(
      "_ZN2at4cuda6mm_outERNS_6TensorERKS1_S4_");
  std::string note;
  const auto mm = [&](int64_t m, int64_t k, int64_t n) {
    const Tensor a = make({m, k}, dtype), b = make({n, k}, dtype).t();
    Tensor out = make({m, n}, dtype);
    Roads roads{{"boxed", boxed("aten::mm", "out", {a, b, out})},
                {"typed", [=]() mutable { at::mm_out(out, a, b); }}};
    add_plans(roads, a, b, out, {}, note);
    if (mm_out) roads["direct"] = [=]() mutable { mm_out(out, a, b); };
    race(kind + " mm" + by({m, k, n}) + note, roads);
  };
  const auto addmm = [&](int64_t m, int64_t k, int64_t n) {
    const Tensor a = make({m, k}, dtype), b = make({n, k}, dtype).t(), bias = make({n}, dtype);
    Tensor out = make({m, n}, dtype);
    Roads roads{{"boxed", boxed("aten::addmm", "out", {bias, a, b, 1, 1, out})},
                {"typed", [=]() mutable { at::addmm_out(out, bias, a, b); }}};
    add_plans(roads, a, b, out, bias, note);
    race(kind + " addmm" + by({m, k, n}) + note, roads);
  };
  const auto bmm = [&](int64_t batch, int64_t m, int64_t k, int64_t n) {
    const Tensor a = make({batch, m, k}, dtype), b = make({batch, n, k}, dtype).transpose(1, 2);
    Tensor out = make({batch, m, n}, dtype);
    Roads roads{{"boxed", boxed("aten::bmm", "out", {a, b, out})},
                {"typed", [=]() mutable { at::bmm_out(out, a, b); }}};
    add_plans(roads, a, b, out, {}, note);
    race(kind + " bmm" + by({batch, m, k, n}) + note, roads);
  };
  for (int64_t n : {64, 256, 1024}) mm(n, n, n);
  addmm(256, 256, 1024);                                                // tf6
  addmm(128, 768, 2304), addmm(128, 768, 3072), addmm(128, 3072, 768);  // GPT-2
  bmm(48, 64, 64, 64);
}

void others(at::ScalarType dtype) {
  using at::Tensor;
  const std::vector<int64_t> one{1, 1}, zero{0, 0};
  for (const auto& [kind, type] : {std::pair{"f16", at::kHalf}, {"f32", at::kFloat}}) {
    const Tensor x = make({4, 64, 32, 32}, type), w = make({64, 64, 3, 3}, type),
                 c = make({64}, type);
    Tensor out = make({4, 64, 32, 32}, type);
    const std::string name = std::string(kind) + " convolution";
    race(name, {{"boxed",
                 boxed("aten::convolution", "", {x, w, IValue(), one, one, one, false, zero, 1})},
                {"typed", [=] { at::convolution(x, w, {}, one, one, one, false, zero, 1); }}});
    race(name + " with bias",
         {{"boxed", boxed("aten::convolution", "", {x, w, c, one, one, one, false, zero, 1})}});
    race(name + " of cuDNN", {{"boxed", boxed("aten::cudnn_convolution", "out",
                                              {x, w, one, one, one, 1, false, false, true, out})},
                              {"typed", [=]() mutable {
                                 at::cudnn_convolution_out(out, x, w, one, one, one, 1, false,
                                                           false, true);
                               }}});
  }
  const Tensor t = make({256, 256}, dtype), g = make({256}, dtype);
  race("f16 native_layer_norm",
       {{"boxed", boxed("aten::native_layer_norm", "", {t, std::vector<int64_t>{256}, g, g, 1e-5})},
        {"typed", [=] { at::native_layer_norm(t, {256}, g, g, 1e-5); }}});
  const Tensor q = make({4, 4, 64, 64}, dtype);
  race("f16 flash attention",
       {{"boxed", boxed("aten::_scaled_dot_product_flash_attention", "",
                        {q, q, q, 0.0, true, false, IValue()})},
        {"typed", [=] { at::_scaled_dot_product_flash_attention(q, q, q, 0.0, true); }}});
  const Tensor f = make({4, 4, 64, 64}, at::kFloat);
  race("f32 efficient attention",
       {{"boxed", boxed("aten::_scaled_dot_product_efficient_attention", "",
                        {f, f, f, IValue(), true, 0.0, true, IValue()})},
        {"typed",
         [=] { at::_scaled_dot_product_efficient_attention(f, f, f, {}, true, 0.0, true); }}});
}
}  // namespace

int main() {
  const at::AutoDispatchBelowADInplaceOrView below;
  make({1}, at::kFloat);
  if (!blaslt_library()) {
    std::fprintf(stderr, "no cuBLASLt is loaded\n");
    return 1;
  }
  products(at::kHalf);
  products(at::kFloat);
  products(at::kBFloat16);
  others(at::kHalf);
}
