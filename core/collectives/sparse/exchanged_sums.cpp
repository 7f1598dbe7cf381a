#include "collectives/sparse/exchanged_sums.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "codec/known_values.hpp"
#include "collectives/sparse/allgather_slices.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/support/counts.hpp"
#include "collectives/support/exchange_order.hpp"
#include "transport/milestone.hpp"

namespace telegrad {
namespace {

constexpr Rank kExchangingRanksMost = 8;  // to each of more, little would be left out, and as much encoded
// Of a slice, if it has several. No number in between: of ranks that have given about as much, some would take one and some
// another, and no longer send as much in a round as they receive.
constexpr std::size_t kParts = 4;
constexpr std::size_t kPartedBytesLeast = kParts * (std::size_t{96} << 10);  // of what all have given
static_assert(kParts <= Counts::kMost);

IndexRange part_of_slice(IndexRange slice, std::size_t parts, std::size_t part) {
  const Range range = part_of({static_cast<std::size_t>(slice.begin), static_cast<std::size_t>(slice.end)}, parts, part);
  return {range.begin, range.end};
}

// Of this rank's slice.
template <class V>
struct Part {
  IndexRange range;
  OwnedSlice<V> sum;
  Buffer encoded;  // the same for all, or
  std::optional<SumMessages<V>> messages;  // another one for each
};

template <class V, class To>
class Exchange {
 public:
  Exchange(Transport& net, SparseVector<V> mine, GivenShares<V> given, const Partition& slices, const SparseReduction& how,
           Step first_step, To& whole)
      : net_(net),
        slices_(slices),
        how_(how),
        first_step_(first_step),
        most_bytes_(most_bytes<V>(slices)),
        steps_(any_size_steps(net, most_bytes_)),
        order_(net.rank(), net.size()),
        mine_(std::move(mine)),
        given_(std::move(given)),
        parts_(number_of_parts()),
        made_(net.ready()),
        counts_(net, first_step + static_cast<Step>(kParts) * steps_, kParts),
        whole_(whole) {
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      parts_[part].range = part_of_slice(slice_of(slices_, net.rank()), parts_.size(), part);
    }
  }

  Task<void> run() {
    std::vector<Task<void>> both;
    both.push_back(make_parts());
    both.push_back(exchange());
    co_await when_all(std::move(both));
    co_await counts_.finish();
  }

 private:
  struct Leaving {
    Buffer own;
    ConstBytes bytes;  // there, or those that all get
  };
  struct Come {
    Rank owner;
    std::size_t part;
    Buffer message;
  };

  std::size_t number_of_parts() const {
    std::size_t bytes = 0;
    for (Rank source = 0; source < net_.size(); ++source) bytes += bytes_of(given_.share(source));
    return bytes < kPartedBytesLeast ? 1 : kParts;
  }
  // Of an average, the sums have been multiplied by that.
  double factor() const { return how_.reduction == Reduction::avg ? 1.0 / net_.size() : 1.0; }

  // One after the other, and says how many entries each has.
  Task<void> make_parts() {
    RankCounts counts;
    for (std::size_t number = 0; number < parts_.size(); ++number) {
      Part<V>& part = parts_[number];
      // Where bytes are not dear enough for packing, leaving out takes longer than what it saves.
      Array<std::uint8_t> givers;
      part.sum = co_await reduce_given(net_, given_, part.range, how_, how_.wire.packs_values ? &givers : nullptr);
      const auto sent = [&](const SparseView<V>& view) { return encoded_size(view, how_.wire); };
      if (sends_densely(part.sum.view(), how_, sent)) co_await make_dense(net_, part.sum, how_);
      const SparseView<V> sum = part.sum.view();
      counts.push_back(announced_count(sum));
      if (how_.wire.packs_values && !sum.dense) {
        part.messages.emplace(sum, how_.wire, std::move(givers));
      } else {
        co_await decide(net_, bytes_of(sum), [&] { part.encoded = encode(sum, how_.wire); });
      }
      made_.reach(number + 1);
    }
    counts_.say(std::move(counts));
    made_.reach(parts_.size() + 1);
    if (!how_.wire.packs_values) given_ = {};  // nothing is left out of anybody's message
  }

  Task<void> exchange() {
    co_await made_.until(1);
    co_await make_for(0, 1);
    co_await exchange_part(0);
    co_await learn_counts();
    for (std::size_t part = 1; part < most_parts_; ++part) co_await exchange_part(part);
    co_await take_arrived();
  }
  Task<void> exchange_part(std::size_t part) {
    for (Rank round = 1; round < net_.size(); ++round) {
      leaving_ = std::exchange(next_, {});
      std::vector<Task<void>> both;
      both.push_back(pass(part, round));
      both.push_back(work_beside(part, round));
      co_await when_all(std::move(both));
    }
  }

