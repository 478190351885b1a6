// benchmarks/package_call.cpp: what a call of a loaded package costs from C++. Usage: package_call
// PACKAGE CALLS Prints the nanoseconds of a call, in the best of ten rounds, on inputs of zeros;
// sizes that vary are 8.
#include <ATen/ops/zeros.h>
#include <plait/package.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

int main(int, char** argv) {
  const auto before = std::chrono::steady_clock::now();
  const plait::Package package = plait::Package::load(argv[1]);
  const std::chrono::duration<double, std::milli> loading =
      std::chrono::steady_clock::now() - before;
  std::vector<at::Tensor> inputs;
  for (const plait::Package::Input& input : package.inputs()) {
    std::vector<int64_t> sizes;
    for (const plait::Package::Size& size : input.sizes)
      sizes.push_back(std::clamp<int64_t>(8, size.lowest, size.highest));
    inputs.push_back(at::zeros(sizes, at::TensorOptions(input.dtype).device(input.device)));
  }
  const long calls = std::atol(argv[2]);
  double best = 1e30;
  for (int round = 0; round < 10; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (long n = 0; n < calls; ++n) package.run(inputs);
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count() / static_cast<double>(calls));
  }
  std::printf("%.1f ns a call, %.2f ms to load\n", best, loading.count());
}
