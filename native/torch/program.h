// native/torch/program.h: a program ready to be called, from any thread.
//
// It owns the Code, which nothing changes, and what is kept from call to call: frames that are free
// (the GIL, or the caller's lock, guards them), recordings, and how long a call takes. The rest is
// in the call's Frame.
#pragma once

#include <atomic>

#include "graphs.h"

namespace plait {

// The same program as C++ that was built, see plait/wrapper/cpp.py. Throws LoadError.
class Generated {
 public:
  Generated(const std::string& path, const std::string& entry);
  void run(Frame& f, bool profiled) const;

 private:
  std::shared_ptr<Library> library_;
  int (*run_)(plait_call*);
};

class Program {
 public:
  // Throws PlanError, LoadError. code: what load() wants. generated: runs instead of the plan's
  // steps.
  explicit Program(Code code, std::optional<Generated> generated = {});

  std::unique_ptr<Frame> take_frame();  // the caller holds the GIL
  void give_frame(std::unique_ptr<Frame> frame) noexcept { frames_.push_back(std::move(frame)); }
  void run(Frame& f) const;
  // As a part of a call of another program, whose frame is `caller`.
  void run_within(Frame& f, Frame& caller) const;

  const Code& code() const { return code_; }
  const Plan& plan() const { return code_.plan; }
  const std::vector<Operand>& outputs() const { return *code_.outputs; }
  const SlotInfo& slot(SlotId s) const { return code_.slot(s); }
  const Graphs* graphs() const { return graphs_.get(); }  // null: nothing is recorded

 private:
  void run_steps(Frame& f) const;
  void walk(Frame& f, bool profiled) const;

  Code code_;
  std::optional<Generated> generated_;
  std::unique_ptr<Graphs> graphs_;
  std::vector<std::unique_ptr<Frame>> frames_;
  mutable std::atomic<int64_t> typical_ticks_{0};  // of the last call
};

}  // namespace plait
