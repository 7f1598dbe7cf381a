#include "linear/model.hpp"

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

void score_rows(const RowsView& rows, std::size_t first, const ModelView& model, std::span<float> scores) {
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(score_of(rows, first + i, model));
}

}  // namespace telegrad::linear
