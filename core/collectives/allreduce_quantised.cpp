// Dense allreduce by split and allgather in which both halves carry encoded values: 2(P−1)α + 2(P−1)/P·n·β·(b + 32/1024)/32
// of QSGD with b bits, and every value encoded and decoded about twice. The exchange is that of Renggli et al., "SparCML:
// high-performance sparse communication for machine learning", SC 2019, §5.3.3 and §6.
//
// Each rank owns a slice of whole encoding units, so that what a value is encoded with does not depend on P. In round t a
// rank sends its share of a slice to the owner t ahead and receives one for its own from the rank t before, in pieces,
// while it encodes the next. The owner adds all shares in the order of ranks, its own as it is, and encodes the sum once;
// the encoded slices are gathered, and everybody, the owner too, decodes the same bytes.
#include "collectives/allreduce_quantised.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/allgather.hpp"
#include "collectives/partition.hpp"
#include "collectives/pieces.hpp"
#include "kernels/encode_values.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scale.hpp"

namespace telegrad {
namespace {

using kernels::kEncodingUnit;

constexpr Step kSplitSteps = Step{1} << 20;  // those of the allgather come before them
constexpr std::size_t kUnitBytes = kEncodingUnit * sizeof(float);
constexpr std::size_t kChunkUnitsMost = 16;  // of a sum under way: it stays in the cache

Bytes as_bytes(std::span<float> values) { return std::as_writable_bytes(values); }

struct Sum {
  Sum(Transport& net, const QuantisedSum& how, std::span<const float> input, std::span<float> error)
      : net(net), how(how), input(input), error(error) {
    this->how.key.rank = net.rank();
  }

  Transport& net;
  QuantisedSum how;
  std::span<const float> input;
  std::span<float> error;

