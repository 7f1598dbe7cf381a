// Sparse recursive doubling: log2 P messages, which grow as the sum does: from log2 P·k entries where all ranks have the same
// indices to (P−1)k where no two have. Renggli et al., "SparCML: high-performance sparse communication for machine
// learning", SC 2019, §5.3.1 (SSAR_Recursive_double); where P is no power of two, with the fold and unfold of
// allreduce_recursive_doubling.cpp.
//
// In round i two ranks that differ in bit i exchange their sums and both add them: both get the same bits because a ∘ b =
// b ∘ a, and by induction so do all 2^(i+1) ranks that have met.
//
// It begins without knowing whether it pays, and may be given up before any round. Then ranks exchange 8 bytes instead of
// sums: the verdict. All 2^i ranks that have met come to the same one, from what they all know; two such groups that meet
// combine theirs, and `split` outweighs `flat_split`, this `filled`, this `dense`, and this a sum. So in the end all P ranks
// have the same. Who says split knows the end already: it tells all partners to come at once and goes on, so that splitting
// costs no time beside.
#include "collectives/sparse/doubling.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "collectives/support/any_size.hpp"

namespace telegrad {
namespace {

// Shorter than the header of any vector.
struct VerdictMessage {
  std::uint32_t magic = kVectorMagic;
  std::uint32_t verdict = 0;
};

Buffer message_of(SparseVerdict verdict) {
  const VerdictMessage content{.verdict = static_cast<std::uint32_t>(verdict)};
  Buffer message(sizeof content);
  std::memcpy(message.data(), &content, sizeof content);
  return message;
}

}  // namespace

// go_on: it is something else, a sum, or what cannot be meant.
template <class V>
SparseVerdict SparseDoubling<V>::verdict_in(const Buffer& message) const {
  if (decision_ == nullptr) return SparseVerdict::go_on;
  VerdictMessage content;
  if (message.size() != sizeof content) return SparseVerdict::go_on;
  std::memcpy(&content, message.data(), sizeof content);
  if (content.magic != kVectorMagic) return SparseVerdict::go_on;
  for (const SparseVerdict verdict :
       {SparseVerdict::dense, SparseVerdict::filled, SparseVerdict::flat_split, SparseVerdict::split}) {
    if (content.verdict != static_cast<std::uint32_t>(verdict)) continue;
    if (verdict == SparseVerdict::filled && !decision_->may_fill()) break;
    if (verdict == SparseVerdict::flat_split && !decision_->knows_levels()) break;
    return verdict;
  }
  return SparseVerdict::go_on;
}

template <class V>
SparseDoubling<V>::SparseDoubling(Transport& net, const SparseVector<V>& mine, const SparseReduction& how,
                                  Step first_step, const SparseDecision* decision)
    : net_(net),
      mine_(mine),
      how_(how),
      first_step_(first_step),
      decision_(decision),
      range_{0, mine.dimension()},
      most_(most_bytes<V>(range_)),
      delta_(wire_delta<V>(range_, how.switch_factor)),
      rounds_(static_cast<Rank>(std::bit_width(net.size())) - 1),
      pairs_(net.size() - (Rank{1} << rounds_)) {}

template <class V>
Step SparseDoubling<V>::step(Step message) const {
  return first_step_ + message * any_size_steps(net_, most_);
}

template <class V>
Rank SparseDoubling<V>::partner(Rank bit) const {
  const Rank self = folded() ? net_.rank() / 2 : net_.rank() - pairs_;
  const Rank member = self ^ (Rank{1} << bit);
  return member < pairs_ ? 2 * member : member + pairs_;
}

template <class V>
Task<SparseVerdict> SparseDoubling<V>::run() {
  if (decision_ != nullptr) verdict_ = decision_->alone(static_cast<double>(mine_.nnz()), mine_.is_dense());
  if (!is_member()) co_return co_await follow();
  fold_is_due_ = folded();
  if (verdict_ == SparseVerdict::split) {
    tell_others(0);
    co_return verdict_;
  }
  const Rank rank = net_.rank();
  if (folded()) {
    const Buffer other = co_await receive_any_size(net_, rank + 1, step(kFold), most_);
    fold_is_due_ = false;
    verdict_ = std::max(verdict_, verdict_in(other));
    if (verdict_ == SparseVerdict::go_on) co_await take(mine_.view(), other, rank + 1);
  } else if (verdict_ == SparseVerdict::go_on) {
    std::vector<SparseView<V>> alone{mine_.view()};
    co_await reduce(std::move(alone));
  }
  co_return co_await exchange_rounds();
}

// Of a rank that only hands its entries to a member, and gets the sum from it.
template <class V>
Task<SparseVerdict> SparseDoubling<V>::follow() {
  const Rank leader = net_.rank() - 1;
  if (verdict_ == SparseVerdict::split) {
    unfold_is_due_ = true;
    tell_others(rounds_);
    co_return verdict_;
  }
  co_await encode_sum_or_verdict(mine_.view());
  co_await send_any_size(net_, leader, step(kFold), leaving_.bytes());
  const Buffer whole = co_await receive_any_size(net_, leader, step(kUnfold), most_);
  verdict_ = verdict_in(whole);
  if (verdict_ == SparseVerdict::go_on) co_await take(std::nullopt, whole, leader);
  next_bit_ = rounds_;  // it hears from nobody else
  co_return verdict_;
}

template <class V>
Task<SparseVerdict> SparseDoubling<V>::exchange_rounds() {
  const Rank rank = net_.rank();
  for (Rank bit = 0; bit < rounds_; ++bit) {
    if (verdict_ == SparseVerdict::go_on && decision_ != nullptr && bit > 0) {
      verdict_ = decision_->after(bit, half_, static_cast<double>(sum_.view().nnz()));
    }
    if (verdict_ == SparseVerdict::split) {
      tell_others(bit);
      co_return verdict_;
    }
    co_await encode_sum_or_verdict(sum_.view());
    const Rank other_rank = partner(bit);
    const Step now = step(kFirstRound + bit);
    const Buffer other = co_await exchange_any_size(net_, other_rank, other_rank, now, leaving_.bytes(), most_);
    verdict_ = std::max(verdict_, verdict_in(other));
    if (verdict_ != SparseVerdict::go_on) {
      sum_ = {};
      continue;
    }
    const OwnedSlice<V> mine_now = std::move(sum_);
    co_await take(mine_now.view(), other, other_rank);
  }
  if (verdict_ == SparseVerdict::split) {
    tell_others(rounds_);
    co_return verdict_;
  }
  if (verdict_ == SparseVerdict::go_on && how_.reduction == Reduction::avg) co_await divide_by_ranks(net_, sum_);
  if (folded()) {
    co_await encode_sum_or_verdict(sum_.view());
    co_await send_any_size(net_, rank + 1, step(kUnfold), leaving_.bytes());
  }
  co_return verdict_;
}

// The verdict, to those who wait for a message of this rank from round `next_bit` on. None of them waits for another
// first.
template <class V>
void SparseDoubling<V>::tell_others(Rank next_bit) {
  sum_ = {};
  next_bit_ = next_bit;
  verdict_message_ = message_of(verdict_);
  const auto tell = [&](Rank to, Step message) {
    telling_.emplace_back(net_, to, step(message), verdict_message_.bytes());
  };
  if (!is_member()) {
    tell(net_.rank() - 1, kFold);
    return;
  }
  for (Rank bit = next_bit; bit < rounds_; ++bit) tell(partner(bit), kFirstRound + bit);
  if (folded()) tell(net_.rank() + 1, kUnfold);
}

template <class V>
Task<void> SparseDoubling<V>::hear_others() {
  if (unfold_is_due_) co_await hear(net_.rank() - 1, kUnfold);
  if (fold_is_due_) co_await hear(net_.rank() + 1, kFold);
  for (Rank bit = next_bit_; bit < rounds_; ++bit) co_await hear(partner(bit), kFirstRound + bit);
  for (; !telling_.empty(); telling_.pop_front()) co_await telling_.front();
}

// A sum that nobody needs, or a verdict.
template <class V>
Task<void> SparseDoubling<V>::hear(Rank from, Step message) {
  const Buffer other = co_await receive_any_size(net_, from, step(message), most_);
  if (verdict_in(other) == SparseVerdict::go_on) co_await check_decoded(net_, from, decode<V>(other.bytes(), range_));
}

template <class V>
Task<void> SparseDoubling<V>::encode_sum_or_verdict(SparseView<V> sum) {
  if (verdict_ != SparseVerdict::go_on) {
    leaving_ = message_of(verdict_);
    co_return;
  }
  co_await decide(net_, bytes_of(sum), [&] { leaving_ = encode_share(sum, how_); });
}

template <class V>
Task<void> SparseDoubling<V>::reduce(std::vector<SparseView<V>> parts) {
  std::size_t bytes = 0;
  for (const auto& part : parts) bytes += bytes_of(part);
  OwnedSlice<V> sum;
  co_await decide(net_, bytes, [&] { sum = reduce_slices<V>(parts, how_.reduction, delta_); });
  sum_ = std::move(sum);
}

template <class V>
Task<void> SparseDoubling<V>::take(std::optional<SparseView<V>> held, const Buffer& message, Rank source) {
  std::optional<Decoded<V>> came;
  co_await decide(net_, message.size(), [&] { came.emplace(decode<V>(message.bytes(), range_)); });
  co_await check_decoded(net_, source, *came);
  std::vector<SparseView<V>> parts;
  if (held) {
    parts.push_back(*held);
    half_ = static_cast<double>(held->nnz() + came->view().nnz()) / 2.0;
  }
  parts.push_back(came->view());
  co_await reduce(std::move(parts));
}

#define TELEGRAD_INSTANTIATE(V) template class SparseDoubling<V>;
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
