// native/torch/call.h: what every way to call a program shares: a frame for the call, and its
// outputs.
#pragma once

#include <mutex>

#include "core/signature.h"
#include "torch/program.h"

namespace plait {

// What a returned value is, decided once.
struct Output {
  enum class Kind { tensor, moved_tensor, opaque, integer, none, real, boolean, value } kind;
  int32_t id = kNone;
  double real = 0;
};
std::vector<Output> plan_outputs(const Program& p);

// A frame for a call; dropped tensors and the arena go back whatever happens. Lock: keeps calls
// apart where no GIL does.
struct Unlocked {
  void lock() {}
  void unlock() {}
};
struct Locked {
  std::mutex& mutex;
  void lock() { mutex.lock(); }
  void unlock() { mutex.unlock(); }
};
template <class Lock = Unlocked>
class Call {
 public:
  explicit Call(Program& p, Lock lock = {}) : program_(p), lock_(lock) {
    const std::lock_guard<Lock> held(lock_);
    frame_ = p.take_frame();
  }
  ~Call() {
    reset(*frame_);
    const std::lock_guard<Lock> held(lock_);
    program_.give_frame(std::move(frame_));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  Frame& frame() { return *frame_; }

 private:
  Program& program_;
  [[no_unique_address]] Lock lock_;
  std::unique_ptr<Frame> frame_;
};

// Whether t carries a tangent of forward-mode differentiation, of which programs know nothing.
bool has_forward_gradient(const at::Tensor& t);
// Whether kernels can read all that t stands for: it wraps no other tensor, as those of torch.func
// and of subclasses do, and carries no such tangent.
bool is_plain(const at::Tensor& t);
// The same for the tensors of one call: few of them are looked at while forward mode is off.
class ForwardMode {
 public:
  bool reaches(const at::Tensor& t) {
    if (state_ == State::off || !t.unsafeGetTensorImpl()->autograd_meta()) return false;
    if (state_ == State::unknown) [[unlikely]]
      state_ = is_on() ? State::on : State::off;
    return state_ == State::on && has_forward_gradient(t);
  }

 private:
  static bool is_on();
  enum class State { unknown, off, on } state_ = State::unknown;
};

// The tensor that the program was given as input number `input`.
const at::Tensor& input_at(const Program& p, const Frame& f, int64_t input);
// The tensor of an output; an undefined one where it is none.
at::Tensor take_tensor(Frame& f, const Output& o);
// A view of base as eager makes it, with its base, version counter and lazy bits, in the caller's
// gradient and inference mode. `like`, what the program made of `bound`, the base as it saw it, has
// its sizes and strides.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& bound, const at::Tensor& like,
                   const Produced& r);
// Addresses of the named functions of SLEEF (inside libtorch_cpu) and libm; null where there is
// none.
std::vector<void*> math_table(const std::vector<std::string>& names);

}  // namespace plait
