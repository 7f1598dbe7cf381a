#include "linear/model.hpp"

#include <algorithm>

namespace telegrad::linear {

double score_of(const RowsView& rows, std::size_t row, const ModelView& model) {
  const float* const weights = model.weights.data();
  double sum = 0;
  if (model.owed == nullptr) {
    for (std::uint64_t i = rows.offsets[row], end = rows.offsets[row + 1]; i < end; ++i) {
      sum += static_cast<double>(weights[rows.indices[i]]) * static_cast<double>(rows.values[i]);
    }
  } else {
    for (std::uint64_t i = rows.offsets[row], end = rows.offsets[row + 1]; i < end; ++i) {
      const std::uint32_t index = rows.indices[i];
      sum += static_cast<double>(model.owed->settled(weights[index], index)) * static_cast<double>(rows.values[i]);
    }
  }
  return model.scale * sum + model.bias;
}

std::pair<double, double> scores_of(const RowsView& rows, std::size_t one, std::size_t other, const ModelView& model) {
  if (model.owed != nullptr) return {score_of(rows, one, model), score_of(rows, other, model)};
  const float* const weights = model.weights.data();
  const float* const values = rows.values.data();
  const std::uint32_t* const indices = rows.indices.data();
  std::uint64_t i = rows.offsets[one], j = rows.offsets[other];
  const std::uint64_t end = rows.offsets[one + 1], other_end = rows.offsets[other + 1];
  double sum = 0, other_sum = 0;
  for (std::uint64_t both = std::min(end - i, other_end - j); both > 0; --both, ++i, ++j) {
    sum += static_cast<double>(weights[indices[i]]) * static_cast<double>(values[i]);
    other_sum += static_cast<double>(weights[indices[j]]) * static_cast<double>(values[j]);
  }
  for (; i < end; ++i) sum += static_cast<double>(weights[indices[i]]) * static_cast<double>(values[i]);
  for (; j < other_end; ++j) other_sum += static_cast<double>(weights[indices[j]]) * static_cast<double>(values[j]);
  return {model.scale * sum + model.bias, model.scale * other_sum + model.bias};
}

void score_rows(const RowsView& rows, std::size_t first, const ModelView& model, std::span<float> scores) {
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(score_of(rows, first + i, model));
}

}  // namespace telegrad::linear
