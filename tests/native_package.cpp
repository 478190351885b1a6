// tests/native_package.cpp: packages cut off at every length, with every byte changed, and with
// random damage behind right checksums, so that nothing but the reader of manifests stands before
// it. Usage: native_package COUNT PACKAGE
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "core/package.h"

namespace {
using Bytes = std::vector<char>;
const std::string kCopy = "damaged.plait";

// What is wrong with the copy, or "".
std::string refusal() {
  try {
    const plait::PackageFile file(kCopy);
    file.map_weights()->verify([](size_t n, const std::function<void(size_t)>& body) {
      for (size_t k = 0; k < n; ++k) body(k);
    });
    plait::choose_variant(file, "", "");
    return "";
  } catch (const plait::PackageError& e) {
    return std::string(e.what()).substr(kCopy.size() + 2);
  }
}

void change(size_t at, char byte) {
  std::fstream file(kCopy, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

std::span<const std::byte> span(const char* first, size_t n) {
  return {reinterpret_cast<const std::byte*>(first), n};
}

// Random damage to the words of a manifest; true if it is still taken.
bool reads(Bytes manifest, uint64_t n_weight_bytes, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const int64_t odd[] = {-1, INT64_MIN, INT64_MAX, int64_t{1} << 31, 0, 1, 2, 3,
                         63, 64,        65,        int64_t{1} << 40};
  for (size_t n = 1 + below(3); n > 0; --n) {
    char* at = manifest.data() + below(manifest.size() - 8);
    int64_t word = odd[below(std::size(odd))];
    if (below(3) == 0)
      *at = static_cast<char>(random());
    else
      std::memcpy(at, &word, 8);
  }
  if (below(10) == 0) manifest.resize(below(manifest.size()));
  try {
    plait::read_manifest(span(manifest.data(), manifest.size()), n_weight_bytes);
    return true;
  } catch (const plait::PackageError&) {
    return false;
  }
}
}  // namespace

int main(int argc, char** argv) {
  std::ifstream file(argv[2], std::ios::binary);
  const Bytes whole(std::istreambuf_iterator<char>(file), {});
  std::ofstream(kCopy, std::ios::binary)
      .write(whole.data(), static_cast<std::streamsize>(whole.size()));
  if (const std::string why = refusal(); !why.empty())
    return std::printf("refused: %s\n", why.c_str()), 1;

  for (size_t n = 0; n < whole.size();
       n += whole[n] ? 1 : 3) {  // zeros, mostly between sections, are many
    change(n, static_cast<char>(whole[n] ^ 1 << n % 8));
    const std::string why = refusal();
    const char* want = n < 8 ? "not a package" : n < 12 ? "wrong version" : "damaged";
    if (why.find(want) != 0 && !(n >= 12 && n < 24 && why.find("truncated") == 0))
      return std::printf("changed at %zu: '%s'\n", n, why.c_str()), 1;
    change(n, whole[n]);
  }
  for (size_t n = whole.size(); n-- > 0;) {
    std::filesystem::resize_file(kCopy, n);
    const std::string why = refusal();
    if (why.find(n < 8 ? "not a package" : "truncated") != 0)
      return std::printf("cut at %zu: '%s'\n", n, why.c_str()), 1;
  }

  uint64_t at[2] = {0, 0}, nbytes[2] = {0, 0};  // of the manifest, of the weights
  uint32_t n_sections = 0;
  std::memcpy(&n_sections, whole.data() + 12, 4);
  for (const char* entry = whole.data() + whole.size() - 80 * n_sections;
       entry < whole.data() + whole.size(); entry += 80) {
    const int which = std::strcmp(entry, "manifest") == 0  ? 0
                      : std::strcmp(entry, "weights") == 0 ? 1
                                                           : -1;
    if (which >= 0)
      std::memcpy(&at[which], entry + 48, 8), std::memcpy(&nbytes[which], entry + 56, 8);
  }
  const Bytes manifest(whole.begin() + static_cast<std::ptrdiff_t>(at[0]),
                       whole.begin() + static_cast<std::ptrdiff_t>(at[0] + nbytes[0]));
  std::mt19937_64 random(1);
  long taken = 0;
  const long count = std::atol(argv[1]);
  for (long n = 0; n < count; ++n) taken += reads(manifest, nbytes[1], random);
  std::printf("%ld of %ld taken\n", taken, count);
}
