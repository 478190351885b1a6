// native/core/arena.h: the process-wide pool of memory blocks that programs check out for a call.
#pragma once

#include <cstdint>

namespace plait {

struct ArenaStats {
  int64_t held_bytes, in_use_bytes, idle_limit_bytes;
};

// A block of at least the asked bytes, aligned to 64, contents undefined. Returned to the pool by
// its destructor. Thread-safe. Throws std::bad_alloc.
class ArenaBlock {
 public:
  ArenaBlock() = default;
  explicit ArenaBlock(int64_t nbytes);
  ~ArenaBlock();
  ArenaBlock(ArenaBlock&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
  }
  ArenaBlock& operator=(ArenaBlock&& other) noexcept;
  ArenaBlock(const ArenaBlock&) = delete;
  ArenaBlock& operator=(const ArenaBlock&) = delete;

  char* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

ArenaStats arena_stats();
void trim_arenas();  // frees every idle block

}  // namespace plait
