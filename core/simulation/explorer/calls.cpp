#include "simulation/explorer/calls.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "collectives/dense/choice.hpp"
#include "collectives/sparse/balanced_slices.hpp"
#include "collectives/support/nodes.hpp"
#include "simulation/explorer/values.hpp"

namespace telegrad::explorer {
namespace {

constexpr std::array kOperations{Operation::allreduce, Operation::allreduce,        Operation::allreduce,
                                 Operation::allreduce, Operation::sparse_allreduce, Operation::sparse_allreduce,
                                 Operation::allgather, Operation::broadcast,        Operation::barrier,
                                 Operation::reduce,    Operation::reduce_scatter,   Operation::sparse_allgather,
                                 Operation::sparse_reduce_scatter, Operation::allreduce_topk, Operation::allreduce_topk,
                                 Operation::gather,    Operation::scatter,          Operation::all_to_all,
                                 Operation::send,      Operation::send};
constexpr std::array kRooted{Operation::broadcast, Operation::reduce, Operation::gather, Operation::scatter};
constexpr std::array kWithHeads{Operation::sparse_allreduce, Operation::sparse_allreduce,
                                Operation::sparse_allgather, Operation::sparse_reduce_scatter, Operation::barrier};
constexpr std::array kGradients{DType::f32, DType::f32, DType::bf16};
constexpr std::array kAny{DType::f32, DType::bf16, DType::u8, DType::i64, DType::f16, DType::c128};
constexpr std::array kSparseAlgorithms{Algorithm::split_allgather, Algorithm::split_allgather,
                                            Algorithm::split_dense_allgather, Algorithm::recursive_doubling,
                                            Algorithm::ring, Algorithm::automatic, Algorithm::automatic};
constexpr std::array kVectorValues{DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64};
constexpr std::array kVectorReductions{Reduction::sum, Reduction::sum, Reduction::avg,    Reduction::min,
                                       Reduction::max, Reduction::prod, Reduction::max_abs};
constexpr std::array kIndexFormats{IndexFormat::none, IndexFormat::raw32, IndexFormat::packed};
constexpr std::array kSwitchFactors{1.0, 1.0, 0.0, 0.3, 1.7, 1e6};
constexpr std::size_t kCallsMost = 8;
constexpr std::uint64_t kRepeatedCountMost = 4000;
// Large calls are dear: only a few ranks make them, and at most one a program.
constexpr Rank kLargeRanksMost = 5;
constexpr double kLargeShare = 0.25;  // of the programs of so few ranks
constexpr double kRoundedShare = 0.35;  // of the sums
constexpr double kIntegerShare = 0.25;  // of those that are exact
constexpr double kUnevenShare = 0.5;    // of what has blocks
constexpr std::uint32_t kTagMost = 2;   // of messages: few, so that several with one tag are under way

// Around the number of ranks, where blocks are empty or have one element; otherwise mostly small.
std::size_t draw_count(Chance& chance, Rank size, double most) {
  switch (chance.integer(0, 9)) {
    case 0: return 0;
    case 1: return 1;
    case 2: return size - 1;
    case 3: return size;
    case 4: return size + 1;
    default: return static_cast<std::size_t>(chance.magnitude(1.0, most));
  }
}

std::size_t draw_large_count(Chance& chance, Operation operation, DType dtype) {
  if (PlannedCall{.operation = operation}.is_sparse()) return static_cast<std::size_t>(chance.magnitude(9e4, 6e5));
  return static_cast<std::size_t>(chance.magnitude(7e4, 6e5)) / size_of(dtype);
}

// Often as a program would call it; otherwise cut into up to six segments on up to three lanes. Not part of what ranks
// compare, so it follows from what they do: calls that agree are cut alike, also where ranks call them in another order.
std::optional<LaneTuning> tuning_of(const PlannedCall& call, Rank size) {
  if (call.operation != Operation::allreduce || call.is_encoded()) return std::nullopt;
  if (call.resolved(size) == Algorithm::rabenseifner) return std::nullopt;
  Chance chance(mix(call.count) + mix(static_cast<std::uint64_t>(call.dtype) * 4 +
                                      static_cast<std::uint64_t>(call.reduction)));
  if (call.bytes() == 0 || chance.happens(0.5)) return std::nullopt;
  const bool levels = call.algorithm == Algorithm::two_level;
  const std::size_t segments = chance.integer<std::size_t>(1, levels ? 12 : 6);
  const std::size_t parts = levels ? Nodes(call.nodes).slices() : call.resolved(size) == Algorithm::ring ? size : 1;
  return LaneTuning{.message_bytes = std::max<std::size_t>(1, call.bytes() / (segments * parts)),
                    .lanes = chance.integer<std::size_t>(1, 3)};
}

// Whether calls that only some ranks know of may be among the others. A mismatch between two ranks is theirs alone, of
// damaged messages another rank may be blamed, and where time runs out, who is waited for may wait himself.
bool may_exchange(Trouble trouble, Rank size) {
  return size > 1 && !is_mismatch(trouble) && !is_damage(trouble) && trouble != Trouble::freeze;
}

// From the call's own seed: other draws stay what they are.
ValueEncoding wire_values_of(const PlannedCall& call, Rank size) {
  constexpr std::array kRounding{ValueEncoding::bf16, ValueEncoding::int8, ValueEncoding::qsgd8, ValueEncoding::qsgd4,
                                 ValueEncoding::f16};
  const bool can = call.operation == Operation::allreduce_topk || call.operation == Operation::allreduce;
  if (!can || call.dtype != DType::f32) return ValueEncoding::native;
  Chance own(mix(call.seed));
  if (!own.happens(0.3)) return ValueEncoding::native;
  const ValueEncoding drawn = own.pick(kRounding);
  // Sums of what is drawn must not become infinite.
  const bool fits = !call.rounded && size <= 65;
  return drawn == ValueEncoding::f16 && !fits ? ValueEncoding::bf16 : drawn;
}

// Also from the call's own seed. Entries that are only moved stay floats.
DType type_of_sum(const PlannedCall& call) {
  constexpr std::array kIntegers{DType::i32, DType::i64, DType::u32, DType::u64};
  const bool can = call.reduction == Reduction::sum && call.operation != Operation::allreduce_topk;
  Chance own(mix(call.seed + 2));
  if (!can || call.rounded || call.is_encoded() || !own.happens(kIntegerShare)) return call.dtype;
  return own.pick(kIntegers);
}

// Two at least, one of which has two ranks at least, or none; also from the call's own seed.
std::vector<std::uint32_t> nodes_of(const PlannedCall& call, Rank size) {
  Chance own(mix(call.seed + 1));
  if (size < 3 || call.slices != Slices::equal || !own.happens(0.5)) return {};
  const Rank nodes = own.integer<Rank>(2, size - 1);
  const bool neighbours = own.happens(0.4), dealt = own.happens(0.4);
  std::vector<std::uint32_t> labels(size);
  for (Rank rank = 0; rank < size; ++rank) {
    labels[rank] = neighbours ? rank * nodes / size : dealt ? rank % nodes : own.integer<Rank>(0, nodes - 1);
  }
  return Nodes(labels).two_level() ? labels : std::vector<std::uint32_t>{};
}

// What is open may go on two levels where there are some: of vectors whether it does stays open in half the calls.
void put_on_nodes(PlannedCall& call, Rank size) {
  if (call.algorithm != Algorithm::automatic || call.is_encoded()) return;
  call.nodes = nodes_of(call, size);
  if (call.nodes.empty() || (call.is_sparse() && call.seed % 2 == 0)) return;
  call.algorithm = Algorithm::two_level;
  call.tuning = tuning_of(call, size);
}

// What only sparse calls have.
void draw_sparse(Chance& chance, PlannedCall& call) {
  call.dtype = chance.pick(kVectorValues);
  call.indices = chance.pick(kIndexFormats);
  if (call.operation == Operation::sparse_allgather) {
    call.reduction = Reduction::none;
    call.rounded = false;  // nothing is added up
    return;
  }
  if (call.operation == Operation::allreduce_topk) {
    call.rounded = call.rounded && call.dtype != DType::f64;
    return;  // a sum or a mean, as it is
  }
  call.reduction = chance.pick(kVectorReductions);
  call.rounded = call.rounded && call.dtype != DType::f64 &&  // in which what is drawn adds up exactly
                 (call.reduction == Reduction::sum || call.reduction == Reduction::avg);
  call.switch_factor = chance.pick(kSwitchFactors);
  if (call.operation == Operation::sparse_reduce_scatter) {
    call.uneven = chance.happens(0.5);
    call.rounded = false;  // no two ranks have anything to compare
    return;
  }
  call.algorithm = chance.pick(kSparseAlgorithms);
  if (call.algorithm != Algorithm::recursive_doubling && chance.happens(0.3)) call.slices = Slices::balanced;
}

Operation suited(Chance& chance, Trouble trouble) {
  switch (trouble) {
    case Trouble::reduction: return chance.happens(0.5) ? Operation::allreduce : Operation::sparse_allreduce;
    case Trouble::algorithm: return Operation::allreduce;
    case Trouble::switch_factor: return Operation::sparse_allreduce;
    case Trouble::root: return chance.pick(kRooted);
    case Trouble::count:
    case Trouble::dtype:
      while (true) {
        if (const Operation one = chance.pick(kOperations); one != Operation::barrier) return one;
      }
    // Noise in the payload of a dense operation is nothing that anybody could notice.
    case Trouble::scrambled_head: return chance.pick(kWithHeads);
    default: return chance.pick(kOperations);
  }
}

}  // namespace

Algorithm PlannedCall::resolved(Rank size) const {
  return algorithm == Algorithm::automatic ? choose_allreduce(size, bytes()) : algorithm;
}

Partition PlannedCall::partition(Rank size, Rank rank) const {
  if (!uneven) return has_blocks() ? Partition(count * size, size) : Partition(count, size);
  const bool own = operation == Operation::all_to_all;
  // Blocks of 0 to 3 shares; the last gets what is left.
  std::vector<std::uint64_t> lengths(size);
  std::uint64_t left = count;
  for (Rank block = 0; block + 1 < size; ++block) {
    lengths[block] = std::min<std::uint64_t>(left, (count + block + (own ? 5 * rank : 0)) % 4 * (count / (2 * size)));
    left -= lengths[block];
  }
  lengths[size - 1] = left;
  return Partition{std::span<const std::uint64_t>(lengths)};
}

Partition PlannedCall::blocks(Rank size, Rank rank) const {
  const Partition elements = partition(size, rank);
  if (!uneven) return Partition(elements.count() * size_of(dtype), size);
  std::vector<std::uint64_t> lengths;
  for (Rank block = 0; block < size; ++block) lengths.push_back(elements[block].size() * size_of(dtype));
  return Partition{std::span<const std::uint64_t>(lengths)};
}

Partition PlannedCall::blocks_received(Rank size, Rank rank) const {
  std::vector<std::uint64_t> lengths;
  for (Rank sender = 0; sender < size; ++sender) lengths.push_back(blocks(size, sender)[rank].size());
  return Partition{std::span<const std::uint64_t>(lengths)};
}

bool PlannedCall::agrees(const PlannedCall& other, Rank size) const {
  if (operation != other.operation || dtype != other.dtype || count != other.count) return false;
  switch (operation) {
    case Operation::allreduce:
      return reduction == other.reduction && resolved(size) == other.resolved(size) && nodes == other.nodes &&
             wire_values() == other.wire_values();
    case Operation::sparse_allreduce:
      return reduction == other.reduction && switch_factor == other.switch_factor && algorithm == other.algorithm &&
             slices == other.slices && nodes == other.nodes;
    case Operation::broadcast: return root == other.root;
    case Operation::gather:
    case Operation::scatter: return root == other.root && partition(size).digest() == other.partition(size).digest();
    case Operation::allgather:
    case Operation::all_to_all: return uneven == other.uneven && partition(size).digest() == other.partition(size).digest();
    case Operation::send: return root == other.root && tag == other.tag;
    case Operation::reduce: return reduction == other.reduction && root == other.root;
    case Operation::allreduce_topk: return reduction == other.reduction;  // and states, which follow from calls
    case Operation::reduce_scatter:
    case Operation::sparse_reduce_scatter:
      return reduction == other.reduction && switch_factor == other.switch_factor &&
             partition(size).digest() == other.partition(size).digest();
    default: return true;
  }
}

PlannedCall draw_call(Chance& chance, Operation operation, Rank size, Extent extent) {
  const bool large = extent == Extent::large;
  PlannedCall call{.operation = operation, .seed = chance.seed()};
  if (operation == Operation::barrier) return call;
  if (call.is_exchange()) {
    call.dtype = chance.pick(kAny);
    call.root = chance.integer<Rank>(1, size - 1);
    call.tag = chance.integer<std::uint32_t>(0, kTagMost);
    call.count = large ? draw_large_count(chance, operation, call.dtype) : draw_count(chance, size, 4000.0);
    return call;
  }
  if (call.has_blocks() || operation == Operation::broadcast) {
    call.dtype = chance.pick(kAny);
    call.count = large ? draw_large_count(chance, operation, call.dtype)
                       : draw_count(chance, size, call.has_blocks() ? 4000.0 / size : 4000.0);
    if (call.is_rooted()) call.root = chance.integer<Rank>(0, size - 1);
    call.uneven = call.has_blocks() && chance.happens(kUnevenShare);
    if (call.uneven) call.count *= size;
    return call;
  }
  call.dtype = chance.pick(kGradients);
  call.reduction = chance.happens(0.6) ? Reduction::sum : Reduction::avg;
  call.count = large ? draw_large_count(chance, operation, call.dtype) : draw_count(chance, size, 4000.0);
  call.rounded = chance.happens(kRoundedShare) && size <= kRoundedRanksMost;
  if (call.is_sparse()) {
    draw_sparse(chance, call);
    call.values = wire_values_of(call, size);
    call.dtype = type_of_sum(call);
    return call;
  }
  if (operation == Operation::reduce) call.root = chance.integer<Rank>(0, size - 1);
  if (operation == Operation::reduce_scatter) {
    call.uneven = chance.happens(0.5);
    call.rounded = false;  // no two ranks have anything to compare
  }
  if (operation != Operation::allreduce) {
    call.dtype = type_of_sum(call);
    return call;
  }
  constexpr std::array kAlgorithms{Algorithm::automatic, Algorithm::ring, Algorithm::recursive_doubling,
                                   Algorithm::rabenseifner};
  call.algorithm = chance.pick(kAlgorithms);
  call.values = wire_values_of(call, size);
  if (call.is_encoded()) call.algorithm = Algorithm::automatic;
  call.dtype = type_of_sum(call);
  call.tuning = tuning_of(call, size);
  return call;
}

bool learns(const PlannedCall& call) {
  return call.operation == Operation::sparse_allreduce &&
         (call.algorithm == Algorithm::automatic || call.algorithm == Algorithm::two_level);
}

// Half of the sums that learn from others of their kind become of the kind of one before.
void repeat_kind(PlannedCall& call, std::span<const PlannedCall> before) {
  if (!learns(call) || !Chance(mix(call.seed)).happens(0.5)) return;
  const auto earlier = std::ranges::find_if(before, learns);
  if (earlier == before.end() || earlier->count > kRepeatedCountMost) return;
  const std::uint64_t seed = call.seed;
  call = *earlier;
  call.seed = seed;
  call.algorithm = Algorithm::automatic;
  call.nodes.clear();
  call.tuning.reset();
}

std::vector<PlannedCall> draw_calls(Chance& chance, Trouble trouble, Rank size, std::size_t& at) {
  std::vector<PlannedCall> calls;
  const bool needs_two = trouble == Trouble::order;
  const std::size_t count = chance.integer<std::size_t>(needs_two ? 2 : 1, kCallsMost - 1);
  at = chance.integer<std::size_t>(0, count - (needs_two ? 2 : 1));
  std::size_t large = count;  // none
  // Only the first piece of a long message has a head; noise in the others is nothing that anybody could notice.
  if (trouble != Trouble::scrambled_head && size <= kLargeRanksMost && chance.happens(kLargeShare)) {
    large = chance.happens(0.5) ? at : chance.integer<std::size_t>(0, count - 1);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const bool everywhere = trouble == Trouble::scrambled_head;
    Operation operation = Operation::send;
    while (operation == Operation::send) {
      operation = suited(chance, i == at || everywhere ? trouble : Trouble::none);
      if (may_exchange(trouble, size)) break;
    }
    calls.push_back(draw_call(chance, operation, size, i == large ? Extent::large : Extent::usual));
    // Lengths of an all_to_all are between two ranks: nobody else could say who is wrong.
    PlannedCall& call = calls.back();
    if (i != large) repeat_kind(call, std::span(calls).first(i));
    if (call.operation == Operation::all_to_all && is_mismatch(trouble)) call.uneven = false;
    // Ranks may come to a dense sum, whose payload nobody could notice noise in.
    const bool reduces = operation == Operation::allreduce || operation == Operation::sparse_allreduce;
    if (everywhere && operation == Operation::sparse_allreduce && call.algorithm == Algorithm::automatic) {
      call.algorithm = Algorithm::split_allgather;
    } else if (reduces && !everywhere) {
      put_on_nodes(call, size);
    }
  }
  if (trouble == Trouble::algorithm) {
    calls[at].nodes.clear();
    calls[at].values = ValueEncoding::native;
    calls[at].algorithm = chance.happens(0.5) ? Algorithm::ring : Algorithm::recursive_doubling;
    calls[at].tuning.reset();
  }
  // Nobody is through with a barrier before all have come: so that everybody hears of a failure, as a program does that
  // goes on calling.
  if (chance.happens(0.7)) calls.push_back(draw_call(chance, Operation::barrier, size));
  return calls;
}

void train(std::vector<PlannedCall>& calls, Trouble trouble, Rank size, std::size_t& at, std::uint64_t k) {
  if (trouble == Trouble::scrambled_head) return;  // whose calls are those in which it shows
  Chance own(mix(calls[0].seed + k));
  const auto count = static_cast<std::size_t>(static_cast<double>(k) * own.magnitude(2.0, 8.0));
  const auto step = [&] {
    PlannedCall call = draw_call(own, Operation::allreduce_topk, size);
    call.count = count;
    call.entries = own.happens(0.75) ? k : k / 4 + 1;
    return call;
  };
  const bool ends_with_barrier = calls.back().operation == Operation::barrier;
  for (std::size_t i = 0; i + (ends_with_barrier ? 1 : 0) < calls.size(); ++i) {
    if (i != at) calls[i] = step();
  }
  for (std::size_t more = own.integer<std::size_t>(2, 5); more > 0; --more, ++at) calls.insert(calls.begin(), step());
}

std::vector<PlannedCall> odd_calls(Chance& chance, Trouble trouble, Rank size, std::vector<PlannedCall> calls,
                                   std::size_t at, std::size_t turn) {
  PlannedCall& call = calls[at];
  switch (trouble) {
    case Trouble::count:
      call.count += chance.happens(0.8) ? 1 : 1 + turn;
      call.tuning = tuning_of(call, size);
      break;
    case Trouble::dtype:
      if (call.reduction != Reduction::none || call.is_sparse()) {
        call.dtype = call.dtype == DType::f32 ? DType::bf16 : DType::f32;
      } else {  // another one of as many bytes
        call.dtype = call.dtype == DType::i64 ? DType::u64 : DType::i8;
      }
      call.tuning = tuning_of(call, size);
      break;
    case Trouble::reduction:
      if (call.reduction != Reduction::sum) {
        call.reduction = Reduction::sum;
      } else {
        call.reduction = is_integer(call.dtype) ? Reduction::max : Reduction::avg;
      }
      call.tuning = tuning_of(call, size);
      break;
    case Trouble::root: call.root = (call.root + 1 + static_cast<Rank>(turn) % (size - 1)) % size; break;
    case Trouble::algorithm:
      call.algorithm = call.algorithm == Algorithm::ring ? Algorithm::recursive_doubling : Algorithm::ring;
      break;
    case Trouble::switch_factor: call.switch_factor += 0.5; break;
    case Trouble::operation:
    case Trouble::more: {
      PlannedCall other = call;
      while (other.operation == call.operation || other.is_exchange() ||
             (other.operation == Operation::all_to_all && other.uneven)) {
        other = draw_call(chance, chance.pick(kOperations), size);
      }
      if (trouble == Trouble::operation) {
        call = other;
      } else {
        calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(at), other);
      }
      break;
    }
    case Trouble::order: std::swap(calls[at], calls[at + 1]); break;
    case Trouble::fewer: calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(at)); break;
    case Trouble::stop: calls.resize(at); break;
    default: break;
  }
  return calls;
}

