// The dense sum of vectors that are held as vectors. Each rank owns a slice of the vector. It gets all ranks' values there,
// block by block, between ranks that share memory from where they lie to the cache, and with them marks, a bit for each
// element that has a value: so nobody makes a dense vector of a vector, whose indices travel in a bit for each element. Blocks
// of sums, formed in the order of ranks, go to all others at once. For few entries of many elements see sparse/split.hpp.
//
// Renggli et al., "SparCML", SC 2019, §5.3.3 (DSAR_Split_allgather), in blocks.
#include "collectives/sparse/filled.hpp"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/support/partition.hpp"
#include "kernels/marks.hpp"
#include "kernels/reduce_marked.hpp"
#include "kernels/scale.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

// Of the sum. In a host's memory few ranks' shares of two of them stay in the cache; over a network, where all send to one,
// longer messages of most densities take less time.
constexpr std::size_t kMemoryBlockBytes = std::size_t{512} << 10;
constexpr std::size_t kNetworkBlockBytes = std::size_t{1} << 20;
constexpr std::size_t kSharesAhead = 2;                      // of each rank, whose blocks come while one is reduced
constexpr std::size_t kSendsMost = 24;                       // messages under way in each part
constexpr Step kSumSteps = Step{1} << 29;                    // from here on blocks of sums

using Marks = Array<std::uint64_t>;

template <class V>
class FilledSum {
 public:
  FilledSum(Transport& net, SparseView<V> mine, Reduction reduction, std::span<V> output)
      : net_(net),
        mine_(mine),
        reduction_(reduction),
        output_(output),
        slices_(static_cast<std::size_t>(mine.range.size()), net.size()),
        block_((net.shares_memory() ? kMemoryBlockBytes : kNetworkBlockBytes) / sizeof(V)),
        coming_(net.size()) {
    for (Rank owner = 0; owner <= net.size() && !mine.dense; ++owner) {
      const auto first = std::ranges::lower_bound(mine.indices, slices_.begin(owner));
      begins_.push_back(static_cast<std::size_t>(first - mine.indices.begin()));
    }
    next_ = begins_;
  }

  Task<void> run() {
    if (!mine_.dense && begins_.back() != mine_.indices.size()) co_await fail_own_indices(net_, mine_.range.size());
    std::vector<Task<void>> all;
    for (Rank distance = 1; distance < net_.size(); ++distance) all.push_back(take_sums(behind(distance)));
    all.push_back(send_shares());
    all.push_back(sum_slice());
    co_await when_all(std::move(all));
  }

 private:
  struct SendingShare {
    SendingShare(Transport& net, Rank to, Step step, Marks kept, ConstBytes values)
        : marks(std::move(kept)), sending_marks(net, to, step, std::as_bytes(marks.span())), sending(net, to, step + 1, values) {}
    Marks marks;
    Transport::Sending sending_marks;
    Transport::Sending sending;
  };
  struct ComingShare {
    ComingShare(Transport& net, Rank from, Step step, std::size_t elements)
        : marks(net, from, step, kernels::mark_words(elements) * sizeof(std::uint64_t)),
          values(net, from, step + 1, elements * sizeof(V)) {}
    Transport::ReceivingAny marks;
    Transport::ReceivingAny values;
  };

  Rank ahead(Rank distance) const { return (net_.rank() + distance) % net_.size(); }
  Rank behind(Rank distance) const { return (net_.rank() + net_.size() - distance) % net_.size(); }
  std::size_t blocks(Rank owner) const { return (slices_[owner].size() + block_ - 1) / block_; }
  Range block(Rank owner, std::size_t number) const {
    const Range slice = slices_[owner];
    const std::size_t begin = slice.begin + number * block_;
    return {begin, std::min(begin + block_, slice.end)};
  }
  static Step share_step(std::size_t block) { return static_cast<Step>(2 * block); }
  static Step sum_step(std::size_t block) { return kSumSteps + static_cast<Step>(block); }

  // Of this rank's entries in a block, on average.
  std::size_t index_bytes(Range range) const {
    const double share = static_cast<double>(range.size()) / static_cast<double>(mine_.range.size());
    return static_cast<std::size_t>(share * static_cast<double>(mine_.indices.size_bytes()));
  }

  // This rank's entries in a block of `owner`'s, which follow those that it was asked for before.
  Task<void> share_of(Rank owner, Range range, Marks& marks, std::span<const V>& values) {
    if (mine_.dense) {
      values = mine_.values.subspan(range.begin, range.size());
      co_return;
    }
    const std::size_t begin = next_[owner];
    marks = Marks(kernels::mark_words(range.size()));
    std::optional<std::size_t> count;
    co_await decide(net_, mine_.marks.empty() ? index_bytes(range) : range.size() / 8,
                    [&] { count = mark_block(mine_, {range.begin, range.end}, begin, marks.span()); });
    next_[owner] = begin + count.value_or(0);
    const bool is_last = range.end == slices_[owner].end;
    if (!count || (is_last && next_[owner] != begins_[owner + 1])) co_await fail_own_indices(net_, mine_.range.size());
    values = mine_.values.subspan(begin, *count);
  }

  // A block of everybody's slice after the other, so that all owners have something to do.
  Task<void> send_shares() {
    Window<SendingShare, kSendsMost> under_way;
    for (std::size_t number = 0; number * block_ < slices_.longest(); ++number) {
      for (Rank distance = 1; distance < net_.size(); ++distance) {
        const Rank to = ahead(distance);
        if (number >= blocks(to)) continue;
        Marks marks;
        std::span<const V> values;
        co_await share_of(to, block(to, number), marks, values);
        if (under_way.full()) {
          co_await under_way.front().sending_marks;
          co_await under_way.front().sending;
          under_way.pop_front();
        }
        under_way.emplace_back(net_, to, share_step(number), std::move(marks), std::as_bytes(values));
      }
    }
    for (; !under_way.empty(); under_way.pop_front()) {
      co_await under_way.front().sending_marks;
      co_await under_way.front().sending;
    }
  }

