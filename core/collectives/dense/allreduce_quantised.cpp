// Dense allreduce by split and allgather in which both halves carry encoded values: 2(P−1)α + 2(P−1)/P·n·β·(b + 32/1024)/32
// of QSGD with b bits, and every value encoded and decoded about twice. The exchange is that of Renggli et al., "SparCML:
// high-performance sparse communication for machine learning", SC 2019, §5.3.3 and §6.
//
// Each rank owns a slice of whole encoding units, so that what a value is encoded with does not depend on P. Shares of
// slices go to their owners round by round, in pieces. The owner adds them to its own, as it is, in the order of the rounds,
// and encodes the sum once; the encoded slices are gathered, and everybody, the owner too, decodes the same bytes. All this
// happens piece by piece while others travel: a share is encoded as it leaves and added as it comes, a sum decoded as it
// comes.
//
// Two ranks send each other their whole vectors instead, encoded, and add both: as many bytes, and one message in turn in
// place of two. A sum has then the same bits wherever in the vector its unit is.
//
// Where a GPU has encoded the input, shares leave as they are given, and nobody decodes the sum here but to see whether it
// is sound. Messages are the same: other ranks may have host vectors.
#include "collectives/dense/allreduce_quantised.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "codec/encode_values.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/support/exchange_order.hpp"
#include "collectives/support/partition.hpp"
#include "collectives/support/pieces.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scale.hpp"
#include "transport/milestone.hpp"

namespace telegrad {
namespace {

using kernels::kEncodingUnit;

constexpr Step kSplitSteps = Step{1} << 20;  // those of the allgather come before them
constexpr std::size_t kUnitBytes = kEncodingUnit * sizeof(float);

Bytes as_bytes(std::span<float> values) { return std::as_writable_bytes(values); }

struct Sum {
  Sum(Transport& net, const QuantisedSum& how, std::span<const float> input, std::span<float> error)
      : net(net), how(how), count(input.size()), held{0, count}, input(input), error(error) {
    this->how.key.rank = net.rank();
  }
  Sum(Transport& net, const QuantisedSum& how, const EncodedVectors& vectors)
      : net(net), how(how), count(vectors.count), held(slice(net.rank())), input(vectors.own), error(vectors.error),
        given(vectors.input) {
    this->how.key.rank = net.rank();
  }

  Transport& net;
  QuantisedSum how;
  std::size_t count;             // of the vector
  Range held;                    // of it, what `input` and `error` are
  std::span<const float> input;
  std::span<float> error;
  ConstBytes given{};            // all of it, encoded by somebody else; or empty

  Range slice(Rank owner) const { return quantised_slice(count, net.size(), owner); }
  std::size_t encoded_bytes(std::size_t count) const { return kernels::encoded_bytes(how.encoding, count); }
  std::size_t slice_bytes(Rank owner) const { return encoded_bytes(slice(owner).size()); }
  ConstBytes given_for(Rank owner) const {
    return given.subspan(encoded_bytes(slice(owner).begin), slice_bytes(owner));
  }
  std::span<const float> input_of(Range range) const { return input.subspan(range.begin - held.begin, range.size()); }
  std::span<float> error_of(Range range) const {
    return error.empty() ? error : error.subspan(range.begin - held.begin, range.size());
  }
  /// `range` of the vector, of which `values` are the elements; `error` too.
  void encode(Range range, std::span<const float> values, Bytes out) const {
    kernels::encode_values(how.encoding, how.key, range.begin, values, out, error_of(range));
  }
};

// The elements of `whole` in the `begin`-th to `end`-th of its units.
Range units_of(Range whole, std::size_t begin, std::size_t end) {
  return {whole.begin + begin * kEncodingUnit, std::min(whole.begin + end * kEncodingUnit, whole.end)};
}
std::size_t units_in(Range range) { return (range.size() + kEncodingUnit - 1) / kEncodingUnit; }

// The first half: this rank's slice of the sum, encoded, becomes `mine`. Three coroutines: one makes shares ahead, one
// exchanges them, one adds what has come.
class Split {
 public:
  Split(const Sum& sum, Bytes mine)
      : sum_(sum),
        net_(sum.net),
        order_(net_.rank(), net_.size()),
        mine_(mine),
        own_(sum.slice(net_.rank())),
        together_(net_.shares_memory() ? std::max(net_.size(), Rank{2}) - 1 : kRoundsTogether),
        total_(own_.size()),
        scratch_(std::min(own_.size(), kChunkUnits * kEncodingUnit)),
        encoded_(net_.ready()),
        left_(net_.ready()),
        come_(net_.ready()),
        added_(net_.ready()) {
    if (net_.size() == 1) return;
    if (sum.given.empty()) {
      for (Buffer& share : leaving_) share = Buffer(sum.slice_bytes(0));  // a longest one
    }
    while (coming_.size() < std::min<Rank>(net_.size() - 1, together_ + 1)) coming_.emplace_back(mine.size());
  }

