// benchmarks/jit_launch.cpp: CPU time of a launch of Triton kernels from C++ (native/jit), beside the
// driver's own call with everything prepared. Usage: jit_launch PACK
//
// Kernels with 0, 3, 19 and 58 arguments, two thirds of them pointers. The four ways take turns; a sample
// is the mean of 16 launches. Prints a JSON line for each kernel: median and 99th percentile in ns.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include <plait/triton.h>
#include <plait/triton_c.h>

#include "core/cubins.h"

using namespace plait::triton;
using Clock = std::chrono::steady_clock;

namespace {
constexpr int kSamples = 4000, kLaunches = 16;

template <class F>
double sample(F launch) {
  const auto start = Clock::now();
  for (int k = 0; k < kLaunches; ++k) launch();
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / kLaunches;
}

struct Samples {
  const char* name;
  std::vector<double> ns;
  double at(double q) {
    std::sort(ns.begin(), ns.end());
    return ns[static_cast<size_t>(q * static_cast<double>(ns.size() - 1))];
  }
};

template <size_t... P, size_t... I>
void measure(const char* path, std::index_sequence<P...>, std::index_sequence<I...>) {
  constexpr size_t n = sizeof...(P) + sizeof...(I);
  alignas(64) static float memory[64];
  const std::string name = "args" + std::to_string(n);
  const plait::cuda::Driver& driver = plait::cuda::Driver::machine();
  driver.need_context(0);

  const auto start = Clock::now();
  const Kernel kernel = from_pack(path, name);
  const auto ad_hoc = [&] {
    kernel[{1, nullptr}]((static_cast<void>(P), memory + 0)..., static_cast<int>(101 + 2 * I)...);
  };
  ad_hoc();
  driver.check(driver.synchronize(), "first launch");
  const double first_ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  const Bound bound = kernel.bind({1}, (static_cast<void>(P), memory + 0)..., static_cast<int>(101 + 2 * I)...);

  plait_triton_kernel* c_kernel = nullptr;
  if (plait_triton_from_pack(path, name.c_str(), &c_kernel) != PLAIT_TRITON_OK) std::abort();
  const std::array<plait_triton_argument, n> arguments{
      (static_cast<void>(P), plait_triton_pointer(memory, PLAIT_TRITON_FP32))...,
      plait_triton_integer(static_cast<int64_t>(101 + 2 * I))...};
  const plait_triton_config at = plait_triton_grid(1, 1, 1, nullptr);

  std::string image, entry = name + "|";
  for (size_t k = 0; k < n; ++k) entry += std::string(k ? "," : "") + (k < sizeof...(P) ? "*fp32:D" : "i32");
  const plait::Cubins cubins = plait::Cubins::read(path);
  int major = 0, minor = 0, device = 0;
  driver.current_device(&device);
  driver.device_attribute(&major, 75, device);
  driver.device_attribute(&minor, 76, device);
  const auto bare = cubins.load(entry + "||" + std::to_string(10 * major + minor), n);
  uint64_t words[n + 2] = {};
  void* parameters[n + 2];
  for (size_t k = 0; k < n + 2; ++k) {
    if (k < n) words[k] = k < sizeof...(P) ? reinterpret_cast<uint64_t>(memory) : 101 + 2 * (k - sizeof...(P));
    parameters[k] = &words[k];
  }
  const plait::cuda::Config config = bare->config_of(1);

  Samples all[] = {{"bare", {}}, {"ad hoc", {}}, {"bound", {}}, {"from C", {}}};
  for (int k = 0; k < kSamples; ++k) {
    all[0].ns.push_back(sample([&] { bare->launch(config, parameters); }));
    all[1].ns.push_back(sample(ad_hoc));
    all[2].ns.push_back(sample([&] { bound(nullptr); }));
    all[3].ns.push_back(sample([&] { plait_triton_launch(c_kernel, &at, arguments.data(), n); }));
    if (k % 8 == 0) driver.check(driver.synchronize(), "launches");
  }
  std::printf("{\"arguments\": %zu, \"first ms\": %.2f", n, first_ms);
  for (Samples& s : all)
    std::printf(", \"%s p50\": %.1f, \"%s p99\": %.1f", s.name, s.at(0.5), s.name, s.at(0.99));
  std::printf("}\n");
}
}  // namespace

int main(int, char** argv) {
  measure(argv[1], std::make_index_sequence<0>(), std::make_index_sequence<0>());
  measure(argv[1], std::make_index_sequence<2>(), std::make_index_sequence<1>());
  measure(argv[1], std::make_index_sequence<13>(), std::make_index_sequence<6>());
  measure(argv[1], std::make_index_sequence<39>(), std::make_index_sequence<19>());
}
