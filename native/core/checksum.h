// native/core/checksum.h: a hash of 64 bits against damage of packages. Whoever wants to deceive it
// can: it is not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace plait {

inline constexpr uint64_t kWeightAlign = 64;  // of storages among the weights

class Checksum {
 public:
  static constexpr size_t kBlock = 32;
  // A multiple of kBlock, or align() or nothing follows.
  void add(std::span<const std::byte> bytes);
  void align();  // zeros up to the next multiple of kWeightAlign
  uint64_t n_bytes() const { return n_bytes_; }
  uint64_t value() const;

 private:
  uint64_t lanes_[4] = {1, 2, 3, 4};
  uint64_t n_bytes_ = 0;
};
uint64_t checksum(std::span<const std::byte> bytes);

// Of weights, whose pieces several threads may sum: the checksum of the checksums of their pieces.
class PiecewiseChecksum {
 public:
  static constexpr size_t kPiece = 1 << 20;    // bytes; the last may be shorter
  void add(std::span<const std::byte> bytes);  // as Checksum::add
  void align();                                // as Checksum::align
  uint64_t value() const;
  static uint64_t combined(std::span<const uint64_t> pieces);

 private:
  void end_full_piece();

  Checksum piece_;
  std::vector<uint64_t> done_;
};

}  // namespace plait