  Task<void> run() {
    if (net_.size() == 1) co_return co_await keep_own();
    std::vector<Task<void>> together;
    together.push_back(encode_shares());
    together.push_back(exchange_shares());
    together.push_back(add_shares());
    co_await when_all(std::move(together));
  }

 private:
  static constexpr std::size_t kChunkUnits = 16;  // of a sum under way: it stays in the cache
  // So many rounds' shares are added at once: each time the sum so far is read and written. Through memory, where messages
  // are as fast as work and nothing is gained by doing both at once, all.
  static constexpr Rank kRoundsTogether = 2;

  // Milestones count bytes over all rounds, as if each share were a longest one.
  std::size_t before(Rank round) const { return (round - 1) * sum_.slice_bytes(0); }
  Rank receiver(Rank round) const { return order_.receiver(round); }
  Bytes share_for(Rank round) const {
    return leaving_[round % 2].bytes().first(sum_.slice_bytes(receiver(round)));
  }
  Bytes share_from(Rank round) const { return coming_[round % coming_.size()].bytes(); }

  Task<void> encode_shares() {
    if (!sum_.given.empty()) {
      encoded_.reach(before(net_.size()));
      co_return;
    }
    for (Rank round = 1; round < net_.size(); ++round) {
      if (round > 2) co_await left_.until(round - 2);
      const Range slice = sum_.slice(receiver(round));
      const Bytes out = share_for(round);
      for (std::size_t begin = 0, units = units_in(slice); begin < units; begin += kChunkUnits) {
        const Range range = units_of(slice, begin, begin + kChunkUnits);
        const std::size_t at = sum_.encoded_bytes(range.begin - slice.begin);
        const Bytes part = out.subspan(at, sum_.encoded_bytes(range.size()));
        co_await net_.compute(range.size() * sizeof(float), [&] {
          sum_.encode(range, sum_.input_of(range), part);
        });
        encoded_.reach(before(round) + at + part.size());
      }
    }
  }

  Task<void> exchange_shares() {
    for (Rank round = 1; round < net_.size(); ++round) {
      if (round > coming_.size()) co_await added_.until(round - coming_.size());
      co_await exchange(round);
      left_.reach(round);
    }
  }

