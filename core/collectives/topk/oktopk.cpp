// Ok-Topk: a sparse allreduce whose volume does not grow with the number of ranks. Li, Hoefler, "Near-optimal sparse
// allreduce for distributed deep learning", PPoPP 2022, Algorithm 1. Six steps, of which the first, selection on each rank,
// is the caller's:
//
//   2  ranks count what each owner of a slice would receive; slices are cut anew where that is more for one than chance brings.
//      After a call in which no rank had many entries for one owner nobody counts: a rank that has many all the same holds
//      its entries back. All hear of that with the counts of step 4, cut slices, and begin again
//   3  entries go to the owners of their slices, which add them
//   4  every τ' calls the threshold is found that k of all sums reach; in between it is corrected by how many reach it, and
//      moved where that is more than a quarter off k: by counts that came with those of kept sums, or by an exchange of others
//   5  owners keep what reaches it; shares that are very unlike are made alike, and all are gathered
//   6  who has given an entry that the sum does not keep takes it back
//
// (2P + O(log P))α; of words at most 2k' in step 3, as many more to receive as chance brings, 2k' to make shares alike and 2k'
// to gather them. The paper's bound of 6k(P−1)/P does not hold as it is published: averaged boundaries, and such as have
// become stale, may bring one owner most of all entries; gathering all sums for the threshold costs up to 2kP; recursive
// doubling of unlike shares 2k·log2 P. Hence pooled boundaries, counts before every split, radix selection, and a ring.
// Counts and headers must not outgrow entries either: a call has about 3P bytes of counts, shares of some tens of entries
// have no header, and histograms have the fewer bins the smaller k is.
#include "collectives/topk/oktopk.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/random.hpp"
#include "codec/entry_sets.hpp"
#include "codec/varint.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/split.hpp"
#include "collectives/support/allgather_short.hpp"
#include "collectives/support/sum_counts.hpp"
#include "collectives/topk/allgather_shares.hpp"
#include "collectives/topk/pooled_slices.hpp"
#include "collectives/topk/short_shares.hpp"
#include "collectives/topk/threshold.hpp"
#include "transport/milestone.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kBucketBytes = std::size_t{256} << 10;  // of a share, about
constexpr std::size_t kBucketsMost = 8;
constexpr std::uint64_t kHeaderBytesMost = 40;  // with padding
constexpr Step kManySteps = Step{1} << 31;  // room for gathering all sums

// Entries of a bin beyond which it is not divided, once slices are cut: so they need not be cut again at once.
std::uint64_t enough_of(std::uint64_t excess, Rank ranks) { return std::max<std::uint64_t>(excess / 2, ranks); }

// What the threshold becomes for the next call, where this one has kept `selected`: changed by a quarter of
// the deviation, and by an eighth at most.
double corrected(double threshold, std::uint64_t selected, std::uint64_t k) {
  const double ratio = static_cast<double>(selected) / static_cast<double>(k);
  return threshold * (1.0 + (std::clamp(ratio, 0.5, 1.5) - 1.0) / 4);
}

// So many entries are kept with a threshold that is not exact: a quarter more or less than k, or all there are.
bool is_near(std::uint64_t selected, bool keeps_all, std::uint64_t k) {
  if (selected > k + k / 4) return false;
  return selected >= k - k / 4 || keeps_all;
}

// Thresholds that are tried where the last one has become useless, and each one's ratio to the next: up to about 2.2 times
// as large, or as small. Of sums as they are in training 5 % more or less changes how many are kept by a fifth.
constexpr std::size_t kTried = 16;
constexpr double kTriedRatio = 1.05;

// Together with how many sums it keeps a rank says how many of these lie in each of so many steps above the threshold, of a
// sixteenth of a doubling each: if too many are kept, all ranks know at once what a larger one would keep. Only where these
// counts are few beside entries.
constexpr std::size_t kSteps = 8;
constexpr std::size_t kSaid = 2;  // more counts of a rank that has sent its entries uncounted
constexpr unsigned kBitsOfSteps = 4;
bool counts_steps(std::uint64_t k, Rank ranks) { return 10 * kSteps * ranks <= k; }
// The same of tried thresholds: then all ranks know at once what each keeps with the one that is taken.
bool tells_tried(std::uint64_t k, Rank ranks) { return 10 * kTried * ranks <= k; }

// Slices that have served may serve again uncounted: where shares are so large that chance makes none of them twice the mean.
constexpr std::uint64_t kUncountedShareLeast = 36;
bool may_go_uncounted(std::uint64_t k, Rank ranks) { return ranks > 1 && k >= kUncountedShareLeast * ranks; }

// Of a rank's `given` entries as many may go to one owner uncounted: so an owner receives less than 2k'.
std::uint64_t uncounted_most(std::uint64_t given, Rank ranks) { return 2 * given / ranks; }

