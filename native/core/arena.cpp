// native/core/arena.cpp: idle blocks, smallest fitting first. Idle memory is bounded: the blocks
// that were idle longest go first.
//
// Blocks are kept because a fresh one above 32 MiB is mapped and faulted page by page at every call
// (6.9 ms against 0.6).
#include "arena.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

namespace plait {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kMinBlock = 4096;
constexpr int64_t kSlack =
    1 << 20;  // a block may be this much larger than asked, or twice as large

class SpinLock {
 public:
  void lock() {
    while (flag_.exchange(true, std::memory_order_acquire))
      while (flag_.load(std::memory_order_relaxed)) __builtin_ia32_pause();
  }
  void unlock() { flag_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> flag_{false};
};

class Pool {
 public:
  Pool() {
    const int64_t ram = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
    idle_limit_ = std::clamp<int64_t>(ram / 8, int64_t{64} << 20, int64_t{4} << 30);
  }

  char* take(int64_t nbytes, int64_t& size) {
    const int64_t want = std::max(kMinBlock, (nbytes + kAlign - 1) / kAlign * kAlign);
    lock_.lock();
    size_t best = idle_.size();
    for (size_t i = 0; i < idle_.size(); ++i) {
      const int64_t have = idle_[i].size;
      if (have >= want && have <= std::max(2 * want, want + kSlack) &&
          (best == idle_.size() || have < idle_[best].size))
        best = i;
    }
    if (best < idle_.size()) {
      const Block found = idle_[best];
      idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(best));
      idle_bytes_ -= found.size;
      in_use_bytes_ += found.size;
      lock_.unlock();
      size = found.size;
      return found.data;
    }
    in_use_bytes_ += want;
    lock_.unlock();
    char* data = static_cast<char*>(std::aligned_alloc(kAlign, static_cast<size_t>(want)));
    if (!data) {
      lock_.lock();
      in_use_bytes_ -= want;
      lock_.unlock();
      throw std::bad_alloc();
    }
    size = want;
    return data;
  }

  void give(char* data, int64_t size) noexcept {
    std::vector<Block> evicted;
    lock_.lock();
    in_use_bytes_ -= size;
    idle_bytes_ += size;
    idle_.push_back({data, size});  // oldest first
    // The block that just came back is kept whatever its size: the next call wants it again.
    while (idle_bytes_ > idle_limit_ && idle_.size() > 1) {
      idle_bytes_ -= idle_.front().size;
      evicted.push_back(idle_.front());
      idle_.erase(idle_.begin());
    }
    lock_.unlock();
    for (const Block& b : evicted) std::free(b.data);
  }

  void trim() {
    lock_.lock();
    std::vector<Block> evicted;
    evicted.swap(idle_);
    idle_bytes_ = 0;
    lock_.unlock();
    for (const Block& b : evicted) std::free(b.data);
  }

  ArenaStats stats() {
    lock_.lock();
    const ArenaStats s{idle_bytes_ + in_use_bytes_, in_use_bytes_, idle_limit_};
    lock_.unlock();
    return s;
  }

 private:
  struct Block {
    char* data;
    int64_t size;
  };
  SpinLock lock_;
  std::vector<Block> idle_;
  int64_t idle_bytes_ = 0, in_use_bytes_ = 0, idle_limit_ = 0;
};

// Never destroyed: a program may be called while the process ends.
Pool& pool() {
  static Pool* p = new Pool;
  return *p;
}

}  // namespace

ArenaBlock::ArenaBlock(int64_t nbytes) { data_ = pool().take(nbytes, size_); }
ArenaBlock::~ArenaBlock() {
  if (data_) pool().give(data_, size_);
}
ArenaBlock& ArenaBlock::operator=(ArenaBlock&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

ArenaStats arena_stats() { return pool().stats(); }
void trim_arenas() { pool().trim(); }

}  // namespace plait
