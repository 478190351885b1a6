// benchmarks/jit_launch.cpp: CPU time of a launch of Triton kernels from C++ (triton_launch/src),
// beside the driver's own call with everything prepared. Usage: jit_launch PACK
//
// Kernels with 0, 3, 19 and 58 arguments, two thirds of them pointers; one that @triton.autotune
// chose and whose grid depends on it, and one with two tensor descriptors, both beside the bare
// launch of 3 arguments. The ways take turns, the driver's own at two places of a turn: what those
// two differ by is noise. A sample is the mean of 16 launches. Prints a JSON line for each kernel:
// median and 99th percentile in ns.
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

float* memory;  // the kernels' arguments

// The driver's own launch of a kernel of the pack, and ours. from_c: nullptr, or a launch through
// the C interface.
template <class AdHoc, class Bind, class FromC>
void race(const char* path, const std::string& label, const std::string& bare_entry, size_t n,
          AdHoc ad_hoc, Bind bind, FromC from_c) {
  const plait::cuda::Driver& driver = plait::cuda::Driver::machine();
  driver.need_context(0);
  const auto start = Clock::now();
  ad_hoc();
  driver.check(driver.synchronize(), "first launch");
  const double first_ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  const Bound bound = bind();

  const plait::Cubins cubins = plait::Cubins::read(path);
  int major = 0, minor = 0, device = 0;
  driver.current_device(&device);
  driver.device_attribute(&major, 75, device);
  driver.device_attribute(&minor, 76, device);
  const auto bare = cubins.load(bare_entry + "||" + std::to_string(10 * major + minor), n);
  std::vector<uint64_t> words(n + 2, reinterpret_cast<uint64_t>(memory));
  std::vector<void*> parameters;
  for (uint64_t& word : words) parameters.push_back(&word);
  const plait::cuda::Config config = bare->config_of(1);

  std::vector<Samples> all{{"bare", {}}, {"ad hoc", {}}, {"bound", {}}, {"bare again", {}}};
  if constexpr (!std::is_null_pointer_v<FromC>) all.push_back({"from C", {}});
  for (int k = 0; k < kSamples; ++k) {
    all[0].ns.push_back(sample([&] { bare->launch(config, parameters.data()); }));
    all[1].ns.push_back(sample(ad_hoc));
    all[2].ns.push_back(sample([&] { bound(nullptr); }));
    all[3].ns.push_back(sample([&] { bare->launch(config, parameters.data()); }));
    if constexpr (!std::is_null_pointer_v<FromC>) all[4].ns.push_back(sample(from_c));
    if (k % 8 == 0) driver.check(driver.synchronize(), "launches");
  }
  std::printf("{\"arguments\": \"%s\", \"first ms\": %.2f", label.c_str(), first_ms);
  for (Samples& s : all)
    std::printf(", \"%s p50\": %.1f, \"%s p99\": %.1f", s.name, s.at(0.5), s.name, s.at(0.99));
  std::printf("}\n");
}

template <size_t... P, size_t... I>
void measure(const char* path, std::index_sequence<P...>, std::index_sequence<I...>) {
  constexpr size_t n = sizeof...(P) + sizeof...(I);
  const Kernel kernel = from_pack(path, "args" + std::to_string(n));
  std::string entry = "args" + std::to_string(n) + "|";
  for (size_t k = 0; k < n; ++k)
    entry += std::string(k ? "," : "") + (k < sizeof...(P) ? "*fp32:D" : "i32");
  plait_triton_kernel* c_kernel = nullptr;
  if (plait_triton_from_pack(path, ("args" + std::to_string(n)).c_str(), &c_kernel) !=
      PLAIT_TRITON_OK)
    std::abort();
  const std::array<plait_triton_argument, n> arguments{
      (static_cast<void>(P), plait_triton_pointer(memory, PLAIT_TRITON_FP32))...,
      plait_triton_integer(static_cast<int64_t>(101 + 2 * I))...};
  const plait_triton_config at = plait_triton_grid(1, 1, 1, nullptr);
  race(
      path, std::to_string(n), entry, n,
      [&] {
        kernel[{1, nullptr}]((static_cast<void>(P), memory)..., static_cast<int>(101 + 2 * I)...);
      },
      [&] {
        return kernel.bind({1}, (static_cast<void>(P), memory)...,
                           static_cast<int>(101 + 2 * I)...);
      },
      [&] { plait_triton_launch(c_kernel, &at, arguments.data(), n); });
}

void measure_more(const char* path) {
  const std::string three = "args3|*fp32:D,*fp32:D,i32";
  static const Tuning first{Miss::first, ""};
  set_tuning(&first);
  const Kernel tuned = from_pack(path, "tuned");
  const int n = 101;
  const auto grid = [n](const Meta& meta) { return cdiv(n, meta["BLOCK"]); };
  race(
      path, "3, tuned", three, 3, [&] { tuned[{grid, nullptr}](memory, memory, n); },
      [&] { return tuned.bind({grid}, memory, memory, n); }, nullptr);
  const Kernel described = from_pack(path, "described");
  const TensorDescriptor d{memory, DType::fp32, {8, 8}, {8, 1}, {8, 8}};
  race(
      path, "2 descriptors", three, 3, [&] { described[{1, nullptr}](d, d); },
      [&] { return described.bind({1}, d, d); }, nullptr);
}
}  // namespace

int main(int, char** argv) {
  alignas(64) static float unused[64];  // a driver that does nothing has no memory
  const plait::cuda::Driver& driver = plait::cuda::Driver::machine();
  driver.need_context(0);
  memory = unused;
  void* device_memory = nullptr;
  if (driver.allocate)
    driver.check(driver.allocate(&device_memory, sizeof unused, nullptr), "cuMemAllocAsync");
  if (device_memory) memory = static_cast<float*>(device_memory);
  measure(argv[1], std::make_index_sequence<0>(), std::make_index_sequence<0>());
  measure(argv[1], std::make_index_sequence<2>(), std::make_index_sequence<1>());
  measure(argv[1], std::make_index_sequence<13>(), std::make_index_sequence<6>());
  measure(argv[1], std::make_index_sequence<39>(), std::make_index_sequence<19>());
  measure_more(argv[1]);
}
