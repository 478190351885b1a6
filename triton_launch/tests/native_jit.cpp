// triton_launch/tests/native_jit.cpp: kernels that a provider of its own makes, launched through
// whichever libcuda is found. Prints what it asks of the provider and what goes wrong; the driver
// writes down the rest.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <thread>

#include <plait/triton.h>

#include "core/cuda.h"

using namespace plait::triton;
using plait::arg, plait::constexpr_, plait::constexpr_value;

namespace {
std::atomic<size_t> n_allocations{};
}
void* operator new(size_t n) {
  ++n_allocations;
  if (void* p = std::malloc(n)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {
// "Compiles" to what the fake driver takes for a kernel with parameters of these types.
class Fake : public Provider {
 public:
  explicit Fake(std::map<std::string, std::string> signatures, bool quiet = false)
      : signatures_(std::move(signatures)), quiet_(quiet) {}

  std::string describe(const std::string&, const std::string& function) override {
    const auto found = signatures_.find(function);
    if (found == signatures_.end()) throw Error("there is none", function);
    return found->second;
  }

  Binary compile(const Request& r) override {
    const std::scoped_lock lock(mutex_);
    ++n_compiled[r.function + r.specialization];
    if (!quiet_)
      std::printf("%s %s [%s] sm_%d\n", r.function.c_str(), r.specialization.c_str(),
                  r.options.c_str(), r.capability);
    Binary made = facts;
    if (const size_t at = r.options.find("num_warps="); at != std::string::npos)
      made.num_warps = static_cast<uint32_t>(std::atoi(&r.options[at + 10]));
    if (made.num_warps == 3) throw Refused("three", r.function, r.specialization);
    made.symbol = r.function;
    made.image = sizes(r.specialization);
    made.image = r.function + made.image;
    return made;
  }

  std::string evaluate(const Question& q) override {
    const std::scoped_lock lock(mutex_);
    ++n_asked[q.function + q.kind];
    if (!quiet_)
      std::printf("asked %s %s %s\n", q.function.c_str(), q.kind.c_str(), q.arguments.c_str());
    return answer ? answer(q) : Provider::evaluate(q);
  }

  std::function<std::string(const Question&)> answer;
  std::map<std::string, int> n_asked;
  Binary facts;
  int wrong = 0;  // bytes to add to the first parameter
  std::map<std::string, int> n_compiled;

 private:
  std::string sizes(const std::string& text) const {
    static const std::map<std::string, int> of = {
        {"u1", 1},  {"i8", 1},  {"u8", 1},   {"i16", 2}, {"u16", 2}, {"fp16", 2}, {"bf16", 2},
        {"i32", 4}, {"u32", 4}, {"fp32", 4}, {"i64", 8}, {"u64", 8}, {"fp64", 8}};
    std::string list, item;
    int n = 0, depth = 0;  // depth: in a constant's parentheses
    for (const char c : text + ",") {
      if (item.starts_with("=")) {
        depth += (c == '(') - (c == ')');
        if (depth >= 0 && (depth > 0 || c != ',')) continue;
        depth = 0;
      }
      if (c != ',' && c != '(' && c != ')') {
        item += c;
        continue;
      }
      const std::string type = item.substr(0, item.find(':'));
      item.clear();
      if (type.empty() || type[0] == '=') continue;
      const int bytes = type[0] == '*' ? 8 : of.at(type);
      list += " " + std::to_string(bytes + (n == 0 ? wrong : 0));
      ++n;
    }
    return " " + std::to_string(n + 2) + " 0" + list;
  }

  std::map<std::string, std::string> signatures_;
  const bool quiet_;
  std::mutex mutex_;
};

template <class F>
void expect_error(F f) {
  try {
    f();
    std::printf("no error\n");
  } catch (const Error& e) {
    std::printf("error: %s [%s] %d\n", e.what(), e.kernel.c_str(), e.argument);
  }
}

Stream stream(size_t n) { return reinterpret_cast<Stream>(n); }
template <class T>
T* at(size_t n) {
  return reinterpret_cast<T*>(n);
}

struct DLTensor {
  void* data;
  struct {
    int device_type, id;
  } device;
  int ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

const Scratch heap{[](void*, size_t n, size_t, Stream) { return std::calloc(1, n); },
                   [](void*, void* memory, Stream) { std::free(memory); }};

void kinds() {
  const auto fake = std::make_shared<Fake>(std::map<std::string, std::string>{
      {"none", ""},
      {"one", "num_warps=4\nx|||"},
      {"four", "num_warps=4\na|||\nb|||\nc|||\nd|||"},
      {"typed", "\nh|fp16||\nb|bf16||\nd|fp64||\ni|i8||\np|*fp32||"},
      {"defaults", "\nx|||\nn|||16\ne|fp64||0.5\nB||c|1024\nt|||(3,(1,2.5))\nz|||None"},
      {"constants", "\nx|||\ns||c|\nd||c|\nt||c|\nf||c|\nB||c|64"},
      {"opaque", "\nx|||?"},
  });
  const auto get = [&](const char* name) { return from_pack(fake, name); };
  get("none")[{5}]();
  const Kernel one = get("one"), four = get("four");
  // Each type once; what a type says again is launched, not compiled.
  one[{1}](at<float>(16));
  one[{1}](at<const float>(8));
  one[{1}](Pointer{at<void>(32), DType::fp8e5});
  const DLTensor tensor{at<void>(64), {2, 0}, 0, {4, 16, 1}, nullptr, nullptr, 2};
  one[{1}](tensor);
  one[{1}](&tensor);
  one[{1}](int8_t{-3});
  one[{1}](uint16_t{65535});
  one[{1}](1);
  one[{1}](1LL);
  one[{1}](int64_t{1} << 40);
  one[{1}](uint64_t{1} << 63);
  one[{1}](uint32_t{3000000000});
  one[{1}](1.0);
  one[{1}](2.0f);
  one[{1}](true);
  one[{1}](nullptr);
  one[{1}](std::optional<int>(5));
  one[{1}](std::optional<int>());
  one[{1}](std::tuple{at<int>(16), std::tuple{2.0, 7}, std::pair{1, false}});
  one[{1}](constexpr_<true>);
  one[{1}](constexpr_<7>);
  one[{1}](constexpr_value(std::string("a b")));
  // Words by name; the values of one key may change.
  for (int k = 2; k < 4; ++k)
    four[{1}](k, arg<"d"> = 1.5f * k, arg<"b"> = at<bool>(16 * k), arg<"c"> = 5 * k);
  // What a parameter is annotated as.
  const Kernel typed = get("typed");
  typed[{1}](1.0, 1.0f, 0.1, -5, nullptr);
  typed[{1}](65504.0, 3, 7, 1, at<float>(48));
  typed[{1}](0x1p-24, -2.0, 1.0f, true, at<float>(52));
  typed[{1}](true, 1e-3, false, 16, at<double>(64));
  const Kernel defaults = get("defaults");
  defaults[{1}](2);
  defaults[{1}](2, arg<"B"> = 64, arg<"n"> = 1);
  const Kernel constants = get("constants");
  for (const char* s : {"ieee", "tf32", "ieee"})
    constants[{1}](2.5, s, DType::fp16, std::tuple{1, nullptr, "x"}, 0.5f);
  constants[{1}](2.5, std::string_view("tf32"), DType::i8, std::tuple{1, nullptr, std::string("x")},
                 1.5f, 32);

  expect_error([&] { get("nowhere")[{1}](1); });
  expect_error([&] { one[{1}](); });
  expect_error([&] { one[{1}](1, 2); });
  expect_error([&] { one[{1}](arg<"y"> = 1); });
  expect_error([&] { one[{1}](1, arg<"x"> = 1); });
  expect_error([&] { one[{1}]("text"); });
  expect_error([&] { typed[{1}](at<int>(16), 1, 1, 1, nullptr); });
  expect_error([&] { typed[{1}](1, 1, 1, 128, nullptr); });
  expect_error([&] { typed[{1}](1, 1, 1, 1.0, nullptr); });
  expect_error([&] { constants[{1}](1, at<int>(1), 1, 1, 1); });
  expect_error([&] { get("opaque")[{1}](); });
  expect_error([&] { one[{1}](DLTensor{nullptr, {2, 0}, 0, {5, 64, 1}, nullptr, nullptr, 0}); });
  one[{1}](DLTensor{nullptr, {3, 0}, 0, {2, 32, 1}, nullptr, nullptr, 0});
  const DLTensor on_host{nullptr, {1, 0}, 0, {2, 32, 1}, nullptr, nullptr, 0};
  expect_error([&] { one[{1}](on_host); });
  expect_error([&] { one[{1}](std::tuple{1, on_host}); });
  expect_error([&] { typed[{1}](1, 1, 1, 1, on_host); });
  expect_error([&] { constants[{1}](1, "ieee", static_cast<DType>(0), 1, 1); });
  const char* none = nullptr;
  constants[{1}](2.5, none, DType::fp16, 2, 0.5f);
}

void launches() {
  const auto fake = std::make_shared<Fake>(
      std::map<std::string, std::string>{{"k", "num_ctas=1;num_stages=3;num_warps=4\nx|||"},
                                         {"big", "\nx|||"},
                                         {"scratch", "\nx|||"},
                                         {"late", "\nx|||"},
                                         {"wrong", "\nx|||"}});
  const Kernel k = from_pack(fake, "k");
  k[{0}](16);  // nothing is launched, nothing compiled
  k[{3, -1}](16);
  k[{7, 5, 3}](16);
  const auto* others = option_set({{"maxnreg_b", 3}, {"enable_fp_fusion", false}, {"a", "b c"}});
  k[{{7, 5},
     stream(9),
     {.num_warps = 8,
      .num_stages = 2,
      .maxnreg = 64,
      .cooperative = true,
      .pdl = true,
      .others = others}}](16);
  k[{2, stream(9), {.num_warps = 4, .num_ctas = 1}}](16);  // as it would be without
  k[{2, stream(9), {.num_warps = 8}}](16);
  const auto* twice = option_set({{"num_warps", 4}});
  expect_error([&] { k[{1, nullptr, {.num_warps = 8, .others = twice}}](16); });
  expect_error([&] { k[{int64_t{1} << 31}](16); });
  expect_error([&] { k[{1, 65536}](16); });
  expect_error([&] { k[{size_t{2} - 3}](16); });
  expect_error([&] { k[{1, stream(13)}](16); });
  const Bound bound = k.bind({4, 2}, 32);
  bound(stream(5));
  bound(nullptr);
  k.bind({0}, 32)(nullptr);
  expect_error([&] { k.bind({1}, 1.5)(stream(13)); });

  fake->facts.num_ctas = 16;
  fake->facts.num_warps = 12;
  fake->facts.shared = 100000;
  fake->facts.cooperative = fake->facts.pdl = true;
  from_pack(fake, "big")[{3}](16);
  fake->facts = {};

  fake->facts.global_scratch = 100;
  fake->facts.global_alignment = 128;
  fake->facts.profile_scratch = 10;
  fake->facts.num_ctas = 2;
  const Kernel scratch = from_pack(fake, "scratch");
  const Bound with_scratch = scratch.bind({3, 2}, 16);
  with_scratch(stream(6));
  static const Scratch own{[](void*, size_t nbytes, size_t alignment, Stream s) {
                             std::printf("allocate %zu by %zu on %zu\n", nbytes, alignment,
                                         size_t(s));
                             return reinterpret_cast<void*>(0x800);
                           },
                           [](void*, void* memory, Stream) { std::printf("free %p\n", memory); }};
  set_scratch(&own);
  scratch[{1, stream(7)}](16);
  static const Scratch empty{
      [](void*, size_t, size_t, Stream) { return static_cast<void*>(nullptr); }, nullptr};
  set_scratch(&empty);
  expect_error([&] { scratch[{1}](16); });
  set_scratch(nullptr);
  fake->facts = {};

  static int n = 0;
  static const Hooks hooks{
      [](void* user, const Launched& l) {
        ++*static_cast<int*>(user);
        std::printf("enter %s %s %s warps %u grid %d on %zu\n", std::string(l.kernel).c_str(),
                    std::string(l.symbol).c_str(), std::string(l.specialization).c_str(),
                    l.num_warps, int(l.grid.x), size_t(l.stream));
      },
      [](void* user, const Launched&) { std::printf("exit %d\n", *static_cast<int*>(user)); }, &n};
  set_hooks(&hooks);
  k[{3, stream(9)}](16);
  bound(stream(8));
  set_hooks(nullptr);
  bound(stream(8));

  const Kernel late = from_pack(fake, "late");
  expect_error([&] { late[{1, stream(17)}](2); });  // stream 17 is being captured
  late[{1, stream(5)}](2);
  late[{1, stream(17)}](3);
  expect_error([&] { late[{1, stream(17)}](16); });
  fake->wrong = 4;
  expect_error([&] { from_pack(fake, "wrong")[{1}](2); });
}

// Arguments of bound launches that change, nodes of graphs, kernels that are prepared.
void bound() {
  const auto fake = std::make_shared<Fake>(
      std::map<std::string, std::string>{{"k", "num_warps=4\nx|||\nt|||\nn|||\nh|fp16||\nB||c|"},
                                         {"scratch", "\nx|||"},
                                         {"big", "\nx|||"},
                                         {"p", "\nx|||\ny|||\nn|||\nm||s|\nB||c|"},
                                         {"h", "\nn|||\nB||c|\n@heuristics|B"}});
  const Kernel k = from_pack(fake, "k");
  auto b = k.bind({[](const Meta& m) { return m["n"] - m["B"]; }}, at<float>(16),
                  std::tuple{5, at<float>(32)}, arg<"n"> = 7, arg<"B"> = constexpr_value(2),
                  arg<"h"> = 0.5);
  b(stream(1));
  b.set<0>(at<const float>(64));
  b.set<4>(3.0);  // the fifth that was given, whose words are converted
  fake->wrong = 4;
  expect_error([&] { b.set<0>(at<int8_t>(64)); });
  fake->wrong = 0;
  b(stream(2));  // as if that had not been
  b.set<1>(std::tuple{6, at<float>(48)});
  b(stream(3));
  b.set<0>(at<int>(8));  // another type, and not aligned
  b(stream(4));
  b.set<2>(16LL);
  b.set<3>(constexpr_value(16));
  b(stream(5));  // the grid is empty now
  b.set<3>(constexpr_value(4));
  b(stream(6));
  auto nothing = k.bind({0}, nullptr, nullptr, 1, 1.5, 1);
  nothing.set<2>(5);
  nothing(stream(7));
  expect_error([&] { nothing.add_to(nullptr); });

  const auto graph = reinterpret_cast<CUgraph_st*>(9);
  const auto exec = reinterpret_cast<CUgraphExec_st*>(11);
  CUgraphNode_st* before[] = {reinterpret_cast<CUgraphNode_st*>(5)};
  fake->facts.num_ctas = 2;
  fake->facts.cooperative = true;
  auto big = from_pack(fake, "big").bind({3}, 32);
  CUgraphNode_st* node = big.add_to(graph, before);
  big.set<0>(48);
  big.update(exec, node);
  fake->facts = {};
  fake->facts.global_scratch = 8;
  expect_error([&] { from_pack(fake, "scratch").bind({3}, 32).add_to(graph); });
  fake->facts = {};

  count_hits(true);
  const Stats first = stats();
  const Kernel p = from_pack(fake, "p");
  using plait::vary;
  std::printf("%zu kernels\n",
              p.prepare({1}, vary(at<float>(16)), at<float>(16), vary(100), vary(100), 64));
  p[{1}](at<float>(4), at<float>(16), 1, 1, 64);
  p[{1}](at<float>(4), at<float>(16), 2, 16, 64);
  p[{1, stream(17)}](at<float>(4), at<float>(16), 3, 16, 64);  // is being captured
  const Stats last = stats();
  std::printf("%zu hits %zu misses %zu compiled %zu loaded: %s\n", last.hits - first.hits,
              last.misses - first.misses, last.compiled - first.compiled,
              last.loaded - first.loaded, last.last_miss.c_str());
  expect_error([&] {
    p.prepare({1}, std::tuple{vary(1), vary(1), vary(1), vary(1), vary(1), vary(1)}, 1, 1, 1, 1);
  });
  fake->answer = [](const Question&) { return "n\nB=5"; };
  const Kernel h = from_pack(fake, "h");
  h[{1}](5);
  expect_error([&] { h.prepare({1}, vary(5)); });
}

// @triton.autotune and @triton.heuristics: who is asked what, what is timed, what is part of a key.
void decorated() {
  const auto fake = std::make_shared<Fake>(std::map<std::string, std::string>{
      {"tuned",
       "num_ctas=1;num_stages=3;num_warps=4\nx|*fp32||\nn|||\nm|||\nB||c|\n#source\n@autotune|n|||"
       "\n"
       "+B=64;num_warps=4\n+B=16;num_warps=8\n+B=32;num_warps=8;maxnreg=64\n+B=8;num_warps=3\n"
       "+B=128;num_warps=64"},
      {"heuristic",
       "num_warps=4\nx|||\nn|||\nB||c|\nE||c|\n@heuristics|B,num_warps\n@heuristics|E"},
      {"both",
       "num_warps=4\nx|||\nn|||\nB||c|\nE||c|\n@autotune|n,gone|x||p\n+B=1\n+B=2\n@heuristics|E"},
      {"outer",
       "num_warps=4\nx|||\nB||c|\nE||c|\n@heuristics|E\n@autotune|E||x|\n+B=1;num_warps=2\n+B=2;"
       "num_warps=8"},
      {"single", "num_warps=4\nx|||\nB||c|\n@autotune|x|||p\n+B=7;num_warps=2"},
      {"packed",
       "num_warps=4\nn|||\nB||c|\n@autotune|n|||\n+B=7\n+B=8\n"
       ">tuned0 n=5;@types=();@gpu='Fake%20GPU' -> B=8"},
  });
  const auto get = [&](const char* name) { return from_pack(fake, name); };
  const auto grid = [](int n) { return [n](const Meta& meta) { return cdiv(n, meta["B"]); }; };
  const Kernel tuned = get("tuned");
  // Is being captured.
  expect_error([&] { tuned[{grid(128), stream(17)}](at<float>(16), 128, 5); });
  tuned[{grid(128), stream(5)}](at<float>(16), 128, 5);
  tuned[{grid(128), stream(17)}](at<float>(16), 128, 5);
  tuned[{grid(128), stream(5)}](at<float>(16), 128, 6);
  // Triton's key has the dtype, annotated or not.
  tuned[{grid(128), stream(5)}](at<double>(16), 128, 6);
  tuned[{grid(256), stream(5)}](at<float>(16), 256, 5);
  tuned[{grid(0), stream(5)}](at<float>(16), 128, 5);  // empty for whatever is chosen
  const Bound bound = tuned.bind({grid(256)}, at<float>(16), 256, 5);
  bound(stream(5));
  expect_error([&] { tuned[{1}](at<float>(16), 128, 5, 64); });
  expect_error([&] { tuned[{1, nullptr, {.num_warps = 8}}](at<float>(16), 128, 5); });
  expect_error([&] { tuned[{[](const Meta& m) { return m["x"]; }}](at<float>(16), 128, 5); });
  expect_error([&] { tuned[{[](const Meta& m) { return m["y"]; }}](at<float>(16), 128, 5); });

  fake->answer = [](const Question& q) {
    const bool is_big = q.arguments.find("n=1;") == std::string::npos;
    if (q.function == "heuristic" && q.kind == "heuristics0")
      return is_big ? "n\nB=8;num_warps=8" : "n,x\nB=1;num_warps=1";
    if (q.function == "heuristic") return "B,none\nE=True";
    if (q.kind == "pruned0") return "n,@types,@gpu\nB=2;num_warps=1|B=4;num_warps=8";
    if (q.function == "both")
      return q.arguments.find("B=2") == std::string::npos ? "B\nE=0.5" : "B,x\nE=None";
    return "x\nE=(1,fp16)";
  };
  const Kernel heuristic = get("heuristic");
  for (const int n : {16, 32, 16, 1, 1})
    heuristic[{[](const Meta& m) { return m["B"] + m["E"] + m["n"]; }}](at<float>(16), n);
  heuristic[{1}](at<double>(16), 1);
  heuristic[{1}](at<int>(16), 16);
  heuristic[{1}](arg<"n"> = 16, arg<"x"> = std::pair{nullptr, at<float>(48)});
  const Kernel both = get("both");
  // It is to be reset, its length unknown.
  expect_error([&] { both[{grid(8)}](at<float>(16), 3); });
  both[{grid(8)}](Pointer{at<float>(16), DType::fp32, 40}, 3);
  both[{grid(8)}](at<float>(16), 3);
  set_scratch(&heap);
  float values[4] = {1, 2, 3, 4};
  int64_t shape[] = {2, 2}, strides[] = {1, 2}, wide[] = {1, 4};
  DLTensor tensor{values, {2, 0}, 2, {2, 32, 1}, shape, wide, 0};
  const Kernel outer = get("outer");
  expect_error([&] { outer[{8}](tensor); });
  tensor.strides = strides;
  outer[{8}](&tensor);
  outer[{8}](arg<"x"> = std::optional(tensor));
  set_scratch(nullptr);
  get("single")[{1}](at<float>(32));

  static const Tuning first{Miss::first}, none{Miss::error};
  set_tuning(&first);
  tuned[{grid(64), stream(5)}](at<float>(16), 64, 5);
  set_tuning(&none);
  expect_error([&] { tuned[{1}](at<float>(16), 65, 5); });
  get("packed")[{1}](5);
  expect_error([&] { get("packed")[{1}](6); });
  set_tuning(nullptr);
  fake->answer = nullptr;
  expect_error([&] { heuristic[{1}](at<float>(16), 17); });
  std::vector<std::string> list = signatures();
  for (const std::string& s : list) std::printf("%s\n", s.c_str());
}

// Two contexts, as two GPUs have: one compilation, a handle each. Stale ones are refused by the
// driver.
void contexts() {
  const auto fake = std::make_shared<Fake>(std::map<std::string, std::string>{{"k", "\nx|||"}});
  const auto& driver = plait::cuda::Driver::machine();
  const Kernel k = from_pack(fake, "k");
  const auto enter = [&](int device) {
    void* context = nullptr;
    driver.retain_context(&context, device);
    driver.set_context(context);
    return context;
  };
  for (const int device : {3, 5, 3}) {
    enter(device);
    k[{1}](16);
    k.bind({1}, 32)(nullptr);
  }
  // What is bound gives a thread without a context its own, and refuses another one.
  void* const own = enter(5);
  auto bound = k.bind({1}, 48);
  const auto in_thread = [&](auto f) {
    std::thread([&] {
      f();
      void* context = nullptr;
      driver.current_context(&context);
      if (context != own) std::printf("another context\n");
    }).join();
  };
  const auto graph = reinterpret_cast<CUgraph_st*>(9);
  in_thread([&] { bound(nullptr); });
  in_thread([&] { bound.set<0>(80); });
  in_thread([&] { bound(nullptr); });
  in_thread([&] { bound.add_to(graph); });
  in_thread([&] {
    bound.update(reinterpret_cast<CUgraphExec_st*>(11), reinterpret_cast<CUgraphNode_st*>(77));
  });
  enter(3);
  expect_error([&] { bound(nullptr); });
  expect_error([&] { bound.set<0>(96); });
  expect_error([&] { bound.add_to(graph); });
  enter(5);
  bound(nullptr);
}

// A cold start of many threads: each key is compiled once, each launch is right.
void threads() {
  std::map<std::string, std::string> signatures;
  for (const char* name : {"a", "b", "c"}) signatures[name] = "\nx|||\nn|||\nB||c|";
  for (const char* name : {"d", "e"})
    signatures[name] =
        "num_warps=4\nx|||\nn|||\nB||c|\nE||c|\n#s\n@autotune|n|||\n+B=1\n+B=2;num_warps=8\n@"
        "heuristics|E";
  const auto fake = std::make_shared<Fake>(signatures, true);
  fake->answer = [](const Question& q) {
    return q.arguments.find("n=1") == std::string::npos ? "n\nE=1" : "n,B\nE=2";
  };
  std::vector<std::thread> all;
  for (int t = 0; t < 8; ++t)
    all.emplace_back([&, t] {
      for (int k = 0; k < 60; ++k)
        for (const char* name : {"a", "b", "c"}) {
          const Kernel kernel = from_pack(fake, name);
          kernel[{1, stream(5)}](at<float>(16), (k + t) % 17, (k * t) % 5);
          kernel.bind({1}, at<float>(8), k % 3, 64)(stream(5));
        }
      for (int k = 0; k < 60; ++k)
        for (const char* name : {"d", "e"})
          from_pack(fake, name)[{[](const Meta& m) { return m["B"]; }, stream(6)}](at<float>(16),
                                                                                   (k + t) % 7);
    });
  for (std::thread& t : all) t.join();
  for (const auto& [key, n] : fake->n_compiled)
    if (n != 1) std::printf("%s was compiled %d times\n", key.c_str(), n);
  for (const auto& [key, n] : fake->n_asked) std::printf("%s was asked %d times\n", key.c_str(), n);
  std::printf("%zu kernels, %zu keys tuned\n", fake->n_compiled.size(), stats().tuned);
}

// What is known is launched without memory of the heap: one key after another, keys that take
// turns, bound.
void hits() {
  const auto fake = std::make_shared<Fake>(
      std::map<std::string, std::string>{
          {"a", "\nx|||\nn|||\ns||c|"},
          {"b", "\nx|||\nh|fp16||\ns||c|"},
          {"c", "\nn|||\nB||c|\nE||c|\n@heuristics|E\n@autotune|n|||\n+B=1\n+B=2"}},
      true);
  const Kernel a = from_pack(fake, "a"), b = from_pack(fake, "b"), c = from_pack(fake, "c");
  fake->answer = [](const Question&) { return "n\nE=3"; };
  const Bound bound =
      a.bind({1}, at<float>(16), 3, "text of some length, which no small string holds");
  for (int round = 0; round < 2; ++round) {
    const size_t before = n_allocations;
    for (int k = 0; k < 40; ++k) {
      for (const Kernel& kernel : {a, b})
        kernel[{1, stream(5), {.num_warps = 8}}](
            at<float>(16), k % 4, "text of some length, which no small string holds");
      a[{1}](at<float>(4), std::tuple{k, nullptr, 1.5}, plait::constexpr_value(k % 5));
      bound(stream(5));
      c[{[](const Meta& m) { return m["B"] + m["E"]; }, stream(5)}](k % 7);
    }
    std::printf("%zu allocations\n", n_allocations - before);
  }
}

// Kernels of a user: argv is python, the file of functions, and a pack of some of them.
void real(char** argv) {
  const auto python = worker(argv[0]);
  const Kernel add = jit(argv[1], "add_kernel", python);
  add[{2}](at<float>(16), at<float>(32), at<float>(48), 100, constexpr_<1024>);
  add[{{2}, nullptr, {.num_warps = 8}}](at<float>(16), at<float>(32), at<float>(48), 1);
  const Kernel all = jit(argv[1], "all_kinds", python);
  all[{2}](at<int8_t>(16), std::tuple{2.0, 5, nullptr}, true, DType::fp16, "ieee", std::tuple{1, 2},
           0.5, 3.25);
  jit(argv[1], "applies", python)[{1}](at<float>(16), Callee{"twice"});
  std::FILE* list = std::fopen((std::string(argv[2]) + ".list").c_str(), "w");
  for (const std::string& s : signatures()) std::fprintf(list, "%s\n", s.c_str());
  std::fclose(list);
  expect_error([&] { jit(argv[1], "applies", python)[{1}](at<float>(16), Callee{"thrice"}); });
  expect_error([&] { jit(argv[1], "nothing", python)[{1}](1); });
  expect_error([&] { jit(argv[1], "not_jit", python)[{1}](1); });
  expect_error([&] { jit(argv[1], "wrong", python)[{1}](at<float>(16)); });
  expect_error([&] {
    add[{{1}, nullptr, {.others = option_set({{"colour", 3}})}}](at<float>(16), nullptr, nullptr,
                                                                 1);
  });
  expect_error([&] { jit("/nowhere.py", "add_kernel", python)[{1}](1); });
  expect_error([&] { jit(argv[1], "add_kernel", worker("/nowhere/python"))[{1}](1); });
  expect_error([&] { jit(argv[1], "add_kernel", worker("/bin/false"))[{1}](1); });
  std::fflush(stdout);
  if (const pid_t child = fork(); child == 0) {  // it speaks to a process of its own
    add[{2}](at<float>(16), at<float>(32), at<float>(48), 16, constexpr_<1024>);
    _exit(0);
  } else {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) std::printf("a forked process ended with %d\n", status);
  }
  const Kernel packed = from_pack(argv[2], "add_kernel");
  packed[{{2}, nullptr, {.num_warps = 4}}](at<float>(16), at<float>(32), at<float>(48), 100);
  packed[{{2}, nullptr, {.num_warps = 8}}](at<float>(16), at<float>(32), at<float>(48), 160, 512);
  expect_error([&] { packed[{2}](at<float>(16), at<float>(32), at<float>(48), 160); });
  expect_error([&] { from_pack(argv[2], "other")[{2}](1); });
  expect_error([&] { open_pack(argv[1]); });
}
// Tensor descriptors of a user's kernels: argv is python and the file.
void descriptors(char** argv) {
  const Kernel copy = jit(argv[1], "copy", worker(argv[0]));
  int64_t shape[] = {100, 64}, strides[] = {80, 1};
  const DLTensor tensor{at<void>(4096), {2, 0}, 2, {2, 16, 1}, shape, strides, 16};
  const auto x = descriptor(tensor, {16, 32});
  const TensorDescriptor out{at<void>(8192), DType::fp16, {7, 3, 128},
                             {512, 128, 1},  {1, 1, 64},  Padding::nan};
  copy[{1, stream(5)}](x, out, at<int64_t>(64));
  const Bound bound = copy.bind({2}, x, out, at<int64_t>(64));
  bound(stream(6));
  bound(stream(7));
  const TensorDescriptor flat{at<void>(16), DType::fp8e5, std::array{1000}, std::array{1}, {256}};
  copy[{1, stream(5)}](flat, flat, at<int64_t>(64));

  const auto with = [&](auto change) {
    TensorDescriptor bad = x;
    change(bad);
    expect_error([&] { copy[{1, stream(5)}](bad, out, at<int64_t>(64)); });
  };
  with([](auto& d) { d.base = at<void>(8); });
  with([](auto& d) { d.strides.at[0] = 81; });
  with([](auto& d) { d.strides.at[1] = 2; });
  with([](auto& d) { d.shape.at[1] = 0; });
  with([](auto& d) { d.block_shape.at[1] = 24; });
  with([](auto& d) { d.block_shape.at[1] = 1 << 20; });
  with([](auto& d) { d.shape.rank = 1; });
  with([](auto& d) { d.shape = d.strides = d.block_shape = {1, 1, 1, 1, 1, 1}; });
  with([](auto& d) {
    d.dtype = DType::i16;
    d.padding = Padding::nan;
  });
  expect_error([&] { copy[{1}](std::tuple{x}, out, at<int64_t>(64)); });
  expect_error([&] { copy[{1}](plait::constexpr_value(x), out, at<int64_t>(64)); });
}

// Kernels from the Python of this process, which is argv[0]'s library; by a thread that has its
// lock and by threads that want it. Then from a process, two at once: each waits for the other.
void python(char** argv) {
  expect_error([&] { jit(argv[1], "add_kernel", embedded())[{1}](1); });
  void* library = dlopen(argv[0], RTLD_NOW | RTLD_GLOBAL);
  reinterpret_cast<void (*)(int)>(dlsym(library, "Py_InitializeEx"))(0);
  const auto add = [&](int n) {
    jit(argv[1], "add_kernel", embedded())[{2, stream(5)}](at<float>(16), at<float>(32),
                                                           at<float>(48), n);
  };
  std::vector<std::thread> all;
  for (int t = 0; t < 4; ++t) all.emplace_back(add, t % 2 + 1);
  reinterpret_cast<void* (*)()>(dlsym(library, "PyEval_SaveThread"))();
  const int had = reinterpret_cast<int (*)()>(dlsym(library, "PyGILState_Ensure"))();
  add(2);
  expect_error([&] { jit(argv[1], "wrong", embedded())[{1}](at<float>(16)); });
  expect_error([&] { jit("/nowhere.py", "wrong", embedded())[{1}](at<float>(16)); });
  reinterpret_cast<void (*)(int)>(dlsym(library, "PyGILState_Release"))(had);
  for (std::thread& t : all) t.join();

  all.clear();
  for (const char* name : {"meets_a", "meets_b"})
    all.emplace_back(
        [&, name] { jit(argv[1], name, worker(argv[2]))[{1, stream(6)}](at<int>(16)); });
  for (std::thread& t : all) t.join();
}

// What decorators of a user's file choose: argv is python, the file, and a pack or "-". Prints a
// line a call.
void chosen(char** argv) {
  static std::string last;
  static const Hooks hooks{[](void*, const Launched& l) {
    last = std::string(l.kernel) + " " + std::string(l.specialization) + " " +
           std::to_string(l.grid.x) + " " + std::to_string(l.num_warps);
  }};
  set_hooks(&hooks);
  set_scratch(&heap);
  alignas(16) static float x[64], out[64];
  const bool packed = std::string_view(argv[2]) != "-";
  for (const char* name : {"tuned", "outer", "warps", "pruned", "modelled", "kept"}) {
    const Kernel kernel = packed ? from_pack(argv[2], name) : jit(argv[1], name, worker(argv[0]));
    for (const int n : {1, 128, 1000, 2048, 128, 1}) {
      const auto grid = [&](const Meta& meta) { return cdiv(meta["n"], meta["BLOCK"]); };
      const Pointer a{x, DType::fp32, sizeof x}, b{out, DType::fp32, sizeof out};
      if (n == 128)
        kernel[{grid, stream(5)}](a, Pointer{out, DType::fp16, sizeof out}, n);
      else
        kernel[{grid, stream(5)}](a, arg<"n"> = n, arg<"out"> = b);
      std::printf("%s\n", last.c_str());
    }
  }
  if (packed) return;
  std::FILE* list = std::fopen((std::string(argv[1]) + ".list").c_str(), "w");
  for (const std::string& s : signatures()) std::fprintf(list, "%s\n", s.c_str());
  std::fclose(list);
  for (const char* name : {"hooked", "hooked_when_timed", "reads_shape", "refused", "clears"})
    expect_error([&] { jit(argv[1], name, worker(argv[0]))[{1}](x + 0, 5); });
  const Kernel clears = jit(argv[1], "clears", worker(argv[0]));
  const Pointer cleared{x, DType::fp32, sizeof x};
  clears[{1, stream(5)}](cleared, 5);
  auto bound = clears.bind({1}, cleared, 5);
  bound(stream(6));
  expect_error([&] { bound.set<0>(cleared); });
  expect_error([&] { bound.add_to(nullptr); });
  expect_error([&] { jit(argv[1], "all_refused", worker(argv[0]))[{1}](x + 0, 5); });
  jit(argv[1], "blocks", worker(argv[0]))[{1}](
      TensorDescriptor{x, DType::fp32, {8, 8}, {8, 1}, {1, 1}}, 5);
  std::printf("%s\n", last.c_str());
}

// Packs that are damaged at random are refused, or launch what is still whole: argv is a pack and a
// file to write.
void damaged(char** argv) {
  std::ifstream file(argv[0], std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(file), {}};
  std::mt19937_64 random(7);
  size_t n_refused = 0;
  for (int k = 0; k < 3000; ++k) {
    std::string data = whole;
    for (size_t n = 1 + random() % 3; n > 0 && !data.empty(); --n) {
      const size_t at = random() % data.size();
      const uint64_t words[] = {
          0, 1, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 32, random() % 64, random()};
      if (random() % 8 == 0)
        data.resize(at);
      else if (random() % 2 == 0)
        data[at] = static_cast<char>(random());
      else
        std::memcpy(&data[at], &words[random() % 7], std::min<size_t>(8, data.size() - at));
    }
    std::ofstream(argv[1], std::ios::binary) << data;
    const auto launch = [&](const char* name, auto f) {
      try {
        f(from_pack(open_pack(argv[1]), name));
      } catch (const Error&) {
        ++n_refused;
      }
    };
    launch("plain", [](Kernel kernel) { kernel[{2}](at<float>(16), 100); });
    launch("tuned", [](Kernel kernel) {
      kernel[{[](const Meta& m) { return m["BLOCK"]; }}](Pointer{at<float>(16), DType::fp32, 64},
                                                         100);
    });
    const TensorDescriptor d{at<void>(64), DType::fp32, {8, 8}, {8, 1}, {8, 8}};
    launch("described", [&](Kernel kernel) { kernel[{1}](d, d); });
  }
  std::printf("%s\n", n_refused > 1000 ? "refused" : "too few are refused");
}
}  // namespace

int main(int, char** argv) {
  const std::string_view what = argv[1];
  if (what == "kinds") kinds();
  if (what == "launches") launches();
  if (what == "bound") bound();
  if (what == "decorated") decorated();
  if (what == "contexts") contexts();
  if (what == "hits") hits();
  if (what == "threads") threads();
  if (what == "real") real(argv + 2);
  if (what == "python") python(argv + 2);
  if (what == "descriptors") descriptors(argv + 2);
  if (what == "chosen") chosen(argv + 2);
  if (what == "damaged") damaged(argv + 2);
}