  // Pieces need not be whole units: they are put together again before anybody decodes.
  Task<void> exchange(Rank round) {
    const ConstBytes leaving = sum_.given.empty() ? share_for(round) : sum_.given_for(receiver(round));
    const Bytes coming = share_from(round);
    const std::size_t sent = leaving.empty() ? 0 : pieces_of(net_, leaving.size());
    const std::size_t received = coming.empty() ? 0 : pieces_of(net_, coming.size());
    const auto end_of = [](std::size_t bytes, std::size_t pieces, std::size_t piece) {
      return pieces == 0 ? 0 : part_of({0, bytes}, pieces, std::min(piece, pieces - 1)).end;
    };
    const auto made = [&](std::size_t piece) {
      return encoded_.until(sent == 0 ? 0 : before(round) + end_of(leaving.size(), sent, piece));
    };
    co_await made(kPiecesUnderWay - 1);
    PieceExchange pieces(net_, std::max(sent, received), [&](PieceExchange& messages, std::size_t piece) {
      const Step step = kSplitSteps + static_cast<Step>(piece);
      if (piece < received) {
        const Range part = part_of({0, coming.size()}, received, piece);
        messages.receive(order_.sender(round), step, coming.subspan(part.begin, part.size()));
      }
      if (piece < sent) {
        const Range part = part_of({0, leaving.size()}, sent, piece);
        messages.send(receiver(round), step, leaving.subspan(part.begin, part.size()));
      }
    });
    for (std::size_t piece = 0; piece < std::max(sent, received); ++piece) {
      co_await made(piece + kPiecesUnderWay);
      co_await pieces.take();
      come_bytes_ = before(round) + end_of(coming.size(), received, piece);
      come_.reach(come_bytes_);
    }
    co_await pieces.finish();
  }

  Task<void> add_shares() {
    const std::size_t units = units_in(own_);
    const std::size_t passes = together_ + 2;  // of add(), at most
    const std::size_t chunk = std::clamp<std::size_t>(Transport::kSliceBytes / kUnitBytes / passes, 1, kChunkUnits);
    for (Rank first = 1, last = 1; first < net_.size(); first = last + 1) {
      last = std::min(first + together_, net_.size()) - 1;
      const auto end_of = [&](std::size_t unit) {
        return before(last) + sum_.encoded_bytes(units_of(own_, 0, unit + 1).size());
      };
      for (std::size_t begin = 0, end = 0; begin < units; begin = end) {
        co_await come_.until(end_of(begin));
        while (end < std::min(units, begin + chunk) && end_of(end) <= come_bytes_) ++end;
        co_await add(first, last, units_of(own_, begin, end));
      }
      added_.reach(last);
    }
  }

  // What the senders of these rounds have of `range`.
  Task<void> add(Rank first, Rank last, Range range) {
    const bool all = last + 1 == net_.size();
    const std::size_t passes = last - first + 1 + (first == 1 ? 1 : 0) + (all ? 1 : 0);
    Rank source = 0;
    bool sound = true;
    co_await net_.compute(passes * range.size() * sizeof(float), [&] {
      for (Rank round = first; round <= last && sound; ++round) {
        source = order_.sender(round);
        sound = add_share(round, range);
      }
      if (all && sound) finish(range);
    });
    if (!sound) co_await net_.fail(source, "rank " + std::to_string(source) + " sent damaged values");
  }

  bool add_share(Rank round, Range range) {
    const std::span<float> total = total_of(range);
    const std::span<float> decoded = round == 1 ? total : scratch_.span().first(range.size());
    if (!kernels::decode_values(sum_.how.encoding, encoded_part(share_from(round), range), decoded)) return false;
    const std::span<const float> addend = round == 1 ? sum_.input_of(range) : decoded;
    kernels::add(DType::f32, as_bytes(total), std::as_bytes(addend));
    return true;
  }

  Task<void> keep_own() {
    co_await compute_slices(net_, units_in(own_), kUnitBytes, [&](std::size_t begin, std::size_t end) {
      const Range range = units_of(own_, begin, end);
      std::ranges::copy(sum_.input_of(range), total_of(range).begin());
      finish(range);
    });
  }

  // What rounding loses of a mean counts once for every rank.
  void finish(Range range) {
    const auto size = static_cast<double>(net_.size());
    const bool mean = sum_.how.reduction == Reduction::avg;
    const std::span<float> total = total_of(range);
    if (mean) kernels::scale(DType::f32, as_bytes(total), 1.0 / size);
    sum_.encode(range, total, encoded_part(mine_, range));
    if (mean) kernels::scale(DType::f32, as_bytes(sum_.error_of(range)), size);
  }

