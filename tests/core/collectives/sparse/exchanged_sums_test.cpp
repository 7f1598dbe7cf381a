// Sums of few ranks between hosts, whose slices leave in parts: right, the same bits on all ranks, safe from damaged counts.
#include "collectives/sparse/exchanged_sums.hpp"

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "codec/slice_reduction.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/sparse/split.hpp"
#include "collectives/support/any_size.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "testing.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr WireFormat kPacked{.indices = IndexFormat::packed, .packs_values = true};
constexpr Step kParts = 4;  // of exchanged_sums.cpp

// Of a slice of 140,000 elements, how densely each rank holds it so that it leaves in several parts.
double parted(Rank size) { return 0.5 / size; }

// Ranks hold much of every other slice, and little of the others.
template <class V>
std::vector<Input<V>> unlike_slices(Rank size, std::uint64_t n, double little, Random& random) {
  std::vector<Input<V>> inputs(size);
  const Partition slices(n, size);
  for (Input<V>& input : inputs) {
    for (Rank owner = 0; owner < size; ++owner) {
      const Input<V> part = uniform<V>(slices[owner].size(), owner % 2 == 0 ? parted(size) : little, random);
      for (const std::uint32_t index : part.indices) input.indices.push_back(index + static_cast<std::uint32_t>(slices[owner].begin));
      input.values.insert(input.values.end(), part.values.begin(), part.values.end());
    }
  }
  return inputs;
}

template <class V>
void expect_sum(World world, const std::vector<Input<V>>& inputs, std::uint64_t n, Reduction reduction, Algorithm algorithm) {
  const auto size = static_cast<Rank>(inputs.size());
  const std::vector<float> expected = dense_result(inputs, n, reduction);
  // Ranks need not have one format.
  const auto how = [&](Rank rank) {
    return SparseReduction{.reduction = reduction, .algorithm = algorithm, .wire = rank == 1 ? WireFormat{} : kPacked};
  };
  std::vector<std::shared_ptr<std::optional<SparseVector<V>>>> sums;
  const Ended ended = run_ranks(
      world, size,
      [&](Rank rank) {
        auto sum = make_all_reduce(inputs[rank].vector(n), how(rank));
        sums.push_back(sum.result);
        return sum.request;
      },
      size);
  REQUIRE(ended.all_succeeded());
  std::vector<V> dense(n);
  (*sums[0])->write_dense(dense, reduction);
  EXPECT(as_floats(std::span<const V>(dense)) == expected);
  for (const auto& sum : sums) EXPECT(same_bits(**sum, **sums[0]));

  std::vector<std::vector<V>> outputs(size, std::vector<V>(n, static_cast<V>(-77.0F)));
  const auto write = [&](Rank rank) { return make_all_reduce_into(inputs[rank].vector(n), std::span(outputs[rank]), how(rank)); };
  EXPECT(run_ranks(world, size, write, size).all_succeeded());
  for (const auto& output : outputs) EXPECT(as_floats(std::span<const V>(output)) == expected);
}

