// tests/fake_gpu.cpp: a GPU on the host, for what records and replays CUDA graphs.
//
// Loaded before plait's extension it is libcuda.so.1: kernels run at once or, while something is
// recorded, become nodes of a graph. With torch's headers it also gives torch memory and a few
// operators for CUDA tensors. An image is text: "symbol parameters static".
// Graphs have conditional nodes, as the kernel that decides on them knows them. Other
// kernels: "k" (x, y, n): y[i] = 2 x[i] + 1. "both" (x, y, z, n): z[i] = x[i] + y[i]. "less"
// (x, y, n, shift, note): y[i] -= x[i], of the address y << shift. All others are
// handed to the function that fake_on_launch names. aten::neg is no kernel; aten::negative is some,
// as fake_negative says.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda.h"

namespace {
using plait::cuda::CopyParams;
using plait::cuda::FillParams;
using Words = std::vector<uint64_t>;

struct Image {
  std::string symbol;
  size_t parameters;
  size_t parameter_nbytes = 8;  // 0: not known
};
struct Node {
  const Image* image = nullptr;  // a kernel
  Words words;
  CopyParams copy{};
  FillParams fill{};
  std::function<void()> call{};  // an operator's
  const Node* before = nullptr;
  std::vector<void*> addresses{};
};
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  const Node* last = nullptr;
};
std::map<uint64_t, bool> conditions;
std::vector<Graph*> outer;  // of the body that is recorded
struct Exec {
  std::vector<std::pair<const Node*, Node>> nodes;
};

Graph* recorded = nullptr;
int64_t pools = 0, limit = int64_t{1} << 40;
struct Pool {
  int64_t id, nbytes;
};
Pool shared{}, own{};  // of all recordings, and of the one that is made
Pool* active = nullptr;
bool refuses_copies = false;
int streams[10];
int pooled = 5;                // the next stream of torch's pool
int stream = 0, event_of = 0;  // the current one, and whose work an event stands for
std::string waits;
int number_of(const void* s) { return static_cast<int>(static_cast<const int*>(s) - streams); }
using OnLaunch = void (*)(const char* symbol, uint32_t x, uint32_t y, uint32_t z,
                          const uint64_t* words);
OnLaunch on_launch = nullptr;

void run(const Node& n) {
  if (n.call) return n.call();
  if (n.fill.to) {
    std::memset(n.fill.to, static_cast<int>(n.fill.value), n.fill.width);
    return;
  }
  if (!n.image) {
    std::memcpy(n.copy.to.device, n.copy.from.device, n.copy.nbytes);
    return;
  }
  const auto at = [&](size_t k) { return reinterpret_cast<float*>(n.words[k]); };
  if (n.image->symbol == "k")
    for (uint64_t i = 0; i < n.words[2]; ++i) at(1)[i] = 2 * at(0)[i] + 1;
  else if (n.image->symbol == "less") {
    auto* y = reinterpret_cast<float*>(n.words[1] << n.words[3]);
    for (uint64_t i = 0; i < n.words[2]; ++i) y[i] -= at(0)[i];
  } else
    for (uint64_t i = 0; i < n.words[3]; ++i) at(2)[i] = at(0)[i] + at(1)[i];
}
void put(Node n) {
  if (!recorded) return run(n);
  n.before = recorded->last;
  recorded->nodes.push_back(std::make_unique<Node>(std::move(n)));
  recorded->last = recorded->nodes.back().get();
}
Words words_of(const Image& image, void** parameters) {
  Words words(image.parameters);
  for (size_t k = 0; k < words.size(); ++k) std::memcpy(&words[k], parameters[k], sizeof words[k]);
  return words;
}

