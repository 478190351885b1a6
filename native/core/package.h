// native/core/package.h: a package, a program in one file: opened, verified and taken apart. No
// torch, no Python.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "core/manifest.h"
#include "plait/errors.h"

namespace plait {

// Memory that stands for a part of a file. Written pages are this process's own.
class Mapping {
 public:
  Mapping(int file, uint64_t offset, size_t nbytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t nbytes_;
};

// A package that was verified. What was verified is what is handed out: nothing but weights is read
// again.
class PackageFile {
 public:
  // Throws PackageError. verify_weights: read and check the weights too.
  PackageFile(const std::string& path, bool verify_weights);
  ~PackageFile();
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // Any but `weights`. Throws PackageError.
  std::span<const std::byte> section(const std::string& name) const;
  std::shared_ptr<Mapping> map_weights() const;
  // Throws PackageError: the file at path is not what it should be.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct Section {
    std::string name;
    uint64_t offset, nbytes, checksum;
    std::vector<std::byte> bytes;  // not of `weights`
  };
  void read_table();
  void read_sections(bool verify_weights);
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
