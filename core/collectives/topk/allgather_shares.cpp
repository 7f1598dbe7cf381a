// Balance and allgatherv of Ok-Topk: Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022,
// §3.1.2. Shares follow each other in the order of ranks and of indices, so that alike ones are parts of that sequence: each
// rank sends the others what lies in theirs, P·α + K·β at worst, all of it on one rank.
//
// Shares of some tens of entries go without headers (short_shares.hpp). Short messages go by Bruck's algorithm, ⌈log2 P⌉·α, in which a rank sends again what has come: where no rank has to send
// more than 2K + P entries by that, or K + P once shares were made alike. Others, and those that are less alike but not
// balanced, go round a ring: (P−1)·α, and whatever the shares no rank sends more than K. (Recursive doubling of unbalanced
// shares may send K·log2 P.)
#include "collectives/topk/allgather_shares.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "codec/short_share.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/allgather_any_size.hpp"
#include "collectives/support/allgather_short.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/topk/short_shares.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

template <class V>
std::size_t most_bytes_of(std::uint64_t entries) {
  return sizeof(VectorHeader) + static_cast<std::size_t>(entries) * (sizeof(std::uint32_t) + sizeof(V)) + 16;
}

template <class V>
class Gathering {
 public:
  Gathering(Transport& net, OwnedSlice<V> mine, const Partition& slices, std::vector<std::uint64_t> counts,
            const ShareGathering& how, SparseTraffic& traffic)
      : net_(net), mine_(std::move(mine)), slices_(slices), counts_(std::move(counts)), how_(how), traffic_(traffic) {
    TELEGRAD_CHECK(!mine_.dense);
    TELEGRAD_CHECK(counts_.size() == net.size() && counts_[net.rank()] == mine_.values.size());
    for (Rank rank = 0; rank < net.size(); ++rank) ranges_.push_back(slice_of(slices, rank));
    begins_ = begins_of(counts_);
  }

  // Where doubling is within its bound however unlike shares are, to make them alike would only cost messages.
  bool is_to_be_balanced() const {
    if (how_.sends_once || (!how_.always_doubles && doubles())) return false;
    const double mean = static_cast<double>(begins_.back()) / net_.size();
    return static_cast<double>(std::ranges::max(counts_)) > how_.balance_factor * mean;
  }

  // Makes shares alike. Messages follow each other in the order of entries, on both their ends: so the first one that is
  // not over is under way. Returns the first step that it has not used.
  Task<Step> balance(Step step) {
    const std::size_t most = most_bytes_of<V>(part_of(all(), net_.size(), 0).size());
    const Range share = part_of(all(), net_.size(), net_.rank());
    OwnedSlice<V> alike{range_of(share), false, Array<std::uint32_t>(share.size()), Array<V>(share.size())};
    std::vector<Task<void>> both;
    both.push_back(send_others(step));
    both.push_back(receive_own(step, most, share, alike));
    co_await when_all(std::move(both));
    mine_ = std::move(alike);
    std::vector<IndexRange> ranges;
    for (Rank rank = 0; rank < net_.size(); ++rank) {
      const Range part = part_of(all(), net_.size(), rank);
      ranges.push_back(range_of(part));
      counts_[rank] = part.size();
    }
    ranges_ = std::move(ranges);
    begins_ = begins_of(counts_);
    balanced_ = true;
    co_return step + any_size_steps(net_, most);
  }

  Task<SparseVector<V>> gather(Step step) {
    indices_ = Array<std::uint32_t>(all().size());
    values_ = Array<V>(all().size());
    if (is_short()) {
      const bool doubled = doubles();
      co_await gather_short_shares(net_, mine_.view(), {begins_, ranges_, indices_.span(), values_.span()}, doubled, step);
      count_gathered(doubled);
    } else {
      co_await gather_with_headers(step);
    }
    for (Rank rank = 0; rank < net_.size(); ++rank) {  // ranges of alike shares overlap
      const std::size_t first = begins_[rank];
      if (first == 0 || first == begins_[rank + 1] || indices_[first - 1] < indices_[first]) continue;
      co_await fail_damaged(net_, rank, "sums", "its indices do not follow those of the rank before");
    }
    co_return SparseVector<V>::adopt_sparse(slices_.count(), std::move(indices_), std::move(values_));
  }