  std::span<float> total_of(Range range) const {
    return total_.span().subspan(range.begin - own_.begin, range.size());
  }
  Bytes encoded_part(Bytes own, Range range) const {
    return own.subspan(sum_.encoded_bytes(range.begin - own_.begin), sum_.encoded_bytes(range.size()));
  }

  const Sum& sum_;
  Transport& net_;
  const ExchangeOrder order_;
  const Bytes mine_;
  const Range own_;
  const Rank together_;
  const Array<float> total_;
  const Array<float> scratch_;
  std::array<Buffer, 2> leaving_;
  std::vector<Buffer> coming_;
  std::size_t come_bytes_ = 0;
  Milestone encoded_;  // bytes
  Milestone left_;     // rounds
  Milestone come_;     // bytes
  Milestone added_;    // rounds
};

// Unit by unit, into `scratch`.
bool units_decode(const Sum& sum, Range range, ConstBytes encoded, std::span<float> scratch) {
  for (std::size_t unit = 0; unit < units_in(range); ++unit) {
    const Range part = units_of({0, range.size()}, unit, unit + 1);
    const ConstBytes from = encoded.subspan(sum.encoded_bytes(part.begin), sum.encoded_bytes(part.size()));
    if (!kernels::decode_values(sum.how.encoding, from, scratch.first(part.size()))) return false;
  }
  return true;
}

// Whether a message can be anything else than what somebody has encoded.
bool can_be_damaged(ValueEncoding encoding) {
  return encoding != ValueEncoding::native && encoding != ValueEncoding::bf16 && encoding != ValueEncoding::f16;
}

// The second half: from encoded slices to the vector; without an `output` they are only checked.
class Decoding {
 public:
  Decoding(const Sum& sum, const Partition& slices, ConstBytes encoded, std::span<float> output)
      : sum_(sum),
        slices_(slices),
        encoded_(encoded),
        output_(output),
        scratch_(output.empty() ? kEncodingUnit : 0),
        decoded_(slices.blocks()) {}

  /// What of the owner's slice is there up to the end of `part`, in whole units.
  Task<void> take(Rank owner, Range part) {
    const Range slice = sum_.slice(owner);
    const ConstBytes all = encoded_.subspan(slices_[owner].begin, slices_[owner].size());
    const std::size_t units = units_in(slice);
    const std::size_t come = part.end - slices_[owner].begin;
    const std::size_t first = decoded_[owner];
    std::size_t& last = decoded_[owner];
    while (last < units && sum_.encoded_bytes(units_of(slice, 0, last + 1).size()) <= come) ++last;
    bool sound = true;
    co_await compute_slices(sum_.net, last - first, kUnitBytes, [&](std::size_t begin, std::size_t end) {
      const Range range = units_of(slice, first + begin, first + end);
      const ConstBytes from =
          all.subspan(sum_.encoded_bytes(range.begin - slice.begin), sum_.encoded_bytes(range.size()));
      sound = sound && (output_.empty() ? are_sound(range, from)
                                        : kernels::decode_values(sum_.how.encoding, from,
                                                                 output_.subspan(range.begin, range.size())));
    });
    if (!sound) co_await sum_.net.fail(owner, "rank " + std::to_string(owner) + " sent a damaged sum");
  }

 private:
  bool are_sound(Range range, ConstBytes from) {
    return !can_be_damaged(sum_.how.encoding) || units_decode(sum_, range, from, scratch_.span());
  }

  const Sum& sum_;
  const Partition& slices_;
  const ConstBytes encoded_;
  const std::span<float> output_;
  const Array<float> scratch_;  // for a unit
  std::vector<std::size_t> decoded_;  // units, by owner
};

// Of two ranks. Three coroutines: one encodes, one exchanges, one decodes both vectors and adds them.
class Swap {
 public:
  Swap(const Sum& sum, std::span<float> output)
      : sum_(sum),
        net_(sum.net),
        output_(output),
        leaving_(sum.encoded_bytes(output.size())),
        coming_(leaving_.size()),
        scratch_{Array<float>(std::min(output.size(), kChunkUnits * kEncodingUnit)),
                 Array<float>(std::min(output.size(), kChunkUnits * kEncodingUnit))},
        encoded_(net_.ready()),
        come_(net_.ready()) {}

