// The P-quantiles of all ranks' indices, by histograms that are allreduced and refined where a quantile lies: at first the
// whole range in equal bins, then those bins that have a quantile and too many entries, and so on. A bin of one index
// has at most P entries. So a cut behind the first bin at which enough entries have come is too far by less than a bin: the
// slice between two cuts has at most T/P and a bin. The more entries a bin may have, the fewer bins there are.
#include "collectives/topk/pooled_slices.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "collectives/support/allreduce_counts.hpp"
#include "collectives/support/blocks.hpp"
#include "collectives/support/sum_counts.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kBinsOfRange = 4;      // at least
constexpr std::size_t kFixedBinsLeast = 1024;  // about: it takes as long as a message of 8 KiB

// ceil(part * total / parts), for which 64 bits might be too few.
std::uint64_t share_of(std::uint64_t total, std::uint64_t parts, std::uint64_t part) {
  __extension__ using Product = unsigned __int128;
  return static_cast<std::uint64_t>((Product{total} * part + parts - 1) / parts);
}

// Of a histogram, about: an evenly filled one has at most `enough` of T/P = `mean` entries of a slice in each.
std::size_t bins_of(Rank ranks, std::uint64_t mean, std::uint64_t enough) {
  return static_cast<std::size_t>(std::bit_ceil(std::max<std::uint64_t>(2, mean / enough)) * ranks);
}

// Where the boundary before a slice is: behind `before` entries in [begin, end), or, once that is empty, at its end.
struct Cut {
  Range within;
  std::uint64_t before = 0;
};

class Cutting {
 public:
  /// `parts`: of what the slices hold, one for each rank. `bins`: of a histogram, about; `enough`: a bin need not have fewer
  /// entries. 0: as many ranges, bins and levels as can be needed, whatever the counts.
  Cutting(std::span<const std::uint32_t> indices, std::uint64_t dimension, std::vector<std::uint64_t> parts,
          std::size_t bins, std::uint64_t enough)
      : indices_(indices),
        parts_(std::move(parts)),
        all_bins_(bins),
        enough_(enough),
        is_fixed_(enough == 0),
        longest_(dimension),
        cuts_(parts_.size() - 1, {{0, static_cast<std::size_t>(dimension)}}) {
    std::partial_sum(parts_.begin(), parts_.end(), parts_.begin());
  }

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
    bins_ = std::max(kBinsOfRange, std::bit_floor(all_bins_ / ranges_.size()));
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
    for (std::size_t i = 0; i < cuts_.size(); ++i) {
      Cut& cut = cuts_[i];
      if (cut.within.size() == 0) continue;
      const std::uint64_t wanted = share_of(total, parts_.back(), parts_[i]);
      const auto found = counts.subspan(range_of_cut_[i] * bins_, bins_);
      std::size_t bin = 0;
      while (bin + 1 < bins_ && cut.before + found[bin] < wanted) cut.before += found[bin++];
      cut.within = part_of(ranges_[range_of_cut_[i]], bins_, bin);
      if ((!is_fixed_ && found[bin] <= enough_) || cut.within.size() <= 1) cut.within.begin = cut.within.end;
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
  std::vector<std::uint64_t> parts_;  // each with those before it
  const std::size_t all_bins_;
  const std::uint64_t enough_;
  const bool is_fixed_;
  std::uint64_t longest_;  // range that there may be
  std::vector<Cut> cuts_;
  std::vector<Range> ranges_;  // ascending
  std::vector<std::size_t> range_of_cut_;
  std::size_t bins_ = 0;
};

}  // namespace

Task<Partition> pooled_slices(Transport& net, std::span<const std::uint32_t> indices, std::uint64_t dimension,
                              std::uint64_t total, std::vector<std::uint64_t> parts, std::uint64_t enough,
                              SparseTraffic& traffic, Step first_step) {
  const Rank size = net.size();
  const Partition equal(static_cast<std::size_t>(dimension), size);
  if (size == 1 || dimension == 0 || total == 0) co_return equal;
  enough = std::max<std::uint64_t>(1, enough);
  Cutting cutting(indices, dimension, std::move(parts), bins_of(size, total / size, enough), enough);
  std::vector<std::uint64_t> counts;
  Step step = first_step;
  for (; cutting.next_level(); step += kSumCountsSteps) {
    co_await net.compute(0, [&] { counts = cutting.histogram(); });
    co_await sum_counts(net, counts, 0, dimension, traffic, step);
    cutting.refine(counts, total);
  }
  TELEGRAD_CHECK(step - first_step <= kSliceSteps);
  co_return Partition(std::span<const std::uint64_t>(cutting.lengths(dimension)));
}

std::uint64_t pooled_slices_bytes_most(std::uint64_t dimension, Rank ranks, std::uint64_t mean, std::uint64_t enough) {
  const std::size_t bins = bins_of(ranks, mean, enough);
  const std::uint64_t total = mean * ranks;
  std::uint64_t bytes = sum_counts_bytes_most(bins, ranks, total);
  const std::size_t others = std::max(bins, kBinsOfRange * ranks);
  for (std::uint64_t range = dimension / bins + 1; range > 1; range = (range + kBinsOfRange - 1) / kBinsOfRange) {
    bytes += std::max(sum_counts_bytes_most(others, ranks, total), sum_counts_bytes_most(256, ranks, total));
  }
  return bytes;
}

Task<PooledSlices> pooled_slices_in_fixed_rounds(Transport& net, std::span<const std::uint32_t> indices,
                                                 std::uint64_t dimension, SparseTraffic& traffic, Step first_step) {
  const Rank size = net.size();
  PooledSlices result{Partition(static_cast<std::size_t>(dimension), size), indices.size(), 0};
  if (size == 1 || dimension == 0) co_return result;
  Cutting cutting(indices, dimension, std::vector<std::uint64_t>(size, 1), std::max(kFixedBinsLeast, std::size_t{4} * size), 0);
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
