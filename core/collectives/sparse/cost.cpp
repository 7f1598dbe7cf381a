#include "collectives/sparse/cost.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "codec/pack_values.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/dense/choice.hpp"
#include "transport/transport.hpp"

namespace telegrad {

SumGrowth::SumGrowth(std::uint64_t dimension, double entries, double overlap)
    : dimension_(static_cast<double>(dimension)) {
  const double common = overlap * entries;
  elsewhere_ = std::max(0.0, dimension_ - common);
  missing_ = elsewhere_ > 0.0 ? std::clamp(1.0 - (entries - common) / elsewhere_, 0.0, 1.0) : 0.0;
}

SumGrowth SumGrowth::seen(std::uint64_t dimension, double half, double full, unsigned doublings) {
  SumGrowth growth;
  growth.dimension_ = static_cast<double>(dimension);
  const double missing_in_half = growth.dimension_ - half;
  const double missing_in_full = growth.dimension_ - full;
  if (missing_in_half <= 0.0 || missing_in_full <= 0.0) {
    growth.elsewhere_ = growth.dimension_;
    growth.missing_ = 0.0;
    return growth;
  }
  // (N − C)·q^m and its half: their ratio is q^(m/2).
  double missing = std::min(1.0, missing_in_full / missing_in_half);
  growth.elsewhere_ = missing_in_half / missing;
  unsigned roots = doublings - 1;
  if (growth.elsewhere_ > growth.dimension_) {  // fewer in common than independent ones have
    growth.elsewhere_ = growth.dimension_;
    missing = missing_in_full / growth.dimension_;
    roots = doublings;
  }
  for (; roots > 0; --roots) missing = std::sqrt(missing);
  growth.missing_ = missing;
  return growth;
}

double SumGrowth::entries(double vectors) const {
  return std::max(0.0, dimension_ - elsewhere_ * std::pow(missing_, vectors));
}

double SumGrowth::entries_doubled(unsigned doublings) const {
  const SumGrowth sums = of_sums_doubled(doublings);
  return std::max(0.0, dimension_ - elsewhere_ * sums.missing_);
}

SumGrowth SumGrowth::of_sums_doubled(unsigned doublings) const {
  SumGrowth growth = *this;
  for (; doublings > 0; --doublings) growth.missing_ *= growth.missing_;
  return growth;
}

SumGrowth SumGrowth::of_slice(double slices) const {
  SumGrowth growth = *this;
  growth.dimension_ /= slices;
  growth.elsewhere_ /= slices;
  return growth;
}

SumGrowth SumGrowth::of_sums(double vectors) const {
  SumGrowth growth = *this;
  growth.missing_ = std::pow(missing_, vectors);
  return growth;
}

double overlap_of(std::uint64_t dimension, double entries, Rank ranks, double sum_entries) {
  constexpr int kHalvings = 40;
  double least = 0.0;
  double most = 1.0;
  const auto more_than_seen = [&](double overlap) {
    return SumGrowth(dimension, entries, overlap).entries(ranks) > sum_entries;
  };
  if (!more_than_seen(least)) return least;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (least + most) / 2.0;
    (more_than_seen(middle) ? least : most) = middle;
  }
  return most;
}

namespace {

// What the collectives do; tests compare with the simulator.
constexpr double kWindow = 16;                                            // of sparse/split.cpp
constexpr double kShortBytes = double{32 << 10};                          // of sparse/split.cpp
constexpr Rank kCountedRanksMost = 64;                                     // counts_go_ahead() of allgather_slices.hpp
constexpr auto kCountedSliceBytes = 4.0 * static_cast<double>(Transport::kSliceBytes);
constexpr Rank kExchangingRanksMost = 8;                                   // of exchanged_sums.cpp
constexpr double kParts = 4;                                               // of exchanged_sums.cpp
constexpr double kPartedBytesLeast = kParts * double{96 << 10};            // of exchanged_sums.cpp
constexpr double kPieceBytes = double{60 << 10};                          // kCardBytes of pieces.hpp
constexpr double kMemorySegmentBytes = double{256 << 10};                 // of a ring: kMemoryMessageBytes of lanes.hpp
constexpr double kPiecesMost = 1024;                                      // of halving.hpp
constexpr std::size_t kDensestIndexBytes = 2;                             // wire_delta() of sparse/messages.hpp
constexpr std::uint64_t kFilledSliceBytesLeast = std::uint64_t{64} << 10;  // shorter ones are made dense in less time than messages take
constexpr Rank kFilledRanksMost = 64;                                      // all of them send to each at once
constexpr double kFilledWork = 0.75;                                       // the rest finds its bytes in the cache; measured
constexpr double kPackedEntryBytes = 16;                                   // work on so many takes as long as packing or reading an entry of one section
constexpr auto kTurnBytes = static_cast<double>(Transport::kTurnBytes);  // shorter work is done at once

}  // namespace

