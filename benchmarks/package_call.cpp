// benchmarks/package_call.cpp: what a call of a loaded package costs from C++. Usage: package_call
// PACKAGE. Prints the nanoseconds of a call, the best of many rounds of some milliseconds for 3
// seconds as benchmarks/package.py has it, on inputs of zeros; sizes that vary are 8.
#include <ATen/ops/zeros.h>
#include <plait/package.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace {
double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}  // namespace

int main(int, char** argv) {
  const auto before = std::chrono::steady_clock::now();
  const plait::Package package = plait::Package::load(argv[1]);
  const double loading = seconds_since(before);
  std::vector<at::Tensor> inputs;
  for (const plait::Package::Input& input : package.inputs()) {
    std::vector<int64_t> sizes;
    for (const plait::Package::Size& size : input.sizes)
      sizes.push_back(std::clamp<int64_t>(8, size.lowest, size.highest));
    inputs.push_back(at::zeros(sizes, at::TensorOptions(input.dtype).device(input.device)));
  }
  double best = 1e30;
  long calls = 1;
  for (const auto begin = std::chrono::steady_clock::now(); seconds_since(begin) < 3;) {
    const auto start = std::chrono::steady_clock::now();
    for (long n = 0; n < calls; ++n) package.run(inputs);
    best = std::min(best, seconds_since(start) / static_cast<double>(calls));
    calls = std::max(1L, static_cast<long>(0.005 / best));
  }
  std::printf("%.1f ns a call, %.2f ms to load\n", best * 1e9, loading * 1e3);
}
