#include "linear/gradient.hpp"

#include <bit>

#include "base/check.hpp"

namespace telegrad::linear {
namespace {

constexpr std::size_t kBits = 64;

constexpr std::size_t words_for(std::size_t bits) { return (bits + kBits - 1) / kBits; }

// Calls visit(base + position) for every bit of `word`, rising.
template <class Visit>
void for_each_bit(std::uint64_t word, std::size_t base, Visit&& visit) {
  for (; word != 0; word &= word - 1) visit(base + static_cast<std::size_t>(std::countr_zero(word)));
}

}  // namespace

double score_of(const RowsView& rows, std::size_t row, const ModelView& model) {
  const float* const weights = model.weights.data();
  double sum = 0;
  for (std::uint64_t i = rows.offsets[row], end = rows.offsets[row + 1]; i < end; ++i) {
    sum += static_cast<double>(weights[rows.indices[i]]) * static_cast<double>(rows.values[i]);
  }
  return model.scale * sum + model.bias;
}

void score_rows(const RowsView& rows, std::size_t first, const ModelView& model, std::span<float> scores) {
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(score_of(rows, first + i, model));
}

void subtract(std::span<float> weights, std::span<const std::uint32_t> indices, std::span<const float> values,
              double factor) {
  const auto by = static_cast<float>(factor);
  if (indices.empty() && values.size() == weights.size()) {
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= by * values[i];
    return;
  }
  for (std::size_t i = 0; i < indices.size(); ++i) weights[indices[i]] -= by * values[i];
}

BatchGradient::BatchGradient(std::size_t features)
    : sums_(features), touched_(words_for(features)), words_(words_for(words_for(features))) {}

BatchGradient::Sums BatchGradient::add(const RowsView& rows, std::span<const float> targets,
                                       std::span<const std::uint64_t> chosen, const ModelView& model, Loss loss) {
  Sums total;
  float* const sums = sums_.data();
  std::uint64_t* const touched = touched_.data();
  std::uint64_t* const words = words_.data();
  for (const std::uint64_t row : chosen) {
    const LossAt found = loss_at(loss, score_of(rows, row, model), targets[row]);
    total.loss += found.value;
    total.slope += found.slope;
    if (found.slope == 0) continue;
    const auto slope = static_cast<float>(found.slope);
    for (std::uint64_t i = rows.offsets[row], end = rows.offsets[row + 1]; i < end; ++i) {
      const std::size_t index = rows.indices[i];
      sums[index] += slope * rows.values[i];
      touched[index / kBits] |= std::uint64_t{1} << index % kBits;
      words[index / (kBits * kBits)] |= std::uint64_t{1} << index / kBits % kBits;
    }
  }
  return total;
}

std::size_t BatchGradient::entries() const {
  std::size_t count = 0;
  for (std::size_t block = 0; block < words_.size(); ++block) {
    for_each_bit(words_[block], block * kBits,
                 [&](std::size_t word) { count += static_cast<std::size_t>(std::popcount(touched_[word])); });
  }
  return count;
}

void BatchGradient::take(std::span<std::uint32_t> indices, std::span<float> values) {
  std::size_t count = 0;
  for (std::size_t block = 0; block < words_.size(); ++block) {
    for_each_bit(words_[block], block * kBits, [&](std::size_t word) {
      for_each_bit(touched_[word], word * kBits, [&](std::size_t index) {
        indices[count] = static_cast<std::uint32_t>(index);
        values[count++] = sums_[index];
        sums_[index] = 0;
      });
      touched_[word] = 0;
    });
    words_[block] = 0;
  }
  TELEGRAD_CHECK(count == indices.size() && count == values.size());
}

}  // namespace telegrad::linear
