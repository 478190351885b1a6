// benchmarks/bare_launch.cpp: what the CUDA driver itself takes for a sequence of kernel launches.
//
// A shared library for gpu_worker.py. Everything is prepared before the clock starts; between its
// two readings there is nothing but cuLaunchKernelEx. A current context is the caller's business.
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <vector>

#include "core/cuda.h"

using namespace plait::cuda;
using Clock = std::chrono::steady_clock;

// As gpu_worker.py fills it: one launch, its arguments being addresses of device memory.
struct Given {
  const void* image;
  const char* symbol;
  uint32_t grid, warps, shared, n_arguments;
  const uint64_t* arguments;
};

namespace {
struct Ready {
  Config config;
  Function function;
  std::vector<uint64_t> values;  // the arguments and the two pointers to scratch memory, here null
  std::vector<void*> parameters;
};
}  // namespace

// Launches of the sequence, or null where the driver refuses one.
extern "C" std::vector<Ready>* bare_prepare(const Given* given, size_t n) try {
  const Driver& driver = Driver::machine();
  std::map<const void*, Function> loaded;
  auto made = std::make_unique<std::vector<Ready>>(n);
  for (size_t k = 0; k < n; ++k) {
    const Given& g = given[k];
    Function& function = loaded[g.image];
    if (!function) {
      Module module = nullptr;
      driver.check(driver.load_module(&module, g.image), g.symbol);
      driver.check(driver.function(&function, module, g.symbol), g.symbol);
    }
    Ready& r = (*made)[k];
    r.config = {g.grid, 1, 1, 32 * g.warps, 1, 1, g.shared, nullptr, nullptr, 0};
    r.function = function;
    r.values.assign(g.arguments, g.arguments + g.n_arguments);
    r.values.resize(g.n_arguments + 2, 0);
    for (uint64_t& v : r.values) r.parameters.push_back(&v);
  }
  return made.release();
} catch (const std::exception& error) {
  std::fprintf(stderr, "bare_prepare: %s\n", error.what());
  return nullptr;
}

// Nanoseconds to enqueue the whole sequence `times` times; negative where a launch failed.
extern "C" double bare_ns(std::vector<Ready>* sequence, int times) {
  const Driver& driver = Driver::machine();
  const auto launch = driver.launch;
  int failed = 0;
  const auto start = Clock::now();
  for (int k = 0; k < times; ++k)
    for (Ready& r : *sequence)
      failed |= launch(&r.config, r.function, r.parameters.data(), nullptr);
  const auto end = Clock::now();
  return failed ? -1 : std::chrono::duration<double, std::nano>(end - start).count();
}
