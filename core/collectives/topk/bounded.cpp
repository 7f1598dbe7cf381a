// The steps of Ok-Topk (see topk/oktopk.cpp) in messages of fixed sizes, as a layer of experts routes its tokens with a
// capacity factor (Lepikhin et al., "GShard", 2020, §3.2): no rank tells another how much there is.
//
//   1  every τ calls slices are cut, one for each rank, in a fixed number of rounds
//   2  to each owner a block of at most C entries; owners add them
//   3  allgather of marks: magnitudes at evenly spaced ranks among each owner's C largest sums. They tell everybody how many
//      sums reach any threshold, to within a few; the one that k reach is taken
//   4  owners keep what reaches it, at most C; allgather of their blocks
//   5  what is not in the sum, or did not fit, stays
//
// (P−1)α + 2C(P−1)β words for the blocks to the owners, as many for gathering, ⌈log2 P⌉α where they are short; ⌈log2 P⌉α for
// marks, and max(16P, 256) values at most. Unlike a threshold that is corrected from the last call's count this one needs no
// past, and does not lag behind residuals that grow.
#include "collectives/topk/bounded.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/random.hpp"
#include "codec/entry_sets.hpp"
#include "collectives/dense/all_to_all.hpp"
#include "collectives/dense/allgather_bruck.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/pieces.hpp"
#include "collectives/topk/block.hpp"
#include "collectives/topk/largest.hpp"
#include "collectives/topk/pooled_slices.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kShortBlockBytes = std::size_t{32} << 10;
// Of an owner; of all together some hundreds, so that the sum keeps k to within a percent. But marks are to cost little.
constexpr std::size_t kMarksMost = 16;
constexpr std::size_t kMarksOfAllLeast = 256;
constexpr std::size_t kEntriesPerMark = 4;

// At which rank among C sums a mark stands, from 0: in the middle of its part of them.
std::size_t place_of(std::size_t mark, std::size_t marks, std::size_t capacity) {
  return (2 * mark + 1) * capacity / (2 * marks);
}

// The elements that sorting in descending order would put at places[first … last − 1], which ascend, are put there.
void settle(std::span<std::uint64_t> keys, std::size_t offset, std::span<const std::size_t> places) {
  if (places.empty()) return;
  const std::size_t middle = places.size() / 2;
  const std::size_t place = places[middle] - offset;
  std::ranges::nth_element(keys, keys.begin() + static_cast<std::ptrdiff_t>(place), std::greater<>());
  settle(keys.first(place), offset, places.first(middle));
  settle(keys.subspan(place + 1), offset + place + 1, places.subspan(middle + 1));
}

template <class V>
V value_of(std::uint64_t key) {
  return std::bit_cast<V>(static_cast<typename kernels::Format<V>::Bits>(key));
}

// Among the `capacity` largest of an owner's sums; zeros where it has fewer.
template <class V>
void write_marks(std::span<const V> sums, std::size_t capacity, std::span<V> marks) {
  std::vector<std::uint64_t> keys;
  keys.reserve(sums.size());
  for (const V value : sums) keys.push_back(magnitude_key(value));
  std::vector<std::size_t> places;
  for (std::size_t mark = 0; mark < marks.size(); ++mark) {
    const std::size_t place = place_of(mark, marks.size(), capacity);
    if (place < keys.size()) places.push_back(place);
  }
  settle(keys, 0, places);
  std::ranges::fill(marks, value_of<V>(0));
  for (std::size_t mark = 0; mark < places.size(); ++mark) marks[mark] = value_of<V>(keys[places[mark]]);
}

// The magnitude that k of all sums reach, by all owners' marks, which are sorted; 0 where there are not so many. In that
// order the i-th mark, from 1, is reached by about i − 1/2 times the sums that a mark stands for.
template <class V>
double threshold_of(std::span<V> marks, double sums_per_mark, std::uint64_t k) {
  const double wanted = static_cast<double>(k) / sums_per_mark + 0.5;
  if (!(wanted < static_cast<double>(marks.size()))) return 0.0;
  const auto above = static_cast<std::size_t>(std::max(1.0, std::floor(wanted)));
  std::ranges::sort(marks, std::greater<>(), magnitude_key<V>);
  const auto as_double = [](V value) { return std::abs(static_cast<double>(static_cast<kernels::Factor<V>>(value))); };
  const double high = as_double(marks[above - 1]);
  const double low = as_double(marks[above]);
  if (!std::isfinite(low)) return 0.0;
  if (!std::isfinite(high) || low == 0.0) return low;
  return high + (low - high) * std::clamp(wanted - static_cast<double>(above), 0.0, 1.0);
}

