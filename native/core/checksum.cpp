// native/core/checksum.cpp: see checksum.h.
//
// Blocks of 32 bytes, the last one filled with zeros, go into four lanes of 64 bits, which start as
// 1, 2, 3, 4, word by word: lane = rotl(lane ^ word, 29) * P. At the end h = number of bytes; h =
// rotl(h ^ lane, 29) * P for each lane, then h ^= h >> 32, h *= P, h ^= h >> 29. Every step can be
// undone, so damage within one word is always found.
#include "core/checksum.h"

#include <algorithm>
#include <cstring>

namespace plait {
namespace {

constexpr uint64_t kPrime = 0x9E3779B97F4A7C15u;

uint64_t stir(uint64_t lane, uint64_t word) {
  const uint64_t x = lane ^ word;
  return (x << 29 | x >> 35) * kPrime;
}

}  // namespace

void Checksum::add(std::span<const std::byte> bytes) {
  n_bytes_ += bytes.size();
  uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
  const auto block = [&](const std::byte* at) {
    uint64_t words[4];
    std::memcpy(words, at, kBlock);
    a = stir(a, words[0]);
    b = stir(b, words[1]);
    c = stir(c, words[2]);
    d = stir(d, words[3]);
  };
  for (; bytes.size() >= kBlock; bytes = bytes.subspan(kBlock)) block(bytes.data());
  if (!bytes.empty()) {
    std::byte last[kBlock] = {};
    std::memcpy(last, bytes.data(), bytes.size());
    block(last);
  }
  lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
}

void Checksum::align() {
  constexpr std::byte zeros[kBlock] = {};
  n_bytes_ = (n_bytes_ + kBlock - 1) / kBlock * kBlock;  // add() has filled the last one
  while (n_bytes_ % kWeightAlign != 0) add(zeros);
}

uint64_t Checksum::value() const {
  uint64_t h = n_bytes_;
  for (const uint64_t lane : lanes_) h = stir(h, lane);
  h ^= h >> 32;
  h *= kPrime;
  return h ^ h >> 29;
}

uint64_t checksum(std::span<const std::byte> bytes) {
  Checksum c;
  c.add(bytes);
  return c.value();
}

void PiecewiseChecksum::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(kPiece - piece_.n_bytes(), bytes.size()));
    piece_.add(part);
    end_full_piece();
    bytes = bytes.subspan(part.size());
  }
}

void PiecewiseChecksum::align() {
  piece_.align();
  end_full_piece();
}

void PiecewiseChecksum::end_full_piece() {
  if (piece_.n_bytes() < kPiece) return;
  done_.push_back(piece_.value());
  piece_ = {};
}

uint64_t PiecewiseChecksum::value() const {
  std::vector<uint64_t> all = done_;
  if (piece_.n_bytes() > 0) all.push_back(piece_.value());
  return combined(all);
}

uint64_t PiecewiseChecksum::combined(std::span<const uint64_t> pieces) {
  return checksum(std::as_bytes(pieces));
}

}  // namespace plait
