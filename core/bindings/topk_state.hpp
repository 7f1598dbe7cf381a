#pragma once
// What Python keeps between calls of all_reduce_topk.

#include <nanobind/stl/vector.h>

#include <functional>
#include <utility>

#include "bindings/binding.hpp"
#include "session/reductions.hpp"

namespace telegrad::bindings {

/// Settings, and the state that the last call has left: one call at a time. Used with the interpreter's lock held.
template <class Settings, class State>
class KeptTopkState {
 public:
  KeptTopkState(const Settings& settings, State state) : settings_(settings), state_(std::move(state)) {}

  const Settings& settings() const { return settings_; }
  bool in_use() const { return last_ && !last_->done(); }
  /// What the next call begins with: after a call that failed, what that one began with.
  const State& state() {
    if (last_ && last_->done()) {
      if (!last_->failure()) state_ = next_();
      forget();
    }
    return state_;
  }
  template <class V>
  void follow(const TopkSum<V, State>& begun) {
    last_ = begun.request;
    next_ = [result = begun.result] { return (**result).state; };
  }
  void load(State state) {
    forget();
    state_ = std::move(state);
  }

 private:
  void forget() {
    last_ = nullptr;
    next_ = nullptr;
  }

  Settings settings_;
  State state_;
  RequestPtr last_;
  std::function<State()> next_;
};

using KeptOkTopk = KeptTopkState<OkTopkSettings, OkTopkState>;
using KeptGTopk = KeptTopkState<GTopkSettings, GTopkState>;
using KeptBoundedTopk = KeptTopkState<BoundedTopkSettings, BoundedTopkState>;

}  // namespace telegrad::bindings
