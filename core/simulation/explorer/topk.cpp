#include "simulation/explorer/topk.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "simulation/workload.hpp"

namespace telegrad::explorer {
namespace {

// By what sums of the tensor at `index` are multiplied where they are compared: 1 outside of tensors.
class Weights {
 public:
  Weights(const Program& program, const PlannedCall& call, const OkTopkState& before) : tensors_(program.topk.tensors) {
    squares_ = before.squares;
    squares_.resize(tensors_.size());
    double least = std::numeric_limits<double>::infinity();
    for (const double square : squares_) {
      if (square > 0.0) least = std::min(least, square);
    }
    for (const double square : squares_) {
      const bool weighs = square > 0.0 && call.dtype != DType::f16;
      weights_.push_back(weighs ? std::sqrt(std::sqrt(least / square)) : 1.0);
    }
  }

  double at(std::uint32_t index) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (index >= tensors_[i].begin && index < tensors_[i].end) return weights_[i];
    }
    return 1.0;
  }

  // Whether these are the mean squares after a sum that ended a period. Of a tensor without a kept entry other than 0 they
  // follow from a threshold that nobody tells.
  bool lead_to(const std::vector<double>& after, SeenEntries sum, DType dtype) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      double total = 0.0;
      for (std::size_t entry = 0; entry < sum.indices.size(); ++entry) {
        const std::uint32_t index = sum.indices[entry];
        if (index < tensors_[i].begin || index >= tensors_[i].end) continue;
        const double value = value_at(dtype, sum.values.data() + entry * size_of(dtype));
        total += value * value;
      }
      const double mean = total / static_cast<double>(tensors_[i].end - tensors_[i].begin);
      const double wanted = squares_[i] > 0.0 ? (squares_[i] + mean) / 2 : mean;
      if (total > 0.0 ? after[i] != wanted : !(after[i] >= squares_[i] / 2)) return false;
    }
    return true;
  }

  const std::vector<double>& squares() const { return squares_; }

 private:
  const std::vector<IndexRange>& tensors_;
  std::vector<double> squares_;
  std::vector<double> weights_{};
};

std::string fault_of_state(const Program& program, const PlannedCall& call, const SeenTopk& seen, SeenEntries sum) {
  const OkTopkState& after = seen.after;
  const Weights weights(program, call, seen.before);
  const bool ends = after.calls % program.topk.threshold_every == 0;
  if (after.squares.size() != program.topk.tensors.size()) return "its state has mean squares of other tensors";
  if (ends ? !weights.lead_to(after.squares, sum, call.dtype) : after.squares != weights.squares()) {
    return "its state has other mean squares of tensors than follow from the sum";
  }
  if (after.calls != seen.before.calls + 1) return "its state counts " + std::to_string(after.calls) + " calls";
  const std::uint64_t length = std::accumulate(after.lengths.begin(), after.lengths.end(), std::uint64_t{0});
  if (after.lengths.size() != program.size || length != call.count) return "its state has slices of another vector";
  if (!(after.threshold >= 0.0)) return "its state has the threshold " + std::to_string(after.threshold);
  return {};
}

std::string fault_of_report(const Program& program, const SeenTopk& seen, std::size_t kept, std::size_t held) {
  const TopkReport& report = seen.report;
  const OkTopkSettings& settings = program.topk;
  if (report.selected != kept) return "its report counts " + std::to_string(report.selected) + " entries";
  if (!report.exact && seen.before.calls % settings.threshold_every == 0) return "its threshold was not found anew";
  const bool has_slices = seen.before.lengths.size() == program.size;
  if (!report.cut && settings.as_published && (!has_slices || seen.before.calls % settings.boundaries_every == 0)) {
    return "its slices were not cut anew";
  }
  if (report.exact && kept < std::min<std::size_t>(held, settings.k)) return "it keeps too few";
  if (settings.as_published) return {};
  const std::uint64_t quarter = settings.k / 4;
  const bool near = kept <= settings.k + quarter && (kept >= settings.k - quarter || kept == held);
  if (!report.exact && !near) return "it keeps " + std::to_string(kept) + " by an old threshold";
  const std::uint64_t most = oktopk_words_most(std::max(report.local_most, report.selected), program.size);
  if (report.words_most() > most) {
    return "it moved " + std::to_string(report.words_most()) + " words, more than " + std::to_string(most);
  }
  // Of what is split, also where it was in vain and began again; and each sum that is kept once.
  const std::uint64_t split_most = 2 * report.local_most + oktopk_excess(report.local_most, program.size);
  if (!report.balanced && report.traffic.entries_received > split_most + report.selected) {
    return "it received " + std::to_string(report.traffic.entries_received) + " entries, more than " +
           std::to_string(split_most) + " of a split and " + std::to_string(report.selected) + " sums";
  }
  return {};
}

