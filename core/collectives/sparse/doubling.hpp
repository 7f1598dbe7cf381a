#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/types.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/sparse/messages.hpp"
#include "transport/transport.hpp"
#include "transport/window.hpp"

namespace telegrad {

/// The reduction of all ranks' vectors by recursive doubling, the same bits on every rank; unless they give it up, which
/// all do or none.
template <class V>
class SparseDoubling {
 public:
  /// Without a `decision` it is never given up. Uses steps from `first_step` on. What it is given outlives it.
  SparseDoubling(Transport& net, const SparseVector<V>& mine, const SparseReduction& how, Step first_step,
                 const SparseDecision* decision);

  /// go_on: it is done, and sum() is there. Otherwise all ranks are to sum by other means, and all hear the same; after
  /// split, others may still send to this rank, which must run hear_others() beside whatever it does.
  Task<SparseVerdict> run();
  Task<void> hear_others();
  /// A slice of the whole range.
  OwnedSlice<V> take_sum() { return std::move(sum_); }

 private:
  static constexpr Step kFold = 0;
  static constexpr Step kUnfold = 1;
  static constexpr Step kFirstRound = 2;
  static constexpr std::size_t kMessagesMost = 33;  // rounds among 2^32 ranks, and an unfolding

  Step step(Step message) const;
  Rank partner(Rank bit) const;
  bool folded() const { return net_.rank() < 2 * pairs_; }
  bool is_member() const { return !folded() || net_.rank() % 2 == 0; }

  SparseVerdict verdict_in(const Buffer& message) const;
  Task<SparseVerdict> follow();
  Task<SparseVerdict> exchange_rounds();
  Task<void> encode_sum_or_verdict(SparseView<V> sum);
  Task<void> take(std::optional<SparseView<V>> held, const Buffer& message, Rank source);
  Task<void> reduce(std::vector<SparseView<V>> parts);
  void tell_others(Rank next_bit);
  Task<void> hear(Rank from, Step message);

  Transport& net_;
  const SparseVector<V>& mine_;
  const SparseReduction& how_;
  const Step first_step_;
  const SparseDecision* const decision_;
  const IndexRange range_;
  const std::size_t most_;
  const double delta_;
  const Rank rounds_;  // among 2^rounds_ members
  const Rank pairs_;   // of which only the even rank is a member
  SparseVerdict verdict_ = SparseVerdict::go_on;
  double half_ = 0.0;  // entries of what was added last, on average
  Buffer leaving_;
  OwnedSlice<V> sum_;
  // Messages that come after the verdict.
  bool fold_is_due_ = false;
  bool unfold_is_due_ = false;
  Rank next_bit_ = 0;
  Buffer verdict_message_;
  Window<Transport::Sending, kMessagesMost> telling_;
};

}  // namespace telegrad