// By which sums of each tensor are multiplied to compare them, at most 1: v^(-1/4), by roots, which all machines round alike.
// A tensor of which nothing is known has the largest factor.
std::vector<double> weights_of(const std::vector<double>& squares) {
  double least = std::numeric_limits<double>::infinity();
  for (const double square : squares) least = square > 0.0 ? std::min(least, square) : least;
  std::vector<double> weights;
  for (const double square : squares) weights.push_back(square > 0.0 ? std::sqrt(std::sqrt(least / square)) : 1.0);
  return weights;
}

template <class V>
class OkTopk {
 public:
  OkTopk(Transport& net, SparseVector<V> mine, const OkTopkSettings& settings, OkTopkState state, Reduction reduction,
         WireFormat wire, std::span<float> residual)
      : net_(net), mine_(std::move(mine)), settings_(settings), state_(std::move(state)) {
    TELEGRAD_CHECK(!SizeOnly::active());  // what is sent depends on values
    TELEGRAD_CHECK(!mine_.is_dense() && settings.k > 0);
    TELEGRAD_CHECK(residual.empty() || residual.size() == mine_.dimension());
    TELEGRAD_CHECK(reduction == Reduction::sum || reduction == Reduction::avg);
    how_.reduction = reduction;
    how_.wire = wire;
    how_.residual = residual;
    how_.switch_factor = std::numeric_limits<double>::infinity();
    TELEGRAD_CHECK(settings_.tensors.empty() || !settings_.as_published);
    if (state_.squares.size() != settings_.tensors.size()) state_.squares.assign(settings_.tensors.size(), 0.0);
    weights_ = weights_of(state_.squares);
    if (std::is_same_v<V, f16>) weights_.assign(weights_.size(), 1.0);  // there is no room below its smallest numbers
  }

  Task<OkTopkSum<V>> run() {
    co_await settle_slices();
    co_await split_and_reduce();
    co_await weigh();
    co_await settle_threshold();
    co_await restore();
    SparseVector<V> sum = co_await gather();
    SparseVector<V> left;
    co_await decide(net_, bytes_of(sum.view()) + bytes_of(mine_.view()), [&] {
      left = sparse_vector(mine_.dimension(), entries_without(mine_.view(), sum.indices()), how_.reduction);
      keep_errors(left.indices());
      if ((state_.calls + 1) % settings_.threshold_every == 0) observe(sum);  // the next call finds a threshold
    });
    state_.threshold = settings_.as_published ? state_.threshold
                                              : corrected(state_.threshold, report_.selected, settings_.k);
    ++state_.calls;
    co_return OkTopkSum<V>{std::move(sum), std::move(left), std::move(state_), report_};
  }

 private:
  bool is_due(std::uint64_t period) const { return state_.calls % period == 0; }

  Task<void> settle_slices() {
    const Rank size = net_.size();
    const std::uint64_t dimension = mine_.dimension();
    slices_ = Partition(std::span<const std::uint64_t>(state_.lengths));
    const bool has_none = slices_.blocks() != size || slices_.count() != dimension;
    if (has_none) slices_ = Partition(static_cast<std::size_t>(dimension), size);
    if (settings_.as_published) {
      report_.local_most = mine_.nnz();
      if (has_none || is_due(settings_.boundaries_every)) co_await average_slices();
    } else if (!has_none && state_.spread && may_go_uncounted(settings_.k, size) && !is_due(settings_.boundaries_every) &&
               !is_due(settings_.threshold_every)) {
      uncounted_ = true;
      holds_back_ = !is_spread();
    } else {
      co_await check_slices();
    }
    if (has_none || report_.cut) keep_slices();
  }

  void keep_slices() {
    state_.lengths.clear();
    for (Rank rank = 0; rank < net_.size(); ++rank) state_.lengths.push_back(slices_[rank].size());
  }

  std::uint64_t count_for(Rank owner) const { return mine_.slice(slices_[owner].begin, slices_[owner].end).nnz(); }
  // Whether this rank has few enough entries for each other one.
  bool is_spread() const {
    for (Rank owner = 0; owner < net_.size(); ++owner) {
      if (owner != net_.rank() && count_for(owner) > uncounted_most(mine_.nnz(), net_.size())) return false;
    }
    return true;
  }

  Task<void> average_slices() {
    const PooledSlices cut = co_await averaged_slices(net_, mine_.indices(), mine_.dimension(), report_.traffic,
                                                      take_steps(kSliceSteps));
    slices_ = cut.slices;
    report_.local_most = cut.most;
    report_.cut = true;
  }