  // This rank's own slice.
  Task<void> sum_slice() {
    const Rank rank = net_.rank();
    Window<Transport::Sending, kSendsMost> under_way;
    for (std::size_t number = 0; number < blocks(rank); ++number) {
      co_await sum_block(number);
      const Range range = block(rank, number);
      const ConstBytes sum = std::as_bytes(output_.subspan(range.begin, range.size()));
      for (Rank distance = 1; distance < net_.size(); ++distance) {
        if (under_way.full()) {
          co_await under_way.front();
          under_way.pop_front();
        }
        under_way.emplace_back(net_, ahead(distance), sum_step(number), sum);
      }
    }
    for (; !under_way.empty(); under_way.pop_front()) co_await under_way.front();
  }

  Task<void> sum_block(std::size_t number) {
    const Rank rank = net_.rank();
    const Range range = block(rank, number);
    std::vector<kernels::MarkedValues<V>> shares(net_.size());
    std::vector<std::pair<Buffer, Buffer>> messages(net_.size());
    Marks own_marks;
    begin_receives(number);
    co_await share_of(rank, range, own_marks, shares[rank].values);
    shares[rank].marks = own_marks.span();
    std::size_t bytes = 0;
    for (Rank source = 0; source < net_.size(); ++source) {
      if (source != rank) {
        auto& [marks, values] = messages[source];
        ComingShare& coming = coming_[source].front();
        marks = co_await coming.marks;
        values = co_await coming.values;
        coming_[source].pop_front();
        const std::string error = share_error(range, marks, values);
        if (!error.empty()) co_await fail_damaged(net_, source, "entries", error);
        shares[source] = {{reinterpret_cast<const std::uint64_t*>(marks.data()), marks.size() / sizeof(std::uint64_t)},
                          {reinterpret_cast<const V*>(values.data()), values.size() / sizeof(V)}};
      }
      bytes += shares[source].values.size_bytes();
    }
    begin_receives(number + 1);
    const std::span<V> sum = output_.subspan(range.begin, range.size());
    co_await net_.compute(std::min(bytes, Transport::kSliceBytes), [&] {
      kernels::reduce_marked<V>(reduction_, shares, sum);
      if (reduction_ == Reduction::avg) kernels::scale(dtype_of<V>, std::as_writable_bytes(sum), 1.0 / net_.size());
    });
  }

  // As many as may be under way while block `number` is waited for.
  void begin_receives(std::size_t number) {
    for (; begun_ < std::min(number + kSharesAhead, blocks(net_.rank())); ++begun_) {
      for (Rank distance = 1; distance < net_.size(); ++distance) {
        const Rank source = behind(distance);
        coming_[source].emplace_back(net_, source, share_step(begun_), block(net_.rank(), begun_).size());
      }
    }
  }

  static std::string share_error(Range range, const Buffer& marks, const Buffer& values) {
    if (marks.empty()) {
      if (values.size() == range.size() * sizeof(V)) return "";
      return "there are " + std::to_string(values.size()) + " bytes of values for " + std::to_string(range.size()) +
             " elements";
    }
    if (marks.size() != kernels::mark_words(range.size()) * sizeof(std::uint64_t)) {
      return "there are " + std::to_string(marks.size()) + " bytes of marks for " + std::to_string(range.size()) +
             " elements";
    }
    const std::span<const std::uint64_t> words(reinterpret_cast<const std::uint64_t*>(marks.data()),
                                               marks.size() / sizeof(std::uint64_t));
    if (range.size() % 64 != 0 && words.back() >> range.size() % 64 != 0) return "elements beyond the last are marked";
    const std::size_t count = kernels::count_marks(words);
    if (values.size() == count * sizeof(V)) return "";
    return "there are " + std::to_string(values.size()) + " bytes of values for " + std::to_string(count) +
           " marked elements";
  }

  // Blocks of sums, to where they belong. They come once this rank's values there have been read.
  Task<void> take_sums(Rank owner) {
    Window<Transport::Receiving, kSharesAhead> under_way;
    std::size_t begun = 0;
    for (std::size_t number = 0; number < blocks(owner); ++number) {
      for (; begun < blocks(owner) && !under_way.full(); ++begun) {
        const Range range = block(owner, begun);
        under_way.emplace_back(net_, owner, sum_step(begun),
                               std::as_writable_bytes(output_.subspan(range.begin, range.size())));
      }
      co_await under_way.front();
      under_way.pop_front();
    }
  }

  Transport& net_;
  const SparseView<V> mine_;
  const Reduction reduction_;
  const std::span<V> output_;
  const Partition slices_;
  const std::size_t block_;  // elements of one
  std::vector<std::size_t> begins_;  // of this rank's entries in each owner's slice; empty where they are dense
  std::vector<std::size_t> next_;    // of these, the first that has not been sent
  std::vector<std::deque<ComingShare>> coming_;
  std::size_t begun_ = 0;  // blocks whose shares may come
};

}  // namespace

template <class V>
Task<void> allreduce_filled(Transport& net, SparseView<V> mine, Reduction reduction, std::span<V> output) {
  TELEGRAD_CHECK(is_for_filling(net.size(), mine.range.size() * sizeof(V)) && mine.range.begin == 0 && output.size() == mine.range.size());
  FilledSum<V> sum(net, mine, reduction, output);
  co_await sum.run();
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<void> allreduce_filled(Transport&, SparseView<V>, Reduction, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
