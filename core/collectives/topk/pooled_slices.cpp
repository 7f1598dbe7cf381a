// The P-quantiles of all ranks' indices, by histograms that are allreduced and refined where a quantile lies: at first the
// whole range in equal bins, then those bins that have a quantile and more than P entries, and so on. A bin of one index
// has at most P entries. So a cut behind the first bin at which enough entries have come is at most P − 1 too far: the
// slice between two cuts has at most T/P + P.
#include "collectives/topk/pooled_slices.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "base/check.hpp"
#include "collectives/support/allreduce_counts.hpp"
#include "collectives/support/blocks.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kBinsLeast = 1024;  // of a histogram, about: it takes as long as a message of 8 KiB

// ceil(part * total / parts), which the product alone might not fit.
std::uint64_t share_of(std::uint64_t total, std::uint64_t parts, std::uint64_t part) {
  return total / parts * part + (total % parts * part + parts - 1) / parts;
}

// Where the boundary before a slice is: behind `before` entries in [begin, end), or, once that is empty, at its end.
struct Cut {
  Range within;
  std::uint64_t before = 0;
};

class Cutting {
 public:
  /// `is_fixed`: as many ranges, bins and levels as can be needed, whatever the counts.
  Cutting(std::span<const std::uint32_t> indices, std::uint64_t dimension, Rank ranks, bool is_fixed)
      : indices_(indices),
        ranks_(ranks),
        is_fixed_(is_fixed),
        longest_(dimension),
        cuts_(ranks - 1, {{0, static_cast<std::size_t>(dimension)}}) {}

  // The ranges to be looked into, each in `bins` bins; false if there is none.
  bool next_level() {
    const bool is_first = ranges_.empty();
    ranges_.clear();
    range_of_cut_.clear();
    for (const Cut& cut : cuts_) {
      const bool repeated = !ranges_.empty() && ranges_.back().begin == cut.within.begin;
      const bool has_own = is_fixed_ ? !is_first || ranges_.empty() : cut.within.size() > 0 && !repeated;
      if (has_own) ranges_.push_back(cut.within);
      range_of_cut_.push_back(ranges_.size() - 1);
    }
    if (is_fixed_ ? longest_ <= 1 : ranges_.empty()) return false;
    const std::size_t bins = std::max(kBinsLeast, std::size_t{4} * ranks_);
    bins_ = std::max<std::size_t>(4, std::bit_floor(bins / ranges_.size()));
    longest_ = (longest_ - 1) / bins_ + 1;
    return true;
  }
  std::size_t counts() const { return ranges_.size() * bins_; }

  // What this rank has in each bin.
  std::vector<std::uint64_t> histogram() const {
    std::vector<std::uint64_t> counts;
    counts.reserve(ranges_.size() * bins_ + 1);
    for (const Range& range : ranges_) {
      auto from = std::ranges::lower_bound(indices_, range.begin);
      for (std::size_t bin = 0; bin < bins_; ++bin) {
        const auto to = std::lower_bound(from, indices_.end(), part_of(range, bins_, bin).end);
        counts.push_back(static_cast<std::uint64_t>(to - from));
        from = to;
      }
    }
    return counts;
  }

  // What all have in each bin: every cut moves into one of them.
  void refine(std::span<const std::uint64_t> counts, std::uint64_t total) {
    for (Rank i = 0; i < cuts_.size(); ++i) {
      Cut& cut = cuts_[i];
      if (cut.within.size() == 0) continue;
      const std::uint64_t wanted = share_of(total, ranks_, i + 1);
      const auto found = counts.subspan(range_of_cut_[i] * bins_, bins_);
      std::size_t bin = 0;
      while (bin + 1 < bins_ && cut.before + found[bin] < wanted) cut.before += found[bin++];
      cut.within = part_of(ranges_[range_of_cut_[i]], bins_, bin);
      if ((!is_fixed_ && found[bin] <= ranks_) || cut.within.size() <= 1) cut.within.begin = cut.within.end;
    }
  }

  std::vector<std::uint64_t> lengths(std::uint64_t dimension) const {
    std::vector<std::uint64_t> lengths;
    std::uint64_t begin = 0;
    for (const Cut& cut : cuts_) {
      const std::uint64_t end = std::max<std::uint64_t>(begin, cut.within.end);  // whatever counts have come
      lengths.push_back(end - begin);
      begin = end;
    }
    lengths.push_back(dimension - begin);
    return lengths;
  }