  // All ranks count what each owner would receive; where that is too much for one, slices are cut.
  Task<void> check_slices() {
    const Rank size = net_.size();
    // Received by each owner; all entries; the most that a rank has, and whether one has many for one owner.
    std::vector<std::uint64_t> counts(size + 3);
    co_await net_.compute(0, [&] {
      for (Rank owner = 0; owner < size; ++owner) {
        if (owner != net_.rank()) counts[owner] = count_for(owner);
      }
      counts[size] = mine_.nnz();
      counts[size + 1] = mine_.nnz();
      counts[size + 2] = is_spread() ? 0 : 1;
    });
    co_await sum_counts(net_, counts, 2, mine_.dimension(), report_.traffic, take_steps(kSumCountsSteps));
    const std::uint64_t total = counts[size];
    report_.local_most = counts[size + 1];
    state_.spread = counts[size + 2] == 0;
    const std::uint64_t received = *std::max_element(counts.begin(), counts.begin() + size);
    const std::uint64_t excess = oktopk_excess(report_.local_most, size);
    if (received <= report_.local_most + (is_due(settings_.boundaries_every) ? excess / 2 : excess)) co_return;
    co_await cut_slices(total, std::vector<std::uint64_t>(size, 1));
  }

  // In proportion to `parts`.
  Task<void> cut_slices(std::uint64_t total, std::vector<std::uint64_t> parts) {
    const std::uint64_t enough = enough_of(oktopk_excess(report_.local_most, net_.size()), net_.size());
    slices_ = co_await pooled_slices(net_, mine_.indices(), mine_.dimension(), total, std::move(parts), enough,
                                     report_.traffic, take_steps(kSliceSteps));
    report_.cut = true;
    state_.spread = false;
  }

  // Some rank has held its entries back. What others have sent was in vain: slices are cut so that with it no owner receives
  // more than 2k' and what chance brings, and it all begins again. Sums are then gathered without sending any twice.
  Task<void> begin_again() {
    uncounted_ = holds_back_ = false;
    again_ = true;
    errors_ = {};  // of what was sent in vain: short shares have none
    std::vector<std::uint64_t> parts;
    for (const std::uint64_t received : received_) {
      parts.push_back(received < 2 * report_.local_most ? 2 * report_.local_most - received : 1);
    }
    co_await cut_slices(total_, std::move(parts));
    keep_slices();
    co_await split_and_reduce();
    co_await weigh();
  }

  // Makes of the owned sums what is compared.
  Task<void> weigh() {
    sums_ = {};
    if (std::ranges::all_of(weights_, [](double weight) { return weight == 1.0; })) co_return;
    sums_ = Array<V>(owned_.values.size());
    co_await net_.compute(owned_.values.size() * sizeof(V), [&] {
      std::ranges::copy(owned_.values.span(), sums_.span().begin());
      for (std::size_t tensor = 0; tensor < weights_.size(); ++tensor) {
        const auto weight = static_cast<kernels::Factor<V>>(weights_[tensor]);
        for (V& value : values_of(settings_.tensors[tensor], owned_.indices.span(), owned_.values.span())) {
          value = kernels::times(value, weight);
        }
      }
    });
  }

  // Makes of those that are kept the sums that they were.
  Task<void> restore() {
    if (sums_.empty()) co_return;
    co_await net_.compute(kept_.values.size() * sizeof(V), [&] {
      std::size_t at = 0;
      for (std::size_t i = 0; i < kept_.values.size(); ++i) {
        while (owned_.indices[at] != kept_.indices[i]) ++at;
        kept_.values[i] = sums_[at];
      }
    });
  }

  template <class T>
  static std::span<T> values_of(IndexRange tensor, std::span<const std::uint32_t> indices, std::span<T> values) {
    const auto begin = std::ranges::lower_bound(indices, tensor.begin);
    const auto end = std::ranges::lower_bound(begin, indices.end(), tensor.end);
    return values.subspan(static_cast<std::size_t>(begin - indices.begin()), static_cast<std::size_t>(end - begin));
  }

  // Half of the old, half of the new. One after another, as all machines add them. A tensor of which the sum keeps nothing
  // has at most such as are just below its threshold, as many as k is of all.
  void observe(const SparseVector<V>& sum) {
    for (std::size_t tensor = 0; tensor < settings_.tensors.size(); ++tensor) {
      const IndexRange range = settings_.tensors[tensor];
      double total = 0.0;
      for (const V one : values_of(range, sum.indices(), sum.values())) {
        const auto value = static_cast<double>(static_cast<kernels::Factor<V>>(one));
        total += value * value;
      }
      const double least = state_.threshold / weights_[tensor];
      const double share = static_cast<double>(settings_.k) / static_cast<double>(mine_.dimension());
      const double mean = total > 0.0 ? total / static_cast<double>(range.size()) : least * least * share;
      double& square = state_.squares[tensor];
      if (std::isfinite(mean)) square = square > 0.0 ? (square + mean) / 2 : mean;
    }
  }

