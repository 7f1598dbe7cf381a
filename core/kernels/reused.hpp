#pragma once
// Selection by a threshold that is reused (RedSync §2.1), with all that comes before it: momentum correction (Deep
// Gradient Compression §3), accumulation, and a look at the gradient. Memory is passed over once: each step is done for
// a block of entries while these are in the nearest caches.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/entries.hpp"

namespace telegrad::kernels {

/// The velocity u of a parameter: u = factor·u + g is added to the residual in place of the gradient g; with `nesterov`
/// u = factor·(u + g), and u + g is added. `before`: what u was, if `velocity` does not hold it.
struct VelocityStep {
  std::span<float> velocity;  // empty: there is no momentum
  std::span<const float> before;
  float factor = 0.0F;
  bool nesterov = false;
  bool masks = false;  // u becomes zero where entries are moved
};

/// Which entries of a parameter are moved: with a `threshold` (0: there is none) and unless it is `due`, those that reach
/// it, if they are `least` to 2k; otherwise exactly the k largest, ties to the lowest index.
struct ReuseRule {
  std::size_t k;
  std::size_t least;
  float threshold = 0.0F;
  bool is_due = false;
};

struct Reused {
  bool is_sound = true;
  bool is_exact = false;  // the k largest, by a new threshold
  std::size_t count = 0;
  float threshold = 0.0F;  // the lowest magnitude that was looked for
  float largest = 0.0F;    // no magnitude that stays is larger
  float added = 0.0F;      // with momentum: the largest magnitude of the gradient
};

/// residual = before + what the gradient contributes (`before` empty: residual +=); moves the entries of `rule` out of
/// it, as accumulate_select() does. `out` holds min(2k, size) (CHECKed).
///
/// Ends where a magnitude of the gradient is `limit` or above, or NaN: then `is_sound` is false, and what the residual,
/// the velocity and `out` hold is undefined. So a `limit` needs `before`, also of the velocity (CHECKed). NaN: no limit.
/// Without momentum an infinite limit costs nothing, but `before` must then be finite, and nothing may overflow.
Reused accumulate_reused(std::span<float> residual, std::span<const float> before, std::span<const float> gradient,
                         const VelocityStep& step, const ReuseRule& rule, std::uint32_t index_offset,
                         EntriesOut<float> out, float limit = std::numeric_limits<float>::quiet_NaN());

namespace reference {  // entry by entry
Reused accumulate_reused(std::span<float> residual, std::span<const float> before, std::span<const float> gradient,
                         const VelocityStep& step, const ReuseRule& rule, std::uint32_t index_offset,
                         EntriesOut<float> out, float limit = std::numeric_limits<float>::quiet_NaN());
}  // namespace reference

}  // namespace telegrad::kernels