  Range slice(Rank owner) const {
    const std::size_t units = (input.size() + kEncodingUnit - 1) / kEncodingUnit;
    const Range part = part_of({0, units}, net.size(), owner);
    return {std::min(part.begin * kEncodingUnit, input.size()), std::min(part.end * kEncodingUnit, input.size())};
  }
  std::size_t encoded_bytes(std::size_t count) const { return kernels::encoded_bytes(how.encoding, count); }
  std::size_t slice_bytes(Rank owner) const { return encoded_bytes(slice(owner).size()); }
  std::span<float> error_of(Range range) const {
    return error.empty() ? error : error.subspan(range.begin, range.size());
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

Task<void> encode_share(const Sum& sum, Rank owner, Bytes out) {
  const Range slice = sum.slice(owner);
  co_await compute_slices(sum.net, units_in(slice), kUnitBytes, [&sum, slice, out](std::size_t begin, std::size_t end) {
    const Range range = units_of(slice, begin, end);
    const std::size_t at = sum.encoded_bytes(range.begin - slice.begin);
    sum.encode(range, sum.input.subspan(range.begin, range.size()), out.subspan(at, sum.encoded_bytes(range.size())));
  });
}

// `leaving`: this rank's share of the slice of the rank `ahead`; `coming`: a share of its own slice.
Task<void> run_round(const Sum& sum, Rank ahead, ConstBytes leaving, Bytes coming) {
  Transport& net = sum.net;
  const Rank to = (net.rank() + ahead) % net.size();
  const Rank from = (net.rank() + net.size() - ahead) % net.size();
  // Pieces need not be whole units: they are put together again before anybody decodes.
  const auto pieces_in = [&](ConstBytes bytes) { return bytes.empty() ? 0 : pieces_of(net, bytes.size()); };
  const std::size_t sent = pieces_in(leaving);
  const std::size_t received = pieces_in(coming);
  PieceExchange round(net, std::max(sent, received), [&](PieceExchange& messages, std::size_t piece) {
    const Step step = kSplitSteps + static_cast<Step>(piece);
    if (piece < received) {
      const Range part = part_of({0, coming.size()}, received, piece);
      messages.receive(from, step, coming.subspan(part.begin, part.size()));
    }
    if (piece < sent) {
      const Range part = part_of({0, leaving.size()}, sent, piece);
      messages.send(to, step, leaving.subspan(part.begin, part.size()));
    }
  });
  for (std::size_t piece = 0; piece < std::max(sent, received); ++piece) co_await round.take();
  co_await round.finish();
}

// What others have for this rank's slice, in the order of rounds: that of the rank t before is the (t − 1)-th.
Task<Buffer> split(const Sum& sum) {
  const Rank size = sum.net.size();
  const std::size_t own_bytes = sum.slice_bytes(sum.net.rank());
  const auto owner = [&](Rank ahead) { return (sum.net.rank() + ahead) % size; };
  Buffer received(own_bytes * (size - 1));
  std::array<Buffer, 2> shares;  // one leaves while the next is made; the first slice is a longest one
  for (Buffer& share : shares) share = Buffer(size > 1 ? sum.slice_bytes(0) : 0);
  const auto share_for = [&](Rank ahead) { return shares[ahead % 2].bytes().first(sum.slice_bytes(owner(ahead))); };
  if (size > 1) co_await encode_share(sum, owner(1), share_for(1));
  for (Rank ahead = 1; ahead < size; ++ahead) {
    std::vector<Task<void>> both;
    both.push_back(run_round(sum, ahead, share_for(ahead), received.bytes().subspan((ahead - 1) * own_bytes, own_bytes)));
    if (ahead + 1 < size) both.push_back(encode_share(sum, owner(ahead + 1), share_for(ahead + 1)));
    co_await when_all(std::move(both));
  }
  co_return received;
}

// Adds everybody's shares of `range`, a part of this rank's slice, into `total`; `scratch` is as long. Gives the rank whose
// share is damaged.
std::optional<Rank> add_shares(const Sum& sum, ConstBytes received, Range range, std::span<float> total,
                               std::span<float> scratch) {
  const Rank rank = sum.net.rank();
  const Rank size = sum.net.size();
  const std::size_t own_bytes = sum.slice_bytes(rank);
  const std::size_t at = sum.encoded_bytes(range.begin - sum.slice(rank).begin);
  const auto share_of = [&](Rank source) {
    const Rank before = (rank + size - source) % size;
    return received.subspan((before - 1) * own_bytes + at, sum.encoded_bytes(range.size()));
  };
  const std::span<const float> own = sum.input.subspan(range.begin, range.size());
  for (Rank source = 0; source < size; ++source) {
    const std::span<float> decoded = source == 0 ? total : scratch;
    if (source == rank) {
      if (source == 0) std::ranges::copy(own, total.begin());
      else kernels::add(DType::f32, as_bytes(total), std::as_bytes(own));
      continue;
    }
    if (!kernels::decode_values(sum.how.encoding, share_of(source), decoded)) return source;
    if (source != 0) kernels::add(DType::f32, as_bytes(total), as_bytes(scratch));
  }
  return std::nullopt;
}

// What rounding loses of a mean counts once for every rank.
void finish(const Sum& sum, Range range, std::span<float> total, Bytes out) {
  const auto size = static_cast<double>(sum.net.size());
  const bool mean = sum.how.reduction == Reduction::avg;
  if (mean) kernels::scale(DType::f32, as_bytes(total), 1.0 / size);
  sum.encode(range, total, out);
  if (mean) kernels::scale(DType::f32, as_bytes(sum.error_of(range)), size);
}

// This rank's slice of the sum, encoded.
Task<void> sum_owned_slice(const Sum& sum, const Buffer& received, Bytes mine) {
  Transport& net = sum.net;
  const Range slice = sum.slice(net.rank());
  const std::size_t units = units_in(slice);
  const std::size_t chunk =
      std::clamp<std::size_t>(Transport::kSliceBytes / kUnitBytes / net.size(), 1, kChunkUnitsMost);
  Array<float> total(std::min(chunk, units) * kEncodingUnit);
  Array<float> scratch(total.size());
  for (std::size_t begin = 0; begin < units; begin += chunk) {
    const Range range = units_of(slice, begin, begin + chunk);
    std::optional<Rank> damaged;
    co_await net.compute(range.size() * sizeof(float) * net.size(), [&] {
      const std::span<float> here = total.span().first(range.size());
      damaged = add_shares(sum, received.bytes(), range, here, scratch.span().first(range.size()));
      const std::size_t at = sum.encoded_bytes(range.begin - slice.begin);
      if (!damaged) finish(sum, range, here, mine.subspan(at, sum.encoded_bytes(range.size())));
    });
    if (damaged) co_await net.fail(*damaged, "rank " + std::to_string(*damaged) + " sent damaged values");
  }
}

Task<void> decode_slice(const Sum& sum, Rank owner, ConstBytes encoded, std::span<float> output) {
  const Range slice = sum.slice(owner);
  bool sound = true;
  co_await compute_slices(sum.net, units_in(slice), kUnitBytes, [&](std::size_t begin, std::size_t end) {
    const Range range = units_of(slice, begin, end);
    const ConstBytes part =
        encoded.subspan(sum.encoded_bytes(range.begin - slice.begin), sum.encoded_bytes(range.size()));
    sound = sound && kernels::decode_values(sum.how.encoding, part, output.subspan(range.begin, range.size()));
  });
  if (!sound) co_await sum.net.fail(owner, "rank " + std::to_string(owner) + " sent a damaged sum");
}

}  // namespace

Task<void> allreduce_quantised(Transport& net, const QuantisedSum& how, std::span<const float> input,
                               std::span<float> output, std::span<float> error) {
  TELEGRAD_CHECK(input.size() == output.size() && (error.empty() || error.size() == input.size()));
  TELEGRAD_CHECK(how.reduction == Reduction::sum || how.reduction == Reduction::avg);
  TELEGRAD_CHECK(how.encoding != ValueEncoding::mean);  // a slice of which has no parts
  const Sum sum(net, how, input, error);
  std::vector<std::uint64_t> lengths;
  for (Rank owner = 0; owner < net.size(); ++owner) lengths.push_back(sum.slice_bytes(owner));
  const Partition slices{std::span<const std::uint64_t>(lengths)};
  const Range own = slices[net.rank()];

  Buffer encoded(slices.count());
  const Bytes mine = encoded.bytes().subspan(own.begin, own.size());
  {
    const Buffer received = co_await split(sum);
    co_await sum_owned_slice(sum, received, mine);
  }
  co_await allgather(net, mine, encoded.bytes(), slices);
  for (Rank owner = 0; owner < net.size(); ++owner) {
    const Range block = slices[owner];
    co_await decode_slice(sum, owner, encoded.bytes().subspan(block.begin, block.size()), output);
  }
}

}  // namespace telegrad
