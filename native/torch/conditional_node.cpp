// native/torch/conditional_node.cpp: conditional nodes, see conditional_node.h.
#include "conditional_node.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <deque>
#include <map>

#include "recordings.h"

namespace plait {
namespace {

constexpr int kThreadLocal = 1;     // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, as torch records
constexpr unsigned kOnlyThese = 1;  // CU_STREAM_SET_CAPTURE_DEPENDENCIES
constexpr const char* kName = "decide";
// The driver compiles it for its device, and is the only one to know the function that it calls.
constexpr const char* kKernel = R"(
.version 8.3
.target sm_50
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry decide(.param .u64 handle, .param .u64 predicate, .param .u32 inverted)
{
  .reg .b64 %handle, %at;
  .reg .b32 %value, %inverted;
  .reg .pred %holds;
  ld.param.u64 %handle, [handle];
  ld.param.u64 %at, [predicate];
  ld.param.u32 %inverted, [inverted];
  cvta.to.global.u64 %at, %at;
  ld.global.u8 %value, [%at];
  setp.ne.u32 %holds, %value, %inverted;
  selp.u32 %value, 1, 0, %holds;
  {
    .param .b64 to;
    .param .b32 what;
    st.param.b64 [to], %handle;
    st.param.b32 [what], %value;
    call.uni cudaGraphSetConditional, (to, what);
  }
  ret;
}
)";

// What a device has for conditions: the kernel that decides, and streams by depth.
struct Deciding {
  cuda::Function kernel = nullptr;
  std::deque<c10::Stream> streams;
};

Deciding& deciding(const Accelerator& gpu) {
  static auto* all = new std::map<c10::DeviceIndex, Deciding>;  // outlives what uses it
  Deciding& found = (*all)[gpu.device().index()];
  if (found.kernel) return found;
  const cuda::Driver& driver = cuda::Driver::machine();
  if (!driver.has_conditional_nodes())
    throw std::runtime_error("the driver has no conditional nodes");
  cuda::Module module = nullptr;
  driver.check(driver.load_module(&module, kKernel), "the kernel that decides");
  driver.check(driver.function(&found.kernel, module, kName), "the kernel that decides");
  return found;
}

// The pool hands its streams out in turn, the one that is recorded among them.
c10::Stream stream_of(const Accelerator& gpu, size_t depth) {
  std::deque<c10::Stream>& streams = deciding(gpu).streams;
  while (streams.size() <= depth) streams.push_back(gpu.pooled_stream());
  for (;; streams[depth] = gpu.pooled_stream()) {
    const c10::StreamGuard on_stream(streams[depth]);
    if (!is_capturing(gpu.stream())) return streams[depth];
  }
}

}  // namespace

ConditionalNode::ConditionalNode(const Accelerator& gpu, size_t depth)
    : gpu_(gpu), stream_(stream_of(gpu, depth)) {
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(
      driver.make_condition(&handle_, recorded_on(gpu.stream()).graph, driver.context(), 0, 0),
      "cuGraphConditionalHandleCreate");
}

void ConditionalNode::decide(const at::Tensor& predicate, bool inverted) const {
  TORCH_CHECK(predicate.numel() == 1 && predicate.device() == gpu_.device(),
              "a condition needs one element on ", gpu_.device(), ", not ", predicate.sizes(),
              " on ", predicate.device());
  const bool is_bool = predicate.scalar_type() == at::kBool;
  const at::Tensor truth = is_bool ? predicate : predicate.ne(0);
  uint64_t handle = handle_;
  const void* at = truth.const_data_ptr();
  uint32_t other = inverted;
  std::array<void*, 3> parameters{&handle, &at, &other};
  const cuda::Config once = {.grid_x = 1,
                             .grid_y = 1,
                             .grid_z = 1,
                             .block_x = 1,
                             .block_y = 1,
                             .block_z = 1,
                             .shared = 0,
                             .stream = gpu_.stream(),
                             .attributes = nullptr,
                             .n_attributes = 0};
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.launch(&once, deciding(gpu_).kernel, parameters.data(), nullptr), kName);
}

void ConditionalNode::record(cuda::ConditionalParams::Kind kind,
                             const std::function<void()>& body) const {
  const cuda::Driver& driver = cuda::Driver::machine();
  const cuda::Stream outer = gpu_.stream();
  const Recorded before = recorded_on(outer);
  cuda::ConditionalParams params{.condition = handle_, .kind = kind, .context = driver.context()};
  cuda::GraphNode node = nullptr;
  driver.check(driver.add_node(&node, before.graph, before.last, nullptr, before.n_last, &params),
               "cuGraphAddNode");
  driver.check(driver.after(outer, &node, 1, kOnlyThese), "cuStreamUpdateCaptureDependencies");
  const c10::StreamGuard on_stream(stream_);
  const cuda::Stream inner = gpu_.stream();
  driver.check(driver.record_to(inner, params.bodies[0], nullptr, nullptr, 0, kThreadLocal),
               "cuStreamBeginCaptureToGraph");
  cuda::Graph graph = nullptr;
  try {
    body();
  } catch (...) {
    driver.end_recording(inner, &graph);
    throw;
  }
  driver.check(driver.end_recording(inner, &graph), "cuStreamEndCapture");
}

}  // namespace plait