template <class V>
class BoundedTopk {
 public:
  BoundedTopk(Transport& net, SparseVector<V> mine, const BoundedTopkSettings& settings, BoundedTopkState state,
              Reduction reduction, WireFormat wire)
      : net_(net),
        mine_(std::move(mine)),
        settings_(settings),
        state_(std::move(state)),
        reduction_(reduction),
        sum_(mine_.dimension()),
        left_(mine_.dimension()) {
    TELEGRAD_CHECK(!mine_.is_dense() && settings.k > 0 && settings.slack >= 1.0 && settings.boundaries_every > 0);
    TELEGRAD_CHECK(reduction == Reduction::sum || reduction == Reduction::avg);
    TELEGRAD_CHECK(wire.values == ValueEncoding::native && wire.indices != IndexFormat::packed && !wire.packs_values);
    const std::size_t capacity = bounded_topk_capacity(settings, net.size(), mine_.dimension());
    shape_.capacity = capacity;
    marks_ = std::min(std::max(kMarksMost, kMarksOfAllLeast / net.size()), (capacity + kEntriesPerMark - 1) / kEntriesPerMark);
  }

  Task<BoundedTopkSum<V>> run() {
    report_.local_most = mine_.nnz();
    co_await settle_slices();
    co_await split_and_reduce();
    co_await settle_threshold();
    co_await gather();
    co_await settle_left();
    ++state_.calls;
    co_return BoundedTopkSum<V>{std::move(sum_), std::move(left_), std::move(state_), report_};
  }

 private:
  IndexRange whole() const { return {0, mine_.dimension()}; }
  SparseView<V> share_of(Rank owner) const { return mine_.slice(slices_[owner].begin, slices_[owner].end); }
  Bytes block_of(const Buffer& blocks, Rank rank) const {
    return blocks.bytes().subspan(rank * shape_.bytes(), shape_.bytes());
  }
  // To and from each other rank.
  void count_traffic(std::size_t entries, std::size_t control_bytes) {
    const std::uint64_t others = net_.size() - 1;
    report_.traffic.entries_sent += others * entries;
    report_.traffic.entries_received += others * entries;
    report_.traffic.control_bytes_sent += others * control_bytes;
    report_.traffic.control_bytes_received += others * control_bytes;
  }

  Task<void> settle_slices() {
    const Rank size = net_.size();
    slices_ = Partition(std::span<const std::uint64_t>(state_.lengths));
    const bool is_due = state_.calls % settings_.boundaries_every == 0;
    if (!is_due && slices_.blocks() == size && slices_.count() == mine_.dimension()) co_return;
    const PooledSlices cut = co_await pooled_slices_in_fixed_rounds(net_, mine_.indices(), mine_.dimension(),
                                                                    report_.traffic, take_steps(kSliceSteps));
    slices_ = cut.slices;
    state_.lengths.clear();
    for (Rank rank = 0; rank < size; ++rank) state_.lengths.push_back(slices_[rank].size());
    report_.cut = true;
  }

