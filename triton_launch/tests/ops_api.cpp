// triton_launch/tests/ops_api.cpp: the operators from C++, on the device that the first argument
// names. The second is the folder of libtorch's CUDA half, or nothing.
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/softmax.h>
#include <ATen/TensorOperators.h>
#include <dlfcn.h>
#include <plait/ops.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {
int n_wrong = 0;

void close(const char* what, const at::Tensor& got, const at::Tensor& want) {
  const bool same = got.sizes() == want.sizes() && got.scalar_type() == want.scalar_type() &&
                    at::allclose(got, want, 1e-4, 1e-4);
  std::printf("%s %s\n", what, same ? "ok" : "WRONG");
  n_wrong += !same;
}

template <class F>
void refused(F f) {
  try {
    f();
    std::printf("no error\n");
    ++n_wrong;
  } catch (const c10::Error& error) {
    const std::string said = error.what_without_backtrace();
    std::printf("%s\n", said.substr(0, said.find('\n')).c_str());
  }
}
}  // namespace

int main(int n, char** given) {
  namespace ops = plait::ops;
  if (n > 3) ops::use_python(given[3]);
  if (n > 2 && given[2][0] &&
      !dlopen((std::string(given[2]) + "/libtorch_cuda.so").c_str(), RTLD_NOW | RTLD_GLOBAL))
    std::printf("%s\n", dlerror());
  const auto options = at::TensorOptions().device(at::Device(given[1]));
  const at::Tensor x = at::randn({4, 6, 32}, options), y = at::randn({4, 6, 32}, options),
                   w = at::randn({32}, options);
  close("add", ops::add(x, w, 2), at::add(x, w, 2));
  close("rms_norm", ops::rms_norm(x, {32}, w, 1e-5), at::rms_norm(x, {32}, w, 1e-5));
  const auto [norm, sum] = ops::add_rms_norm(x, y, {32}, w, 1e-5);
  close("add_rms_norm", norm, at::rms_norm(x + y, {32}, w, 1e-5));
  close("add_rms_norm's sum", sum, x + y);
  close("softmax", ops::softmax(x, 1), at::softmax(x, 1));
  const at::Tensor angle = at::randn({8, 4}, options), z = x.view({4, 6, 4, 8});
  close("rotary",
        ops::rotary(ops::rotary(z, angle.cos(), angle.sin(), {}, 2), angle.cos(), angle.sin(), {},
                    2, false, true),
        z);
  const at::Tensor target = at::randint(32, {24}, options.dtype(at::kLong)),
                   rows = x.view({24, 32});
  close("cross_entropy", ops::cross_entropy(rows, target, w.abs()),
        at::cross_entropy_loss(rows, target, w.abs()));
  close("matmul", ops::matmul(x, y.transpose(1, 2)), at::matmul(x, y.transpose(1, 2)));

  at::Tensor leaf = rows.detach().clone().requires_grad_();
  ops::cross_entropy(leaf, target).backward();
  const at::Tensor got = leaf.grad().clone();
  leaf.mutable_grad().zero_();
  at::cross_entropy_loss(leaf, target).backward();
  close("the gradient of cross_entropy", got, leaf.grad());

  refused([&] { ops::rms_norm(x, {31}, w); });
  refused([&] { ops::matmul(x, y); });
  return n_wrong;
}
