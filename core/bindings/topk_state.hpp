#pragma once
// What Python keeps between calls of all_reduce_topk.

#include <nanobind/stl/vector.h>

#include <functional>
#include <utility>

#include "bindings/binding.hpp"
#include "collectives/allreduce_oktopk.hpp"
#include "session/reductions.hpp"

namespace telegrad::bindings {

/// Settings, and the state that the last call has left: one call at a time. Used with the interpreter's lock held.
class TopkState {
 public:
  TopkState(const OkTopkSettings& settings, OkTopkState state) : settings_(settings), state_(std::move(state)) {}

  const OkTopkSettings& settings() const { return settings_; }
  bool in_use() const { return last_ && !last_->done(); }
  /// What the next call begins with: after a call that failed, what that one began with.
  const OkTopkState& state() {
    if (last_ && last_->done()) {
      if (!last_->failure()) state_ = next_();
      forget();
    }
    return state_;
  }
  template <class V>
  void follow(const TopkSum<V>& begun) {
    last_ = begun.request;
    next_ = [result = begun.result] { return (**result).state; };
  }
  void load(OkTopkState state) {
    forget();
    state_ = std::move(state);
  }

 private:
  void forget() {
    last_ = nullptr;
    next_ = nullptr;
  }

  OkTopkSettings settings_;
  OkTopkState state_;
  RequestPtr last_;
  std::function<OkTopkState()> next_;
};

}  // namespace telegrad::bindings
