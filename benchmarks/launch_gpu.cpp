// benchmarks/launch_gpu.cpp: nanoseconds of CPU time a launch, plait's launcher beside the bare
// driver call with everything prepared. Arguments: file of a cubin, its symbol, bytes of shared
// memory, warps, n pointer arguments. Prints a line of JSON.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "core/cuda.h"

using namespace plait::cuda;
using Clock = std::chrono::steady_clock;

namespace {
template <class F>
F entry(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<F>(dlsym(library, name));
}

// The least mean of a batch, over rounds that take turns.
template <class F>
void round(F f, double& best) {
  constexpr int kBatch = 512;  // less than the driver queues, so that no launch waits
  const auto start = Clock::now();
  for (int i = 0; i < kBatch; ++i) f();
  const auto end = Clock::now();
  best = std::min(best, std::chrono::duration<double, std::nano>(end - start).count() / kBatch);
}
}  // namespace

int main(int, char** argv) {
  const Driver& driver = Driver::machine();
  void* context = nullptr;
  driver.check(entry<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0), "context");
  driver.check(entry<int (*)(void*)>("cuCtxSetCurrent")(context), "context");
  const auto synchronize = entry<int (*)()>("cuCtxSynchronize");
  uint64_t memory = 0;
  driver.check(entry<int (*)(uint64_t*, size_t)>("cuMemAlloc_v2")(&memory, 1 << 20), "memory");
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
  KernelFacts facts;
  facts.symbol = argv[2];
  facts.shared = static_cast<uint32_t>(std::atoi(argv[3]));
  facts.num_warps = static_cast<uint32_t>(std::atoi(argv[4]));
  const size_t n = static_cast<size_t>(std::atoi(argv[5]));
  const Kernel kernel(driver, image.data(), facts, n);

  std::vector<uint64_t> values(n, memory);
  values.resize(n + 2, 0);
  std::vector<void*> parameters;
  for (uint64_t& v : values) parameters.push_back(&v);

  Module module;
  Function function;
  driver.check(driver.load_module(&module, image.data()), "load");
  driver.check(driver.function(&function, module, argv[2]), "function");
  Config config{1, 1, 1, 32 * facts.num_warps, 1, 1, facts.shared, nullptr, nullptr, 0};
  double bare = 1e12, ours = 1e12;
  for (int r = 0; r < 400; ++r) {
    round([&] { driver.launch(&config, function, parameters.data(), nullptr); }, bare);
    driver.check(synchronize(), "bare");
    round([&] { kernel.launch(nullptr, 1, parameters.data()); }, ours);
    driver.check(synchronize(), "plait");
  }
  std::printf("{\"bare_ns\": %.1f, \"plait_ns\": %.1f}\n", bare, ours);
}
