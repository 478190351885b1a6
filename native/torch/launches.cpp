// native/torch/launches.cpp: regions on the CPU, launches on a GPU, see run.h.
#include "run.h"

#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/stable/c/shim.h>
#include <x86intrin.h>

#include <algorithm>
#include <atomic>

namespace plait {
namespace {

// Going parallel pays once the time saved exceeds the cost of a region: about 2 us while the pool's
// threads still spin, 39 us after.
constexpr int64_t kColdRegionNs = 60'000, kWarmRegionNs = kSerialRegionNs;
constexpr uint64_t kWarmTicks = 500 * kTicksPerUs;
constexpr int64_t kThreadNs = 8'000;  // least share of a region for a thread
constexpr int64_t kBarrierNs = 300;
std::atomic<uint64_t> last_candidate{0};

// How many threads a region is worth. After a region that could have been parallel a short while
// ago the pool is warm, or will be from now on: a stream of middling regions pays for waking it
// once.
int32_t region_threads(int64_t split_ns, int32_t n_tasks) {
  if (split_ns <= kWarmRegionNs) return 1;
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), split_ns / kThreadNs);
  if (threads <= 1 || at::in_parallel_region()) return 1;
  const int64_t saved_ns = split_ns - split_ns / threads - n_tasks * kBarrierNs;
  const bool warm = __rdtsc() - last_candidate.load(std::memory_order_relaxed) < kWarmTicks;
  return saved_ns > (warm ? kWarmRegionNs : kColdRegionNs) ? static_cast<int32_t>(threads) : 1;
}

void parallel_for(int64_t begin, int64_t end, void (*body)(int64_t, int64_t, void*),
                  void* context) {
  if (torch_parallel_for(begin, end, 1, body, context) != 0)
    throw std::runtime_error("ATen's thread pool failed");
}

const ThreadPool& aten_pool() {
  static const ThreadPool pool{
      parallel_for,
      at::get_parallel_info().find("ATen parallel backend: OpenMP") != std::string::npos};
  return pool;
}

void launch_on(const Accelerator& gpu, cuda::Stream stream, Frame& f, int32_t kernel, int64_t grid,
               void** params, bool profiled) {
  const cuda::Kernel& loaded = *f.code.kernels[static_cast<size_t>(kernel)];
  const cuda::KernelFacts& facts = loaded.facts();
  if (facts.global_scratch == 0 && facts.profile_scratch == 0 && !profiled) [[likely]]
    return loaded.launch(stream, static_cast<uint64_t>(grid), params);
  RECORD_FUNCTION(f.code.plan.kernels[static_cast<size_t>(kernel)].name,
                  std::vector<c10::IValue>());
  // The allocator hands memory out in the order of the stream: it may go back at once.
  const auto programs =
      static_cast<int64_t>(cuda::Grid(static_cast<uint64_t>(grid)).programs() * facts.num_ctas);
  const c10::DataPtr global = gpu.allocate(programs * facts.global_scratch),
                     profile = gpu.allocate(programs * facts.profile_scratch);
  f.scratch[0] = global.get();
  f.scratch[1] = profile.get();
  loaded.launch(stream, static_cast<uint64_t>(grid), params);
}

}  // namespace

void fail_check(const Code& code, int32_t kernel, int64_t number) {
  const Kernel& k = code.plan.kernels[static_cast<size_t>(kernel)];
  const auto at = static_cast<size_t>(number - 1);
  TORCH_CHECK(at < k.checks.size(), "check ", number, " (in kernel ", k.name, ")");
  const Check& check = k.checks[at];
  TORCH_CHECK_INDEX(check.error != Check::Error::index, check.message, " (in kernel ", k.name, ")");
  TORCH_CHECK(false, check.message, " (in kernel ", k.name, ")");
}

void run_tasks(const Code& code, const Task* tasks, int32_t n_tasks, int64_t split_ns,
               bool profiled) {
  const int32_t nthreads = region_threads(split_ns, n_tasks);
  Failure failure;
  const auto run = [&](int32_t first, int32_t n) {
    return nthreads == 1 ? run_serial(tasks + first, n)
                         : run_parallel(tasks + first, n, nthreads, aten_pool());
  };
  if (profiled) [[unlikely]] {
    for (int32_t k = 0; k < n_tasks && failure.code == 0; ++k) {
      RECORD_FUNCTION(code.plan.kernels[static_cast<size_t>(tasks[k].kernel)].name,
                      std::vector<c10::IValue>());
      failure = run(k, 1);
      failure.task = k;
    }
  } else {
    failure = run(0, n_tasks);
  }
  if (split_ns > kWarmRegionNs) last_candidate.store(__rdtsc(), std::memory_order_relaxed);
  if (failure.code != 0) [[unlikely]]
    fail_check(code, tasks[failure.task].kernel, failure.code);
}

void run_region(Frame& f, const RegionInfo& r, bool profiled) {
  int64_t split_ns = r.split_ns;
  Task* tasks = f.tasks.data() + r.first;
  if (!r.is_static) {
    split_ns = 0;
    for (int32_t k = 0; k < r.n; ++k) {
      const LaunchInfo& l = f.code.launches[static_cast<size_t>(r.first + k)];
      const int64_t work = f.value(l.work_ns);
      tasks[k].split = l.parallel && work >= kSplitTaskNs;
      if (tasks[k].split) split_ns += work;
    }
  }
  for (int32_t k = r.first; k < r.first + r.n; ++k) {
    const LaunchInfo& l = f.code.launches[static_cast<size_t>(k)];
    if (!l.dynamic_sizes) continue;
    for (size_t i = 0; i < l.size_ids.size(); ++i)
      f.syms[static_cast<size_t>(l.sizes.first) + i] = f.value(l.size_ids[i]);
  }
  run_tasks(f.code, tasks, r.n, split_ns, profiled);
}

void run_grid(Frame& f, int32_t kernel, int64_t grid, void** params, bool profiled) {
  if (grid <= 0) return;
  const c10::Device device = f.code.kernel_devices[static_cast<size_t>(kernel)];
  if (!f.code.is_elsewhere(device)) [[likely]]
    return launch_on(*f.code.gpu, f.stream, f, kernel, grid, params, profiled);
  const c10::DeviceGuard there(device);
  const Accelerator& gpu = f.code.on(device);
  launch_on(gpu, gpu.stream(), f, kernel, grid, params, profiled);
}

void run_launch(Frame& f, const GridLaunch& l, bool profiled) {
  if (l.dynamic_sizes)
    for (size_t i = 0; i < l.size_ids.size(); ++i)
      f.syms[static_cast<size_t>(l.sizes.first) + i] = f.value(l.size_ids[i]);
  run_grid(f, l.kernel, f.value(l.grid), f.params.data() + l.params.first, profiled);
}

}  // namespace plait
