// native/core/checksum.h: a hash of 64 bits against damage of packages. Whoever wants to deceive it
// can: it is not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace plait {

inline constexpr uint64_t kWeightAlign = 64;  // of storages among the weights

class Checksum {
 public:
  static constexpr size_t kBlock = 32;
  // A multiple of kBlock, or align() or nothing follows.
  void add(std::span<const std::byte> bytes);
  void align();  // zeros up to the next multiple of kWeightAlign
  uint64_t value() const;

 private:
  uint64_t lanes_[4] = {1, 2, 3, 4};
  uint64_t n_bytes_ = 0;
};
uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace plait