NetworkCosts costs_unmeasured(bool shares_memory) {
  return shares_memory ? NetworkCosts{.alpha_s = 2e-6, .beta_s_per_byte = 0.2e-9} : NetworkCosts{};
}

unsigned SparseCosts::rounds() const { return static_cast<unsigned>(std::bit_width(shape_.ranks)) - 1; }

double SparseCosts::members() const { return static_cast<double>(std::bit_floor(shape_.ranks)); }

double SparseCosts::delta(std::uint64_t range) const {
  return switch_entries(range, size_of(shape_.dtype), kDensestIndexBytes, shape_.switch_factor);
}

double SparseCosts::message_bytes(std::uint64_t range, double entries) const {
  const bool dense = entries > delta(range);
  const auto held = dense ? range : std::min(range, static_cast<std::uint64_t>(entries));
  const WireFormat format{.indices = shape_.indices, .packs_values = shape_.packs_values};
  return static_cast<double>(encoded_size(expected_header({0, range}, dense, held, shape_.dtype, format)));
}

double SparseCosts::memory_bytes(std::uint64_t range, double entries) const {
  const auto value_bytes = static_cast<double>(size_of(shape_.dtype));
  if (entries > delta(range)) return static_cast<double>(range) * value_bytes;
  return entries * (sizeof(std::uint32_t) + value_bytes);
}

// Where sizes alone are sent nothing is packed.
double SparseCosts::packing_s(std::uint64_t range, double entries) const {
  if (entries > delta(range) || (!shape_.shares_memory && !shape_.fills)) return 0.0;
  const double sections = (shape_.indices == IndexFormat::packed ? 1.0 : 0.0) + (shape_.packs_values ? 1.0 : 0.0);
  return sections * entries * kPackedEntryBytes * costs_.gamma_s_per_byte;
}

SparseCosts::Message SparseCosts::message(std::uint64_t range, double entries) const {
  const double bytes = message_bytes(range, entries);
  const double packing = packing_s(range, entries);
  return {bytes, memory_bytes(range, entries) * costs_.gamma_s_per_byte + packing, bytes * costs_.gamma_s_per_byte + packing};
}

// A message is encoded, sent, decoded and added to so much that is held.
double SparseCosts::added_message_s(double entries, double byte_s, double added_bytes) const {
  const Message one = message(shape_.dimension, entries);
  return costs_.alpha_s + one.bytes * byte_s + one.encode_s + one.decode_s + added_bytes * costs_.gamma_s_per_byte;
}

double SparseCosts::rounds_s(const SumGrowth& members, unsigned round, unsigned end) const {
  double time_s = 0.0;
  for (unsigned i = round; i < end; ++i) {
    const double entries = members.entries_doubled(i);
    time_s += added_message_s(entries, exchange_s_per_byte(), 2.0 * memory_bytes(shape_.dimension, entries));
  }
  return time_s;
}

