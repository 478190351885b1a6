// tests/native_plans.cpp: plans with random damage and a right checksum, so that nothing but the
// reader and the verifier stands before them. Usage: native_plans COUNT PLAN...
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "core/plan.h"

namespace {
constexpr size_t kHeader = 24;

uint32_t crc32(const char* data, size_t n) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < n; ++i) {
    crc ^= static_cast<unsigned char>(data[i]);
    for (int k = 0; k < 8; ++k) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

void sign(std::vector<char>& plan) {
  const uint64_t length = plan.size() - kHeader;
  const uint32_t crc = crc32(plan.data() + kHeader, length);
  std::memcpy(plan.data() + 12, &crc, 4);
  std::memcpy(plan.data() + 16, &length, 8);
}

// True if the plan was taken.
bool read(const std::vector<char>& plan) {
  try {
    plait::read_plan({reinterpret_cast<const std::byte*>(plan.data()), plan.size()});
    return true;
  } catch (const plait::PlanError&) {
    return false;
  }
}

std::vector<char> damaged(std::vector<char> plan, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const int64_t odd[] = {
      -1, INT64_MIN, INT64_MAX, int64_t{1} << 31, (int64_t{1} << 31) - 1, 0, 1, 2, 7,
      12, 64,        100,       int64_t{1} << 40};
  const size_t words = (plan.size() - kHeader) / 8;
  for (size_t n = 1 + (below(3) == 0) * below(5); n > 0; --n) {
    char* at = plan.data() + kHeader + 8 * below(words);
    int64_t word;
    std::memcpy(&word, at, 8);
    switch (below(5)) {
      case 0: word = odd[below(std::size(odd))]; break;
      case 1: word = static_cast<int64_t>(below(64)); break;
      case 2: word = static_cast<int64_t>(static_cast<uint64_t>(word) + (below(2) ? 1 : -1)); break;
      case 3: word ^= int64_t{1} << below(64); break;
      default: std::memcpy(&word, plan.data() + kHeader + 8 * below(words), 8);
    }
    std::memcpy(at, &word, 8);
  }
  if (below(10) == 0) plan.resize(kHeader + below(plan.size() - kHeader));
  sign(plan);
  return plan;
}
}  // namespace

int main(int argc, char** argv) {
  std::mt19937_64 random(1);
  std::vector<std::vector<char>> plans;
  for (int i = 2; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    plans.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!read(plans.back())) return std::printf("%s is no plan\n", argv[i]), 1;
  }
  long taken = 0;
  const long count = std::atol(argv[1]);
  for (long n = 0; n < count; ++n)
    taken += read(damaged(plans[static_cast<size_t>(n) % plans.size()], random));
  std::printf("%ld of %ld taken\n", taken, count);
}
