#pragma once
// Gradients of batches of sparse rows, as sorted entries, in time that does not depend on the number of features but for a
// scan of one bit in 4,096.
//
// Threads share the rows to find their slopes, then the features to sum them: each feature's sum is formed in the order
// of the rows, so that its bits do not depend on how many threads there are.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "linear/large.hpp"
#include "linear/loss.hpp"
#include "linear/model.hpp"
#include "linear/team.hpp"

namespace telegrad::linear {

class BatchGradient {
 public:
  struct Sums {
    double loss = 0;
    double slope = 0;  // the gradient by the bias
  };

  /// `team` outlives it.
  BatchGradient(std::size_t features, Team& team);

  /// Adds the gradients of `chosen` rows by the weights. Indices are below the number of features, and rise in a row.
  Sums add(const RowsView& rows, std::span<const float> targets, std::span<const std::uint64_t> chosen,
           const ModelView& model, Loss loss);

  /// How many features have been touched.
  std::size_t collect();

  /// The sums in rising order of their indices, as many as collect() has just said, after which all is 0 again.
  void take(std::span<std::uint32_t> indices, std::span<float> values);

  /// Calls visit(index, sum) for every touched feature instead of take(), in no order, from all threads; a feature
  /// whose sum was 0 in between comes again, with 0. Returns how many calls that were.
  template <class Visit>
  std::size_t drain(const Visit& visit);

  /// The slopes of `chosen` rows, for one subtract_entries() of the same rows: what add() needs no sums for.
  Sums find_slopes(const RowsView& rows, std::span<const float> targets, std::span<const std::uint64_t> chosen,
                   const ModelView& model, Loss loss);

  /// weights[index] -= factor · slope · value for every entry of these rows, but for rows without a slope; a feature's
  /// entries in the order of rows, by one thread. Returns how many entries that were.
  std::size_t subtract_entries(const RowsView& rows, std::span<const std::uint64_t> chosen, std::span<float> weights,
                               float factor);

  std::size_t features() const { return features_; }

 private:
  // Features that one thread sums. Borders are multiples of 4,096, so that threads' bits are in words of their own.
  struct Part {
    std::size_t begin = 0, end = 0;
    std::vector<std::uint32_t> first;  // features whose sum was 0 when they were added to: all that are touched
    std::size_t firsts = 0;            // how many of `first` there are
    std::size_t entries = 0;           // how many different ones, once collected
  };
  struct RowSlope {
    double loss = 0, slope = 0;
  };

  void divide(const RowsView& rows, std::span<const std::uint64_t> chosen);
  void add_entries(Part& part, const RowsView& rows, std::uint64_t begin, std::uint64_t end, float slope);
  Sums add_alone(const RowsView& rows, std::span<const float> targets, std::span<const std::uint64_t> chosen,
                 const ModelView& model, Loss loss);

  // Fetches a row some rows behind number i. Inlined always, as GCC drops calls of functions that do nothing but fetch.
  [[gnu::always_inline]] static inline void fetch_ahead(const RowsView& rows, std::span<const std::uint64_t> chosen,
                                                        std::size_t i);
  // The entries of row `row` that are `part`'s: [first, second).
  static std::pair<std::uint64_t, std::uint64_t> own_entries(const Part& part, const RowsView& rows, std::uint64_t row);

  std::size_t features_;
  Team& team_;
  LargeVector<float> sums_;             // made for the first add()
  std::vector<std::uint64_t> touched_;  // a bit for each feature
  std::vector<std::uint64_t> words_;    // a bit for each word of touched_ that is not 0
  std::vector<Part> parts_;             // one for each thread
  bool divided_ = false;
  std::vector<RowSlope> slopes_;
};

template <class Visit>
std::size_t BatchGradient::drain(const Visit& visit) {
  team_.run([&](std::size_t own) {
    Part& part = parts_[own];
    for (std::size_t i = 0; i < part.firsts; ++i) {
      const std::size_t index = part.first[i];
      visit(index, sums_[index]);
      sums_[index] = 0;
    }
  });
  std::size_t count = 0;
  for (Part& part : parts_) {
    count += part.firsts;
    part.firsts = 0;
  }
  divided_ = false;
  return count;
}

}  // namespace telegrad::linear