double SparseCosts::doubling_s(const SumGrowth& members, unsigned round) const {
  const std::uint64_t n = shape_.dimension;
  const bool folds = !std::has_single_bit(shape_.ranks);
  double time_s = rounds_s(members, round, rounds());
  const double sum_entries = members.entries_doubled(rounds());
  if (!folds && round == 0) time_s += memory_bytes(n, members.entries_doubled(0)) * costs_.gamma_s_per_byte;
  if (folds && round == 0) {
    const double entries = members.entries_doubled(0) / 2.0;
    time_s += added_message_s(entries, costs_.beta_s_per_byte, 2.0 * memory_bytes(n, entries));
  }
  if (folds) time_s += added_message_s(sum_entries, costs_.beta_s_per_byte, memory_bytes(n, sum_entries));
  return time_s + memory_bytes(n, sum_entries) * costs_.gamma_s_per_byte;
}

double SparseCosts::split_phase_s(double entries) const {
  const double others = shape_.ranks - 1;
  const Message share = message(slice(), entries / shape_.ranks);
  const double port_s = share.bytes * costs_.beta_s_per_byte;
  if (memory_bytes(shape_.dimension, entries) / shape_.ranks < kShortBytes) {
    const double windows = std::ceil(others / kWindow);
    const double first_encoded_s = std::min(kWindow, others) * share.encode_s;
    return first_encoded_s + std::max(costs_.alpha_s + others * port_s, windows * (costs_.alpha_s + port_s)) +
           others * share.decode_s;
  }
  const double round_s = std::max(costs_.alpha_s + port_s, share.encode_s + share.decode_s);
  return share.encode_s + others * round_s + share.decode_s;
}

double SparseCosts::given_bytes(double entries) const {
  return shape_.ranks * memory_bytes(slice(), entries / shape_.ranks);
}

double SparseCosts::reduce_scatter_s(double entries) const {
  return split_phase_s(entries) + given_bytes(entries) * costs_.gamma_s_per_byte;
}

double SparseCosts::allgather_s(double sum_entries) const {
  return gather_s(message(slice(), sum_entries / shape_.ranks));
}

double SparseCosts::second_half_s(double entries, const Message& sum) const {
  const double reduce_s = given_bytes(entries) * costs_.gamma_s_per_byte;
  return exchanges() ? exchange_s(entries, reduce_s, sum) : reduce_s + gather_s(sum);
}

// The first part is reduced and encoded before anything leaves, and the last one's last message decoded in the end; in between
// links and processors are busy side by side. The own slice is put where it belongs, too.
double SparseCosts::exchange_s(double entries, double reduce_s, const Message& sum) const {
  const double others = shape_.ranks - 1;
  const double parts = given_bytes(entries) < kPartedBytesLeast ? 1.0 : kParts;
  const double first_s = (reduce_s + sum.encode_s) / parts;
  const double sent_s = parts * costs_.alpha_s + sum.bytes * costs_.beta_s_per_byte;
  const double own_s = sum.bytes * costs_.gamma_s_per_byte;
  const double work_s = (parts - 1.0) * first_s + own_s + (others - 1.0 / parts) * sum.decode_s;
  return first_s + std::max(others * sent_s, sent_s / parts + work_s) + sum.decode_s / parts;
}

double SparseCosts::gather_s(const Message& sum) const {
  const double others = shape_.ranks - 1;
  const double sent_s = costs_.alpha_s + sum.bytes * costs_.beta_s_per_byte;
  // Where it is known ahead how long all are, slices are decoded while others come, as many at once as make up a turn; else all
  // at the end.
  const double batch = counts_go_ahead() ? std::min(others, std::ceil(kTurnBytes / sum.bytes)) : others;
  return sum.encode_s + batch * sent_s + (others - batch) * std::max(sent_s, sum.decode_s) + (batch + 1.0) * sum.decode_s;
}

double SparseCosts::split_s(double entries, double sum_entries) const {
  Message sum = message(slice(), sum_entries / shape_.ranks);
  const double left_out = known_bytes(entries, sum_entries);
  sum.bytes -= left_out;
  sum.decode_s -= left_out * costs_.gamma_s_per_byte;
  return split_phase_s(entries) + second_half_s(entries, sum);
}

