// tests/native_core.cpp: what the native core promises about threads and memory, without torch. Run
// by test_native_core.py.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "core/region.h"

using namespace plait;

#define CHECK(c)                                                        \
  do {                                                                  \
    if (!(c)) std::printf("line %d: %s\n", __LINE__, #c), std::exit(1); \
  } while (0)

constexpr int64_t kN = 512;
constexpr int32_t kPhases = 40;
static double memory[2][kN];
static std::atomic<int> alone{0};

// Each phase reads all of the other half's memory: right only if every thread has ended the phase
// before.
static int64_t phase(int64_t tid, int64_t n, void* const* bufs, const int64_t* syms) {
  const double* in = static_cast<const double*>(bufs[0]);
  double* out = static_cast<double*>(bufs[1]);
  for (int64_t i = kN * tid / n; i < kN * (tid + 1) / n; ++i) {
    if (i % 64 == 0) std::this_thread::yield();
    out[i] = in[kN - 1 - i] + 1;
  }
  return 0;
}
static int64_t single(int64_t tid, int64_t n, void* const*, const int64_t*) {
  CHECK(tid == 0 && n == 1);
  ++alone;
  return 0;
}
static int64_t fails(int64_t tid, int64_t n, void* const* bufs, const int64_t* syms) {
  return tid == n - 1 ? syms[0] : 0;
}

// Real threads, as many as `threads` says: each takes one contiguous chunk.
static int64_t threads = 1;
static void concurrent(int64_t begin, int64_t end, void (*body)(int64_t, int64_t, void*),
                       void* context) {
  const int64_t chunk = (end - begin + threads - 1) / threads;
  std::vector<std::thread> pool;
  for (int64_t b = begin; b < end; b += chunk)
    pool.emplace_back(body, b, std::min(b + chunk, end), context);
  for (std::thread& t : pool) t.join();
}
// Chunks one after another on this thread: a barrier inside would never open.
static void one_by_one(int64_t begin, int64_t end, void (*body)(int64_t, int64_t, void*),
                       void* context) {
  for (int64_t b = begin; b < end; ++b) body(b, b + 1, context);
}

static void run(const ThreadPool& pool, int32_t nthreads) {
  void* forth[2] = {memory[0], memory[1]};
  void* back[2] = {memory[1], memory[0]};
  std::vector<Task> tasks;
  for (int32_t i = 0; i < kPhases; ++i) {
    tasks.push_back({phase, i % 2 ? back : forth, nullptr, true, true});
    if (i % 3 == 0) tasks.push_back({single, nullptr, nullptr, false, false});
  }
  for (int64_t i = 0; i < kN; ++i) memory[0][i] = static_cast<double>(i);
  alone = 0;
  CHECK(run_parallel(tasks.data(), static_cast<int32_t>(tasks.size()), nthreads, pool).code == 0);
  for (int64_t i = 0; i < kN; ++i) CHECK(memory[0][i] == static_cast<double>(i) + kPhases);
  CHECK(alone == (kPhases + 2) / 3);
}

static void test_regions() {
  for (int round = 0; round < 4; ++round)
    for (int32_t logical : {1, 2, 3, 7})
      for (threads = 1; threads <= logical; ++threads) run({concurrent, true}, logical);
  for (int32_t logical : {1, 2, 5}) run({one_by_one, false}, logical);
}

static void test_earliest_failure_is_reported() {
  const int64_t codes[] = {3, 5};
  const std::vector<Task> tasks = {{single, nullptr, nullptr, false, true},
                                   {fails, nullptr, codes, true, true},
                                   {fails, nullptr, codes + 1, true, true}};
  for (threads = 1; threads <= 4; ++threads) {
    const Failure f = run_parallel(tasks.data(), 3, 4, {concurrent, true});
    CHECK(f.code == 3 && f.task == 1);
  }
  const Failure f = run_parallel(tasks.data(), 3, 4, {one_by_one, false});
  CHECK(f.code == 3 && f.task == 1);
  CHECK(run_serial(tasks.data(), 3).task == 1);
}

static void test_arenas() {
  {
    ArenaBlock a(100), b(100);
    CHECK(a.data() != b.data() && a.size() >= 100 &&
          reinterpret_cast<uintptr_t>(a.data()) % 64 == 0);
    CHECK(arena_stats().in_use_bytes == a.size() + b.size());
    const ArenaBlock moved = std::move(a);
    CHECK(a.data() == nullptr && moved.data() != nullptr);
  }
  CHECK(arena_stats().in_use_bytes == 0 && arena_stats().held_bytes > 0);
  char* first = nullptr;
  { first = ArenaBlock(1 << 20).data(); }
  { CHECK(ArenaBlock(1 << 20).data() == first); }  // kept
  { CHECK(ArenaBlock(64).data() != first); }       // a large block is not spent on a small wish
  trim_arenas();
  CHECK(arena_stats().held_bytes == 0);
  const int64_t limit = arena_stats().idle_limit_bytes;
  {
    std::vector<ArenaBlock> many;
    for (int64_t held = 0; held < limit + (int64_t{256} << 20); held += int64_t{64} << 20)
      many.emplace_back(int64_t{64} << 20);
  }
  CHECK(arena_stats().held_bytes <= limit);
  trim_arenas();
  std::vector<std::thread> workers;
  for (int t = 0; t < 4; ++t)
    workers.emplace_back([t] {
      for (int i = 0; i < 5000; ++i) {
        const ArenaBlock b(1000 + 1000 * ((i + t) % 5));
        std::memset(b.data(), t, 1000);
        for (int k = 0; k < 1000; k += 111) CHECK(b.data()[k] == t);
      }
    });
  for (std::thread& w : workers) w.join();
  CHECK(arena_stats().in_use_bytes == 0);
}

int main() {
  test_regions();
  test_earliest_failure_is_reported();
  test_arenas();
  std::printf("ok\n");
}
