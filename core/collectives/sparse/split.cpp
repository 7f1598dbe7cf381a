// The split: each rank owns one slice of the index range, and every rank sends every owner its entries of that slice, in an
// order in which no owner is everybody's first. Renggli et al., "SparCML: high-performance sparse communication
// for machine learning", SC 2019, §5.3.2 (the first half of SSAR_Split_allgather).
//
// Long shares go round by round: where two senders share a receiver's port, TCP loses most of it. Of many short ones a
// few rounds overlap, and in memory all, of any length (see AtOnce). Messages are the same, so that ranks need not do
// alike. This cannot deadlock: of the first round of which a message is not over, all that its sender and its receiver wait
// for before they begin it is of earlier rounds, and over.
#include "collectives/sparse/split.hpp"

#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "codec/slice_reduction.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/sections.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/support/exchange_order.hpp"
#include "collectives/support/kept_messages.hpp"
#include "transport/window.hpp"

namespace telegrad {
namespace {

constexpr Rank kWindow = 16;  // short messages under way in one direction
constexpr std::size_t kEncodedWindow = 4;  // long shares that are encoded, between ranks that share memory
constexpr std::size_t kShortBytes = std::size_t{32} << 10;  // of a share, on average
constexpr std::size_t kBatchBytes = Transport::kTurnBytes;  // of small pieces that are encoded or decoded in one go

bool same_message(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), SizeOnly::there(a.size())) == 0;
}

// The reduction of the ranks' shares of one range, in the order of ranks; in parts of the range, between which the
// network has its turn.
template <class V>
Task<OwnedSlice<V>> reduce_shares(Transport& net, std::vector<SparseView<V>> shares, Reduction reduction,
                                  double delta, Array<std::uint8_t>* givers) {
  SliceReduction<V> sum(std::move(shares), reduction, delta);
  if (givers != nullptr) sum.remember_givers();
  const Range whole{static_cast<std::size_t>(sum.range().begin), static_cast<std::size_t>(sum.range().end)};
  const std::size_t parts = sum.bytes() / Transport::kSliceBytes + 1;
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t bytes = sum.advance(part_of(whole, parts, part).end);
    co_await net.compute(bytes, [] {});
  }
  OwnedSlice<V> result = sum.finish();
  if (givers != nullptr) *givers = sum.take_givers();
  if (result.dense) co_await net.compute(bytes_of(result.view()), [] {});  // its entries went there once more
  co_return result;
}

template <class V>
struct Split {
  Transport& net;
  const SparseVector<V>& mine;
  const Partition& slices;
  const SparseReduction how;  // of shares
  const SplitBucket& bucket;

  IndexRange slice(Rank owner) const {
    const Range part = part_of(slices[owner], bucket.buckets, bucket.number);
    return {part.begin, part.end};
  }
  SparseView<V> share(Rank owner) const { return mine.slice(slice(owner).begin, slice(owner).end); }
  Buffer encoded(const SparseView<V>& share) const {
    if constexpr (std::is_same_v<V, float>) {
      if (!bucket.errors.empty()) {
        TELEGRAD_CHECK(!goes_dense(share, how));
        const auto first = static_cast<std::size_t>(share.indices.data() - mine.indices().data());
        return encode(share, how.wire, bucket.errors.subspan(first, share.nnz()));
      }
    }
    return encode_share(share, how);
  }
  Decoded<V> decoded(ConstBytes message) const {
    Decoded<V> share = decode<V>(message, slice(net.rank()));
    if (!bucket.only_entries || !share.ok() || !share.view().dense) return share;
    return Decoded<V>("its entries are dense, which nobody's can be here");
  }
  Rank receiver(Rank round) const { return ExchangeOrder(net.rank(), net.size()).receiver(round); }
  Rank sender(Rank round) const { return ExchangeOrder(net.rank(), net.size()).sender(round); }
  std::size_t most() const { return most_bytes<V>(slices); }
  ExpectedVector expected() const { return {dtype_of<V>, slice(net.rank()), most()}; }
};

template <class V>
void say_received(const Split<V>& split, const GivenShares<V>& given) {
  if (!split.bucket.received) return;
  std::uint64_t entries = 0;
  for (Rank source = 0; source < split.net.size(); ++source) {
    if (source != split.net.rank()) entries += given.share(source).nnz();
  }
  split.bucket.received(entries);
}