  // In buckets: while one is reduced, the next one's messages come. A lane does every other bucket.
  Task<void> split_and_reduce() {
    // What no rank has more of than, and about what all agree that it is.
    const std::uint64_t most = uncounted_ ? mine_.dimension() : report_.local_most;
    const std::uint64_t about = uncounted_ ? settings_.k : report_.local_most;
    const SparseVector<V> none(mine_.dimension());
    const SparseVector<V>& given = holds_back_ ? none : mine_;
    if (!settings_.as_published && net_.size() > 1 && are_short<V>(about, net_.size(), how_.wire)) {
      owned_ = co_await split_short_shares(net_, given, slices_, most, how_.reduction, report_.traffic, take_steps(1));
      co_return;
    }
    const std::size_t share = about * (sizeof(std::uint32_t) + sizeof(V)) / net_.size();
    const bool agreed = !settings_.as_published || report_.cut;
    const std::size_t buckets = agreed ? std::clamp<std::size_t>(share / kBucketBytes, 1, kBucketsMost) : 1;
    const Step steps = split_steps<V>(net_, slices_);
    const Step first_step = take_steps(static_cast<Step>(buckets) * steps);
    if (how_.wire.values != ValueEncoding::native && !how_.residual.empty()) {
      errors_ = Array<float>(given.nnz());
      std::ranges::fill(errors_, 0.0F);
    }
    std::vector<OwnedSlice<V>> sums(buckets);
    Milestone received(net_.ready());  // how many buckets have come
    std::vector<Task<void>> lanes;
    for (std::size_t lane = 0; lane < std::min<std::size_t>(2, buckets); ++lane) {
      lanes.push_back(run_lane(given, lane, first_step, steps, sums, received));
    }
    co_await when_all(std::move(lanes));
    const Rank rank = net_.rank();
    for (Rank owner = 0; owner < net_.size(); ++owner) {
      if (owner != rank) report_.traffic.entries_sent += given.slice(slices_[owner].begin, slices_[owner].end).nnz();
    }
    if (buckets == 1) {
      owned_ = std::move(sums[0]);
      co_return;
    }
    std::vector<SparseView<V>> views;
    std::size_t bytes = 0;
    for (const OwnedSlice<V>& sum : sums) {
      views.push_back(sum.view());
      bytes += bytes_of(views.back());
    }
    co_await decide(net_, bytes, [&] {
      owned_ = concatenate_slices<V>(views);
    });
  }

  Task<void> run_lane(const SparseVector<V>& given, std::size_t lane, Step first_step, Step steps,
                      std::vector<OwnedSlice<V>>& sums, Milestone& received) {
    for (std::size_t bucket = lane; bucket < sums.size(); bucket += 2) {
      co_await received.until(bucket);
      SplitBucket part;
      part.first_step = first_step + static_cast<Step>(bucket) * steps;
      part.number = bucket;
      part.buckets = sums.size();
      part.errors = errors_.span();
      part.only_entries = true;
      part.received = [this, &received, bucket](std::uint64_t entries) {
        report_.traffic.entries_received += entries;
        received.reach(bucket + 1);
      };
      sums[bucket] = co_await reduce_owned_slice(net_, given, slices_, how_, std::move(part));
    }
  }

  Task<void> settle_threshold() {
    if (!is_due(settings_.threshold_every)) {
      const std::uint64_t key = key_of(state_.threshold);
      const std::size_t steps = !settings_.as_published && counts_steps(settings_.k, net_.size()) ? kSteps : 0;
      co_await keep_from(key, steps);
      if (is_held_back_) {
        co_await begin_again();
        co_await keep_from(key, steps);
      }
      if (settings_.as_published || is_near(report_.selected, keeps_all_, settings_.k)) co_return;
      if (moves_by_steps(key) || co_await move_threshold()) co_return;
    }
    report_.exact = true;
    const std::uint64_t key = co_await find_threshold();
    state_.threshold = magnitude_of(key);
    co_await keep_from(key);
    if (!settings_.as_published && report_.selected > 2 * settings_.k) co_await drop_ties(key);
  }

  static std::uint64_t key_of(double threshold) {
    return magnitude_key(static_cast<V>(static_cast<kernels::Factor<V>>(threshold)));
  }

  static double magnitude_of(std::uint64_t key) {
    using Bits = typename kernels::Format<V>::Bits;
    return static_cast<double>(static_cast<kernels::Factor<V>>(std::bit_cast<V>(static_cast<Bits>(key))));
  }

