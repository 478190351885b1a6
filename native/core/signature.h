// native/core/signature.h: what a program's inputs have to be, and what its results are, as data.
// No torch, no Python.
//
// Written by plait/capture/bound_program.py for a program in this process, by
// plait/wrapper/package.py for one in a file; torch/bound.h checks calls against it.
#pragma once

#include <limits>
#include <optional>

#include "core/plan.h"

namespace plait {

// One size or stride: any, an exact number, or a symbol within bounds.
struct Dim {
  enum class Kind { any, fixed, symbol } kind = Kind::any;
  int64_t value = 0;  // fixed: the number; symbol: its index
  int64_t lo = std::numeric_limits<int64_t>::min(), hi = std::numeric_limits<int64_t>::max();
};

struct InputSpec {
  enum class Kind { bound, tensor, symbol, integer, object, none } kind = Kind::none;
  int64_t arg =
      0;  // bound: number of the bound tensor; tensor, integer, object: of the caller's argument
  std::string name;           // bound
  std::string dtype, device;  // tensor
  std::vector<Dim> sizes, strides;
  enum class Layout { any, listed, contiguous } layout = Layout::any;
  Dim integer;  // integer, symbol
};

// A result, at its place among the caller's results.
struct Produced {
  enum class Kind { program, input, view } kind = Kind::program;
  int64_t arg = 0;             // input, view: of which argument
  bool requires_grad = false;  // view
  // view: elements from the argument's first one to its own; if unknown, the program's tensor tells
  std::optional<int64_t> offset;
};

// A condition on inputs beyond those of Dim: holds unless its last node is 0. A node `symbol` is
// number `a` of its facts.
struct Condition {
  // Of an input: the integer itself, or of a tensor the size or the stride of a dimension, or its
  // offset in its storage.
  struct Fact {
    enum class Kind { integer, size, stride, offset } kind;
    size_t input;
    int64_t dim;  // size, stride
  };
  std::string text;
  std::vector<Fact> facts;
  std::vector<ExprNode> nodes;
};

struct Signature {
  std::vector<InputSpec> inputs;     // in the program's order
  std::vector<std::string> names;    // of the caller's arguments
  std::vector<std::string> symbols;  // by index
  std::vector<Produced> results;     // empty: all are the program's own; args are numbers of inputs
  std::vector<Condition> conditions;
  bool single = false;  // the only result itself, no tuple of it

  // A dimension that is this symbol, which is new if no other is called so.
  Dim symbol(const std::string& symbol_name) {
    size_t i = 0;
    while (i < symbols.size() && symbols[i] != symbol_name) ++i;
    if (i == symbols.size()) symbols.push_back(symbol_name);
    return {Dim::Kind::symbol, static_cast<int64_t>(i)};
  }
};

}  // namespace plait