 private:
  Task<void> gather_with_headers(Step step) {
    const std::size_t most = most_bytes();
    Buffer encoded;
    SparseReduction keeping;
    keeping.wire = how_.wire;
    keeping.residual = how_.residual;
    co_await decide(net_, bytes_of(mine_.view()),
                    [&] { encoded = encode_keeping_error(mine_.view(), keeping, how_.weight); });
    if (how_.always_doubles || doubles()) {
      co_await gather_by_doubling(encoded.bytes(), most, step);
    } else {
      co_await gather_by_ring(std::move(encoded), most, step);
    }
  }
  void count_gathered(bool doubled) {
    const Rank right = (net_.rank() + 1) % net_.size();
    traffic_.entries_sent += doubled ? sent_by_doubling(net_.rank()) : all().size() - counts_[right];
    traffic_.entries_received += all().size() - counts_[net_.rank()];
  }

  static std::vector<std::size_t> begins_of(const std::vector<std::uint64_t>& counts) {
    std::vector<std::size_t> begins{0};
    for (const std::uint64_t count : counts) begins.push_back(begins.back() + static_cast<std::size_t>(count));
    return begins;
  }
  bool is_short() const { return !how_.always_doubles && are_short<V>(all().size(), net_.size(), how_.wire); }
  Range all() const { return {0, begins_.back()}; }
  Range held(Rank rank) const { return {begins_[rank], begins_[rank + 1]}; }
  static Range common(Range a, Range b) {
    const std::size_t begin = std::max(a.begin, b.begin);
    return {begin, std::max(begin, std::min(a.end, b.end))};
  }
  // Of the slices that entries `share` of the sequence come from.
  IndexRange range_of(Range share) const {
    if (share.size() == 0) return {};
    const auto owner_of = [&](std::size_t entry) {
      return static_cast<std::size_t>(std::ranges::upper_bound(begins_, entry) - begins_.begin()) - 1;
    };
    return {slices_[owner_of(share.begin)].begin, slices_[owner_of(share.end - 1)].end};
  }

  Task<void> send_others(Step step) {
    const Range own = held(net_.rank());
    WireFormat whole = how_.wire;
    whole.values = ValueEncoding::native;
    Window<SendingShort, kShortWindow> sends;
    for (Rank to = 0; to < net_.size(); ++to) {
      const Range part = common(own, part_of(all(), net_.size(), to));
      if (to == net_.rank() || part.size() == 0) continue;
      const std::size_t first = part.begin - own.begin;
      const SparseView<V> view{mine_.range, false, mine_.indices.span().subspan(first, part.size()),
                               mine_.values.span().subspan(first, part.size())};
      Buffer encoded;
      if (is_short()) {
        co_await decide(net_, bytes_of(view), [&] { encoded = encode_short(view); });
        if (sends.full()) {
          co_await sends.front().sending;
          sends.pop_front();
        }
        sends.emplace_back(net_, to, step, std::move(encoded));
      } else {
        co_await decide(net_, bytes_of(view), [&] { encoded = encode(view, whole); });
        co_await send_any_size(net_, to, step, encoded.bytes());
      }
      traffic_.entries_sent += part.size();
    }
    for (; !sends.empty(); sends.pop_front()) co_await sends.front().sending;
  }
  Task<void> receive_own(Step step, std::size_t most, Range share, OwnedSlice<V>& alike) {
    for (Rank from = 0; from < net_.size(); ++from) {
      const Range part = common(held(from), share);
      if (part.size() == 0) continue;
      const auto indices = alike.indices.span().subspan(part.begin - share.begin, part.size());
      const auto values = alike.values.span().subspan(part.begin - share.begin, part.size());
      if (from == net_.rank()) {
        const std::size_t first = part.begin - held(from).begin;
        co_await decide(net_, indices.size_bytes() + values.size_bytes(), [&] {
          copy_bytes(indices.data(), mine_.indices.data() + first, indices.size_bytes());
          copy_bytes(values.data(), mine_.values.data() + first, values.size_bytes());
        });
        continue;
      }
      Buffer message;
      std::string error;
      if (is_short()) {
        message = co_await net_.receive_any_size(from, step, most_short_bytes<V>(part.size()));
        co_await decide(net_, message.size(), [&] {
          if (!read_short<V>(message.bytes(), ranges_[from], indices, values)) error = kDamagedShort;
        });
      } else {
        message = co_await receive_any_size(net_, from, step, most);
        co_await decide(net_, message.size(), [&] { error = decode_into<V>(message.bytes(), ranges_[from], indices, values); });
      }
      if (!error.empty()) co_await fail_damaged(net_, from, "sums", error);
      traffic_.entries_received += part.size();
    }
  }