  Task<void> run() {
    std::vector<Task<void>> together;
    together.push_back(encode());
    together.push_back(exchange());
    together.push_back(add());
    co_await when_all(std::move(together));
  }

 private:
  static constexpr std::size_t kChunkUnits = 16;  // they stay in the cache

  Rank peer() const { return 1 - net_.rank(); }
  std::size_t units() const { return units_in(all()); }
  Range all() const { return {0, output_.size()}; }
  Range bytes_of(Range range) const {
    const std::size_t begin = sum_.encoded_bytes(range.begin);
    return {begin, begin + sum_.encoded_bytes(range.size())};
  }
  static Bytes part(Bytes bytes, Range range) { return bytes.subspan(range.begin, range.size()); }

  Task<void> encode() {
    for (std::size_t begin = 0; begin < units(); begin += kChunkUnits) {
      const Range range = units_of(all(), begin, begin + kChunkUnits), bytes = bytes_of(range);
      co_await net_.compute(range.size() * sizeof(float), [&] {
        sum_.encode(range, sum_.input.subspan(range.begin, range.size()), part(leaving_.bytes(), bytes));
      });
      encoded_.reach(bytes.end);
    }
  }

  Task<void> exchange() {
    const Range whole{0, leaving_.size()};
    const std::size_t count = pieces_of(net_, whole.size());
    const auto end_of = [&](std::size_t piece) { return part_of(whole, count, std::min(piece, count - 1)).end; };
    co_await encoded_.until(end_of(kPiecesUnderWay - 1));
    PieceExchange pieces(net_, count, [&](PieceExchange& messages, std::size_t piece) {
      const Range range = part_of(whole, count, piece);
      const Step step = kSplitSteps + static_cast<Step>(piece);
      messages.receive(peer(), step, part(coming_.bytes(), range));
      messages.send(peer(), step, part(leaving_.bytes(), range));
    });
    for (std::size_t piece = 0; piece < count; ++piece) {
      co_await encoded_.until(end_of(piece + kPiecesUnderWay));
      co_await pieces.take();
      come_.reach(end_of(piece));
    }
    co_await pieces.finish();
  }

  // Own values are decoded from what was sent: `input` may be `output`, which this writes over.
  Task<void> add() {
    for (std::size_t begin = 0; begin < units(); begin += kChunkUnits) {
      const Range range = units_of(all(), begin, begin + kChunkUnits), bytes = bytes_of(range);
      co_await come_.until(bytes.end);
      bool sound = true;
      co_await net_.compute(3 * range.size() * sizeof(float), [&] {
        const std::span<float> first = scratch_[0].span().first(range.size());
        const std::span<float> second = scratch_[1].span().first(range.size());
        sound = kernels::decode_values(sum_.how.encoding, part(leaving_.bytes(), bytes), net_.rank() == 0 ? first : second) &&
                kernels::decode_values(sum_.how.encoding, part(coming_.bytes(), bytes), net_.rank() == 0 ? second : first);
        if (!sound) return;
        kernels::add(DType::f32, as_bytes(first), std::as_bytes(std::span<const float>(second)));
        if (sum_.how.reduction == Reduction::avg) kernels::scale(DType::f32, as_bytes(first), 0.5);
        std::ranges::copy(first, output_.subspan(range.begin, range.size()).begin());
      });
      if (!sound) co_await net_.fail(peer(), "rank " + std::to_string(peer()) + " sent damaged values");
    }
  }