  // By what all ranks have said of their sums above `key`: false if too few are kept, or no step's end keeps near enough to k.
  bool moves_by_steps(std::uint64_t key) {
    if (steps_.empty() || report_.selected <= settings_.k) return false;
    std::size_t nearest = 0;
    std::array<std::uint64_t, kSteps + 1> kept{report_.selected};  // from the start of each step on
    for (std::size_t step = 0; step < kSteps; ++step) {
      kept[step + 1] = kept[step];
      for (Rank rank = 0; rank < net_.size(); ++rank) kept[step + 1] -= steps_[rank * kSteps + step];
      if (off(kept[step + 1]) < off(kept[nearest])) nearest = step + 1;
    }
    if (!is_near(kept[nearest], false, settings_.k)) return false;
    report_.selected = kept[nearest];
    for (Rank rank = 0; rank < net_.size(); ++rank) {
      for (std::size_t step = 0; step < nearest; ++step) kept_counts_[rank] -= steps_[rank * kSteps + step];
    }
    key += nearest * kStep;
    state_.threshold = magnitude_of(key);
    std::size_t next = 0;
    for (std::size_t i = 0; i < kept_.values.size(); ++i) {
      kept_.indices[next] = kept_.indices[i];
      kept_.values[next] = kept_.values[i];
      next += magnitude_key(kept_.values[i]) >= key ? 1 : 0;
    }
    kept_.indices.truncate(next);
    kept_.values.truncate(next);
    return true;
  }
  static constexpr std::uint64_t kStep = std::uint64_t{1} << (kMantissaBits<V> - kBitsOfSteps);  // of keys
  std::uint64_t off(std::uint64_t count) const { return count > settings_.k ? count - settings_.k : settings_.k - count; }

  // All ranks count what larger thresholds would keep, or smaller ones where too few are kept; the one that keeps nearest
  // to k is taken, if that is near enough. One exchange of few counts in place of a search for the exact threshold.
  Task<bool> move_threshold() {
    const double ratio = report_.selected > settings_.k ? kTriedRatio : 1 / kTriedRatio;
    std::array<double, kTried> tried{};
    std::array<std::uint64_t, kTried> keys{};
    double threshold = state_.threshold;
    for (std::size_t i = 0; i < kTried; ++i) {
      tried[i] = threshold *= ratio;
      keys[i] = key_of(threshold);
    }
    std::array<std::uint64_t, kTried> counts{};
    const std::span<const V> values = owned_.values.span();
    co_await compute_slices(net_, values.size(), sizeof(V), [&](std::size_t begin, std::size_t end) {
      for (const V value : values.subspan(begin, end - begin)) {
        const std::uint64_t key = magnitude_key(value);
        for (std::size_t i = 0; i < kTried; ++i) counts[i] += key >= keys[i] ? 1 : 0;
      }
    });
    std::vector<std::uint64_t> of_ranks;
    if (tells_tried(settings_.k, net_.size())) {
      of_ranks = co_await gather_counts(net_, counts, report_.traffic, take_steps(kGatherCountsSteps));
      counts.fill(0);
      for (std::size_t i = 0; i < of_ranks.size(); ++i) counts[i % kTried] += of_ranks[i];
    } else {
      co_await sum_counts(net_, counts, 0, mine_.dimension(), report_.traffic, take_steps(kSumCountsSteps));
    }
    const auto nearest = std::ranges::min_element(counts, std::less<>(), [&](std::uint64_t count) { return off(count); });
    if (!is_near(*nearest, false, settings_.k)) co_return false;
    const auto place = static_cast<std::size_t>(nearest - counts.begin());
    state_.threshold = tried[place];
    if (of_ranks.empty()) {
      co_await keep_from(keys[place]);
      co_return true;
    }
    for (Rank rank = 0; rank < net_.size(); ++rank) {
      kept_counts_[rank] = of_ranks[rank * kTried + place];
      if (kept_counts_[rank] > slices_[rank].size()) co_await fail_kept(rank);
    }
    report_.selected = *nearest;
    co_await take_from(keys[place]);
    co_return true;
  }

  // Fewer than k sums are above the threshold. Of those that equal it, so many stay that 2k are kept, the first ones in the
  // order of ranks, which is that of indices.
  Task<void> drop_ties(std::uint64_t key) {
    std::uint64_t ties = 0;
    for (const V value : kept_.values) ties += magnitude_key(value) == key ? 1 : 0;
    const std::vector<std::uint64_t> tied = co_await gather_counts(net_, std::span(&ties, 1), report_.traffic,
                                                                   take_steps(kGatherCountsSteps));
    std::uint64_t dropped = report_.selected - 2 * settings_.k;  // by this rank or those before it, from the end
    std::uint64_t own = 0;
    for (Rank rank = net_.size(); rank-- > 0;) {
      if (tied[rank] > kept_counts_[rank]) {
        co_await net_.fail(rank, "rank " + std::to_string(rank) + " says that " + std::to_string(tied[rank]) + " of " +
                                     std::to_string(kept_counts_[rank]) + " sums equal the threshold");
      }
      const std::uint64_t of_rank = std::min(dropped, tied[rank]);
      dropped -= of_rank;
      kept_counts_[rank] -= of_rank;
      if (rank == net_.rank()) own = of_rank;
    }
    report_.selected = std::accumulate(kept_counts_.begin(), kept_counts_.end(), std::uint64_t{0});
    std::uint64_t stay = ties - own;
    std::size_t next = 0;
    for (std::size_t i = 0; i < kept_.values.size(); ++i) {
      if (magnitude_key(kept_.values[i]) == key) {
        if (stay == 0) continue;
        --stay;
      }
      kept_.indices[next] = kept_.indices[i];
      kept_.values[next++] = kept_.values[i];
    }
    kept_.indices.truncate(next);
    kept_.values.truncate(next);
  }

