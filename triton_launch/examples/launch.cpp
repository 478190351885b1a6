// triton_launch/examples/launch.cpp: Triton kernels launched from C++.
//
// Usage: launch_cpp KERNELS [PYTHON]
//   KERNELS  a pack, for a process without Python: `plait pack kernels.py --signatures
//   @signatures.txt`;
//            or kernels.py itself, whose functions PYTHON (python3) compiles when they are first
//            launched
#include <plait/triton.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu.h"

using plait::constexpr_;
namespace triton = plait::triton;

namespace {
double add(const triton::Kernel& kernel) {
  constexpr int n = 100000, block = 1024;
  std::vector<float> x(n), y(n), out(n);
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(std::sin(i)), y[i] = static_cast<float>(i);
  const float *x_gpu = gpu_copy_of(x.data(), n), *y_gpu = gpu_copy_of(y.data(), n);
  float* out_gpu = gpu_copy_of(out.data(), n);

  kernel[{(n + block - 1) / block}](x_gpu, y_gpu, out_gpu, n, constexpr_<block>);

  gpu_read(out.data(), out_gpu, n);
  double error = 0;
  for (int i = 0; i < n; ++i)
    error = std::max(error, std::fabs(double{x[i]} + y[i] - out[i]) / (1 + y[i]));
  return error;
}

double softmax(const triton::Kernel& kernel) {
  constexpr int n_rows = 64, n_columns = 1000;
  std::vector<float> x(n_rows * n_columns), out(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(10 * std::sin(i));
  const float* x_gpu = gpu_copy_of(x.data(), x.size());
  float* out_gpu = gpu_copy_of(out.data(), x.size());

  // Resolved once; each launch is then the driver's call and little more.
  const triton::Bound bound = kernel.bind({n_rows, nullptr, {.num_warps = 8}}, out_gpu, x_gpu,
                                          n_columns, plait::arg<"BLOCK"> = 1024);
  for (int k = 0; k < 3; ++k) bound(nullptr);

  gpu_read(out.data(), out_gpu, x.size());
  double error = 0;
  for (size_t row = 0; row < x.size(); row += n_columns) {
    double sum = 0;
    for (size_t i = row; i < row + n_columns; ++i) sum += std::exp(double{x[i]});
    for (size_t i = row; i < row + n_columns; ++i)
      error = std::max(error, std::fabs(std::exp(double{x[i]}) / sum - out[i]));
  }
  return error;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: %s KERNELS [PYTHON]\n", argv[0]), 2;
  const std::string kernels = argv[1], python = argc > 2 ? argv[2] : "python3";
  try {
    gpu_open();
    const auto get = [&](const char* name) {
      return kernels.ends_with(".py") ? triton::jit(kernels, name, triton::worker(python))
                                      : triton::from_pack(kernels, name);
    };
    const double errors[] = {add(get("add_kernel")), softmax(get("softmax_kernel"))};
    std::printf("add: largest error %.1e\nsoftmax: largest error %.1e\n", errors[0], errors[1]);
    return std::max(errors[0], errors[1]) < 1e-6 ? 0 : 1;
  } catch (const triton::Error& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
}
