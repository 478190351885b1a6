// native/torch/load/load.cpp: Plan -> Code. Everything that can be decided once is decided here.
#include <ATen/Context.h>

#include "torch/control.h"
#include "walks.h"

namespace plait {
namespace {

constexpr int64_t kSmallRegionNs = 10'000;

// Also notes which expressions are those of a symbol.
Constants fold_constants(Code& code) {
  const std::vector<ExprNode>& exprs = code.plan.exprs;
  Constants constants(exprs.size());
  code.values.resize(exprs.size());
  code.symbol_exprs.resize(code.plan.symbols.size());
  for (size_t i = 0; i < exprs.size(); ++i) {
    const ExprNode& e = exprs[i];
    if (e.op == ExprNode::Op::symbol) {
      code.symbol_exprs[static_cast<size_t>(e.a)].push_back(static_cast<ExprId>(i));
    } else if (e.op == ExprNode::Op::constant ||
               (constants[static_cast<size_t>(e.a)] && constants[static_cast<size_t>(e.b)])) {
      evaluate(e, code.values.data(), code.values[i]);
      constants[i] = code.values[i];
    }
  }
  return constants;
}

void name_slots(Code& code) {
  for (const Slot& s : code.plan.slots) {
    SlotInfo i;
    i.name = s.name;
    i.dtype = s.dtype;
    if (s.dtype < DType::opaque) i.scalar = scalar_type(s.dtype);
    i.root = static_cast<SlotId>(code.slots.size());
    code.slots.push_back(std::move(i));
  }
}

// The library runs instead of the steps: nothing here could.
void use_generated(Code& code) {
  code.steps.clear();
  code.patches.clear();
  for (SlotInfo& i : code.slots) i.patches = {};
  code.functions.resize(code.plan.kernels.size());
}

void estimate_time(Code& code) {
  int64_t work_ns = 0;
  code.small = code.externs.empty() && code.pythons.empty() && code.programs.empty() && !code.gpu;
  for (const RegionInfo& r : code.regions) {
    code.small = code.small && r.is_static && r.work_ns < kSmallRegionNs;
    work_ns += r.work_ns;
  }
  code.typical_ticks = work_ns * kTicksPerUs / 1000;  // a first guess
}

}  // namespace

void load(Code& code) {
  if (code.constants.size() != static_cast<size_t>(code.plan.n_constants))
    throw LoadError("the program wants " + std::to_string(code.plan.n_constants) +
                    " constants and got " + std::to_string(code.constants.size()));
  // The older question raises where the user asked by the newer flags, of any device.
  const at::Float32Precision rounded =
      at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  code.full_precision =
      rounded != at::Float32Precision::BF16 && rounded != at::Float32Precision::TF32;
  load_programs(code);
  Constants constants = fold_constants(code);
  name_slots(code);
  SlotLearner slots(code, constants);
  slots.run();
  StepEmitter steps(code, constants, slots.last_use);
  steps.run();
  if (code.generated) use_generated(code);
  if (!code.partitions.empty()) learn_partitions(code, steps.patches, steps.writes);
  estimate_time(code);
}

}  // namespace plait
