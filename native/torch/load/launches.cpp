// native/torch/load/launches.cpp: launches, and the kernels that they want: of the CPU in regions,
// of a GPU one by one.
#include <c10/core/DeviceGuard.h>

#include "walks.h"

namespace plait {
namespace {

KernelFn host_kernel(Code& code, int32_t k) {
  code.functions.resize(code.plan.kernels.size());
  KernelFn& fn = code.functions[static_cast<size_t>(k)];
  if (!code.library) throw LoadError("the program has kernels and no kernel library was given");
  const Kernel& made = code.plan.kernels[static_cast<size_t>(k)];
  if (!fn) fn = code.library->kernel(made.name, made.n_args, made.n_sizes);
  return fn;
}

const cuda::Kernel* grid_kernel(Code& code, int32_t k) {
  if (!code.cubins) throw LoadError("the program has GPU kernels and no file of them was given");
  code.kernels.resize(code.plan.kernels.size());
  const cuda::Kernel*& loaded = code.kernels[static_cast<size_t>(k)];
  if (loaded) return loaded;
  const c10::DeviceGuard there(code.kernel_devices[static_cast<size_t>(k)]);
  code.on(there.current_device()).stream();  // kernels are loaded into a current context
  const Kernel& kernel = code.plan.kernels[static_cast<size_t>(k)];
  loaded = code.cubins->share(kernel.name, static_cast<size_t>(kernel.n_args + kernel.n_sizes));
  return loaded;
}

// Room for arguments and sizes, which either kind of launch has.
template <class L>
void take_operands(StepEmitter& e, L& l, const Launch& i) {
  l.kernel = i.kernel;
  l.args = {static_cast<int32_t>(e.code.n_bufs), static_cast<int32_t>(i.args.size())};
  l.sizes = {static_cast<int32_t>(e.code.n_syms), static_cast<int32_t>(i.sizes.size())};
  l.size_ids = i.sizes;
  for (SlotId s : i.args) e.add_buf(s);
  e.need(i.sizes);
  for (ExprId size : i.sizes) l.dynamic_sizes = l.dynamic_sizes || !e.constant(size);
  e.code.n_syms += l.sizes.n;
}

}  // namespace

void learn(SlotLearner& l, const Launch& i) {
  const std::vector<Kernel>& kernels = l.code.plan.kernels;
  l.code.kernel_devices.resize(kernels.size(), c10::kCPU);
  const auto k = static_cast<size_t>(i.kernel);
  l.code.kernel_devices[k] = l.device(kernels[k].device);
  for (SlotId s : i.args) l.touch(s);
}

void emit(StepEmitter& e, const Launch& i) {
  for (SlotId s : i.outs) e.write(s);
  if (e.code.kernel_devices[static_cast<size_t>(i.kernel)].is_cpu()) {
    LaunchInfo l{.fn = host_kernel(e.code, i.kernel),
                 .work_ns = i.work_ns,
                 .parallel = i.parallel,
                 .barrier = i.barrier};
    take_operands(e, l, i);
    e.size(i.work_ns);
    e.region.push_back(std::move(l));
    return;
  }
  e.close_region();
  GridLaunch l{.loaded = grid_kernel(e.code, i.kernel), .grid = i.grid};
  l.params = {static_cast<int32_t>(e.code.n_params),
              static_cast<int32_t>(l.loaded->n_parameters())};
  take_operands(e, l, i);
  e.size(i.grid);
  e.code.n_params += l.params.n;
  e.push(StepKind::launch, static_cast<int32_t>(e.code.grid_launches.size()));
  e.code.grid_launches.push_back(std::move(l));
}

}  // namespace plait
