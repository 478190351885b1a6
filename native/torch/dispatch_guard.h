// native/torch/dispatch_guard.h: the dispatcher's state while a program runs.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace plait {

// Below autograd and autocast, gradients off; restored by the destructor.
class DispatchGuard {
 public:
  DispatchGuard()
      : state_(c10::AutogradState::get_tls_state()), grad_mode_(state_.get_grad_mode()) {
    state_.set_grad_mode(false);
  }
  ~DispatchGuard() { state_.set_grad_mode(grad_mode_); }
  // The keys that one adds to those that this thread excludes.
  static c10::DispatchKeySet added() {
    return c10::DispatchKeySet(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                               c10::autocast_dispatch_keyset) -
           c10::impl::tls_local_dispatch_key_set().excluded_;
  }
  DispatchGuard(const DispatchGuard&) = delete;
  DispatchGuard& operator=(const DispatchGuard&) = delete;

 private:
  c10::AutogradState& state_;
  bool grad_mode_;
  c10::impl::ExcludeDispatchKeyGuard keys_{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset};
};

}  // namespace plait
