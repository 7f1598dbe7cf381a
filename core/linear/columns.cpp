#include "linear/columns.hpp"

#include <algorithm>
#include <atomic>

namespace telegrad::linear {

Columns::Columns(const RowsView& rows, std::span<const std::uint64_t> chosen, std::size_t features, Team& team)
    : rows_(chosen.size()), team_(team), offsets_(features + 1), in_block_(chosen.size()) {
  for (const std::uint64_t row : chosen) {
    for (std::uint64_t i = rows.offsets[row]; i < rows.offsets[row + 1]; ++i) ++offsets_[rows.indices[i] + 1];
  }
  for (std::size_t column = 0; column < features; ++column) offsets_[column + 1] += offsets_[column];
  row_of_.resize(offsets_[features]);
  values_.resize(offsets_[features]);
  // While it is filled, a column's offset is where its next entry goes; afterwards that is where the next one begins.
  for (std::size_t number = 0; number < chosen.size(); ++number) {
    for (std::uint64_t i = rows.offsets[chosen[number]]; i < rows.offsets[chosen[number] + 1]; ++i) {
      const std::uint64_t place = offsets_[rows.indices[i]]++;
      row_of_[place] = static_cast<std::uint32_t>(number);
      values_[place] = rows.values[i];
    }
  }
  std::move_backward(offsets_.begin(), offsets_.end() - 1, offsets_.end());
  offsets_[0] = 0;
}

void Columns::derivatives(std::span<const std::uint32_t> block, std::span<const double> scores,
                          std::span<const float> targets, double bias, Loss loss, std::span<double> slopes,
                          std::span<double> curvatures) {
  const auto own_columns = [&](std::size_t part, const auto& visit) {
    const std::size_t size = team_.size();
    for (std::size_t i = block.size() * part / size; i < block.size() * (part + 1) / size; ++i) visit(i);
  };
  team_.run([&](std::size_t part) {
    own_columns(part, [&](std::size_t i) {
      for (std::uint64_t e = offsets_[block[i]]; e < offsets_[block[i] + 1]; ++e) {
        std::atomic_ref(in_block_[row_of_[e]]).fetch_add(1, std::memory_order_relaxed);
      }
    });
  });
  team_.run([&](std::size_t part) {
    own_columns(part, [&](std::size_t i) {
      double slope = 0, curvature = 0;
      for (std::uint64_t e = offsets_[block[i]]; e < offsets_[block[i] + 1]; ++e) {
        const std::uint32_t row = row_of_[e];
        const auto value = static_cast<double>(values_[e]);
        slope += slope_at(loss, scores[row] + bias, static_cast<double>(targets[row])) * value;
        curvature += in_block_[row] * value * value;
      }
      slopes[i] = slope;
      curvatures[i] = curvature;
    });
  });
  for (const std::uint32_t column : block) {
    for (std::uint64_t e = offsets_[column]; e < offsets_[column + 1]; ++e) in_block_[row_of_[e]] = 0;
  }
}

void Columns::move(std::span<const std::uint32_t> block, std::span<const float> changes, std::span<double> scores) {
  team_.run([&](std::size_t part) {
    const std::size_t first = rows_ * part / team_.size(), last = rows_ * (part + 1) / team_.size();
    for (std::size_t i = 0; i < block.size(); ++i) {
      const std::uint32_t* const begin = row_of_.data() + offsets_[block[i]];
      const std::uint32_t* const end = row_of_.data() + offsets_[block[i] + 1];
      const auto change = static_cast<double>(changes[i]);
      const std::uint32_t* row = team_.size() == 1 ? begin : std::lower_bound(begin, end, first);
      for (; row != end && *row < last; ++row) {
        scores[*row] += change * static_cast<double>(values_[static_cast<std::size_t>(row - row_of_.data())]);
      }
    }
  });
}

LossSums sum_losses(std::span<const double> scores, std::span<const float> targets, double bias, Loss loss) {
  LossSums sums;
  for (std::size_t row = 0; row < scores.size(); ++row) {
    const LossAt found = loss_at(loss, scores[row] + bias, static_cast<double>(targets[row]));
    sums.loss += found.value;
    sums.slope += found.slope;
  }
  return sums;
}

}  // namespace telegrad::linear
