// native/core/region.h: runs consecutive kernels inside one parallel region, over a thread pool
// that is handed in.
#pragma once

#include <cstdint>

#include "library.h"

namespace plait {

// One kernel call with all of its arguments.
struct Task {
  KernelFn fn;
  void* const* bufs;
  const int64_t* syms;
  bool split;          // divided over the threads; else thread 0 runs it whole
  bool barrier;        // starts after every earlier task has ended on every thread
  int32_t kernel = 0;  // its number, for messages
};

// A pool: calls body(begin, end, context) with disjoint chunks that cover [begin, end), possibly
// fewer than asked.
struct ThreadPool {
  void (*parallel_for)(int64_t begin, int64_t end, void (*body)(int64_t, int64_t, void*),
                       void* context);
  bool concurrent;  // chunks of one call always run at the same time (true for OpenMP), so that
                    // they may wait for each other
};

// A run-time check that failed: check `code` of task number `task`. code 0: none did.
struct Failure {
  int64_t code = 0;
  int32_t task = 0;
};

Failure run_serial(const Task* tasks, int32_t n);  // stops at the first failure
// Runs the tasks in order on `nthreads` logical threads and returns the earliest failure; never
// deadlocks when the pool gives fewer real threads. Later tasks may have run after a failure:
// kernels never leave their memory, so only their results are undefined.
Failure run_parallel(const Task* tasks, int32_t n, int32_t nthreads, const ThreadPool& pool);

}  // namespace plait