// A rank keeps what reaches a threshold: where sums are exact, nothing that it does not keep is as large; and at an exact
// one it keeps the k largest and no more than what equals the least of them, of which 2k in all stay, of the lowest indices.
std::string fault_of_selection(const Program& program, const PlannedCall& call, const SeenTopk& seen, SeenEntries sum,
                               const Expected& expected) {
  const std::size_t element = size_of(call.dtype);
  const Weights weights(program, call, seen.before);
  const auto size_at = [&](std::uint32_t index) {
    const double size = std::abs(value_at(call.dtype, expected.dense.data() + index * element));
    const double weight = weights.at(index);
    if (weight == 1.0) return size;
    if (call.dtype == DType::f64) return size * weight;
    std::array<std::byte, sizeof(float)> rounded{};
    put_value(call.dtype, rounded.data(), static_cast<double>(static_cast<float>(size) * static_cast<float>(weight)));
    return value_at(call.dtype, rounded.data());
  };
  std::vector<double> sizes;
  double least_kept = std::numeric_limits<double>::infinity();
  double most_dropped = -1.0;
  std::size_t next = 0;
  for (const std::uint32_t index : expected.indices) {
    const double size = size_at(index);
    sizes.push_back(size);
    if (next < sum.indices.size() && sum.indices[next] == index) {
      least_kept = std::min(least_kept, size);
      ++next;
    } else {
      most_dropped = std::max(most_dropped, size);
    }
  }
  const std::size_t limit = program.topk.as_published ? sizes.size() : std::size_t{2} * program.topk.k;
  const bool is_cut_off = seen.report.exact && sum.indices.size() == limit;
  if (is_cut_off ? most_dropped > least_kept : most_dropped >= least_kept) {
    return "it keeps an entry that is not larger than one that it does not keep";
  }
  if (!seen.report.exact) return {};
  double wanted = 0.0;
  if (sizes.size() >= program.topk.k) {
    std::vector<double> ordered = sizes;
    const auto at = ordered.begin() + static_cast<std::ptrdiff_t>(program.topk.k - 1);
    std::ranges::nth_element(ordered, at, std::greater<>());
    wanted = *at;
  }
  const auto reaching = static_cast<std::size_t>(std::ranges::count_if(sizes, [&](double size) { return size >= wanted; }));
  const std::size_t right = std::min(reaching, limit);
  if (sum.indices.size() != right) {
    return "it keeps " + std::to_string(sum.indices.size()) + " entries instead of " + std::to_string(right);
  }
  bool has_dropped = false;  // of those that equal the least
  for (const std::uint32_t index : expected.indices) {
    if (size_at(index) != wanted) continue;
    const bool is_kept = std::ranges::binary_search(sum.indices, index);
    if (is_kept && has_dropped) return "of equal entries it keeps one behind one that it does not keep";
    has_dropped = has_dropped || !is_kept;
  }
  return {};
}

}  // namespace

std::string fault_of_topk(const Program& program, const PlannedCall& call, Rank rank, const SeenTopk& seen,
                          SeenEntries sum, const Expected& expected) {
  const std::size_t element = size_of(call.dtype);
  if (!std::ranges::includes(expected.indices, sum.indices) || sum.values.size() != sum.indices.size() * element) {
    return "it has an entry where no rank has one";
  }
  const bool is_exact = expected.errors_most.empty();
  for (std::size_t i = 0; i < sum.indices.size(); ++i) {
    const std::byte* const found = sum.values.data() + i * element;
    const std::size_t at = sum.indices[i];
    const bool right = is_exact ? std::memcmp(found, expected.dense.data() + at * element, element) == 0
                                : std::abs(value_at(call.dtype, found) - expected.sums[at]) <= expected.errors_most[at];
    if (!right) return "its entry at " + std::to_string(at) + " is " + std::to_string(value_at(call.dtype, found));
  }
  const Contribution share(call, rank, program.size);
  std::vector<std::uint32_t> left;
  std::vector<std::byte> left_values;
  std::uint64_t given = 0;
  for (std::uint32_t i = 0; i < call.count; ++i) {
    if (!share.has(i)) continue;
    ++given;
    if (std::ranges::binary_search(sum.indices, i)) continue;
    left.push_back(i);
    left_values.resize(left_values.size() + element);
    (void)put_value(call.dtype, left_values.data() + left_values.size() - element, share.value(i));
  }
  if (left != seen.left_indices || left_values != seen.left_values) return "what is handed back is not what it does not keep";
  if (seen.report.local_most < given) return "its report says that no rank has more than " + std::to_string(seen.report.local_most);
  std::string fault = fault_of_state(program, call, seen, sum);
  if (fault.empty()) fault = fault_of_report(program, seen, sum.indices.size(), expected.indices.size());
  if (fault.empty() && is_exact) fault = fault_of_selection(program, call, seen, sum, expected);
  return fault;
}

std::string fault_of_balance(const std::vector<TopkPart>& parts, SeenEntries sum) {
  const PlannedCall& call = parts[0].call;
  const auto size = static_cast<Rank>(parts.size());
  std::vector<double> balance(call.count);
  std::vector<double> magnitudes(call.count);
  double largest = 0.0;
  for (Rank rank = 0; rank < size; ++rank) {
    const auto& [given, seen, lost] = parts[rank];
    const Contribution share(given, rank, size);
    for (std::size_t i = 0; i < call.count; ++i) {
      const double value = share.has(i) ? static_cast<double>(share.value(i)) : 0.0;
      balance[i] += value - static_cast<double>(lost[i]);
      magnitudes[i] += std::abs(value);
      largest = std::max(largest, magnitudes[i]);
    }
    for (std::size_t i = 0; i < seen.left_indices.size(); ++i) {
      balance[seen.left_indices[i]] -= value_at(DType::f32, seen.left_values.data() + i * sizeof(float));
    }
  }
  const double weight = call.reduction == Reduction::avg ? static_cast<double>(size) : 1.0;
  for (std::size_t i = 0; i < sum.indices.size(); ++i) {
    balance[sum.indices[i]] -= weight * value_at(DType::f32, sum.values.data() + i * sizeof(float));
  }
  // Some roundings of floats for each rank: far less than any format of a wire loses.
  const double rounding = 8.0 * (static_cast<double>(size) + 4.0) * 0x1p-24;
  for (std::size_t i = 0; i < call.count; ++i) {
    const double scale = has_own_scale(call.wire_values()) ? magnitudes[i] : largest;
    if (std::abs(balance[i]) <= rounding * scale) continue;
    return "the sum, what is left and what rounding has lost differ by " + std::to_string(balance[i]) +
           " from what ranks have given at " + std::to_string(i);
  }
  return {};
}

}  // namespace telegrad::explorer
