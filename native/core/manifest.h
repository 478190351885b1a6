// native/core/manifest.h: what a package says of itself and its program, as data. No torch, no
// Python.
//
// A Manifest that read_manifest() returned has been checked: numbers are in range, tensors lie in
// their storages.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "core/signature.h"

namespace plait {

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

// Reads and checks the bytes of a manifest; n_weight_bytes: of the section `weights`. Throws
// PackageError.
Manifest read_manifest(std::span<const std::byte> bytes, uint64_t n_weight_bytes);

}  // namespace plait
