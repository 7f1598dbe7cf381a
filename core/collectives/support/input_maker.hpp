#pragma once
// An input that is not held densely: a collective has pieces of it written, or reduced with what has come, where and when it needs
// them, so that a dense vector need not be made first.

#include "base/types.hpp"
#include "collectives/support/blocks.hpp"
#include "transport/task.hpp"

namespace telegrad {

/// A collective asks once for each element, by one of the two, and does not end without having asked for all.
class InputMaker {
 public:
  virtual ~InputMaker() = default;

  /// out = these elements.
  virtual Task<void> make(Range elements, Bytes out) = 0;
  /// out = partial ∘ these elements; `out` may be `partial`. An average is summed like a sum.
  virtual Task<void> reduce(Range elements, ConstBytes partial, Bytes out) = 0;
};

}  // namespace telegrad
