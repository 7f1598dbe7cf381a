#pragma once
// Gradients of batches of sparse rows, as sorted entries, in time that does not depend on the number of features but for a
// scan of one bit in 4,096.

#include <cstdint>
#include <span>
#include <vector>

#include "linear/loss.hpp"

namespace telegrad::linear {

/// Rows in compressed form: row r has the entries [offsets[r], offsets[r + 1]).
struct RowsView {
  std::span<const std::uint64_t> offsets;
  std::span<const std::uint32_t> indices;
  std::span<const float> values;
};

/// A linear model: its weights are scale · weights. So shrinking all of them (L2) costs one multiplication.
struct ModelView {
  std::span<const float> weights;
  double scale = 1;
  double bias = 0;
};

/// scale · (weights · row) + bias, summed in f64 in the order of the entries.
double score_of(const RowsView& rows, std::size_t row, const ModelView& model);

/// The scores of rows `first`, `first` + 1, …, as many as `scores` has room for.
void score_rows(const RowsView& rows, std::size_t first, const ModelView& model, std::span<float> scores);

/// weights[indices[i]] -= factor · values[i]; without indices, of all weights.
void subtract(std::span<float> weights, std::span<const std::uint32_t> indices, std::span<const float> values,
              double factor);

class BatchGradient {
 public:
  struct Sums {
    double loss = 0;
    double slope = 0;  // the gradient by the bias
  };

  explicit BatchGradient(std::size_t features);

  /// Adds the gradients of `chosen` rows by the weights. Indices are below the number of features.
  Sums add(const RowsView& rows, std::span<const float> targets, std::span<const std::uint64_t> chosen,
           const ModelView& model, Loss loss);

  /// How many features have been touched.
  std::size_t entries() const;

  /// The sums in rising order of their indices, entries() of them, after which all is 0 again.
  void take(std::span<std::uint32_t> indices, std::span<float> values);

  std::size_t features() const { return sums_.size(); }

 private:
  std::vector<float> sums_;
  std::vector<std::uint64_t> touched_;  // a bit for each feature
  std::vector<std::uint64_t> words_;    // a bit for each word of touched_ that is not 0
};

}  // namespace telegrad::linear