 private:
  const std::span<const std::uint32_t> indices_;
  const Rank ranks_;
  const bool is_fixed_;
  std::uint64_t longest_;  // range that there may be
  std::vector<Cut> cuts_;
  std::vector<Range> ranges_;  // ascending
  std::vector<std::size_t> range_of_cut_;
  std::size_t bins_ = 0;
};

}  // namespace

Task<PooledSlices> pooled_slices(Transport& net, std::span<const std::uint32_t> indices, std::uint64_t dimension,
                                 SparseTraffic& traffic, Step first_step) {
  const Rank size = net.size();
  PooledSlices result{Partition(static_cast<std::size_t>(dimension), size), indices.size(), indices.size()};
  if (size == 1 || dimension == 0) co_return result;
  Cutting cutting(indices, dimension, size, false);
  std::vector<std::uint64_t> counts;
  Step step = first_step;
  for (bool first = true; cutting.next_level(); first = false, step += kCountSteps) {
    co_await net.compute(0, [&] { counts = cutting.histogram(); });
    if (first) counts.push_back(indices.size());
    co_await allreduce_counts(net, counts, first ? 1 : 0, traffic, step);
    if (first) {
      result.most = counts.back();
      counts.pop_back();
      result.total = 0;
      for (const std::uint64_t count : counts) result.total += count;
      if (result.total == 0) co_return result;
    }
    cutting.refine(counts, result.total);
  }
  TELEGRAD_CHECK(step - first_step <= kSliceSteps);
  result.slices = Partition(std::span<const std::uint64_t>(cutting.lengths(dimension)));
  co_return result;
}

Task<PooledSlices> pooled_slices_in_fixed_rounds(Transport& net, std::span<const std::uint32_t> indices,
                                                 std::uint64_t dimension, SparseTraffic& traffic, Step first_step) {
  const Rank size = net.size();
  PooledSlices result{Partition(static_cast<std::size_t>(dimension), size), indices.size(), 0};
  if (size == 1 || dimension == 0) co_return result;
  Cutting cutting(indices, dimension, size, true);
  std::vector<std::uint64_t> counts;
  Step step = first_step;
  for (bool first = true; cutting.next_level(); first = false, step += kCountSteps) {
    co_await net.compute(0, [&] { counts = cutting.histogram(); });
    counts.resize(cutting.counts());
    co_await allreduce_counts(net, counts, 0, traffic, step);
    co_await net.compute(0, [&] {
      if (first) result.total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
      cutting.refine(counts, result.total);
    });
  }
  TELEGRAD_CHECK(step - first_step <= kSliceSteps);
  co_await net.compute(0, [&] {
    if (result.total > 0) result.slices = Partition(std::span<const std::uint64_t>(cutting.lengths(dimension)));
  });
  co_return result;
}

Task<PooledSlices> averaged_slices(Transport& net, std::span<const std::uint32_t> indices, std::uint64_t dimension,
                                   SparseTraffic& traffic, Step first_step) {
  const Rank size = net.size();
  std::vector<std::uint64_t> boundaries;  // as sums, then the total and the most
  for (Rank rank = 1; rank < size; ++rank) {
    const std::uint64_t place = share_of(indices.size(), size, rank);
    boundaries.push_back(place < indices.size() ? indices[place] : indices.empty() ? dimension * rank / size : dimension);
  }
  boundaries.push_back(indices.size());
  boundaries.push_back(indices.size());
  co_await allreduce_counts(net, boundaries, 1, traffic, first_step);
  std::vector<std::uint64_t> lengths;
  std::uint64_t begin = 0;
  for (Rank rank = 1; rank <= size; ++rank) {
    const std::uint64_t end = rank == size ? dimension : std::clamp(boundaries[rank - 1] / size, begin, dimension);
    lengths.push_back(end - begin);
    begin = end;
  }
  co_return PooledSlices{Partition(std::span<const std::uint64_t>(lengths)), boundaries[size - 1], boundaries[size]};
}

}  // namespace telegrad