// Memory of a pool serves the same pool again, cut to size and joined when it is freed; of ordinary
// memory nothing that was freed keeps its values.
struct Block {
  int64_t pool, segment;
  size_t nbytes;
  char* data;
};
std::map<char*, Block> unused;
int64_t segments = 0;
// New memory follows what was given before, from a multiple of 2^32 on: recordings compare
// addresses, and see the same distances and carries in each run.
char* new_memory(size_t n) {
  constexpr uintptr_t kStep = uintptr_t{1} << 32;
  static char* next = [] {
    void* all = mmap(nullptr, 16 * kStep, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) throw std::runtime_error("no addresses for the memory of the GPU");
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(all) + kStep - 1) / kStep * kStep);
  }();
  return std::exchange(next, next + n);
}
void give_back(Block b) {
  auto next = unused.lower_bound(b.data);
  if (next != unused.end() && next->second.segment == b.segment &&
      next->first == b.data + b.nbytes) {
    b.nbytes += next->second.nbytes;
    next = unused.erase(next);
  }
  if (next != unused.begin()) {
    Block& before = std::prev(next)->second;
    if (before.segment == b.segment && before.data + before.nbytes == b.data) {
      before.nbytes += b.nbytes;
      return;
    }
  }
  unused.emplace(b.data, b);
}
struct Allocator : c10::Allocator {
  static void release(void* context) {
    const std::unique_ptr<Block> b(static_cast<Block*>(context));
    c10::reportMemoryUsageToProfiler(b->data, -static_cast<int64_t>(b->nbytes), 0, 0,
                                     {c10::kCUDA, 0});
    if (b->pool == 0) std::memset(b->data, 0xff, b->nbytes);
    give_back(*b);
  }
  c10::DataPtr allocate(size_t n) override {
    const c10::Device device(c10::kCUDA, 0);
    if (n == 0) return {nullptr, device};
    n = (n + 255) / 256 * 256;
    const int64_t pool = recorded ? active->id : 0;
    auto best = unused.end();
    for (auto it = unused.begin(); it != unused.end(); ++it)
      if (it->second.pool == pool && it->second.nbytes >= n &&
          (best == unused.end() || it->second.nbytes < best->second.nbytes))
        best = it;
    Block b;
    if (best != unused.end()) {
      b = best->second;
      unused.erase(best);
    } else {
      if (pool && own.nbytes + shared.nbytes + static_cast<int64_t>(n) > limit)
        throw std::runtime_error("CUDA out of memory");
      b = {pool, ++segments, n, new_memory(n)};
      if (pool) active->nbytes += static_cast<int64_t>(n);
    }
    if (b.nbytes > n && pool) {
      give_back({b.pool, b.segment, b.nbytes - n, b.data + n});
      b.nbytes = n;
    }
    c10::reportMemoryUsageToProfiler(b.data, static_cast<int64_t>(b.nbytes), 0, 0, device);
    return {b.data, new Block(b), release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} allocator;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &allocator)
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream numbered(int n) { return c10::Stream(c10::Stream::UNSAFE, only(), n); }
  static c10::Device only() { return {c10::kCUDA, 0}; }
  c10::Device getDevice() const override { return only(); }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Stream getStream(c10::Device) const noexcept override { return numbered(stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return numbered(pooled++);
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    return numbered(std::exchange(stream, static_cast<int>(s.id())));
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks : at::CUDAHooksInterface {  // autograd's engine asks for them
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &allocator,
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                      type.value_or(c10::kFloat)));
}
at::Tensor& neg_out(const at::Tensor& x, at::Tensor& y) {
  const auto* from = static_cast<const float*>(x.unsafeGetTensorImpl()->data());
  auto* to = static_cast<float*>(y.unsafeGetTensorImpl()->mutable_data());
  int64_t last = 0;  // of both: gaps between elements are turned, too
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  Node n;
  n.call = [from, to, k = x.numel() ? last + 1 : 0] {
    for (int64_t i = 0; i < k; ++i) to[i] = -from[i];
  };
  put(std::move(n));
  return y;
}
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  Node n;
  n.copy.from.device = const_cast<void*>(from.unsafeGetTensorImpl()->data());
  n.copy.to.device = to.unsafeGetTensorImpl()->mutable_data();
  n.copy.nbytes = from.nbytes();
  put(std::move(n));
  return to;
}
at::Tensor less(const at::Tensor& x, const at::Scalar& bound) {
  at::Tensor y = empty_strided(x.sizes(), x.strides(), c10::kBool, {}, {}, {});
  const auto* from = static_cast<const float*>(x.unsafeGetTensorImpl()->data());
  auto* to = static_cast<bool*>(y.unsafeGetTensorImpl()->mutable_data());
  Node n;
  n.call = [from, to, k = x.numel(), b = bound.toFloat()] {
    for (int64_t i = 0; i < k; ++i) to[i] = from[i] < b;
  };
  put(std::move(n));
  return y;
}
at::Scalar number_in(const at::Tensor& x) {
  if (recorded) throw std::runtime_error("a value is read while it is recorded");
  return *static_cast<const bool*>(x.unsafeGetTensorImpl()->data());
}
at::Tensor neg(const at::Tensor& x) {
  at::Tensor y = empty_strided(x.sizes(), x.strides(), c10::kFloat, {}, {}, {});
  return neg_out(x, y);
}
// An operator of kernels, whose memory and parameters are as `how` says.
enum How : int { plain, spaced, brought, numbered, packed, pointed, over_freed };
int negative_how = plain;
uint64_t number = 0;
constexpr uint64_t table = uint64_t{1} << 60;  // on the host, one may think
const Image less_image{"less", 5};
void put_less(const void* x, void* y, int64_t k, uint64_t shift = 0, uint64_t note = 0) {
  Node n;
  n.image = &less_image;
  n.words = {reinterpret_cast<uint64_t>(x), reinterpret_cast<uint64_t>(y) >> shift,
             static_cast<uint64_t>(k), shift, note};
  put(std::move(n));
}
void put_zeros(void* y, size_t nbytes) {
  Node n;
  n.fill = {y, 0, 0, 1, nbytes, 1};
  put(std::move(n));
}
at::Tensor negative(const at::Tensor& x) {
  const size_t nbytes = x.nbytes();
  const auto empty = [&] { return empty_strided(x.sizes(), x.strides(), c10::kFloat, {}, {}, {}); };
  const auto data = [](const at::Tensor& t) { return t.unsafeGetTensorImpl()->mutable_data(); };
  const void* from = x.unsafeGetTensorImpl()->data();
  at::Tensor freed = negative_how == over_freed ? empty() : at::Tensor();
  if (freed.defined()) put_zeros(data(freed), nbytes);
  freed.reset();
  at::Tensor y = empty();
  put_zeros(data(y), nbytes);
  if (negative_how == spaced) {  // y -= (0 - (0 - x))
    at::Tensor one = empty(), two = empty();
    put_zeros(data(one), nbytes), put_zeros(data(two), nbytes);
    put_less(from, data(one), x.numel());
    put_less(data(one), data(two), x.numel());
    put_less(data(two), data(y), x.numel());
    return y;
  }
  if (negative_how == brought) {
    at::Tensor one = empty();
    put_zeros(data(one), nbytes);
    put_less(from, data(one), x.numel());
    Node n;
    n.copy.from.memory_type = n.copy.to.memory_type = 2;
    n.copy.from.device = data(one), n.copy.to.device = data(y), n.copy.nbytes = nbytes;
    put(std::move(n));
    return y;
  }
  const uint64_t note = negative_how == pointed    ? table + 4096 * ++number
                        : negative_how == numbered ? 0x1e3779b97f4a7 * ++number
                                                   : 0;
  put_less(from, data(y), x.numel(), negative_how == packed ? 4 : 0, note);
  return y;
}
at::Tensor to_gpu(const at::Tensor& x) {
  at::Tensor y = empty_strided(x.sizes(), x.strides(), c10::kFloat, {}, {}, {});
  std::memcpy(y.unsafeGetTensorImpl()->mutable_data(), x.const_data_ptr(), x.nbytes());
  return y;
}
at::Tensor to_host(const at::Tensor& x) {
  at::Tensor y = at::Tensor(at::detail::empty_strided_cpu(x.sizes(), x.strides(), c10::kFloat));
  std::memcpy(y.mutable_data_ptr(), x.unsafeGetTensorImpl()->data(), x.nbytes());
  return y;
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_local_scalar_dense", number_in);
  m.impl("copy_", copy);
  m.impl("empty_strided", empty_strided);
  m.impl("lt.Scalar", less);
  m.impl("neg", neg);
  m.impl("negative", negative);
  m.impl("neg.out", neg_out);
}
TORCH_LIBRARY(fake_gpu, m) {
  m.def("to_gpu(Tensor x) -> Tensor", to_gpu);
  m.def("to_host(Tensor x) -> Tensor", to_host);
}
}  // namespace

