// tests/gpu_jit.cpp: a shared library that launches the kernels of test_gpu_jit.py on its tensors. What
// goes wrong is returned as text.
#include <plait/triton.h>

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
}

const char* add(const float* x, const float* y, float* out, int64_t n, Stream stream, int block, bool pdl, int ctas) {
  return told([&] {
    get("add")[{(n + block - 1) / block, stream, {.num_ctas = static_cast<int16_t>(ctas), .pdl = pdl}}](
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
    get("kinds")[{1}](out, int8_t{-3}, uint64_t{1} << 63, 0.1, 0.1f, 0.1, 0.1, 0.1, true, 7, nullptr,
                      std::tuple{1, std::tuple{2.5, int64_t{1} << 40}}, DType::bf16, "mode", 0.25);
  });
}

const char* described(const float* x, float* out, Stream stream) {
  return told([&] { get("described")[{4, stream}](x, out, 64); });
}
}