  Task<std::uint64_t> find_threshold() {
    const std::span<const V> values = owned_.values.span();
    if (!settings_.as_published) {
      co_return co_await global_threshold_key<V>(net_, values, settings_.k, mine_.dimension(), report_.traffic,
                                                 take_steps(kThresholdSteps));
    }
    const std::vector<SparseView<V>> owned{owned_.view()};
    OwnedSlice<V> all = concatenate_slices<V>(owned);
    co_await exchange_counts(values.size());
    bool balanced = false;
    ShareGathering how = gathering();
    how.balance_factor = std::numeric_limits<double>::infinity();
    how.wire.values = ValueEncoding::native;  // they are only looked at
    const SparseVector<V> sum = co_await allgather_shares(net_, std::move(all), slices_, kept_counts_, how, report_.traffic,
                                                          balanced, take_steps(kManySteps));
    std::vector<std::uint64_t> keys;
    for (const V value : sum.values()) keys.push_back(magnitude_key(value));
    if (keys.size() < settings_.k) co_return 0;
    const auto wanted = keys.begin() + static_cast<std::ptrdiff_t>(settings_.k - 1);
    std::ranges::nth_element(keys, wanted, std::greater<>());
    co_return *wanted;
  }

  // Of the owned sums; all ranks say how many they keep, and how many in each of `steps` above the threshold.
  Task<void> keep_from(std::uint64_t key, std::size_t steps = 0) {
    co_await take_from(key);
    const std::size_t count = kept_.values.size();
    std::vector<std::uint64_t> in_steps(steps + 1);
    if (steps > 0) {
      co_await net_.compute(count * sizeof(V), [&] {
        for (const V value : kept_.values) ++in_steps[std::min<std::uint64_t>((magnitude_key(value) - key) / kStep, steps)];
      });
    }
    co_await exchange_counts(count, std::span(in_steps).first(steps));
    report_.selected = std::accumulate(kept_counts_.begin(), kept_counts_.end(), std::uint64_t{0});
  }

  Task<void> take_from(std::uint64_t key) {
    const std::span<const V> values = owned_.values.span();
    kept_ = {owned_.range, false, Array<std::uint32_t>(values.size()), Array<V>(values.size())};
    std::size_t count = 0;
    co_await compute_slices(net_, values.size(), sizeof(V), [&](std::size_t begin, std::size_t end) {
      const std::uint32_t* const indices = owned_.indices.data();
      std::uint32_t* const kept_indices = kept_.indices.data();
      V* const kept_values = kept_.values.data();
      std::size_t next = count;
      for (std::size_t i = begin; i < end; ++i) {  // without a branch that cannot be foreseen
        kept_indices[next] = indices[i];
        kept_values[next] = values[i];
        next += magnitude_key(values[i]) >= key ? 1 : 0;
      }
      count = next;
    });
    kept_.indices.truncate(count);
    kept_.values.truncate(count);
  }

  // How many sums each rank keeps, whether these are all that there are, and how many lie in each step. Where nobody has
  // counted, also what else check_slices() would have told.
  Task<void> exchange_counts(std::size_t kept, std::span<const std::uint64_t> steps = {}) {
    std::vector<std::uint64_t> mine{std::uint64_t{kept} << 1 | (kept == owned_.values.size() ? 1 : 0)};
    mine.insert(mine.end(), steps.begin(), steps.end());
    if (uncounted_) {
      mine.push_back(std::uint64_t{mine_.nnz()} << 1 | (holds_back_ ? 1 : 0));
      mine.push_back(report_.traffic.entries_received);
    }
    const std::vector<std::uint64_t> all = co_await gather_counts(net_, mine, report_.traffic, take_steps(kGatherCountsSteps));
    kept_counts_.clear();
    steps_.clear();
    received_.clear();
    keeps_all_ = true;
    total_ = 0;
    for (Rank rank = 0; rank < net_.size(); ++rank) {
      const auto of_rank = std::span(all).subspan(rank * mine.size(), mine.size());
      const auto of_steps = of_rank.subspan(1, steps.size());
      kept_counts_.push_back(of_rank[0] >> 1);
      steps_.insert(steps_.end(), of_steps.begin(), of_steps.end());
      keeps_all_ = keeps_all_ && (of_rank[0] & 1) != 0;
      const std::uint64_t in_steps = std::accumulate(of_steps.begin(), of_steps.end(), std::uint64_t{0});
      if (kept_counts_[rank] > slices_[rank].size()) co_await fail_kept(rank);
      if (in_steps > kept_counts_[rank]) {
        co_await net_.fail(rank, says_kept(rank) + ", " + std::to_string(in_steps) + " of them just above the threshold");
      }
      if (uncounted_) co_await take_said(rank, of_rank[steps.size() + 1], of_rank[steps.size() + 2]);
    }
    if (!uncounted_) co_return;
    const std::uint64_t excess = oktopk_excess(report_.local_most, net_.size());
    state_.spread = std::ranges::max(received_) <= report_.local_most + excess;
  }

