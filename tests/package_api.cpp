// tests/package_api.cpp: plait::Package as a C++ program sees it. Usage: package_api PACKAGE MIXED
// STRIDED; the packages are those of tests/test_package_cpp.py.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <plait/package.h>
#include <torch/library.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

namespace {
void require(bool holds, const char* what) {
  if (!holds) std::printf("wrong: %s\n", what), std::exit(1);
}
#define REQUIRE(condition) require(condition, #condition)

template <class Error>
void refuses(const std::function<void()>& body, const std::string& words) {
  try {
    body();
  } catch (const Error& e) {
    if (std::string(e.what()).find(words) != std::string::npos) return;
    std::printf("said: %s\n", e.what());
  }
  require(false, words.c_str());
}

at::Tensor twice(const at::Tensor& x) { return x.add(x); }
TORCH_LIBRARY(plait_cpp, library) {
  library.def("twice(Tensor x) -> Tensor");
  library.impl("twice", c10::DispatchKey::CPU, TORCH_FN(twice));
}

// f(x, n, {"a": [y, 2.5]}, flag=None, how="up", dtype=float64, zero=-0.0): a loop of n rounds, an
// operator of this program.
void mixed(const std::string& path) {
  using plait::InputError, plait::Package;
  using Kind = Package::Input::Kind;
  const Package p = Package::load(path);
  std::vector<std::string> names;
  for (const Package::Input& input : p.inputs()) names.push_back(input.name);
  REQUIRE(names == (std::vector<std::string>{"x", "n", "more['a'][0]", "more['a'][1]", "flag",
                                             "how", "dtype", "zero"}));
  REQUIRE(p.inputs()[1].kind == Kind::integer && p.inputs()[1].sizes[0].lowest == 2);
  REQUIRE(p.inputs()[2].kind == Kind::tensor && p.inputs()[2].dtype == at::kFloat);
  REQUIRE(p.inputs()[3].kind == Kind::constant && std::get<double>(p.inputs()[3].value) == 2.5);
  REQUIRE(std::holds_alternative<std::monostate>(p.inputs()[4].value));

  const at::Tensor x = at::ones({3}), y = at::full({3}, 7.f);
  const std::vector<Package::Value> given = {x, 4, y, 2.5, {}, "up", "torch.float64", -0.0};
  REQUIRE(p.run_values(given)[0].equal(at::full({3}, 16 * 2 * 2.5 + 7, at::kDouble)));
  REQUIRE(p.run_values({x, 5, y, 2.5, {}, "up", "torch.float64", -0.0})[0].equal(
      at::full({3}, 32 * 2 * 2.5 + 7, at::kDouble)));
  REQUIRE(p.run_values({x.neg(), 5, y, 2.5, {}, "up", "torch.float64", -0.0})[0].equal(
      at::full({3}, -2 * 2.5 + 7, at::kDouble)));
  const auto with = [&](size_t k, const Package::Value& value) {
    std::vector<Package::Value> changed = given;
    changed[k] = value;
    return [&p, changed] { p.run_values(changed); };
  };
  refuses<InputError>(with(3, 2.25),
                      "input 'more['a'][1]': the program was compiled for 2.5, got 2.25");
  refuses<InputError>(with(3, 2), "compiled for 2.5, got 2");
  refuses<InputError>(with(7, 0.0), "input 'zero': the program was compiled for -0.0, got 0");
  refuses<InputError>(with(4, false), "input 'flag': the program was compiled for None, got False");
  refuses<InputError>(with(5, "down"),
                      "input 'how': the program was compiled for 'up', got 'down'");
  refuses<InputError>(with(5, x), "compiled for 'up', got a Tensor");
  refuses<InputError>(with(6, "torch.float32"), "compiled for torch.float64, got 'torch.float32'");
  refuses<InputError>(with(1, 1), "input 'n': expected at least 2");
  refuses<InputError>(with(1, 4.0), "input 'n': expected an int, got 4.0");
  refuses<InputError>(with(2, 3), "input 'more['a'][0]': expected a tensor, got 3");
  refuses<InputError>([&] { p.run({x, y}); }, "input 'n' is an int: give all inputs to run_values");
  refuses<InputError>([&] { p.run_values({x}); }, "expected 8 inputs, got 1");
}

// x.reshape(-1) of rows that are apart in memory.
void strided(const std::string& path) {
  const plait::Package p = plait::Package::load(path);
  const at::Tensor x = at::arange(27, at::kFloat).view({3, 9}), part = x.narrow(1, 2, 5);
  REQUIRE(p.run({part})[0].equal(part.flatten()));
  refuses<plait::InputError>([&] { p.run({x}); },
                             "strides break a condition of the program, x.stride(0) != x.shape[1]: "
                             "x [3, 9], x.stride(0) = 9");
  refuses<plait::InputError>([&] { p.run({x.t()}); },
                             "input 'x': expected stride 1 in dimension 1, got 9");
}

// One of its weights was changed.
void damaged(const std::string& path) {
  plait::Package p = plait::Package::load(path);
  const at::Tensor x = at::ones({3, 4});
  const char* want = "damaged section 'weights': its checksum is wrong";
  for (int n = 0; n < 2; ++n) refuses<plait::PackageError>([&] { p.run({x}); }, want);
  refuses<plait::PackageError>([&] { p.weights(); }, want);
  refuses<plait::PackageError>([&] { p.set_weight("w", x); }, want);
  refuses<plait::PackageError>([&] { p.verify(); }, want);
  p = plait::Package::load(path, {"", "", false});
  p.verify();
  REQUIRE(p.run({x})[0].sum().item<float>() != 12 * 6.f);
}
}  // namespace

