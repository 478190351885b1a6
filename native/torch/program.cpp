// native/torch/program.cpp: a call of a program: its GPU and stream, the dispatcher's state, the
// GIL.
#include "program.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <x86intrin.h>

#include <algorithm>

#include "dispatch_guard.h"
#include "run.h"

namespace plait {
namespace {

constexpr int64_t kReleaseGilTicks = 100 * kTicksPerUs;

}  // namespace

Program::Program(Code code, std::optional<Generated> generated)
    : code_(std::move(code)), generated_(std::move(generated)) {
  code_.generated = generated_.has_value();
  load(code_);
  typical_ticks_ = code_.typical_ticks;
  const std::vector<PartitionInfo>& all = code_.partitions;
  if (std::any_of(all.begin(), all.end(), [](const PartitionInfo& p) { return p.recorded; }))
    graphs_ = std::make_unique<Graphs>(all.size());
}

std::unique_ptr<Frame> Program::take_frame() {
  if (frames_.empty()) return std::make_unique<Frame>(code_);
  std::unique_ptr<Frame> f = std::move(frames_.back());
  frames_.pop_back();
  return f;
}

void Program::walk(Frame& f, bool profiled) const {
  if (generated_)
    generated_->run(f, profiled);
  else
    for (const Step& s : code_.steps) run_step(f, s, profiled);
  if (!f.copied.empty()) [[unlikely]]
    write_back(f);
}

void Program::run_steps(Frame& f) const {
  const bool profiled = at::hasCallbacks();
  std::optional<c10::DeviceGuard> on_gpu;
  c10::OptionalStreamGuard callers_stream;
  if (code_.gpu) {
    if (!code_.gpu->is_current()) on_gpu.emplace(code_.gpu->device());
    f.stream = code_.gpu->stream();
    if (code_.forks) {  // the caller's stream is current again, whatever fails
      const c10::impl::VirtualGuardImpl streams(code_.gpu->device().type());
      callers_stream.reset_stream(streams.getStream(code_.gpu->device()));
    }
  }
  if (!code_.needs_guard) return walk(f, profiled);
  f.excluded_by_us = DispatchGuard::added();
  const DispatchGuard guard;
  walk(f, profiled);
}

void Program::run_within(Frame& f, Frame& caller) const {
  f.gil = std::exchange(caller.gil, nullptr);
  f.recorded = caller.recorded;
  const auto end = [&] { caller.gil = std::exchange(f.gil, nullptr); };
  try {
    run_steps(f);
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Program::run(Frame& f) const {
  if (code_.small) return run_steps(f);
  if (graphs_ && run_graphs(*graphs_, f)) return;
  if (typical_ticks_.load(std::memory_order_relaxed) > kReleaseGilTicks)
    f.gil = code_.host.release_gil();
  const auto end = [&] {
    if (f.gil) code_.host.retake_gil(std::exchange(f.gil, nullptr));
    if (graphs_) note_beside(f);
  };
  const uint64_t start = __rdtsc();
  try {
    run_steps(f);
  } catch (...) {
    end();
    throw;
  }
  typical_ticks_.store(static_cast<int64_t>(__rdtsc() - start), std::memory_order_relaxed);
  end();
}

}  // namespace plait