  std::string says_kept(Rank rank) const {
    return "rank " + std::to_string(rank) + " says that it keeps " + std::to_string(kept_counts_[rank]) + " sums";
  }
  Transport::Failing fail_kept(Rank rank) {
    return net_.fail(rank, says_kept(rank) + ", in a slice of " + std::to_string(slices_[rank].size()));
  }

  Task<void> take_said(Rank rank, std::uint64_t given, std::uint64_t received) {
    const std::uint64_t entries = given >> 1;
    if (entries > mine_.dimension()) {
      co_await net_.fail(rank, "rank " + std::to_string(rank) + " says that it has " + std::to_string(entries) +
                                   " entries of " + std::to_string(mine_.dimension()));
    }
    is_held_back_ = is_held_back_ || (given & 1) != 0;
    report_.local_most = std::max(report_.local_most, entries);
    total_ += entries;
    received_.push_back(received);
  }

  Task<SparseVector<V>> gather() {
    return allgather_shares(net_, std::move(kept_), slices_, kept_counts_, gathering(), report_.traffic,
                            report_.balanced, next_step_);
  }
  ShareGathering gathering() const {
    return {.wire = how_.wire,
            .balance_factor = settings_.balance_factor,
            .always_doubles = settings_.as_published,
            .sends_once = again_,
            .residual = how_.residual,
            .weight = how_.reduction == Reduction::avg ? static_cast<float>(net_.size()) : 1.0F};
  }

  // Of this rank's entries that the sum has: those that it has not are handed back as they were. Both ascend.
  void keep_errors(std::span<const std::uint32_t> left) {
    if (errors_.empty()) return;
    const std::span<const std::uint32_t> indices = mine_.indices();
    std::size_t next = 0;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      if (next < left.size() && left[next] == indices[i]) {
        ++next;
      } else {
        how_.residual[indices[i]] += errors_[i];
      }
    }
  }

  Step take_steps(Step steps) { return std::exchange(next_step_, next_step_ + steps); }

  Transport& net_;
  const SparseVector<V> mine_;
  const OkTopkSettings settings_;
  OkTopkState state_;
  std::vector<double> weights_;  // by tensor
  SparseReduction how_;
  Partition slices_{0, 0};
  Array<float> errors_;  // of what has been sent, if they are kept
  OwnedSlice<V> owned_;  // sums, or these as they are compared
  Array<V> sums_;        // in that case
  OwnedSlice<V> kept_;
  std::vector<std::uint64_t> kept_counts_;  // by rank
  std::vector<std::uint64_t> steps_;        // how many of these lie in each step, by rank; none if nobody has said
  bool keeps_all_ = false;                  // on every rank
  bool uncounted_ = false;     // entries are sent before anybody has counted them,
  bool holds_back_ = false;    // but not this rank's,
  bool is_held_back_ = false;  // or some rank's,
  bool again_ = false;         // so that all have begun again
  std::vector<std::uint64_t> received_;  // entries, by rank, and of all ranks, as they say where nobody has counted
  std::uint64_t total_ = 0;
  TopkReport report_;
  Step next_step_ = 0;
};

}  // namespace

std::uint64_t OkTopkState::digest(const OkTopkSettings& settings) const {
  std::uint64_t digest = 0;
  const auto add = [&digest](std::uint64_t word) { digest = mix(digest + word + 1); };
  add(settings.k);
  add(settings.boundaries_every);
  add(settings.threshold_every);
  add(std::bit_cast<std::uint64_t>(settings.balance_factor));
  add(settings.as_published ? 1 : 0);
  add(calls);
  add(std::bit_cast<std::uint64_t>(threshold));
  add(spread ? 1 : 0);
  for (const std::uint64_t length : lengths) add(length);
  for (const IndexRange& tensor : settings.tensors) {
    add(tensor.begin);
    add(tensor.end);
  }
  for (const double square : squares) add(std::bit_cast<std::uint64_t>(square));
  return digest;
}

std::uint64_t oktopk_excess(std::uint64_t most, Rank ranks) {
  return std::max<std::uint64_t>(ranks, static_cast<std::uint64_t>(6.0 * std::sqrt(static_cast<double>(most))));
}