struct Sending {
  Sending(Transport& net, Rank to, Step step, Buffer share)
      : encoded(std::move(share)), sending(net, to, step, encoded.bytes()) {}
  Buffer encoded;
  Transport::Sending sending;
};

template <class V>
Task<void> send_short_shares(const Split<V>& split) {
  Transport& net = split.net;
  const Rank size = net.size();
  Window<Sending, kWindow> sends;
  std::vector<SparseView<V>> batch;
  std::vector<Buffer> encoded;
  for (Rank round = 1; round < size;) {
    batch.clear();
    encoded.clear();
    std::size_t bytes = 0;
    for (Rank next = round; next < size && batch.size() < kWindow && bytes < kBatchBytes; ++next) {
      batch.push_back(split.share(split.receiver(next)));
      bytes += bytes_of(batch.back());
    }
    co_await decide(net, bytes, [&] {
      for (const auto& share : batch) encoded.push_back(split.encoded(share));
    });
    for (Buffer& share : encoded) {
      const Rank to = split.receiver(round);
      ++round;
      if (has_several_pieces(net, share.size())) {  // one among many short ones
        co_await send_any_size(net, to, split.bucket.first_step, share.bytes());
        continue;
      }
      if (sends.full()) {
        co_await sends.front().sending;
        sends.pop_front();
      }
      sends.emplace_back(net, to, split.bucket.first_step, std::move(share));
    }
  }
  for (; !sends.empty(); sends.pop_front()) co_await sends.front().sending;
}

// From all other ranks, but for those that equal `nothing`: of many ranks most have no entry in most slices.
template <class V>
Task<KeptMessages> receive_short_shares(const Split<V>& split, ConstBytes nothing) {
  Transport& net = split.net;
  const Rank size = net.size();
  const std::size_t first_piece = first_piece_bytes(net, split.most());
  KeptMessages shares;
  Window<Transport::ReceivingAny, kWindow> receives;
  Rank begun = 1;
  for (Rank round = 1; round < size; ++round) {
    for (; begun < size && !receives.full(); ++begun) {
      receives.emplace_back(net, split.sender(begun), split.bucket.first_step, first_piece);
    }
    Buffer share = co_await receives.front();
    receives.pop_front();
    if (has_several_pieces(net, share.size()) || begins_sections(share.bytes())) {
      share = co_await receive_rest_of_vector(net, split.sender(round), split.bucket.first_step, std::move(share),
                                              split.expected());
    }
    if (!same_message(share.bytes(), nothing)) shares.add(split.sender(round), std::move(share));
  }
  co_return shares;
}

// All ranks' messages, decoded in batches between which the network has its turn. Views lie in the messages.
template <class V, class Decode>
Task<std::vector<Decoded<V>>> decode_all(Transport& net, const std::vector<ConstBytes>& messages, Decode decode) {
  const Rank size = net.size();
  std::vector<Decoded<V>> decoded;
  decoded.reserve(size);
  for (Rank end = 0; end < size;) {
    const Rank begin = end;
    std::size_t bytes = 0;
    for (; end < size && bytes < kBatchBytes; ++end) bytes += messages[end].size();
    co_await decide(net, bytes, [&] {
      for (Rank source = begin; source < end; ++source) decoded.push_back(decode(source));
    });
    for (Rank source = begin; source < end; ++source) {
      if (!decoded[source].ok()) co_await check_decoded(net, source, decoded[source]);
    }
  }
  co_return decoded;
}

template <class V>
Task<void> take_short_shares(const Split<V>& split, GivenShares<V>& given) {
  Transport& net = split.net;
  const Rank rank = net.rank();
  const IndexRange owned = split.slice(rank);
  given.nothing = encode(SparseVector<V>(split.mine.dimension()).slice(owned.begin, owned.end), split.how.wire);
  given.kept = co_await receive_short_shares(split, given.nothing.bytes());
  std::vector<ConstBytes> incoming = given.kept.by_source(net.size(), given.nothing.bytes());
  incoming[rank] = {};
  given.decoded = co_await decode_all<V>(net, incoming, [&](Rank source) {
    if (source == rank) return Decoded<V>(split.share(rank), {});
    return split.decoded(incoming[source]);
  });
}