int main(int, char** argv) {
  const std::string path = argv[1];
  plait::Package p = plait::Package::load(path);
  REQUIRE(dlsym(RTLD_DEFAULT, "Py_IsInitialized") == nullptr);

  REQUIRE(p.inputs().size() == 1 && p.inputs()[0].name == "x" && p.inputs()[0].dtype == at::kFloat);
  REQUIRE(p.inputs()[0].device == "cpu" && p.inputs()[0].sizes.size() == 2);
  const plait::Package::Size rows = p.inputs()[0].sizes[0], columns = p.inputs()[0].sizes[1];
  REQUIRE(rows.symbol == "s0" && rows.lowest == 1 && rows.highest == 3);
  REQUIRE(columns.symbol.empty() && columns.lowest == 4 && columns.highest == 4);
  REQUIRE(p.outputs() == (std::vector<std::string>{"sum", "rows", "first", "nothing", "half"}));
  REQUIRE(p.machine() == "portable");
  REQUIRE(p.weights().size() == 1 && p.weights()[0].first == "w" &&
          p.weights()[0].second.sizes() == at::IntArrayRef({3, 4}));

  const at::Tensor x = at::ones({2, 4});
  const std::vector<at::Tensor> out = p.run({x});
  REQUIRE(out.size() == 5 && out[0].equal(at::full({2, 4}, 6.f)));
  REQUIRE(out[1].dim() == 0 && out[1].item<int64_t>() == 2);
  REQUIRE(out[2].is_alias_of(x) && out[2].sizes() == at::IntArrayRef({2}));  // a view of the input
  REQUIRE(!out[3].defined());
  REQUIRE(out[4].item<double>() == 0.5);

  using plait::InputError, plait::PackageError;
  refuses<InputError>([&] { p.run({x, x}); }, "expected 1 inputs, got 2");
  refuses<InputError>([&] { p.run({at::Tensor()}); },
                      "input 'x': expected a tensor, got an undefined tensor");
  refuses<InputError>([&] { p.run({at::ones({4, 4})}); },
                      "expected size at most 3 (s0) in dimension 0, got 4");
  refuses<InputError>([&] { p.run({x.to(at::kDouble)}); },
                      "input 'x': expected dtype float32, got float64");
  refuses<PackageError>([&] { plait::Package::load(path + "x"); }, "cannot be opened");
  refuses<PackageError>([&] { plait::Package::load(path, {"cuda:0", "", true}); },
                        "made for the CPU");
  refuses<PackageError>([&] { plait::Package::load(path, {"", "avx512+sm_90", true}); },
                        "nothing for the machine");

  const plait::Package other = plait::Package::load(path), same = p;
  p.set_weight("w", at::full({3, 4}, 10.f));
  REQUIRE(p.run({x})[0].equal(at::full({2, 4}, 11.f)) &&
          same.run({x})[0].equal(at::full({2, 4}, 11.f)));
  REQUIRE(other.run({x})[0].equal(at::full({2, 4}, 6.f)));
  refuses<PackageError>([&] { p.set_weight("v", x); }, "weight 'v' does not exist");
  refuses<PackageError>([&] { p.set_weight("old", x); }, "weight 'old' cannot be changed");
  refuses<PackageError>([&] { p.set_weight("w", x); },
                        "weight 'w' is float32 with sizes [3, 4], and cannot be set to");

  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      const at::Tensor mine = at::full({1 + t % 3, 4}, static_cast<float>(t));
      const at::Tensor want = at::full({1 + t % 3, 4}, static_cast<float>(t + 10));
      for (int n = 0; n < 2000; ++n) wrong += !p.run({mine})[0].equal(want);
    });
  for (std::thread& t : threads) t.join();
  REQUIRE(wrong == 0);
  mixed(argv[2]);
  strided(argv[3]);
  damaged(argv[4]);
  std::printf("ok\n");
}