// What is left out of a slice's message to a rank: values of its entries that no other rank has. Of each further vector the
// share `apart` of its entries, on average, is new to the sum: 1 − P·d/2 of independent entries of density d, of which 1 − (P−1)d are
// no other rank's, about the square. The work of leaving out is beside other messages, and not counted.
double SparseCosts::known_bytes(double entries, double sum_entries) const {
  if (entries == 0.0 || shape_.ranks == 1) return 0.0;
  const double share = entries / shape_.ranks;
  const double owned = sum_entries / shape_.ranks;
  if (!leaves_known_out() || owned > delta(slice()) || share > delta(slice())) return 0.0;
  const double apart = std::clamp((sum_entries - entries) / ((shape_.ranks - 1.0) * entries), 0.0, 1.0);
  const auto count = static_cast<std::uint64_t>(owned);
  const auto value_bytes = static_cast<double>(kernels::packed_values_expected(shape_.dtype, count)) / owned;
  const double alone = shape_.ranks == 2 ? apart : apart * apart;
  return std::max(0.0, alone * share * value_bytes - share / 8.0 - 2.0 * sizeof(VectorHeader));
}

bool SparseCosts::leaves_known_out() const {
  return shape_.packs_values && kernels::packs_values(shape_.dtype) && exchanges();
}

bool SparseCosts::exchanges() const {
  return shape_.ranks > 1 && shape_.ranks <= kExchangingRanksMost && !shape_.shares_memory && counts_go_ahead();
}

bool SparseCosts::counts_go_ahead() const {
  const auto most = static_cast<double>(slice() * (sizeof(std::uint32_t) + size_of(shape_.dtype)));
  return shape_.ranks <= kCountedRanksMost && most >= kCountedSliceBytes;
}

double SparseCosts::split_dense_s(double entries) const {
  const auto every = static_cast<double>(slice());
  Message sum = message(slice(), every);
  sum.encode_s *= 2.0;  // it is made dense before
  return split_phase_s(entries) + second_half_s(entries, sum);
}

bool is_for_filling(Rank ranks, std::uint64_t bytes) {
  return ranks > 1 && ranks <= kFilledRanksMost && bytes / ranks >= kFilledSliceBytesLeast;
}

bool is_for_borrowing(std::uint64_t dimension, double entries) {
  constexpr double kShare = 1.0 / 16.0;
  return entries > kShare * static_cast<double>(dimension);
}

bool SparseCosts::sums_filled() const {
  return shape_.fills && is_for_filling(shape_.ranks, shape_.dimension * size_of(shape_.dtype));
}

// Through memory all of it is work of processors, which copy, mark and add: nothing is beside anything else.
double SparseCosts::filled_s(double entries) const {
  const auto value_bytes = static_cast<double>(size_of(shape_.dtype));
  const auto dimension = static_cast<double>(shape_.dimension);
  const double all_but_one = (shape_.ranks - 1.0) / shape_.ranks;
  const double received = all_but_one * (dimension / 8.0 + (entries + dimension) * value_bytes);
  const double marked = entries * sizeof(std::uint32_t) + dimension / 8.0;
  const double reduced = (entries + dimension) * value_bytes;
  const double port_s = received * costs_.beta_s_per_byte;
  const double work_s = kFilledWork * (marked + reduced) * costs_.gamma_s_per_byte;
  return 2.0 * costs_.alpha_s + (shape_.shares_memory ? port_s + work_s : std::max(port_s, work_s));
}

double SparseCosts::written_s(double sum_entries) const {
  if (!shape_.into_dense || !shape_.shares_memory) return 0.0;
  const double bytes = static_cast<double>(shape_.dimension) * static_cast<double>(size_of(shape_.dtype));
  return (bytes + memory_bytes(shape_.dimension, sum_entries)) * costs_.gamma_s_per_byte;
}

// Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005, §4.5; Patarasuk, Yuan, J.
// Parallel and Distributed Computing 69(2), 2009, §4.
double SparseCosts::dense_s(Algorithm algorithm) const {
  const double bytes = static_cast<double>(shape_.dimension) * static_cast<double>(size_of(shape_.dtype));
  const double ranks = shape_.ranks;
  const double all_but_one = (ranks - 1.0) / ranks;
  const double work_s = bytes * costs_.gamma_s_per_byte;
  if (algorithm == Algorithm::recursive_doubling) {
    const double folds = std::has_single_bit(shape_.ranks) ? 0.0 : 1.0;
    return (rounds() + folds) * (costs_.alpha_s + bytes * exchange_s_per_byte() + work_s) +
           folds * (costs_.alpha_s + bytes * costs_.beta_s_per_byte);
  }
  if (algorithm == Algorithm::rabenseifner) {
    const double all_rounds = 2.0 * std::bit_width(shape_.ranks - 1);
    // The halving's messages go in pieces, so that adding overlaps with receiving.
    const double port_s = all_but_one * bytes * costs_.beta_s_per_byte;
    const double added_s = all_but_one * work_s;
    const double pieces = std::clamp(std::ceil(bytes / 2.0 / kPieceBytes), 1.0, kPiecesMost);
    return all_rounds * costs_.alpha_s + std::max(port_s, added_s) + std::min(port_s, added_s) / pieces + port_s;
  }
  // Two lanes, each with every other segment: one adds while the other's blocks travel.
  const double segment_bytes = shape_.shares_memory ? kMemorySegmentBytes : kPieceBytes;
  const double segments = std::max(1.0, std::ceil(bytes / (ranks * segment_bytes)));
  const double block_port_s = bytes / (ranks * segments) * costs_.beta_s_per_byte;
  const double block_work_s = work_s / (ranks * segments);
  if (segments == 1.0) {
    return (ranks - 1.0) * (2.0 * (costs_.alpha_s + block_port_s) + block_work_s);
  }
  const double adding_s = std::max({costs_.alpha_s + block_port_s + block_work_s, 2.0 * block_port_s,
                                    2.0 * block_work_s});
  const double passing_s = std::max(costs_.alpha_s + block_port_s, 2.0 * block_port_s);
  return segments / 2.0 * (ranks - 1.0) * (adding_s + passing_s);
}

double SparseCosts::copied_s(double entries) const {
  if (!sums_filled() || !is_for_borrowing(shape_.dimension, entries)) return 0.0;
  return entries * (sizeof(std::uint32_t) + static_cast<double>(size_of(shape_.dtype))) * costs_.gamma_s_per_byte;
}

double SparseCosts::made_dense_s() const {
  return static_cast<double>(shape_.dimension) * static_cast<double>(size_of(shape_.dtype)) * costs_.gamma_s_per_byte;
}

namespace {

NetworkCosts of_port(double beta_s_per_byte) {
  return {.alpha_s = 0.0, .beta_s_per_byte = beta_s_per_byte, .gamma_s_per_byte = 0.0};
}

}  // namespace

SparseLevelCosts::SparseLevelCosts(const SparseSumShape& shape, const Nodes& nodes, const NetworkCosts& between,
                                   const NodeCosts& costs)
    : shape_(shape), nodes_(nodes), between_(between), costs_(costs) {}

double SparseLevelCosts::two_level_s(double entries, const SumGrowth& members, double sum_entries) const {
  const double slices = nodes_.slices();
  SparseSumShape shape = inside();
  if (shape.shares_memory) {
    shape.indices = IndexFormat::none;
    shape.packs_values = false;
  }
  const SparseCosts near(shape, costs_.inside);
  const SparseCosts far(between(), between_);
  const unsigned rounds_together = static_cast<unsigned>(std::bit_width(shape.ranks)) - 1;
  const SumGrowth sums = members.of_sums_doubled(rounds_together).of_slice(slices);
  const double between_s = std::min(far.split_s(sums.entries_doubled(0), sum_entries / slices), far.doubling_s(sums, 0));

  return near.reduce_scatter_s(entries) + between_s + near.allgather_s(sum_entries);
}

double SparseLevelCosts::doubling_s(const SumGrowth& members, unsigned round) const {
  const SparseCosts costs(shape_, between_);
  const unsigned end = std::max(round, nodes_.rounds_inside());
  return costs.doubling_s(members, round) - costs.rounds_s(members, round, end) +
         SparseCosts(shape_, costs_.inside).rounds_s(members, round, end);
}

