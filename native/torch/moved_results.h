// native/torch/moved_results.h: results of operators that a recording writes where the caller wants
// them, call by call, with no copy.
//
// The kernels of a product get the address of its result as they get any other number. To find it,
// a product is recorded twice, with its result in two places: a word of a parameter that differs by
// as much as the places do is that address. Where a word may hold it in another way, or something
// that is no kernel is recorded, the result is copied out of the recording instead. What was
// recorded the second time never runs.
#pragma once

#include "frame.h"
#include "recordings.h"

namespace plait {

// Products that are being recorded.
class MovedResults {
 public:
  // The number of the export that a step makes and nothing but a check of its strides needs after
  // it, if its launches may be told where it lies; -1 for others.
  static int32_t made_by(const Frame& f, const PartitionInfo& p, int32_t at);
  // Runs the step, which makes an export. False: the result is to be copied.
  bool record(Frame& f, const Step& step, SlotId result);
  // The launches of the step that was recorded last.
  std::vector<MovedLaunch> take() { return std::move(launches_); }
  // Once the recording can run: what was recorded twice runs once.
  void finish(cuda::GraphExec exec) const;

 private:
  std::vector<MovedLaunch> launches_;
  std::vector<cuda::GraphNode> again_;
};

// From its next launch on, a recording writes a result to its room. False: it did before.
bool move_result(cuda::GraphExec exec, Recording::Copy& c);

}  // namespace plait