  Task<void> split_and_reduce() {
    const Rank size = net_.size();
    const Buffer outgoing(size * shape_.bytes());
    const Buffer incoming(size * shape_.bytes());
    std::vector<OwnedSlice<V>> unsent(size);
    for (Rank owner = 0; owner < size; ++owner) {
      if (owner == net_.rank()) continue;
      co_await net_.compute(shape_.bytes(), [&] { unsent[owner] = fill_block(owner, outgoing); });
    }
    co_await exchange_blocks(net_, outgoing.bytes(), incoming.bytes(), take_steps(kExchangeBlocksSteps));
    count_traffic(shape_.capacity, shape_.control_bytes());
    std::vector<SparseView<V>> shares(size);
    for (Rank source = 0; source < size; ++source) {
      if (source == net_.rank()) continue;
      std::string error;
      co_await net_.compute(shape_.bytes(), [&] {
        error = read_block<V>(shape_, block_of(incoming, source), slice_of(slices_, net_.rank()), shares[source]);
      });
      if (!error.empty()) co_await fail_damaged(net_, source, "entries", error);
    }
    co_await net_.compute(incoming.size(), [&] {
      shares[net_.rank()] = share_of(net_.rank());
      owned_ = reduce_slices<V>(shares, reduction_, std::numeric_limits<double>::infinity());
      if (reduction_ == Reduction::avg) scale(owned_, 1.0 / size);
      std::vector<SparseView<V>> views;
      for (Rank owner = 0; owner < size; ++owner) {
        if (owner == net_.rank()) unsent[owner].range = slice_of(slices_, owner);
        views.push_back(unsent[owner].view());
      }
      unsent_ = concatenate_slices<V>(views);
      report_.overflow = unsent_.values.size();
    });
  }

  // Returns what does not fit.
  OwnedSlice<V> fill_block(Rank owner, const Buffer& outgoing) const {
    const SparseView<V> share = share_of(owner);
    const Bytes block = block_of(outgoing, owner);
    if (share.nnz() <= shape_.capacity) {
      write_block<V>(shape_, share, block);
      return {share.range, false, {}, {}};
    }
    PartedEntries<V> parted = take_largest(share, shape_.capacity);
    write_block<V>(shape_, parted.taken.view(), block);
    return std::move(parted.rest);
  }

  Task<void> settle_threshold() {
    const Rank size = net_.size();
    const Buffer all(size * marks_ * sizeof(V));
    const Partition blocks(all.size(), size);
    const Bytes own = all.bytes().subspan(blocks[net_.rank()].begin, marks_ * sizeof(V));
    co_await net_.compute(shape_.bytes(), [&] {
      write_marks<V>(owned_.values.span(), shape_.capacity, {reinterpret_cast<V*>(own.data()), marks_});
    });
    const Step step = take_steps(kBruckSteps);
    if (size > 1) co_await allgather_bruck(net_, own, all.bytes(), blocks, step);
    count_traffic(0, own.size());
    co_await net_.compute(all.size(), [&] {
      const double per_mark = static_cast<double>(shape_.capacity) / static_cast<double>(std::max<std::size_t>(1, marks_));
      state_.threshold = threshold_of<V>({reinterpret_cast<V*>(all.data()), size * marks_}, per_mark, settings_.k);
    });
  }

