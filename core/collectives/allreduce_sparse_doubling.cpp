// Sparse recursive doubling: log2 P messages, which grow as the sum does: from log2 P·k entries where all ranks have the same
// indices to (P−1)k where no two have. Renggli et al., "SparCML: high-performance sparse communication for machine
// learning", SC 2019, §5.3.1 (SSAR_Recursive_double); where P is no power of two, with the fold and unfold of
// allreduce_recursive_doubling.cpp.
//
// In round i two ranks that differ in bit i exchange their sums and both add them: both get the same bits because a ∘ b =
// b ∘ a, and by induction so do all 2^(i+1) ranks that have met.
#include "collectives/allreduce_sparse_doubling.hpp"

#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/any_size.hpp"

namespace telegrad {
namespace {

template <class V>
class Doubling {
 public:
  Doubling(Transport& net, const SparseStream<V>& mine, const SparseReduction& how)
      : net_(net),
        how_(how),
        range_{0, mine.dimension()},
        most_(most_bytes<V>(range_)),
        delta_(wire_delta<V>(range_, how.switch_factor)),
        members_(std::bit_floor(net.size())),
        pairs_(net.size() - members_) {}

  Task<OwnedSlice<V>> run(const SparseStream<V>& mine) {
    const Rank rank = net_.rank();
    const bool folded = rank < 2 * pairs_;
    if (folded && rank % 2 == 1) {
      co_await encode_sum(mine.view());
      co_await send_any_size(net_, rank - 1, step(kFold), leaving_.bytes());
      const Buffer whole = co_await receive_any_size(net_, rank - 1, step(kUnfold), most_);
      co_await add_to(std::nullopt, whole, rank - 1);
      co_return std::move(sum_);
    }
    if (folded) {
      const Buffer other = co_await receive_any_size(net_, rank + 1, step(kFold), most_);
      co_await add_to(mine.view(), other, rank + 1);
    } else {
      const std::vector<StreamView<V>> alone{mine.view()};
      co_await reduce(alone);
    }
    const Rank self = folded ? rank / 2 : rank - pairs_;
    for (Rank bit = 0; (Rank{1} << bit) < members_; ++bit) {
      const Rank member = self ^ (Rank{1} << bit);
      const Rank partner = member < pairs_ ? 2 * member : member + pairs_;
      co_await encode_sum(sum_.view());
      const Step now = step(kFirstRound + bit);
      const Buffer other = co_await exchange_any_size(net_, partner, partner, now, leaving_.bytes(), most_);
      const OwnedSlice<V> mine_now = std::move(sum_);
      co_await add_to(mine_now.view(), other, partner);
    }
    if (how_.reduction == Reduction::avg) co_await divide_by_ranks(net_, sum_);
    if (folded) {
      co_await encode_sum(sum_.view());
      co_await send_any_size(net_, rank + 1, step(kUnfold), leaving_.bytes());
    }
    co_return std::move(sum_);
  }

 private:
  static constexpr Step kFold = 0;
  static constexpr Step kUnfold = 1;
  static constexpr Step kFirstRound = 2;

  Step step(Step message) const { return message * any_size_steps(net_, most_); }

  Task<void> encode_sum(StreamView<V> sum) {
    co_await decide(net_, bytes_of(sum), [&] { leaving_ = encode_share(sum, how_); });
  }
  Task<void> reduce(std::vector<StreamView<V>> parts) {
    std::size_t bytes = 0;
    for (const auto& part : parts) bytes += bytes_of(part);
    OwnedSlice<V> sum;
    co_await decide(net_, bytes, [&] { sum = reduce_slices<V>(parts, how_.reduction, delta_); });
    sum_ = std::move(sum);
  }
  Task<void> add_to(std::optional<StreamView<V>> held, const Buffer& message, Rank source) {
    const Decoded<V> came = decode<V>(message.bytes(), range_);
    co_await check_decoded(net_, source, came);
    std::vector<StreamView<V>> parts;
    if (held) parts.push_back(*held);
    parts.push_back(came.view());
    co_await reduce(std::move(parts));
  }

  Transport& net_;
  const SparseReduction& how_;
  const IndexRange range_;
  const std::size_t most_;
  const double delta_;
  const Rank members_;  // take part in the doubling
  const Rank pairs_;    // of which only the even rank is a member
  Buffer leaving_;
  OwnedSlice<V> sum_;
};

}  // namespace

template <class V>
Task<OwnedSlice<V>> allreduce_sparse_doubling(Transport& net, SparseStream<V> mine, const SparseReduction& how) {
  Doubling<V> doubling(net, mine, how);
  co_return co_await doubling.run(mine);
}

#define TELEGRAD_INSTANTIATE(V) \
  template Task<OwnedSlice<V>> allreduce_sparse_doubling(Transport&, SparseStream<V>, const SparseReduction&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
