// native/torch/run.h: the steps of a program, the instructions that are a step as they stand, and
// the kernels that they launch.
//
// - The GPU, stream and dispatch state that steps rely on are set by whoever walks them: Program
//   for a whole call, graphs.cpp and record.cpp for a partition.
// - Launches on the CPU that follow each other are one region: it is divided over ATen's threads,
//   or runs in this one where that costs less.
// - A launch on a GPU goes on the frame's stream, or on the current one of the kernel's device.
// - A kernel that finds one of its checks broken stops its region, and the error names the kernel.
#pragma once

#include "frame.h"

namespace plait {

void run_step(Frame& f, const Step& s, bool profiled);
int64_t read(const Frame& f, SlotId s, Source::Kind source, int64_t dim);

// What an instruction does that the loader makes one step of (StepEmitter::push_run): those that
// become steps of other kinds have none.
#define PLAIT_RUN(I) void run(Frame& f, const I& i);
PLAIT_INSTRUCTIONS(PLAIT_RUN)
#undef PLAIT_RUN

// launches.cpp
void run_region(Frame& f, const RegionInfo& r, bool profiled);
// split_ns: estimated work of the tasks that are divided over threads.
void run_tasks(const Code& code, const Task* tasks, int32_t n, int64_t split_ns, bool profiled);
void run_launch(Frame& f, const GridLaunch& l, bool profiled);
void run_grid(Frame& f, int32_t kernel, int64_t grid, void** params, bool profiled);
[[noreturn]] void fail_check(const Code& code, int32_t kernel, int64_t number);

}  // namespace plait
