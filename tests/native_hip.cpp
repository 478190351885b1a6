// tests/native_hip.cpp: loads and launches a code object, double(p0, p1, n), through the HIP
// library that it is given: LIBRARY IMAGE WARPS SHARED.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "core/cuda.h"
#include "expect_error.h"

using namespace plait::cuda;

int main(int, char** argv) {
  const Driver driver(argv[1]);
  std::ifstream file(argv[2], std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), {}};
  KernelFacts facts;
  facts.symbol = "double";
  facts.num_warps = static_cast<uint32_t>(std::stoi(argv[3]));
  facts.shared = static_cast<uint32_t>(std::stoi(argv[4]));
  std::string name;
  driver.check(driver.architecture(driver, &name, 0), "name");
  std::printf("%s\n", name.c_str());
  driver.need_context(0);
  uint64_t words[5] = {4096, 8192, 1000, 0, 0};
  void* parameters[5] = {&words[0], &words[1], &words[2], &words[3], &words[4]};
  {
    const Kernel kernel(driver, image.data(), facts, 3);
    kernel.launch(reinterpret_cast<Stream>(5), 8, parameters);
    kernel.launch(reinterpret_cast<Stream>(5), 0, parameters);  // empty: no launch
    kernel.set_node(nullptr, reinterpret_cast<GraphNode>(22), 3, parameters);
    parameters[1] = nullptr;
    expect_error([&] { kernel.launch(nullptr, 1, parameters); });
    parameters[1] = &words[1];
    expect_error([&] { kernel.launch(nullptr, uint64_t{1} << 31, parameters); });
  }
  KernelFacts other = facts;
  other.cooperative = true;
  Kernel(driver, image.data(), other, 3).launch(nullptr, 1, parameters);
  other = facts;
  other.num_warps *= 2;
  expect_error([&] { Kernel(driver, image.data(), other, 3).launch(nullptr, 1, parameters); });
  other = facts;
  other.shared = 70000;
  expect_error([&] { Kernel(driver, image.data(), other, 3); });
  other = facts;
  other.symbol = "missing";
  expect_error([&] { Kernel(driver, image.data(), other, 3); });
  expect_error([&] { Kernel(driver, "garbage", facts, 3); });
  int value = 0;
  std::printf("%d\n", driver.device_attribute(&value, 75, 0));  // of CUDA alone
}