template <class V>
std::uint64_t oktopk_bytes_most(std::uint64_t most, std::uint64_t k, Rank ranks, std::uint64_t dimension, OkTopkSteps steps) {
  if (ranks == 1) return 0;
  const std::uint64_t total = ranks * most;
  const std::uint64_t excess = oktopk_excess(most, ranks);
  const bool uncounted = may_go_uncounted(k, ranks);  // then k decides on how shares are sent
  const WireFormat raw{.indices = IndexFormat::raw32};
  const WireFormat packed{.indices = IndexFormat::packed};
  const bool may_be_short = are_short<V>(most, ranks, raw) || (uncounted && are_short<V>(k, ranks, raw));
  const bool may_have_headers = !are_short<V>(most, ranks, packed) || (uncounted && !are_short<V>(k, ranks, packed));
  // Of `entries`, in so many messages with headers, or in such as have none and lie in ranges that are `within` long together.
  const auto shares = [&](std::uint64_t entries, std::uint64_t messages, std::uint64_t within) {
    const std::uint64_t short_bytes = entries * sizeof(V) + varints_bytes_most(entries, within);
    const std::uint64_t with_headers = entries * (sizeof(std::uint32_t) + sizeof(V)) + messages * kHeaderBytesMost;
    return std::max(may_be_short ? short_bytes : 0, may_have_headers ? with_headers : 0);
  };
  const std::uint64_t everywhere = ranks * dimension;
  const std::uint64_t share = std::max(most, uncounted ? k : 0) * (4 + sizeof(V)) / ranks;
  const std::uint64_t messages = ranks * std::clamp<std::uint64_t>(share / kBucketBytes, 1, kBucketsMost);
  std::uint64_t sent = shares(most, messages, dimension);
  const std::uint64_t of_uncounted = uncounted ? uncounted_most(most, ranks) * (ranks - 1) : 0;
  std::uint64_t received = shares(std::max(most + excess, of_uncounted), messages, everywhere);
  if (steps.balanced) {
    sent += shares(most, ranks, everywhere) + shares(most + ranks, ranks, everywhere);
    received += shares(most / ranks + 1, ranks, everywhere) + shares(most, ranks, everywhere);
  } else {
    const bool may_double = most * (4 + sizeof(V)) / ranks <= kDoubledShareBytes;
    const std::uint64_t rounds = std::bit_width(ranks - 1);
    sent += shares(may_double ? 2 * most + ranks : most, ranks, rounds * dimension);
    received += shares(most, ranks, dimension);
  }
  if (steps.cut && uncounted) {  // it was in vain, and began again
    sent = std::max(sent, 2 * shares(most, messages, dimension) + shares(most, ranks, dimension));
    received = std::max(received, shares(2 * most + excess, 2 * messages, 2 * everywhere) + shares(most, ranks, dimension));
  }
  // What owners would receive, all entries, the most of a rank; what is kept by a useless threshold, and by the right one.
  const std::uint64_t checks = sum_counts_bytes_most(ranks + 3, ranks, 2 * total + most + 1);
  const std::size_t counts = 1 + (counts_steps(k, ranks) ? kSteps : 0);
  const std::uint64_t said = uncounted ? gather_counts_bytes_most(counts + kSaid, ranks, 6 * total + 2 * ranks) : 0;
  const std::uint64_t kept = gather_counts_bytes_most(counts, ranks, 3 * total + ranks);
  const std::uint64_t gathered = (steps.cut ? said + checks + kept : std::max(said, checks + kept)) +
                                 gather_counts_bytes_most(1, ranks, 2 * most + ranks);
  const std::uint64_t tried = tells_tried(k, ranks) ? gather_counts_bytes_most(kTried, ranks, kTried * total)
                                                     : sum_counts_bytes_most(kTried, ranks, kTried * total);
  std::uint64_t bytes = std::max(sent, received) + gathered + tried;
  if (steps.exact) bytes += threshold_bytes_most<V>(k, ranks, total) + gather_counts_bytes_most(1, ranks, most);
  if (steps.cut) bytes += pooled_slices_bytes_most(dimension, ranks, most, enough_of(excess, ranks));
  return bytes;
}

template <class V>
Task<OkTopkSum<V>> allreduce_oktopk(Transport& net, SparseVector<V> mine, OkTopkSettings settings, OkTopkState state,
                                    Reduction reduction, WireFormat wire, std::span<float> residual) {
  OkTopk<V> oktopk(net, std::move(mine), settings, std::move(state), reduction, wire, residual);
  co_return co_await oktopk.run();
}

#define TELEGRAD_INSTANTIATE(V)                                                                                    \
  template std::uint64_t oktopk_bytes_most<V>(std::uint64_t, std::uint64_t, Rank, std::uint64_t, OkTopkSteps);     \
  template Task<OkTopkSum<V>> allreduce_oktopk(Transport&, SparseVector<V>, OkTopkSettings, OkTopkState, Reduction, \
                                               WireFormat, std::span<float>);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
