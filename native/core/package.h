// native/core/package.h: a package, a program in one file: opened, verified and taken apart. No
// torch, no Python.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "core/plan.h"
#include "core/signature.h"
#include "plait/errors.h"

namespace plait {

inline constexpr uint32_t kPackageVersion = 3;
inline constexpr uint64_t kWeightAlign = 64;  // of storages among the weights

// A hash of 64 bits against damage. Whoever wants to deceive it can: it is not cryptographic.
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

struct Manifest {
  using Texts = std::vector<std::string>;
  // Bytes of the section `weights` that tensors lie in, and where they are to live, unless they are
  // an input of the program, which says itself where.
  struct Storage {
    int64_t offset, nbytes;
    std::string device;
  };
  struct Tensor {
    std::string name;  // of a weight
    int32_t storage;
    DType dtype;
    std::vector<int64_t> sizes, strides;
    int64_t offset;  // in elements, from the storage's first byte
  };
  // What stands for a call of Python in a plan, by number there: runs some of `routines`.
  struct Control {
    enum class Kind { call, cond, loop, scan } kind;
    struct Given {
      bool constant;
      int64_t value;  // or the number of the call's operand
    };
    std::vector<int64_t> routines;  // cond: if it holds, if not; loop: its condition, its body
    std::vector<Given> operands;    // of the routines; cond: the condition before them
    int64_t n_carried, n_scanned;   // loop, scan: the operands that change, come in slices
    std::vector<std::optional<std::vector<int64_t>>> strides;  // of results, where promised
  };
  // A program that others call: it runs operators alone, on any machine. Its controls and theirs
  // run routines before it.
  struct Routine {
    std::string plan;  // section
    int64_t first_constant;
    std::vector<Control> controls;
  };
  // One way to run the program. plan, kernels, cubins: names of sections; kernels and cubins may be
  // "".
  struct Variant {
    std::string machine, plan, kernels, cubins;
  };
  std::vector<std::pair<std::string, std::string>> versions;  // of what wrote it
  std::string name;
  Texts math;  // names of the functions in the table that kernels get
  std::vector<Storage> storages;
  std::vector<Tensor> weights, constants;
  Texts folded;  // weights that the writer put into others
  std::vector<Routine> routines;
  std::vector<Control> controls;  // of the program
  // A constant among the caller's arguments, which has to be given as it was.
  struct Fixed {
    int64_t position;  // among all of them, laid flat
    std::string name;
    enum class Kind { none, boolean, integer, real, text, other } kind;
    int64_t word;       // boolean, integer; real: its bits
    std::string text;   // text; other: as Python prints it
    std::string shown;  // for errors
  };
  std::vector<Fixed> fixed;  // by position
  Signature signature;       // a bound input's arg is the number of its weight
  Texts outputs;
  std::vector<Variant> variants;  // best first
  bool wants_gpu() const;         // some variant has kernels for one
};

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

// Reads and checks the bytes of a manifest; n_weight_bytes: of the section `weights`. Throws
// PackageError.
Manifest read_manifest(std::span<const std::byte> bytes, uint64_t n_weight_bytes);

// The variant that fits this machine best, by what it has: the instruction set of its CPU, and a
// GPU of this compute capability (0: none). wanted: the machine of a variant, or "". Throws
// PackageError with what is missing.
const Manifest::Variant& choose_variant(const PackageFile& file, const std::string& wanted,
                                        int capability);

}  // namespace plait
