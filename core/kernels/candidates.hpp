#pragma once
// What a selection by rank looks at: the few entries that a fused pass has taken out, or the residual itself. For the
// kernels' own sources.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/buffer.hpp"
#include "kernels/cut.hpp"
#include "kernels/select.hpp"

namespace telegrad::kernels {

class Candidates {
 public:
  /// Adds the gradient (nothing, if that is empty), and takes at least `wanted` entries out of the residual if a sample
  /// shows how. `with_moments`: they are needed; otherwise moments() has none.
  Candidates(std::span<float> residual, std::span<const float> gradient, std::size_t wanted, Side side,
             bool with_moments);

  /// Those that a pass has taken out already, by their positions: all with a key of at least `lowest`, and no others.
  Candidates(std::span<float> residual, Side side, std::int32_t lowest, Array<std::uint32_t> indices,
             Array<float> values)
      : residual_(residual),
        side_(side),
        lowest_(lowest),
        taken_(true),
        indices_(std::move(indices)),
        values_(std::move(values)),
        count_(values_.size()) {}

  const Moments& moments() const { return moments_; }

  /// How many entries have a key of at least `bound`: exact up to `wanted`, and never less than that where it is more.
  std::size_t count_at_least(std::int32_t bound) const;

  /// The k largest, k <= wanted, given that at least `count`, and they alone, have a key of at least `bound`.
  Cut topk(std::size_t k, std::int32_t bound, std::size_t count) const;

  /// Moves what `cut` selects into `out`, and puts the others back. Returns how many were moved.
  std::size_t move(const Cut& cut, std::uint32_t index_offset, EntriesOut<float> out);

 private:
  bool take(std::span<const float> gradient, std::size_t wanted, bool with_moments);
  void put_back(std::size_t count);

  std::span<float> residual_;
  Side side_;
  Moments moments_;
  std::int32_t lowest_ = 0;  // every entry with such a key is among those taken out
  bool taken_ = false;
  Array<std::uint32_t> indices_;
  Array<float> values_;
  std::size_t count_ = 0;
};

}  // namespace telegrad::kernels
