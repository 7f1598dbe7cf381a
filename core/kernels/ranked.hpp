#pragma once
// Selections by rank: exact top-k, and RedSync's two ways to it (papers: RedSync, Algorithms 2 and 3, corrected). Each is
// one fused pass on most inputs. A random sample of the sums gives a key that somewhat more entries than are wanted
// should reach; the pass adds the gradient and takes those out; the selection is made among them, and the others are put
// back. Where the sample misled, the residual itself is looked at, in more passes: the answer is the same.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entries.hpp"
#include "kernels/key.hpp"

namespace telegrad::kernels {

struct Chosen {
  std::size_t count;
  float threshold;  // the lowest magnitude that was looked for
  float largest;    // no magnitude that stays is larger
};

// Each adds `gradient` to `residual` (nothing, if it is empty), then moves entries out of it into `out`, as
// accumulate_select() does. 1 <= k <= residual.size() (CHECKed). Of one sign, where that has fewer than k entries, all of
// them are moved.

/// Exactly the k entries with the largest keys, ties to the lowest index. `out` holds k (CHECKed).
Chosen accumulate_topk(std::span<float> residual, std::span<const float> gradient, std::size_t k, Side side,
                       std::uint32_t index_offset, EntriesOut<float> out);

class Candidates;
/// The same of sums that a pass has taken out of a residual of `size` entries; of both sides.
Chosen move_topk(Candidates& sums, std::size_t k, std::size_t size, std::uint32_t index_offset, EntriesOut<float> out);

/// The same k entries. Before it ranks, it leaves out all below mean + ratio·(max − mean), the highest such threshold
/// that k entries reach, of the ratios 1 − step, 1 − 2·step, … 0. 0 < step < 1 (CHECKed).
Chosen accumulate_trimmed(std::span<float> residual, std::span<const float> gradient, std::size_t k, double step,
                          Side side, std::uint32_t index_offset, EntriesOut<float> out);

/// All entries of magnitude >= mean + ratio·(max − mean), with a ratio in [0, 1] found by bisection for which those are
/// k to 2k; exactly k as in accumulate_topk() if the bisection ends without, at an interval of `tolerance`, as it does
/// among ties. 0 < tolerance < 1; `out` holds min(2k, residual.size()) (CHECKed).
Chosen accumulate_search(std::span<float> residual, std::span<const float> gradient, std::size_t k, double tolerance,
                         Side side, std::uint32_t index_offset, EntriesOut<float> out);

namespace reference {  // in plain passes over the residual, without a sample
Chosen accumulate_topk(std::span<float> residual, std::span<const float> gradient, std::size_t k, Side side,
                       std::uint32_t index_offset, EntriesOut<float> out);
Chosen accumulate_search(std::span<float> residual, std::span<const float> gradient, std::size_t k, double tolerance,
                         Side side, std::uint32_t index_offset, EntriesOut<float> out);
}  // namespace reference

}  // namespace telegrad::kernels