  Task<void> place(std::span<const Arrived> batch) {
    for (const auto& [source, message] : batch) {
      std::string error;
      co_await decide(net_, message.size(), [&] {
        const auto count = static_cast<std::size_t>(counts_[source]);
        error = decode_into<V>(message, ranges_[source], indices_.span().subspan(begins_[source], count),
                               values_.span().subspan(begins_[source], count));
      });
      if (!error.empty()) co_await fail_damaged(net_, source, "sums", error);
    }
  }

  // What a rank sends by doubling.
  std::size_t sent_by_doubling(Rank rank) const {
    const Rank size = net_.size();
    std::size_t sent = 0;
    for (Rank have = 1; have < size; have *= 2) {
      const Rank end = rank + std::min(have, size - have);
      sent += begins_[std::min(end, size)] - begins_[rank] + (end > size ? begins_[end - size] : 0);
    }
    return sent;
  }
  std::size_t most_bytes() const { return most_bytes_of<V>(std::ranges::max(counts_)); }
  // Short messages, of which no rank has too many to send.
  bool doubles() const {
    if (how_.sends_once || (!is_short() && most_bytes() > kDoubledShareBytes)) return false;
    const std::size_t most = (balanced_ ? 1 : 2) * all().size() + net_.size();
    for (Rank rank = 0; rank < net_.size(); ++rank) {
      if (sent_by_doubling(rank) > most) return false;
    }
    return true;
  }

  Task<void> gather_by_ring(Buffer encoded, std::size_t most, Step step) {
    Taking taking;
    taking.take = [this](std::span<const Arrived> batch) { return place(batch); };
    co_await allgather_any_size(net_, std::move(encoded), most, step, taking);
    count_gathered(false);
  }

  Task<void> gather_by_doubling(ConstBytes encoded, std::size_t most, Step step) {
    const ShortMessages messages = co_await allgather_short(net_, encoded, "sums", step, most);
    std::vector<Arrived> batch;
    for (Rank rank = 0; rank < net_.size(); ++rank) batch.push_back({rank, messages.by_rank[rank]});
    co_await place(batch);
    count_gathered(true);
  }

  Transport& net_;
  OwnedSlice<V> mine_;
  const Partition& slices_;
  std::vector<std::uint64_t> counts_;
  const ShareGathering& how_;
  SparseTraffic& traffic_;
  std::vector<IndexRange> ranges_;  // in which each rank's share lies
  std::vector<std::size_t> begins_;  // of shares in the sequence of all entries
  bool balanced_ = false;
  Array<std::uint32_t> indices_;
  Array<V> values_;
};

}  // namespace

template <class V>
Task<SparseVector<V>> allgather_shares(Transport& net, OwnedSlice<V> mine, const Partition& slices,
                                       std::vector<std::uint64_t> counts, ShareGathering how, SparseTraffic& traffic,
                                       bool& was_balanced, Step first_step) {
  Gathering<V> gathering(net, std::move(mine), slices, std::move(counts), how, traffic);
  was_balanced = gathering.is_to_be_balanced();
  Step step = first_step;
  if (was_balanced) step = co_await gathering.balance(step);
  co_return co_await gathering.gather(step);
}

#define TELEGRAD_INSTANTIATE(V)                                                                                \
  template Task<SparseVector<V>> allgather_shares(Transport&, OwnedSlice<V>, const Partition&,                 \
                                                  std::vector<std::uint64_t>, ShareGathering, SparseTraffic&, \
                                                  bool&, Step);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