extern "C" {
// The test's own.
void fake_begin() {
  own = {++pools, 0};
  if (shared.id == 0) shared.id = ++pools;
  active = &shared;
  recorded = new Graph;
}
void fake_keep(int kept) { active = kept ? &own : &shared; }
void fake_forget_shared() { shared = {}; }
Exec* fake_end() {
  auto* made = new Exec;
  for (const auto& n : recorded->nodes) made->nodes.emplace_back(n.get(), *n);
  recorded = nullptr;
  return made;
}
int64_t fake_own_nbytes() { return own.nbytes; }
int64_t fake_shared_nbytes() { return shared.nbytes; }
void fake_limit(int64_t nbytes) { limit = nbytes; }
void fake_on_launch(OnLaunch f) { on_launch = f; }
void fake_negative(int how) { negative_how = how; }
void fake_refuse_copies(int yes) { refuses_copies = yes != 0; }
void fake_stream(int number) { stream = number; }
// Pairs of streams since the last call, a digit each: one that waits, and what for.
const char* fake_waits() {
  static std::string said;
  said = std::exchange(waits, {});
  return said.c_str();
}

int cuInit(unsigned) { return 0; }
int cuGetErrorString(int, const char** text) {
  *text = "out of luck";
  return 0;
}
int cuCtxGetDevice(int* device) { return *device = 0; }
int cuCtxGetCurrent(void** context) {
  *context = &pools;
  return 0;
}
int cuDevicePrimaryCtxRetain(void**, int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? 4 : attribute == 75 ? 9 : attribute == 76 ? 0 : 232448;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  char symbol[64];
  size_t parameters = 0;
  if (std::strstr(static_cast<const char*>(image), "cudaGraphSetConditional")) {
    *module = new Image{"decide", 3};
    return 0;
  }
  if (std::sscanf(static_cast<const char*>(image), "%63s %zu", symbol, &parameters) != 2)
    return 200;
  *module = new Image{symbol, parameters, 0};
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = module;
  return 0;
}
int cuFuncGetAttribute(int* value, int, void*) { return *value = 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernelEx(const plait::cuda::Config* c, void* function, void** parameters, void**) {
  const auto& image = *static_cast<Image*>(function);
  if (image.symbol == "decide") {
    Node n;
    n.call = [handle = *static_cast<uint64_t*>(parameters[0]),
              at = *static_cast<const bool**>(parameters[1]),
              inverted = *static_cast<uint32_t*>(parameters[2]) != 0] {
      conditions[handle] = *at != inverted;
    };
    put(std::move(n));
    return 0;
  }
  if (image.symbol != "k" && image.symbol != "both") {
    on_launch(image.symbol.c_str(), c->grid_x, c->grid_y, c->grid_z,
              words_of(image, parameters).data());
    return 0;
  }
  Node n;
  n.image = &image;
  n.words = words_of(image, parameters);
  put(std::move(n));
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuStreamIsCapturing(void*, int* status) { return *status = 0; }
int cuStreamGetCaptureInfo_v2(void*, int* status, uint64_t*, void** graph, const void*** nodes,
                              size_t* n) {
  static const void* last;
  *status = 1;
  *graph = recorded;
  last = recorded->last;
  *n = last ? 1 : 0;
  *nodes = &last;
  return 0;
}
int cuGraphConditionalHandleCreate(uint64_t* handle, void*, void*, unsigned, unsigned) {
  *handle = conditions.size() + 1;
  conditions[*handle] = false;
  return 0;
}
int cuGraphAddNode_v2(void** node, void*, const void*, const void*, size_t,
                      plait::cuda::ConditionalParams* p) {
  static plait::cuda::Graph bodies[1];
  auto* body = new Graph;
  bodies[0] = reinterpret_cast<plait::cuda::Graph>(body);
  p->bodies = bodies;
  Node n;
  n.call = [body, again = p->kind == plait::cuda::ConditionalParams::again, c = p->condition] {
    do {
      if (!conditions[c]) return;
      for (const auto& inner : body->nodes) run(*inner);
    } while (again);
  };
  put(std::move(n));
  *node = recorded->nodes.back().get();
  return 0;
}
int cuStreamUpdateCaptureDependencies(void*, const Node** last, size_t n, unsigned) {
  recorded->last = n ? *last : nullptr;
  return 0;
}
int cuGraphNodeGetType(const Node* node, int* type) {
  *type = node->call ? 3 : node->image ? 0 : node->fill.to ? 2 : 1;
  return 0;
}
int cuGraphNodeGetDependencies_v2(const Node* node, const Node** before, void*, size_t* n) {
  *n = node->before ? 1 : 0;
  if (*n) *before = node->before;
  return 0;
}
int cuGraphKernelNodeGetParams_v2(Node* node, plait::cuda::NodeParams* p) {
  node->addresses.clear();
  for (uint64_t& word : node->words) node->addresses.push_back(&word);
  p->function = reinterpret_cast<plait::cuda::Function>(const_cast<Image*>(node->image));
  p->parameters = node->addresses.data();
  return 0;
}
int cuFuncGetParamInfo(const Image* image, size_t index, size_t* offset, size_t* nbytes) {
  if (index >= image->parameters) return 1;
  *offset = 8 * index;
  *nbytes = image->parameter_nbytes;
  return 0;
}
int cuKernelGetParamInfo(const Image* image, size_t index, size_t* offset, size_t* nbytes) {
  return cuFuncGetParamInfo(image, index, offset, nbytes);
}
int cuGraphMemsetNodeGetParams(const Node* node, FillParams* p) {
  *p = node->fill;
  return 0;
}
int cuStreamBeginCaptureToGraph(void*, void* graph, const void*, const void*, size_t, int) {
  outer.push_back(std::exchange(recorded, static_cast<Graph*>(graph)));
  return 0;
}
int cuStreamEndCapture(void*, void** graph) {
  *graph = recorded;
  recorded = outer.back();
  outer.pop_back();
  return 0;
}
static Node& node_of(void* exec, void* node) {
  for (auto& [key, n] : static_cast<Exec*>(exec)->nodes)
    if (key == node) return n;
  std::abort();
}
int cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const plait::cuda::NodeParams* p) {
  Node& n = node_of(exec, node);
  n.words = words_of(*n.image, p->parameters);
  return 0;
}
int cuGraphMemcpyNodeGetParams(void* node, CopyParams* p) {
  *p = static_cast<Node*>(node)->copy;
  return 0;
}
int cuGraphExecMemcpyNodeSetParams(void* exec, void* node, const CopyParams* p, void*) {
  if (refuses_copies) return 1;
  node_of(exec, node).copy = *p;
  return 0;
}
int cuGraphExecMemsetNodeSetParams(void* exec, void* node, const FillParams* p, void*) {
  node_of(exec, node).fill = *p;
  return 0;
}
int cuGraphDestroyNode(void* node) {
  return std::erase_if(recorded->nodes, [&](const auto& n) { return n.get() == node; }) ? 0 : 1;
}
int cuPointerGetAttribute(unsigned* type, int, uint64_t address) {
  *type = 2;
  return address >= table ? 0 : 1;
}
int cuGraphLaunch(void* exec, void*) {
  for (const auto& [key, n] : static_cast<Exec*>(exec)->nodes) run(n);
  return 0;
}
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t nbytes, void*) {
  Node n;
  n.copy.from.device = const_cast<void*>(from);
  n.copy.to.device = to;
  n.copy.nbytes = nbytes;
  put(std::move(n));
  return 0;
}
int cuEventCreate(void**, unsigned) { return 0; }
int cuEventRecord(void*, void* s) {
  event_of = number_of(s);
  return 0;
}
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void*, void*) {
  *ms = 1;
  return 0;
}
int cuEventDestroy_v2(void*) { return 0; }
int cuMemsetD8Async(void*, unsigned char, size_t, void*) { return 0; }
int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "fake", static_cast<size_t>(size));
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 12090;
  return 0;
}
int cuStreamWaitEvent(void* s, void*, unsigned) {
  waits += std::to_string(number_of(s)) + std::to_string(event_of) + " ";
  return 0;
}

int aoti_torch_get_current_cuda_stream(int32_t, void** current) {
  *current = &streams[stream];
  return 0;
}
}
