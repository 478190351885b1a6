// native/core/plan.h: a compiled program as plain data, read from plan bytes. No torch, no Python.
//
// The layout of the bytes is written in plan.cpp, its writer is plait/wrapper/native.py. A Plan
// that read_plan() returned has been verified: every id is in range and defined before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "instructions.h"

namespace plait {

struct Slot {
  std::string name;
  DType dtype;
};

struct Input {
  using Kind = InputKind;
  Kind kind;
  int32_t id;                 // tensor, opaque: slot; symbol: symbol number
  DType dtype = DType::kAny;  // that of the slot
  Shape shape;
  std::string device;
};

struct Kernel {
  std::string name;
  int32_t n_args, n_sizes;
  std::vector<Check> checks;  // a kernel that returns k > 0 fails with checks[k - 1]
  std::string device;
};

struct Plan {
  std::string name;
  int32_t n_constants = 0, n_callables = 0;
  int32_t n_results = kNone;  // first of the returned values that are for the caller; kNone: all
  std::vector<ExprNode> exprs;
  std::vector<std::string> symbols;
  std::vector<Slot> slots;
  std::vector<Input> inputs;
  std::vector<Kernel> kernels;
  std::vector<Instr> body;
  std::vector<Plan> programs;  // that CallPrograms runs
};

// Reads, checks and verifies plan bytes. Throws PlanError.
Plan read_plan(std::span<const std::byte> bytes);

// Checks the rules that need no bytes: defined before use, freed once, ranks, kernels' argument
// counts. Throws PlanError.
void verify(const Plan& plan);

// Whether Python takes the bytes as a str.
bool is_utf8(std::string_view text);

// The value of a node over `values` of earlier nodes; false on overflow or a divisor that is not
// positive.
bool evaluate(const ExprNode& node, const int64_t* values, int64_t& out);

}  // namespace plait
