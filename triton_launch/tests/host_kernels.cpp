// triton_launch/tests/host_kernels.cpp: what the kernels of triton_launch/examples compute, for a
// driver whose GPU is the host (fake_cuda.cpp).
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {
template <class T>
T at(void** parameters, int k) {
  return *static_cast<T*>(parameters[k]);
}
}  // namespace

extern "C" {
// Grids are for blocks of 1024.
void add_kernel(const uint32_t* grid, void** p) {
  const auto *x = at<const float*>(p, 0), *y = at<const float*>(p, 1);
  auto* out = at<float*>(p, 2);
  const int n = std::min<int>(at<int32_t>(p, 3), static_cast<int>(1024 * grid[0]));
  for (int i = 0; i < n; ++i) out[i] = x[i] + y[i];
}

void softmax_kernel(const uint32_t* grid, void** p) {
  auto* out = at<float*>(p, 0);
  const auto* x = at<const float*>(p, 1);
  const int n = at<int32_t>(p, 2);
  for (uint32_t row = 0; row < grid[0]; ++row, x += n, out += n) {
    const float top = *std::max_element(x, x + n);
    float sum = 0;
    for (int i = 0; i < n; ++i) sum += out[i] = std::exp(x[i] - top);
    for (int i = 0; i < n; ++i) out[i] /= sum;
  }
}
}