template <class V>
Task<void> overlap_rounds(const Split<V>& split, GivenShares<V>& given) {
  std::vector<Task<void>> both;
  both.push_back(send_short_shares(split));
  both.push_back(take_short_shares(split, given));
  co_await when_all(std::move(both));
}

// Shares that come in any order.
template <class V>
class Arriving {
 public:
  explicit Arriving(const Split<V>& split) : split_(split), messages_(split.net.size()), decoded_(split.net.size()) {}

  void keep(Rank source, Buffer message) { messages_[source] = std::move(message); }
  Task<void> decode_from(Rank source) {
    const ConstBytes message = messages_[source].bytes();
    std::optional<Decoded<V>>& share = decoded_[source];
    co_await decide(split_.net, message.size(), [&] { share.emplace(split_.decoded(message)); });
    co_await check_decoded(split_.net, source, *share);
  }
  /// Once all others' have been decoded.
  GivenShares<V> take() {
    GivenShares<V> given;
    const Rank rank = split_.net.rank();
    decoded_[rank].emplace(Decoded<V>(split_.share(rank), {}));
    given.messages = std::move(messages_);
    for (auto& one : decoded_) given.decoded.push_back(std::move(*one));
    return given;
  }

 private:
  const Split<V>& split_;
  std::vector<Buffer> messages_;
  std::vector<std::optional<Decoded<V>>> decoded_;
};

// While a round's messages travel, the next one's is encoded and the last one's decoded.
template <class V>
class Rounds {
 public:
  explicit Rounds(const Split<V>& split) : split_(split), arriving_(split) {}

  Task<GivenShares<V>> run() {
    Transport& net = split_.net;
    co_await encode_for(1);
    for (Rank round = 1; round < net.size(); ++round) {
      outgoing_ = std::move(next_);
      std::vector<Task<void>> both;
      both.push_back(exchange(round));
      both.push_back(work_beside(round));
      co_await when_all(std::move(both));
    }
    co_await arriving_.decode_from(split_.sender(net.size() - 1));
    co_return arriving_.take();
  }

 private:
  Task<void> encode_for(Rank round) {
    const SparseView<V> share = split_.share(split_.receiver(round));
    co_await decide(split_.net, bytes_of(share), [&] { next_ = split_.encoded(share); });
  }
  Task<void> exchange(Rank round) {
    const Rank source = split_.sender(round);
    arriving_.keep(source, co_await exchange_any_size(split_.net, split_.receiver(round), source,
                                                      split_.bucket.first_step, outgoing_.bytes(), split_.most()));
  }
  Task<void> work_beside(Rank round) {
    if (round + 1 < split_.net.size()) co_await encode_for(round + 1);
    if (round > 1) co_await arriving_.decode_from(split_.sender(round - 1));
  }

  const Split<V>& split_;
  Arriving<V> arriving_;
  Buffer outgoing_;
  Buffer next_;
};

// Between ranks that share memory: all receives are under way at once, and so are the sends of shares that go in sections,
// which are no work. Others are encoded one by one while those before them travel.
template <class V>
class AtOnce {
 public:
  explicit AtOnce(const Split<V>& split) : split_(split), arriving_(split) {}

  Task<GivenShares<V>> run() {
    const Rank size = split_.net.size();
    std::vector<Task<void>> all;
    std::vector<Rank> others;
    for (Rank round = 1; round < size; ++round) {
      const Rank to = split_.receiver(round);
      if (!in_sections(to)) {
        others.push_back(to);
        continue;
      }
      if constexpr (!std::is_same_v<V, CountedF32>) {
        all.push_back(send_in_sections(split_.net, to, split_.bucket.first_step, split_.share(to)));
      }
    }
    for (Rank round = 1; round < size; ++round) all.push_back(receive(split_.sender(round)));
    all.push_back(send_encoded(std::move(others)));
    co_await when_all(std::move(all));
    co_return arriving_.take();
  }

 private:
  struct SendingShare {
    SendingShare(Transport& net, Rank to, Step step, Buffer share)
        : encoded(std::move(share)), sending(send_any_size(net, to, step, encoded.bytes())) {}
    Buffer encoded;
    TaskUnderWay sending;
  };