  // Of the owned sums.
  OwnedSlice<V> kept() const {
    const std::uint64_t key = magnitude_key(static_cast<V>(static_cast<kernels::Factor<V>>(state_.threshold)));
    const std::span<const V> values = owned_.values.span();
    OwnedSlice<V> reaching{owned_.range, false, Array<std::uint32_t>(values.size()), Array<V>(values.size())};
    std::size_t count = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      reaching.indices[count] = owned_.indices[i];
      reaching.values[count] = values[i];
      count += magnitude_key(values[i]) >= key ? 1 : 0;
    }
    reaching.indices.truncate(count);
    reaching.values.truncate(count);
    if (count <= shape_.capacity) return reaching;
    return take_largest(reaching.view(), shape_.capacity).taken;
  }

  Task<void> gather() {
    const Rank size = net_.size();
    const std::size_t bytes = shape_.bytes();
    const Buffer all(size * bytes);
    const Bytes own = block_of(all, net_.rank());
    co_await net_.compute(bytes, [&] {
      const OwnedSlice<V> largest = kept();
      write_block<V>(shape_, largest.view(), own);
    });
    if (size > 1 && bytes <= kShortBlockBytes) {
      const Step step = take_steps(kBruckSteps);
      co_await allgather_bruck(net_, own, all.bytes(), Partition(all.size(), size), step);
    } else if (size > 1) {
      co_await gather_by_ring(all);
    }
    count_traffic(shape_.capacity, shape_.control_bytes());
    co_await take_blocks(all);
  }

  Task<void> gather_by_ring(const Buffer& all) {
    const Rank size = net_.size();
    const Rank right = (net_.rank() + 1) % size;
    const Rank left = (net_.rank() + size - 1) % size;
    const std::size_t pieces = pieces_of(net_, shape_.bytes());
    for (Rank hop = 0; hop + 1 < size; ++hop) {
      const Step step = take_steps(static_cast<Step>(pieces));
      const ConstBytes leaving = block_of(all, (net_.rank() + size - hop) % size);
      const Bytes coming = block_of(all, (left + size - hop) % size);
      co_await exchange_in_pieces(net_, right, leaving, left, coming, pieces, step);
    }
  }

  Task<void> take_blocks(const Buffer& all) {
    const Rank size = net_.size();
    std::vector<SparseView<V>> shares(size);
    for (Rank source = 0; source < size; ++source) {
      std::string error;
      co_await net_.compute(shape_.bytes(), [&] {
        error = read_block<V>(shape_, block_of(all, source), slice_of(slices_, source), shares[source]);
      });
      if (!error.empty()) co_await fail_damaged(net_, source, "sums", error);
    }
    co_await net_.compute(all.size(), [&] {
      sum_ = whole_vector(concatenate_slices<V>(shares), reduction_, std::numeric_limits<double>::infinity());
      report_.selected = sum_.nnz();
    });
  }

  Task<void> settle_left() {
    co_await net_.compute(std::size_t{2} * net_.size() * shape_.bytes(), [&] {
      const OwnedSlice<V> without = entries_without(mine_.view(), sum_.indices());
      const OwnedSlice<V> held_back = entries_within(unsent_.view(), sum_.indices());
      left_ = sparse_vector(mine_.dimension(), sum_of_entries(without.view(), held_back.view()), reduction_);
    });
  }

  static constexpr Step kBruckSteps = 32;
  Step take_steps(Step steps) { return std::exchange(next_step_, next_step_ + steps); }

  Transport& net_;
  const SparseVector<V> mine_;
  const BoundedTopkSettings settings_;
  BoundedTopkState state_;
  const Reduction reduction_;
  BlockShape<V> shape_;
  std::size_t marks_ = 0;  // of each owner
  Partition slices_{0, 0};
  OwnedSlice<V> owned_;   // sums
  OwnedSlice<V> unsent_;  // of this rank's entries, what did not fit
  SparseVector<V> sum_;
  SparseVector<V> left_;
  TopkReport report_;
  Step next_step_ = 0;
};

}  // namespace

std::size_t bounded_topk_capacity(const BoundedTopkSettings& settings, Rank ranks, std::uint64_t dimension) {
  const double share = std::ceil(settings.slack * static_cast<double>(settings.k) / ranks);
  return static_cast<std::size_t>(std::min(share, static_cast<double>(dimension)));
}

std::uint64_t BoundedTopkState::digest(const BoundedTopkSettings& settings) const {
  std::uint64_t digest = 0;
  const auto add = [&digest](std::uint64_t word) { digest = mix(digest + word + 1); };
  add(settings.k);
  add(std::bit_cast<std::uint64_t>(settings.slack));
  add(settings.boundaries_every);
  add(calls);
  add(std::bit_cast<std::uint64_t>(threshold));
  for (const std::uint64_t length : lengths) add(length);
  return digest;
}

template <class V>
Task<BoundedTopkSum<V>> allreduce_bounded_topk(Transport& net, SparseVector<V> mine, BoundedTopkSettings settings,
                                               BoundedTopkState state, Reduction reduction, WireFormat wire) {
  BoundedTopk<V> bounded(net, std::move(mine), settings, std::move(state), reduction, wire);
  co_return co_await bounded.run();
}

#define TELEGRAD_INSTANTIATE(V)                                                                                    \
  template Task<BoundedTopkSum<V>> allreduce_bounded_topk(Transport&, SparseVector<V>, BoundedTopkSettings,        \
                                                          BoundedTopkState, Reduction, WireFormat);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