TEST("sums are right where slices leave in parts, where only some do, and where some ranks pack") {
  for (const World world : {World::simulated, World::local}) {
    for (const Rank size : {2U, 3U, 4U, 8U}) {
      const std::uint64_t n = std::uint64_t{140'000} * size;
      for (const double little : {0.0, 0.001, 0.9}) {
        Random random(size);
        const auto inputs = unlike_slices<float>(size, n, little, random);
        expect_sum(world, inputs, n, Reduction::sum, Algorithm::split_allgather);
        if (size == 3) expect_sum(world, inputs, n, Reduction::avg, Algorithm::automatic);
        if (size == 4) expect_sum(world, inputs, n, Reduction::max_abs, Algorithm::split_dense_allgather);
      }
      Random random(size + 1);
      const std::uint64_t halves = std::uint64_t{180'000} * size;
      expect_sum(world, unlike_slices<bf16>(size, halves, 0.001, random), halves, Reduction::min, Algorithm::split_allgather);
      expect_sum(world, unlike_slices<double>(size, n, 0.001, random), n, Reduction::prod, Algorithm::split_allgather);
    }
  }
}

TEST("nothing is written before the last rank has called") {
  const Rank size = 4;
  const std::uint64_t n = std::uint64_t{140'000} * size;
  Random random(3);
  const auto inputs = unlike_slices<float>(size, n, 0.001, random);
  for (Rank absent = 0; absent < size; ++absent) {
    std::vector<std::vector<float>> outputs(size, std::vector<float>(n, -77.0F));
    const Ended ended = run_ranks(World::simulated, size, [&](Rank rank) -> RequestPtr {
      if (rank == absent) return nullptr;
      return make_all_reduce_into(inputs[rank].vector(n), std::span(outputs[rank]), {.wire = kPacked});
    });
    EXPECT(ended.stuck);
    for (const auto& output : outputs) EXPECT(output == std::vector<float>(n, -77.0F));
  }
}

// The protocol up to what is said of this rank's slice, and that with other numbers.
Task<void> say_counts(Transport& net, SparseVector<float> mine, std::vector<std::uint64_t> counts) {
  const Partition slices(static_cast<std::size_t>(mine.dimension()), net.size());
  GivenShares<float> given;
  co_await give_shares(net, mine, slices, SparseReduction{.wire = kPacked}, {}, given);
  const Step first_step = split_steps<float>(net, slices);
  const Step step = first_step + kParts * any_size_steps(net, most_bytes<float>(slices));
  const Buffer sum = encode(given.share(net.rank()));  // of a slice without other entries
  for (Rank to = 0; to < net.size(); ++to) {
    if (to == net.rank()) continue;
    co_await net.send(to, step, std::as_bytes(std::span(counts)));
    co_await net.send(to, first_step, sum.bytes());
  }
  co_await net.receive_any_size(0, (Step{1} << 30) - 1, 0);  // never comes
}

TEST("damaged counts end the operation on all ranks, and name their sender") {
  constexpr std::uint64_t kN = 420'000;
  constexpr Rank kDamaged = 2;
  struct Damage {
    std::vector<std::uint64_t> counts;
    std::string reason;
  };
  const std::vector<Damage> damages{
      {{}, "rank 2 sent counts of 0 bytes"},
      {{kN}, "rank 2 sent damaged sums: it says that 420000 of 140000 elements have an entry"},
      {{7}, "does not hold the 7 entries that were announced"},
      {{1, 2, 3, kN}, "rank 2 sent damaged sums: it says that 420000 of 35000 elements have an entry"},
      {{0, 0, 0, 0, 0}, "has 40 bytes instead of at most 32"},
  };
  for (const Damage& damage : damages) {
    Random random(3);
    const Input<float> input = uniform<float>(kN, 0.001, random);
    std::vector<RequestPtr> requests;
    Simulation simulation(3, {});
    simulation.begin_all([&](Rank rank) {
      auto request = make_all_reduce(input.vector(kN), SparseReduction{.wire = kPacked}).request;
      if (rank == kDamaged) {
        request = std::make_shared<Request>(
            request->call(), [&](Transport& net) { return say_counts(net, input.vector(kN), damage.counts); });
      }
      return requests.emplace_back(std::move(request));
    });
    EXPECT(!simulation.run().deadlock);
    for (const Rank rank : {Rank{0}, Rank{1}}) {
      REQUIRE(requests[rank]->failure());
      EXPECT_EQ(requests[rank]->failure()->peer, kDamaged);
      EXPECT(requests[rank]->failure()->reason.find(damage.reason) != std::string::npos);
    }
  }
}

TEST("a reduction that remembers who gave what has the same bits, says it of each entry, and of nothing that is dense") {
  Random random(4);
  constexpr std::uint64_t kN = 30'000;
  for (const std::size_t pieces : {2, 5, 8, 9}) {
    std::vector<SparseVector<float>> vectors;
    for (std::size_t i = 0; i < pieces; ++i) vectors.push_back(uniform<float>(kN, 0.06, random).vector(kN));
    for (const bool one_is_dense : {false, true}) {
      if (one_is_dense) vectors[1].to_dense();
      std::vector<SparseView<float>> views;
      for (const auto& vector : vectors) views.push_back(vector.slice(0, kN));
      for (const double delta : {1000.0, 1e9}) {
        const OwnedSlice<float> expected = reduce_slices<float>(views, Reduction::sum, delta);
        SliceReduction<float> parts(views, Reduction::sum, delta);
        parts.remember_givers();
        for (const std::uint64_t end : {std::uint64_t{7}, std::uint64_t{20'000}, kN}) parts.advance(end);
        const OwnedSlice<float> sum = parts.finish();
        EXPECT_EQ(sum.dense, expected.dense);
        EXPECT(std::ranges::equal(sum.indices.span(), expected.indices.span()));
        EXPECT(std::ranges::equal(std::as_bytes(sum.values.span()), std::as_bytes(expected.values.span())));
        const Array<std::uint8_t> givers = parts.take_givers();
        const bool known = !sum.dense && pieces <= 8;
        if (!known || !givers.empty() || pieces > 2) EXPECT_EQ(givers.size(), known ? sum.indices.size() : 0);  // of two it may not pay
        for (std::size_t i = 0; i < givers.size(); ++i) {
          unsigned who = 0;
          for (std::size_t piece = 0; piece < pieces; ++piece) {
            who |= std::ranges::binary_search(vectors[piece].indices(), sum.indices[i]) ? 1U << piece : 0U;
          }
          EXPECT_EQ(unsigned{givers[i]}, who);
        }
      }
    }
  }
}

}  // namespace