// Between ranks that hold any number of entries: the sum is as long as the vector at most.
Effort sparse_effort_of(const PlannedCall& call, double ranks, double rounds) {
  const double whole = static_cast<double>(call.count) * 8.0 + 64.0 * ranks;
  const double pieces = whole / 6e4;
  if (call.operation == Operation::sparse_allgather) return {rounds + ranks * (1.0 + pieces), 2.0 * ranks * whole};
  if (call.operation == Operation::sparse_reduce_scatter) return {ranks + pieces, whole};
  if (call.operation == Operation::allreduce_topk) {  // counts of slices, of histograms and for two thresholds
    const double sums_of_counts = (rounds + 2.0) * 24.0;
    return {4.0 * ranks + 4.0 * pieces + sums_of_counts, (rounds + 4.0) * whole + sums_of_counts * (8e3 + 32.0 * ranks)};
  }
  if (call.slices == Slices::balanced) {
    const double samples = ranks * (8.0 + 4.0 * static_cast<double>(samples_per_rank(static_cast<Rank>(ranks))));
    return {2.0 * ranks + 2.0 * pieces + rounds, 2.0 * whole + samples};
  }
  if (call.algorithm == Algorithm::recursive_doubling) return {(rounds + 2.0) * (1.0 + pieces), (rounds + 2.0) * whole};
  if (!call.nodes.empty()) {  // perhaps doubling, and then inside, automatic between, inside
    return {2.0 * (rounds + 3.0) * (1.0 + pieces) + 4.0 * ranks + 4.0 * pieces, (2.0 * rounds + 10.0) * whole};
  }
  if (call.algorithm == Algorithm::automatic) {  // perhaps one after the other
    return {(rounds + 2.0) * (1.0 + pieces) + 2.0 * ranks + 2.0 * pieces, (rounds + 5.0) * whole};
  }
  return {2.0 * ranks + 2.0 * pieces, 2.0 * whole};
}

