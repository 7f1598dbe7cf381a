#pragma once
// An input that is written only where and when a collective is about to read it, so that the work is done while messages travel.

#include "collectives/blocks.hpp"
#include "transport/task.hpp"

namespace telegrad {

class InputMaker {
 public:
  virtual ~InputMaker() = default;

  /// Writes these elements of the input. A collective asks once for each element, before it reads it; it does not end without
  /// having asked for all.
  virtual Task<void> make(Range elements) = 0;
};

}  // namespace telegrad
