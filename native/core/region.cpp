// native/core/region.cpp: phases, a spin barrier between them, logical threads dealt out to real
// ones.
//
// A chunk [begin, end) of logical threads is run by one real thread, phase by phase; it arrives at
// a barrier with weight end - begin, so that the barrier opens however many real threads the pool
// has given.
#include "region.h"

#include <sched.h>

#include <atomic>

namespace plait {
namespace {

constexpr int kSpins = 4096;  // then yield: the machine may have fewer free cores than threads

struct Region {
  const Task* tasks;
  int32_t n;
  int64_t nthreads;
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<int64_t> failed{
      0};  // ((n - task) << 32 | code): the earliest task has the largest value

  void run(const Task& t, int32_t index, int64_t tid, int64_t of) {
    const int64_t code = t.fn(tid, of, t.bufs, t.syms);
    if (code == 0) return;
    const int64_t mark = (static_cast<int64_t>(n - index) << 32) | (code & 0x7FFFFFFF);
    int64_t seen = failed.load();
    while (seen < mark && !failed.compare_exchange_weak(seen, mark)) {}
  }
  Failure failure() const {
    const int64_t mark = failed.load();
    if (mark == 0) return {};
    return {mark & 0x7FFFFFFF, n - static_cast<int32_t>(mark >> 32)};
  }

  // The barrier number `phase` (1, 2, ...) opens when nthreads * phase logical threads have
  // arrived.
  void wait(int64_t weight, int64_t phase) {
    const int64_t target = nthreads * phase;
    if (arrived.fetch_add(weight, std::memory_order_acq_rel) + weight >= target) return;
    for (int spins = 0; arrived.load(std::memory_order_acquire) < target;) {
      __builtin_ia32_pause();
      if (++spins == kSpins) {
        spins = 0;
        sched_yield();
      }
    }
  }
};

void run_chunk(int64_t begin, int64_t end, void* context) {
  Region& r = *static_cast<Region*>(context);
  int64_t phase = 0;
  for (int32_t i = 0; i < r.n; ++i) {
    const Task& t = r.tasks[i];
    if (t.barrier && i > 0) r.wait(end - begin, ++phase);
    if (!t.split) {
      if (begin == 0) r.run(t, i, 0, 1);
      continue;
    }
    for (int64_t tid = begin; tid < end; ++tid) r.run(t, i, tid, r.nthreads);
  }
}

}  // namespace

Failure run_serial(const Task* tasks, int32_t n) {
  for (int32_t i = 0; i < n; ++i)
    if (const int64_t code = tasks[i].fn(0, 1, tasks[i].bufs, tasks[i].syms); code != 0)
      return {code, i};
  return {};
}

Failure run_parallel(const Task* tasks, int32_t n, int32_t nthreads, const ThreadPool& pool) {
  if (pool.concurrent) {
    Region region{tasks, n, nthreads};
    pool.parallel_for(0, nthreads, run_chunk, &region);
    return region.failure();
  }
  // Chunks may run one after another on one thread: no waiting inside, so every task is a region of
  // its own.
  for (int32_t i = 0; i < n; ++i) {
    Failure f;
    if (tasks[i].split) {
      Region region{tasks + i, 1, nthreads};
      pool.parallel_for(0, nthreads, run_chunk, &region);
      f = region.failure();
    } else {
      f = run_serial(tasks + i, 1);
    }
    if (f.code != 0) return {f.code, i};
  }
  return {};
}

}  // namespace plait
