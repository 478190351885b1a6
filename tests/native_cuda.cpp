// tests/native_cuda.cpp: loads and launches kernels through the driver library that it is given.
#include <cstdio>
#include <string>

#include "core/cuda.h"
#include "expect_error.h"

using namespace plait::cuda;

namespace {
KernelFacts facts(const char* symbol) {
  KernelFacts f;
  f.symbol = symbol;
  return f;
}
}  // namespace

int main(int, char** argv) {
  expect_error([] { Driver("/nowhere/libcuda.so"); });
  const Driver driver(argv[1]);
  int64_t first = 42;
  void* parameters[3] = {&first, &first, &first};
  const auto stream = [](size_t n) { return reinterpret_cast<Stream>(n); };
  {
    const Kernel plain(driver, "plain 3 0", facts("plain"), 1);
    plain.launch(stream(5), 7, parameters);
    plain.launch(stream(5), 0, parameters);  // empty: no launch
    expect_error([&] { plain.launch(stream(5), uint64_t{1} << 31, parameters); });
    expect_error([&] { plain.launch(stream(13), 1, parameters); });
  }
  KernelFacts all = facts("all");
  all.num_warps = 8;
  all.num_ctas = 16;
  all.shared = 100000;
  all.cooperative = all.pdl = true;
  const Kernel kernel(driver, "all 3 512", all, 1);
  kernel.launch(stream(0), 3, parameters);
  expect_error([&] { kernel.launch(stream(0), uint64_t{1} << 28, parameters); });
  kernel.set_node(reinterpret_cast<GraphExec>(21), reinterpret_cast<GraphNode>(22), 3, parameters);
  Driver older(argv[1]);
  older.records_early = false;
  Kernel(older, "all 3 512", all, 1).launch(stream(0), 3, parameters);
  all.shared = 232448;
  expect_error([&] { Kernel(driver, "all 3 512", all, 1); });
  expect_error([&] { Kernel(driver, "other 3 0", facts("missing"), 1); });
  expect_error([&] { Kernel(driver, "short 2 0", facts("short"), 1); });
  expect_error([&] { Kernel(driver, "long 4 0", facts("long"), 1); });
  expect_error([&] { Kernel(driver, "garbage", facts("garbage"), 1); });
}
