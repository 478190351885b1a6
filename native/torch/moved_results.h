// native/torch/moved_results.h: results of operators that a recording writes where the caller wants
// them, call by call, with no copy.
//
// The kernels of an operator get the address of its result as they get any other number. To find
// it, the operator is recorded twice, with its results and what it needs in between in two places;
// torch's allocator says where. A word that names the same byte of a result both times is an
// address in it, one that names the same byte of other memory of the operator is that one's. Where
// another word differs, or nodes are recorded that cannot be told another place, the result is
// copied out of the recording instead. What was recorded the first time is taken out of it.
#pragma once

#include <map>

#include "frame.h"
#include "recordings.h"

namespace plait {

struct RecordedCall;
class MovedResult;

// Operators that are being recorded.
class MovedResults {
 public:
  // The numbers of the exports that a step makes and nothing but a check of their strides needs
  // after it, if nodes may be told where they lie.
  static std::vector<size_t> made_by(const Frame& f, const PartitionInfo& p, int32_t at);
  // Runs the step, which makes these exports.
  void record(Frame& f, const PartitionInfo& p, int32_t at, const std::vector<size_t>& exports);
  // The nodes that write an export of the step recorded last; none: it is to be copied.
  std::vector<MovedNode> take(size_t an_export);
  // What else was to move is copied.
  void forget() { moved_.clear(); }
  // Why results of operators are copied, and how many.
  const std::map<std::string, int64_t>& copied() const { return copied_; }
  // Once nothing more is recorded: what was recorded again and again runs once.
  void leave_out() const;

 private:
  void leave(const RecordedCall& call, cuda::GraphNode first, cuda::Stream stream);
  void settle(const ExternCall& c, const std::vector<size_t>& exports,
              std::vector<MovedResult>& results);

  std::map<size_t, std::vector<MovedNode>> moved_;  // by export
  std::map<std::string, int64_t> copied_;
  std::vector<cuda::GraphNode> away_;
};

// From its next launch on, a recording writes a result to its room. False: it did before.
bool move_result(cuda::GraphExec exec, Recording::Copy& c);

}  // namespace plait
