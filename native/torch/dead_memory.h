// native/torch/dead_memory.h: memory of what dies while a partition is recorded, for what it makes
// later.
//
// In a run without graphs saved tensors are freed as the backward pass goes, and their memory is
// used again. In a recording they are memory that stays, for the next replay of the forward pass
// writes it. So what dies in a partition, lies in memory of another recording and is held by nobody
// else is lent to the partition's temporaries. A replay is good for calls that find it just so.
#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <memory>
#include <vector>

#include "graphs.h"

namespace plait {

// Smaller tensors are neither lent nor borrow: there is little to gain.
inline constexpr int64_t kLentNbytes = 1 << 20;
inline size_t whole_blocks(size_t nbytes) {  // as torch's allocator counts
  constexpr size_t kBlock = 512;
  return (nbytes + kBlock - 1) / kBlock * kBlock;
}

// Free memory. What is given back joins its neighbours, if they are of one piece.
class Rooms : public std::enable_shared_from_this<Rooms> {
 public:
  void add(char* at, size_t nbytes, const void* piece);
  c10::DataPtr take(size_t nbytes, c10::Device device);  // null: none is large enough

 private:
  struct Room {
    size_t nbytes;
    const void* piece;
  };
  std::map<char*, Room> free_;
};

class DeadMemory {
 public:
  // others: all other recordings of the device.
  DeadMemory(Recording& made, const std::vector<Recording*>& others)
      : made_(made), others_(others) {}
  // The tensor of an import dies, though its slot still holds it.
  void dies(int32_t import, const at::Tensor& t);
  c10::DataPtr take(int64_t nbytes, c10::Device device);  // null: there is no room

 private:
  struct Dying {
    std::vector<Recording*> owners;  // one for each tensor of theirs that holds it
    std::vector<int32_t> imports;
  };
  void lend();

  Recording& made_;
  const std::vector<Recording*>& others_;
  std::map<c10::StorageImpl*, Dying> dying_;
  std::shared_ptr<Rooms> rooms_ = std::make_shared<Rooms>();
};

}  // namespace plait