double SparseLevelCosts::empty_rounds_s(unsigned round) const {
  const unsigned rounds = SparseCosts(shape_, between_).rounds();
  const unsigned inside = std::clamp(nodes_.rounds_inside(), round, rounds) - round;
  return inside * costs_.inside.alpha_s + (rounds - round - inside) * between_.alpha_s;
}

double SparseLevelCosts::flat_s(double entries, double sum_entries) const {
  const SparseCosts costs(shape_, to_all());
  if (costs.exchanges()) return costs.split_s(entries, sum_entries);
  return costs.reduce_scatter_s(entries) + SparseCosts(shape_, round_the_ring()).allgather_s(sum_entries);
}

double SparseLevelCosts::filled_s(double entries) const { return SparseCosts(shape_, to_all()).filled_s(entries); }

double SparseLevelCosts::dense_s(Algorithm algorithm) const {
  if (algorithm == Algorithm::two_level) return dense_two_level_s();
  return SparseCosts(shape_, algorithm == Algorithm::ring ? round_the_ring() : between_).dense_s(algorithm);
}

// What is inside of a segment and what is between goes on beside the other of segments before and after it, but for what both
// need a rank's port for.
double SparseLevelCosts::dense_two_level_s() const {
  SparseSumShape near = inside();
  SparseSumShape far = between();
  const std::size_t segments = two_level_segments(static_cast<std::size_t>(far.dimension) * size_of(far.dtype));
  near.dimension = (near.dimension + segments - 1) / segments;
  far.dimension = (far.dimension + segments - 1) / segments;
  const Algorithm algorithm = choose_between(far.ranks, static_cast<std::size_t>(far.dimension) * size_of(far.dtype));
  const auto inside_of = [&](const NetworkCosts& costs) {
    const SparseCosts together(near, costs);
    return std::min(together.dense_s(Algorithm::ring), together.dense_s(Algorithm::rabenseifner));
  };
  const auto between_of = [&](const NetworkCosts& costs) { return SparseCosts(far, costs).dense_s(algorithm); };

  const double inside_s = inside_of(costs_.inside);
  const double between_s = between_of(between_);
  double longest_s = std::max(inside_s, between_s);
  if (!costs_.share_memory) {
    const double port_s = inside_of(of_port(costs_.inside.beta_s_per_byte)) + between_of(of_port(beta_alone_s_per_byte()));
    longest_s = std::max(longest_s, port_s);
  }
  return inside_s + between_s + (static_cast<double>(segments) - 1.0) * longest_s;
}

// A sum of the ranks of one node.
SparseSumShape SparseLevelCosts::inside() const {
  SparseSumShape shape = shape_;
  shape.ranks = (nodes_.ranks() + nodes_.count() - 1) / nodes_.count();
  shape.shares_memory = costs_.share_memory;
  return shape;
}

// A sum of the owners of one slice.
SparseSumShape SparseLevelCosts::between() const {
  SparseSumShape shape = shape_;
  shape.ranks = nodes_.count();
  shape.dimension = (shape.dimension + nodes_.slices() - 1) / nodes_.slices();
  return shape;
}

// Of a rank that sends as much to each of the others.
NetworkCosts SparseLevelCosts::to_all() const {
  const double others = nodes_.ranks() - 1.0;
  const double neighbours = static_cast<double>(nodes_.ranks()) / nodes_.count() - 1.0;
  NetworkCosts costs = between_;
  costs.beta_s_per_byte = ((others - neighbours) * between_.beta_s_per_byte + neighbours * costs_.inside.beta_s_per_byte) / others;
  return costs;
}

// Only some ranks of a node have a neighbour beyond, and share its link.
NetworkCosts SparseLevelCosts::round_the_ring() const {
  NetworkCosts costs = between_;
  costs.beta_s_per_byte = std::max(
      {nodes_.leaving() * between_.beta_s_per_byte, beta_alone_s_per_byte(), costs_.inside.beta_s_per_byte});
  return costs;
}

}  // namespace telegrad