  // A rank may have one part only; which have more, all know once the first ones have come.
  Task<void> pass(std::size_t part, Rank round) {
    const Rank to = order_.receiver(round);
    const Rank from = order_.sender(round);
    const Step step = first_step_ + static_cast<Step>(part) * steps_;
    const bool sends = part < parts_.size();
    const bool receives = part == 0 || part < counts_of_[from].size();
    Buffer message;
    if (sends && receives) {
      message = co_await exchange_any_size(net_, to, from, step, leaving_.bytes, most_bytes_);
    } else if (sends) {
      co_await send_any_size(net_, to, step, leaving_.bytes);
    } else if (receives) {
      message = co_await receive_any_size(net_, from, step, most_bytes_);
    }
    if (receives) come_.push_back({from, part, std::move(message)});
  }

  Task<void> work_beside(std::size_t part, Rank round) {
    const bool last = round + 1 == net_.size();
    const std::size_t next_part = last ? part + 1 : part;
    if (next_part < parts_.size()) {
      co_await made_.until(next_part + 1);
      co_await make_for(next_part, last ? 1 : round + 1);
    }
    if (counts_.all_known()) co_await take_arrived();
  }

  Task<void> make_for(std::size_t number, Rank round) {
    Part<V>& part = parts_[number];
    if (!part.messages) {
      next_.bytes = part.encoded.bytes();
      co_return;
    }
    const Rank receiver = order_.receiver(round);
    const GivenEntries<V> given{given_.share(receiver).slice(part.range), factor()};
    co_await decide(net_, bytes_of(part.sum.view()), [&] { next_.bytes = part.messages->to(receiver, given, next_.own); });
  }

  Task<void> learn_counts() {
    if (!counts_of_.empty()) co_return;
    co_await made_.until(parts_.size() + 1);
    counts_of_ = co_await counts_.wait();
    for (const RankCounts& one : counts_of_) most_parts_ = std::max(most_parts_, one.size());
  }

  Task<void> begin_whole() {
    co_await learn_counts();
    std::vector<ClaimedSlice> slices;
    for (Rank owner = 0; owner < net_.size(); ++owner) {
      const RankCounts& counts = counts_of_[owner];
      first_slice_.push_back(slices.size());
      for (std::size_t part = 0; part < counts.size(); ++part) {
        slices.push_back({owner, part_of_slice(slice_of(slices_, owner), counts.size(), part), counts[part]});
      }
    }
    co_await whole_.begin(std::move(slices));
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      co_await whole_.place(first_slice_[net_.rank()] + part, parts_[part].sum.view());
    }
  }

  Task<void> take_arrived() {
    if (!whole_.begun()) co_await begin_whole();
    const std::vector<Come> batch = std::exchange(come_, {});
    for (const auto& [owner, part, message] : batch) {
      const IndexRange range = part_of_slice(slice_of(slices_, owner), counts_of_[owner].size(), part);
      const GivenEntries<V> given{mine_.slice(range.begin, range.end), factor()};
      co_await whole_.place(first_slice_[owner] + part, message.bytes(), given);
    }
  }

  Transport& net_;
  const Partition& slices_;
  const SparseReduction& how_;
  const Step first_step_;
  const std::size_t most_bytes_;  // of a message
  const Step steps_;
  const ExchangeOrder order_;
  const SparseVector<V> mine_;
  GivenShares<V> given_;
  std::vector<Part<V>> parts_;
  Milestone made_;  // how many parts are, and one more: what they have has been said
  Counts counts_;
  To& whole_;
  std::vector<RankCounts> counts_of_;  // by owner, once they are known
  std::size_t most_parts_ = 1;
  std::vector<std::size_t> first_slice_;  // in `whole_`, by owner
  Leaving leaving_;
  Leaving next_;
  std::vector<Come> come_;  // not yet taken
};

}  // namespace

template <class V>
bool exchanges_sums(const Transport& net, const Partition& slices, const SparseReduction& how) {
  const bool few = net.size() > 1 && net.size() <= kExchangingRanksMost;
  return few && !net.shares_memory() && how.algorithm != Algorithm::ring && how.wire.values == ValueEncoding::native &&
         counts_go_ahead<V>(net, slices);
}

template <class V, class To>
Task<void> exchange_sums(Transport& net, SparseVector<V> mine, GivenShares<V> given, const Partition& slices,
                         const SparseReduction& how, Step first_step, To& whole) {
  Exchange<V, To> all(net, std::move(mine), std::move(given), slices, how, first_step, whole);
  co_await all.run();
}

#define TELEGRAD_INSTANTIATE(V, To)                                                                                 \
  template Task<void> exchange_sums(Transport&, SparseVector<V>, GivenShares<V>, const Partition&, const SparseReduction&, \
                                    Step, To<V>&);
#define TELEGRAD_INSTANTIATE_BOTH(V)                                                                   \
  template bool exchanges_sums<V>(const Transport&, const Partition&, const SparseReduction&);         \
  TELEGRAD_INSTANTIATE(V, AssembledSum)                                                                \
  TELEGRAD_INSTANTIATE(V, WrittenSum)
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE_BOTH)
TELEGRAD_INSTANTIATE(CountedF32, AssembledSum)
template bool exchanges_sums<CountedF32>(const Transport&, const Partition&, const SparseReduction&);
#undef TELEGRAD_INSTANTIATE
#undef TELEGRAD_INSTANTIATE_BOTH

}  // namespace telegrad