  bool in_sections(Rank to) const {
    if constexpr (std::is_same_v<V, CountedF32>) {
      return false;
    } else {
      const SparseView<V> share = split_.share(to);
      return split_.bucket.errors.empty() && !goes_dense(share, split_.how) &&
             goes_in_sections(split_.net, share, split_.how.wire);
    }
  }

  Task<void> send_encoded(std::vector<Rank> receivers) {
    Transport& net = split_.net;
    Window<SendingShare, kEncodedWindow> under_way;
    for (const Rank to : receivers) {
      const SparseView<V> share = split_.share(to);
      Buffer encoded;
      co_await decide(net, bytes_of(share), [&] { encoded = split_.encoded(share); });
      if (under_way.full()) {
        co_await under_way.front().sending;
        under_way.pop_front();
      }
      under_way.emplace_back(net, to, split_.bucket.first_step, std::move(encoded));
    }
    for (; !under_way.empty(); under_way.pop_front()) co_await under_way.front().sending;
  }

  Task<void> receive(Rank source) {
    arriving_.keep(source, co_await receive_vector(split_.net, source, split_.bucket.first_step, split_.expected()));
    co_await arriving_.decode_from(source);
  }

  const Split<V>& split_;
  Arriving<V> arriving_;
};

}  // namespace

template <class V>
Task<void> give_shares(Transport& net, const SparseVector<V>& mine, const Partition& slices, const SparseReduction& how,
                       const SplitBucket& bucket, GivenShares<V>& given) {
  TELEGRAD_CHECK(bucket.number < bucket.buckets);
  SparseReduction of_shares = how;
  if (!how.rounds_shares) of_shares.wire.values = ValueEncoding::native;
  const Split<V> split{net, mine, slices, std::move(of_shares), bucket};
  wire_delta<V>(split.slice(net.rank()), how.switch_factor);  // throws, if it does, before anything is sent
  const Rank size = net.size();
  if (size == 1) {
    given.decoded.emplace_back(split.share(0), Array<std::uint32_t>());
  } else if (bytes_of(mine.view()) / size / bucket.buckets < kShortBytes) {
    co_await overlap_rounds(split, given);
  } else if (net.shares_memory()) {
    AtOnce<V> at_once(split);
    given = co_await at_once.run();
  } else {
    Rounds<V> rounds(split);
    given = co_await rounds.run();
  }
  say_received(split, given);
}

template <class V>
Task<OwnedSlice<V>> reduce_given(Transport& net, const GivenShares<V>& given, IndexRange range, const SparseReduction& how,
                                 Array<std::uint8_t>* givers) {
  std::vector<SparseView<V>> shares;
  shares.reserve(given.decoded.size());
  for (const auto& one : given.decoded) shares.push_back(one.view().slice(range));
  const double delta = wire_delta<V>(range, how.switch_factor);
  OwnedSlice<V> sum = co_await reduce_shares<V>(net, std::move(shares), how.reduction, delta, givers);
  if (how.reduction == Reduction::avg) co_await divide_by_ranks(net, sum);
  co_return sum;
}

template <class V>
Task<OwnedSlice<V>> reduce_owned_slice(Transport& net, const SparseVector<V>& mine, const Partition& slices,
                                       const SparseReduction& how, SplitBucket bucket) {
  GivenShares<V> given;
  co_await give_shares(net, mine, slices, how, bucket, given);
  co_return co_await reduce_given(net, given, given.share(net.rank()).range, how);
}

template <class V>
Step split_steps(const Transport& net, const Partition& slices) {
  return vector_steps(net, most_bytes<V>(slices));
}

#define TELEGRAD_INSTANTIATE(V)                                                                      \
  template Task<void> give_shares(Transport&, const SparseVector<V>&, const Partition&, const SparseReduction&, \
                                  const SplitBucket&, GivenShares<V>&);                              \
  template Task<OwnedSlice<V>> reduce_given(Transport&, const GivenShares<V>&, IndexRange, const SparseReduction&, \
                                             Array<std::uint8_t>*);                                     \
  template Task<OwnedSlice<V>> reduce_owned_slice(Transport&, const SparseVector<V>&, const Partition&, \
                                                  const SparseReduction&, SplitBucket);              \
  template Step split_steps<V>(const Transport&, const Partition&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