  const Sum& sum_;
  Transport& net_;
  const std::span<float> output_;
  Buffer leaving_;
  Buffer coming_;
  const std::array<Array<float>, 2> scratch_;  // what rank 0 and rank 1 have sent
  Milestone encoded_;  // bytes
  Milestone come_;     // bytes
};

// The same messages of a vector that is given encoded; `output` becomes the other rank's.
Task<void> swap_encoded(const Sum& sum, Bytes output) {
  Transport& net = sum.net;
  const Rank peer = 1 - net.rank();
  co_await exchange_in_pieces(net, peer, sum.given, peer, output, pieces_of(net, output.size()), kSplitSteps);
  if (!can_be_damaged(sum.how.encoding)) co_return;
  const Array<float> scratch(kEncodingUnit);
  bool sound = true;
  co_await compute_slices(net, units_in({0, sum.count}), kUnitBytes, [&](std::size_t begin, std::size_t end) {
    const Range range = units_of({0, sum.count}, begin, end);
    const Bytes from = output.subspan(sum.encoded_bytes(range.begin), sum.encoded_bytes(range.size()));
    sound = sound && units_decode(sum, range, from, scratch.span());
  });
  if (!sound) co_await net.fail(peer, "rank " + std::to_string(peer) + " sent damaged values");
}

// Of any other number. `encoded`: for the whole sum.
Task<void> split_and_gather(const Sum& sum, Bytes encoded, std::span<float> output) {
  Transport& net = sum.net;
  std::vector<std::uint64_t> lengths;
  for (Rank owner = 0; owner < net.size(); ++owner) lengths.push_back(sum.slice_bytes(owner));
  const Partition slices{std::span<const std::uint64_t>(lengths)};
  const Range own = slices[net.rank()];
  const Bytes mine = encoded.subspan(own.begin, own.size());
  {
    Split split(sum, mine);
    co_await split.run();
  }
  Decoding decoding(sum, slices, encoded, output);
  // Whoever owns something has heard from all others by now, and may write it.
  std::vector<Task<void>> both;
  both.push_back(decoding.take(net.rank(), own));
  both.push_back(allgather(net, mine, encoded, slices,
                           [&](Rank owner, Range part) { return decoding.take(owner, part); }));
  co_await when_all(std::move(both));
}

}  // namespace

Range quantised_slice(std::size_t count, Rank size, Rank owner) {
  const Range part = part_of({0, units_in({0, count})}, size, owner);
  return {std::min(part.begin * kEncodingUnit, count), std::min(part.end * kEncodingUnit, count)};
}

Task<void> allreduce_quantised(Transport& net, const QuantisedSum& how, std::span<const float> input,
                               std::span<float> output, std::span<float> error) {
  TELEGRAD_CHECK(input.size() == output.size() && (error.empty() || error.size() == input.size()));
  TELEGRAD_CHECK(how.reduction == Reduction::sum || how.reduction == Reduction::avg);
  TELEGRAD_CHECK(how.encoding != ValueEncoding::mean);  // a slice of which has no parts
  const Sum sum(net, how, input, error);
  if (net.size() == 2) {
    Swap swap(sum, output);
    co_return co_await swap.run();
  }
  const Buffer encoded(sum.encoded_bytes(input.size()));
  co_await split_and_gather(sum, encoded.bytes(), output);
}

Task<void> allreduce_encoded(Transport& net, const QuantisedSum& how, const EncodedVectors& vectors) {
  const std::size_t bytes = kernels::encoded_bytes(how.encoding, vectors.count);
  const std::size_t own = net.size() > 2 ? quantised_slice(vectors.count, net.size(), net.rank()).size() : 0;
  TELEGRAD_CHECK(vectors.input.size() == bytes && vectors.output.size() == bytes);
  TELEGRAD_CHECK(vectors.own.size() == own && (vectors.error.empty() || vectors.error.size() == own));
  TELEGRAD_CHECK(how.reduction == Reduction::sum || how.reduction == Reduction::avg);
  TELEGRAD_CHECK(how.encoding != ValueEncoding::mean);
  if (net.size() == 1) {
    std::ranges::copy(vectors.input, vectors.output.begin());
    co_return;
  }
  const Sum sum(net, how, vectors);
  if (net.size() == 2) co_return co_await swap_encoded(sum, vectors.output);
  co_await split_and_gather(sum, vectors.output, {});
}

}  // namespace telegrad
