// native/core/package.h: a package, a program in one file: opened, verified and taken apart. No
// torch, no Python.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "core/manifest.h"
#include "plait/errors.h"

namespace plait {

// The weights of a package: pages of its file, which are read when they are first used. Written
// pages are this process's own.
class Weights {
 public:
  // Throws PackageError, which begins with path.
  Weights(const std::string& path, int file, uint64_t offset, size_t nbytes, uint64_t checksum);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  char* data() const { return data_; }

  // Runs a function for every number below n, in any order, in one thread or several.
  using ForEach = void (*)(size_t n, const std::function<void(size_t)>&);
  // Compares them with their checksum, before anybody uses or writes them; only once, if it
  // succeeds. Any thread may. Throws PackageError.
  void verify(ForEach for_each);
  // Nothing is compared. Before any verify().
  void trust() { verified_ = true; }

 private:
  int read_ahead(std::span<std::byte> piece) const;

  std::string path_;
  char* data_ = nullptr;
  size_t nbytes_;
  uint64_t checksum_;
  std::mutex verifying_;
  bool verified_ = false;
};

// A package that was verified, but for its weights. What was verified is what is handed out:
// nothing but weights is read again.
class PackageFile {
 public:
  // Throws PackageError.
  explicit PackageFile(const std::string& path);
  ~PackageFile();
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // Any but `weights`. Throws PackageError.
  std::span<const std::byte> section(const std::string& name) const;
  // Not verified yet. Throws PackageError.
  std::shared_ptr<Weights> map_weights() const;
  // Throws PackageError: the file at path is not what it should be.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct Section {
    std::string name;
    uint64_t offset, nbytes, checksum;
    std::vector<std::byte> bytes;  // not of `weights`
  };
  void read_table();
  void read_sections();
  void require_zeros(uint64_t first, uint64_t last);
  void read(uint64_t offset, std::span<std::byte> into);

  std::string path_;
  int file_ = -1;
  uint64_t size_ = 0, table_ = 0;
  std::vector<Section> sections_;
  Manifest manifest_;
};

// The variant that fits this machine best, by what it has: the instruction set of its CPU, and a
// GPU of this name ("sm_90", "gfx942"; "": none). wanted: the machine of a variant, or "". Throws
// PackageError with what is missing.
const Manifest::Variant& choose_variant(const PackageFile& file, const std::string& wanted,
                                        const std::string& gpu);

}  // namespace plait
