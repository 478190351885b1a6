// triton_launch/tests/gpu_jit.cpp: a shared library that launches the kernels of test_gpu_jit.py on
// its tensors. What goes wrong is returned as text.
#include <filesystem>

#include <plait/triton.h>

#include "core/cuda.h"

using namespace plait::triton;

namespace {
std::string python, file, said;

Kernel get(const char* name) { return jit(file, name, worker(python)); }

template <class F>
const char* told(F f) {
  try {
    f();
    return nullptr;
  } catch (const Error& error) {
    said = error.what();
    return said.c_str();
  }
}
}  // namespace

extern "C" {
void setup(const char* python_, const char* file_) {
  python = python_;
  file = file_;
  static const std::string folder = std::filesystem::path(file).parent_path() / "tuned";
  static const Tuning tuning{Miss::tune, folder.c_str()};
  set_tuning(&tuning);
}

const char* add(const float* x, const float* y, float* out, int64_t n, Stream stream, int block,
                bool pdl, int ctas) {
  return told([&] {
    get("add")[{
        (n + block - 1) / block, stream, {.num_ctas = static_cast<int16_t>(ctas), .pdl = pdl}}](
        x, y, out, n, plait::constexpr_value(block));
  });
}

const char* add_bound(const float* x, float* y, float* out, int n, Stream stream) {
  return told([&] {
    const Bound bound = get("add").bind({(n + 255) / 256}, x, y, out, n, plait::arg<"BLOCK"> = 256);
    bound(stream);
    bound(stream);
  });
}

const char* kinds(double* out) {
  return told([&] {
    get("kinds")[{1}](out, int8_t{-3}, uint64_t{1} << 63, 0.1, 0.1f, 0.1, 0.1, 0.1, true, 7,
                      nullptr, std::tuple{1, std::tuple{2.5, int64_t{1} << 40}}, DType::bf16,
                      "mode", 0.25);
  });
}

const char* described(const float* x, float* out, Stream stream) {
  return told([&] { get("described")[{4, stream}](x, out, 64); });
}

// kind: 1 for i32, 2 for fp16, 3 for fp32.
const char* doubled(void* x, void* out, int64_t m, int64_t n, int64_t width, int64_t kind) {
  return told([&] {
    const DType dtype = kind == 1 ? DType::i32 : kind == 2 ? DType::fp16 : DType::fp32;
    const auto of = [&](void* p) {
      return TensorDescriptor{p, dtype, {m, n}, {width, 1}, {16, 32}};
    };
    get("doubled")[{(m + 15) / 16, (n + 31) / 32}](of(x), of(out), 16);
  });
}

const char* tuned(float* x, int32_t* count, int64_t n, Stream stream) {
  return told([&] {
    const auto bytes = static_cast<uint64_t>(4 * n);
    get("tuned")[{[&](const Meta& meta) { return cdiv(n, meta["BLOCK"]); }, stream}](
        Pointer{x, DType::fp32, bytes}, Pointer{count, DType::i32, bytes}, n);
  });
}

// x + y, and then by the same node x + x to another place.
const char* nodes(const float* x, const float* y, float* out, float* other, int64_t n) {
  return told([&] {
    const plait::cuda::Driver& driver = plait::cuda::Driver::machine();
    int (*create)(CUgraph_st**, unsigned);
    int (*instantiate)(CUgraphExec_st**, CUgraph_st*, uint64_t);
    driver.need(create, "cuGraphCreate");
    driver.need(instantiate, "cuGraphInstantiateWithFlags");
    CUgraph_st* graph = nullptr;
    CUgraphExec_st* exec = nullptr;
    auto bound = get("add").bind({(n + 255) / 256}, x, y, out, n, plait::constexpr_<256>);
    driver.check(create(&graph, 0), "cuGraphCreate");
    CUgraphNode_st* node = bound.add_to(graph);
    driver.check(instantiate(&exec, graph, 0), "cuGraphInstantiate");
    const auto run = [&] {
      driver.check(driver.launch_graph(reinterpret_cast<plait::cuda::GraphExec>(exec), nullptr),
                   "cuGraphLaunch");
      driver.check(driver.synchronize(), "cuCtxSynchronize");
    };
    run();
    bound.set<1>(x);
    bound.set<2>(other);
    bound.update(exec, node);
    run();
  });
}
}
