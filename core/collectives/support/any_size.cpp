#include "collectives/support/any_size.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "collectives/support/pieces.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

// The first word of a first piece: which no message begins with that is all there is. So a first piece that has lost a part
// is not taken for a whole message, whose sender would wait for ever to be relieved of the others.
using FirstWord = std::uint64_t;
constexpr FirstWord kOthersFollow = FirstWord{0xffff} << 48;

// Among many ranks there are many messages anyway: each in many pieces would cost processors more than links gain.
constexpr Rank kManyRanks = 256;

// The pieces of one message, the first few of which are under way from the beginning.
class Outgoing {
 public:
  Outgoing(Transport& net, Rank to, Step first_step, ConstBytes bytes)
      : net_(net), to_(to), step_(first_step), rest_(bytes) {
    if (!has_several_pieces(net, bytes.size())) {
      TELEGRAD_CHECK(!others_follow(bytes));
      rest_ = {};
      sends_.emplace_back(net, to, step_++, bytes);
      return;
    }
    first_ = Buffer(longest_piece(net));
    const FirstWord word = kOthersFollow | bytes.size();
    const std::size_t taken = first_.size() - sizeof word;
    std::memcpy(first_.data(), &word, sizeof word);
    copy_bytes(first_.data() + sizeof word, bytes.data(), SizeOnly::there(first_.size()) - sizeof word);
    rest_ = bytes.subspan(taken);
    sends_.emplace_back(net, to, step_++, first_.bytes());
    while (!rest_.empty() && !sends_.full()) begin_piece();
  }

  bool all_begun() const { return rest_.empty(); }
  /// One piece more, once the oldest has left. Not if all have begun.
  Task<void> send_more() {
    if (sends_.full()) {
      co_await sends_.front();
      sends_.pop_front();
    }
    begin_piece();
  }
  Task<void> finish() {
    while (!all_begun()) co_await send_more();
    for (; !sends_.empty(); sends_.pop_front()) co_await sends_.front();
  }

 private:
  void begin_piece() {
    const std::size_t taken = std::min(rest_.size(), longest_piece(net_));
    sends_.emplace_back(net_, to_, step_++, rest_.first(taken));
    rest_ = rest_.subspan(taken);
  }

  Transport& net_;
  const Rank to_;
  Step step_;
  ConstBytes rest_;  // not yet begun
  Buffer first_;
  Window<Transport::Sending, kPiecesUnderWay> sends_;
};

// What comes after a first message that is as long as a piece; `outgoing`, if any, sends a piece for each that comes.
Task<Buffer> receive_others(Transport& net, Rank from, Step step, Buffer first, std::size_t most_bytes,
                            Outgoing* outgoing) {
  FirstWord word = 0;
  std::memcpy(&word, first.data(), sizeof word);
  const FirstWord length = word ^ kOthersFollow;
  if (length < first.size() || length > most_bytes) {
    co_await net.fail(from, "rank " + std::to_string(from) + " sent a damaged message: it says that it has " +
                                std::to_string(length) + " bytes, which is not between " +
                                std::to_string(first.size()) + " and " + std::to_string(most_bytes));
  }
  Buffer whole(static_cast<std::size_t>(length));
  copy_bytes(whole.data(), first.data() + sizeof word, SizeOnly::there(first.size()) - sizeof word);
  Bytes rest = whole.bytes().subspan(first.size() - sizeof word);
  first = {};
  Window<Transport::Receiving, kPiecesUnderWay> receives;
  while (!rest.empty() || !receives.empty()) {
    while (!rest.empty() && !receives.full()) {
      const std::size_t taken = std::min(rest.size(), longest_piece(net));
      receives.emplace_back(net, from, step++, rest.first(taken));
      rest = rest.subspan(taken);
    }
    co_await receives.front();
    receives.pop_front();
    if (outgoing != nullptr && !outgoing->all_begun()) co_await outgoing->send_more();
  }
  co_return whole;
}

Task<Buffer> with_others(Transport& net, Rank from, Step first_step, Buffer first, std::size_t most_bytes,
                         Outgoing* outgoing) {
  if (has_several_pieces(net, first.size())) {
    co_return co_await receive_others(net, from, first_step + 1, std::move(first), most_bytes, outgoing);
  }
  if (others_follow(first.bytes())) {
    // Its sender may wait for these to be taken, and this rank for the sender: nobody would come to decode it.
    co_await net.fail(from, "rank " + std::to_string(from) + " sent a damaged message: others are to follow its first " +
                                std::to_string(first.size()) + " bytes, which should be " +
                                std::to_string(longest_piece(net)));
  }
  co_return first;
}

Task<Buffer> receive_message(Transport& net, Rank from, Step first_step, std::size_t most_bytes, Outgoing* outgoing) {
  Buffer first = co_await net.receive_any_size(from, first_step, first_piece_bytes(net, most_bytes));
  if (!has_several_pieces(net, first.size()) && !others_follow(first.bytes())) co_return first;
  co_return co_await with_others(net, from, first_step, std::move(first), most_bytes, outgoing);
}

}  // namespace

std::size_t longest_piece(const Transport& net) {
  return piece_bytes(net) * std::max<std::size_t>(1, net.size() / kManyRanks);
}

Step any_size_steps(const Transport& net, std::size_t most_bytes) {
  return static_cast<Step>((most_bytes + sizeof(FirstWord)) / longest_piece(net) + 1);
}

std::size_t first_piece_bytes(const Transport& net, std::size_t most_bytes) {
  return std::min(most_bytes, longest_piece(net));
}

bool others_follow(ConstBytes first) {
  FirstWord word = 0;
  if (first.size() >= sizeof word) std::memcpy(&word, first.data(), sizeof word);
  return word >= kOthersFollow;
}

bool has_several_pieces(const Transport& net, std::size_t bytes) { return bytes >= longest_piece(net); }

Task<void> send_any_size(Transport& net, Rank to, Step first_step, ConstBytes bytes) {
  Outgoing outgoing(net, to, first_step, bytes);
  co_await outgoing.finish();
}

Task<Buffer> receive_rest(Transport& net, Rank from, Step first_step, Buffer first, std::size_t most_bytes) {
  return with_others(net, from, first_step, std::move(first), most_bytes, nullptr);
}

Task<Buffer> receive_any_size(Transport& net, Rank from, Step first_step, std::size_t most_bytes) {
  return receive_message(net, from, first_step, most_bytes, nullptr);
}

Task<Buffer> exchange_any_size(Transport& net, Rank to, Rank from, Step first_step, ConstBytes bytes,
                               std::size_t most_bytes) {
  Outgoing outgoing(net, to, first_step, bytes);
  Buffer incoming = co_await receive_message(net, from, first_step, most_bytes, &outgoing);
  co_await outgoing.finish();
  co_return incoming;
}

}  // namespace telegrad