Effort effort_of(const PlannedCall& call, Rank size) {
  const double ranks = size;
  const double rounds = std::bit_width(size - 1);
  // Of blocks of unlike lengths the longest counts.
  const auto bytes = static_cast<double>(call.uneven && call.has_blocks()
                                             ? call.partition(size).longest() * size_of(call.dtype)
                                             : call.bytes());
  switch (call.operation) {
    case Operation::allreduce: {
      if (call.is_encoded()) return {2.0 * ranks + 2.0 * bytes / 6e4 + rounds, 5.0 * bytes};
      if (call.algorithm == Algorithm::two_level) {
        const double segments =
            1.0 + (call.tuning ? bytes / static_cast<double>(call.tuning->message_bytes * Nodes(call.nodes).slices()) : 0.0);
        return {segments * (3.0 * ranks + 6.0 * rounds) + bytes / 5e4, (rounds + 6.0) * bytes};
      }
      if (call.resolved(size) == Algorithm::rabenseifner) return {rounds * (2.0 + bytes / 2e5), 3.0 * bytes};
      const bool ring = call.resolved(size) == Algorithm::ring;
      const double whole = bytes / (ring ? ranks : 1.0);
      const double segments = 1.0 + (call.tuning ? whole / static_cast<double>(call.tuning->message_bytes) : 0.0);
      if (ring) return {2.0 * ranks * segments, 2.0 * bytes};
      return {rounds * segments + 2.0, bytes * (rounds + 2.0)};
    }
    case Operation::sparse_allreduce:
    case Operation::sparse_allgather:
    case Operation::allreduce_topk:
    case Operation::sparse_reduce_scatter: return sparse_effort_of(call, ranks, rounds);
    // Long blocks and vectors go in pieces.
    case Operation::allgather: return {ranks * (1.0 + bytes / (call.uneven ? 6e4 : 256e3)) + rounds, ranks * bytes};
    case Operation::gather:
    case Operation::scatter: return {ranks, ranks * bytes};
    case Operation::all_to_all: return {ranks * (1.0 + bytes / 6e4) + rounds, (ranks + rounds) * bytes};
    case Operation::broadcast: return {rounds + 1.0 + ranks + bytes / 16e3, (rounds + 1.0) * bytes};
    case Operation::barrier: return {rounds, 0.0};
    case Operation::send: return {2.0, 2.0 * bytes};
    case Operation::reduce: return {ranks + rounds * (1.0 + bytes / 2e5), (rounds + 2.0) * bytes};
    case Operation::reduce_scatter:
      return {(bytes < 2e5 ? 0.0 : 2.0 * ranks) + rounds * (2.0 + bytes / 2e5), (rounds + 2.0) * bytes};
    default: break;  // is not drawn
  }
  return {};
}

}  // namespace telegrad::explorer
