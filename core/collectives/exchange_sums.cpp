#include "collectives/exchange_sums.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "collectives/any_size.hpp"
#include "collectives/exchange_order.hpp"
#include "collectives/sparse_messages.hpp"

namespace telegrad {
namespace {

template <class V>
class Exchange {
 public:
  Exchange(Transport& net, const EncodedSlice<V>& mine, const WireFormat& format, TakingSums taking)
      : net_(net), mine_(mine), taking_(std::move(taking)), order_(net.rank(), net.size()) {
    if (mine.encoded.empty()) sums_.emplace(mine.owned.view(), format);
  }

  Task<void> run() {
    co_await make_for(1);
    for (Rank round = 1; round < net_.size(); ++round) {
      leaving_ = std::exchange(next_, {});
      std::vector<Task<void>> both;
      both.push_back(exchange(round));
      both.push_back(work_beside(round));
      co_await when_all(std::move(both));
    }
    co_await take_arrived();
  }

 private:
  struct Leaving {
    Buffer own;
    ConstBytes bytes;  // there, or those that all get
  };
  struct Come {
    Rank owner;
    Buffer message;
  };

  Task<void> make_for(Rank round) {
    if (!sums_) {
      next_.bytes = mine_.encoded.bytes();
      co_return;
    }
    const GivenEntries<V> given{mine_.addends->given.share(order_.receiver(round)), mine_.addends->factor};
    co_await decide(net_, bytes_of(mine_.owned.view()), [&] { next_.bytes = sums_->to(given, next_.own); });
  }
  Task<void> exchange(Rank round) {
    const Rank owner = order_.sender(round);
    Buffer message = co_await exchange_any_size(net_, order_.receiver(round), owner, mine_.first_step, leaving_.bytes,
                                                mine_.most_bytes);
    come_.push_back({owner, std::move(message)});
  }
  Task<void> work_beside(Rank round) {
    if (round + 1 < net_.size()) co_await make_for(round + 1);
    if (taking_.ready()) co_await take_arrived();
  }
  Task<void> take_arrived() {
    const std::vector<Come> batch = std::exchange(come_, {});
    for (const Come& one : batch) co_await taking_.take(one.owner, one.message.bytes());
  }

  Transport& net_;
  const EncodedSlice<V>& mine_;
  const TakingSums taking_;
  const ExchangeOrder order_;
  std::optional<SumMessages<V>> sums_;
  Leaving leaving_;
  Leaving next_;
  std::vector<Come> come_;  // not yet taken
};

}  // namespace

template <class V>
GivenEntries<V> given_to(const EncodedSlice<V>& mine, Rank owner) {
  if (!mine.addends) return GivenEntries<V>::none();
  const IndexRange range = slice_of(mine.slices, owner);
  return {mine.addends->mine.slice(range.begin, range.end), mine.addends->factor};
}

template <class V>
Task<void> exchange_sums(Transport& net, const EncodedSlice<V>& mine, const WireFormat& format, TakingSums taking) {
  Exchange<V> all(net, mine, format, std::move(taking));
  co_await all.run();
}

#define TELEGRAD_INSTANTIATE(V)                                    \
  template GivenEntries<V> given_to(const EncodedSlice<V>&, Rank); \
  template Task<void> exchange_sums(Transport&, const EncodedSlice<V>&, const WireFormat&, TakingSums);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
