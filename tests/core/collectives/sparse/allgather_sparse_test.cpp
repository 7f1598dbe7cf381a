// Allgather of sparse vectors: every rank's entries on every rank, exactly; few bytes; safe from damaged messages.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "codec/counted.hpp"
#include "session/moves.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 33};
constexpr World kWorlds[] = {World::simulated, World::local};
constexpr IndexFormat kFormats[] = {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed};

template <class V>
using Result = std::shared_ptr<std::optional<std::vector<SparseVector<V>>>>;

template <class V>
std::vector<Result<V>> gathered(World world, const std::vector<SparseVector<V>>& inputs, const SparseReduction& how,
                                std::uint64_t seed) {
  std::vector<Result<V>> results;
  const Ended ended = run_ranks(
      world, static_cast<Rank>(inputs.size()),
      [&](Rank rank) {
        auto begun = make_all_gather(inputs[rank].clone(), how);
        results.push_back(begun.result);
        return begun.request;
      },
      seed);
  EXPECT(ended.all_succeeded());
  return results;
}

template <class V>
void check(World world, const std::vector<SparseVector<V>>& inputs, std::uint64_t seed) {
  const SparseReduction how{.wire = {.indices = kFormats[seed % std::size(kFormats)],
                                      .packs_values = seed / 3 % 2 == 0}};
  const auto results = gathered(world, inputs, how, seed);
  for (const auto& result : results) {
    REQUIRE(result->has_value() && (*result)->size() == inputs.size());
    for (std::size_t source = 0; source < inputs.size(); ++source) {
      EXPECT(same_bits((**result)[source], inputs[source]));
    }
  }
}

template <class V>
std::vector<SparseVector<V>> uniform_vectors(Rank size, std::uint64_t n, double density) {
  Random random(size * 1000 + n);
  std::vector<SparseVector<V>> vectors;
  for (Rank rank = 0; rank < size; ++rank) vectors.push_back(uniform<V>(n, density, random).vector(n));
  return vectors;
}

TEST("every rank gets every rank's entries, zeros too: every world, P, length, density and type") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::uint64_t n : {0UL, 1UL, 63UL, 3000UL}) {
        for (const double density : {0.0, 0.02, 0.5, 1.0}) {
          check(world, uniform_vectors<float>(size, n, density), size);
          if (size > 5) continue;
          check(world, uniform_vectors<double>(size, n, density), size + 1);
          check(world, uniform_vectors<bf16>(size, n, density), size + 2);
          check(world, uniform_vectors<f16>(size, n, density), size);
        }
      }
    }
  }
}

TEST("ranks may hold any number of entries, or the whole vector densely") {
  constexpr std::uint64_t kN = 5000;
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 8U}) {
      Random random(size);
      std::vector<SparseVector<float>> vectors;
      for (Rank rank = 0; rank < size; ++rank) vectors.push_back(uniform<float>(kN, 0.1 * (rank % 3), random).vector(kN));
      check(world, vectors, 1);
      vectors[size / 2] = uniform<float>(kN, 0.3, random).vector(kN);
      vectors[size / 2].to_dense();
      check(world, vectors, 2);
    }
  }
}

TEST("long vectors, in pieces") {
  std::vector<SparseVector<float>> vectors = uniform_vectors<float>(4, 3'000'000, 0.05);
  check(World::simulated, vectors, 1);
  check(World::local, vectors, 2);
}

TEST("rounded values are the same on all ranks, and their error is kept") {
  constexpr std::uint64_t kN = 4000;
  constexpr Rank kRanks = 3;
  for (const World world : kWorlds) {
    for (const ValueEncoding encoding : {ValueEncoding::bf16, ValueEncoding::int8, ValueEncoding::qsgd4, ValueEncoding::codebook2}) {
      Random random(7);
      std::vector<Input<float>> inputs;
      std::vector<std::vector<float>> errors(kRanks, std::vector<float>(kN, 1.0F));
      for (Rank rank = 0; rank < kRanks; ++rank) {
        inputs.push_back(uniform<float>(kN, 0.1, random));
        for (float& value : inputs.back().values) value = static_cast<float>(random.uniform() - 0.5);
      }
      std::vector<Result<float>> results;
      const Ended ended = run_ranks(
          world, kRanks,
          [&](Rank rank) {
            const SparseReduction how{.wire = {.values = encoding, .key = {.seed = 5}}, .residual = errors[rank]};
            auto begun = make_all_gather(inputs[rank].vector(kN), how);
            results.push_back(begun.result);
            return begun.request;
          },
          1);
      EXPECT(ended.all_succeeded());
      for (Rank source = 0; source < kRanks; ++source) {
        const SparseVector<float>& vector = (**results[0])[source];
        for (const auto& result : results) EXPECT(same_bits((**result)[source], vector));
        std::vector<float> expected(kN, 1.0F);
        std::size_t rounded = 0;
        REQUIRE(std::ranges::equal(vector.indices(), inputs[source].indices));
        for (std::size_t i = 0; i < vector.nnz(); ++i) {
          const float lost = inputs[source].values[i] - vector.values()[i];
          expected[vector.indices()[i]] += lost;
          rounded += lost != 0.0F;
        }
        EXPECT(rounded > vector.nnz() / 2);
        for (std::size_t i = 0; i < kN; ++i) EXPECT(std::abs(errors[source][i] - expected[i]) <= 1e-6F);
      }
    }
  }
}

// What lengths take in the messages of an allgather of short ones: 4 bytes each, padded to 8 in each round.
std::uint64_t length_bytes(Rank size, std::uint64_t& rounds) {
  std::uint64_t bytes = 0;
  rounds = 0;
  for (Rank have = 1; have < size; have *= 2, ++rounds) bytes += (std::min(have, size - have) * 4 + 7) / 8 * 8;
  return bytes;
}

TEST("short vectors take log2 P messages, long ones a ring more, and no rank receives more than the others' entries") {
  constexpr std::uint64_t kN = 1'000'000;
  for (const Rank size : {1U, 2U, 5U, 8U}) {
    for (const double density : {0.001, 0.02}) {
      const std::vector<SparseVector<float>> inputs = uniform_vectors<float>(size, kN, density);
      std::uint64_t all = 0;
      for (const auto& input : inputs) all += encoded_size(input.view());
      Simulation simulation(size, {});
      simulation.begin_all([&](Rank rank) { return make_all_gather(inputs[rank].clone(), SparseReduction{}).request; });
      EXPECT(!simulation.run().deadlock);
      std::uint64_t rounds = 0;
      const std::uint64_t lengths = length_bytes(size, rounds);
      for (Rank rank = 0; rank < size; ++rank) {
        const SimCounts& counts = simulation.network().counts(rank);
        const std::uint64_t others = all - encoded_size(inputs[rank].view());
        if (density < 0.01) {
          EXPECT_EQ(counts.messages_sent, rounds);
          EXPECT_EQ(counts.bytes_received, others + lengths);
        } else {  // the first of several pieces has 8 bytes more: the length of the whole
          EXPECT(counts.messages_sent >= rounds + size - 1);
          EXPECT(counts.bytes_received >= others + lengths);
          EXPECT(counts.bytes_received <= others + lengths + 8 * (size - 1));
        }
      }
    }
  }
}

TEST("short and long vectors at once, and just about as long as a short one may be") {
  constexpr std::uint64_t kN = 40'000;
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 7U, 8U}) {
      std::vector<SparseVector<float>> vectors;
      for (Rank rank = 0; rank < size; ++rank) {
        std::vector<std::uint32_t> indices(rank % 3 == 0 ? 4090 + rank : rank % 3 == 1 ? 30'000 : 5);
        std::iota(indices.begin(), indices.end(), rank);
        const std::vector<float> values(indices.size(), static_cast<float>(rank) + 1.0F);
        vectors.push_back(SparseVector<float>::sparse(kN, indices, values));
      }
      check(world, vectors, 1);  // raw32: 32 KiB are 4,092 entries and a header
      check(world, vectors, 2);
    }
  }
}

TEST("counted vectors send what real ones would") {
  constexpr std::uint64_t kN = 1'000'000;
  constexpr Rank kRanks = 4;
  std::vector<SparseVector<float>> inputs = uniform_vectors<float>(kRanks, kN, 0.01);
  Simulation real(kRanks, {});
  real.begin_all([&](Rank rank) { return make_all_gather(inputs[rank].clone(), SparseReduction{}).request; });
  EXPECT(!real.run().deadlock);
  const SizeOnly sizes;
  Simulation counted(kRanks, {});
  std::vector<Result<CountedF32>> results;
  counted.begin_all([&](Rank rank) {
    auto begun = make_all_gather(SparseVector<CountedF32>::sparse(kN, {.own = inputs[rank].nnz()}), SparseReduction{});
    results.push_back(begun.result);
    return begun.request;
  });
  EXPECT(!counted.run().deadlock);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    // But for the lengths that go ahead.
    std::uint64_t rounds = 0;
    const std::uint64_t lengths = length_bytes(kRanks, rounds);
    EXPECT_EQ(counted.network().counts(rank).bytes_sent + lengths, real.network().counts(rank).bytes_sent);
    for (Rank source = 0; source < kRanks; ++source) EXPECT_EQ((**results[rank])[source].nnz(), inputs[source].nnz());
  }
}

// What a damaged rank does among three: sends both others its own bytes, with their length before them.
Task<void> send_damaged(Transport& net, Buffer message) {
  Buffer packed(8 + message.size());
  const std::uint64_t length = message.size();
  std::memcpy(packed.data(), &length, sizeof length);
  std::memcpy(packed.data() + 8, message.data(), message.size());
  const Rank before = (net.rank() + 2) % 3;
  const Rank behind = (net.rank() + 1) % 3;
  co_await net.send(before, 0, packed.bytes());
  co_await net.receive_any_size(behind, 0, 1 << 16);
  co_await net.send(behind, 1, packed.bytes());
  co_await net.receive_any_size(before, 1, 1 << 16);
  co_await net.receive_any_size(behind, 9999, 0);  // never comes
}

TEST("a damaged vector ends the operation on all ranks, and names its sender") {
  constexpr std::uint64_t kN = 300;
  constexpr Rank kDamaged = 1;
  for (int damage = 0; damage < 4; ++damage) {
    Random random(3);
    const SparseVector<float> input = uniform<float>(kN, 0.2, random).vector(kN);
    Buffer message = encode(input.view(), {.indices = IndexFormat::raw32});
    if (damage == 0) message.data()[0] ^= std::byte{1};        // magic
    if (damage == 1) message.truncate(message.size() - 8);     // cut short
    if (damage == 2) message.data()[36] = message.data()[32];  // an index twice, or out of order
    if (damage == 3) message.truncate(message.size() - 4);     // a length that no message has
    std::vector<RequestPtr> requests;
    Simulation simulation(3, {});
    simulation.begin_all([&](Rank rank) {
      auto request = make_all_gather(input.clone(), SparseReduction{}).request;
      if (rank == kDamaged) {
        auto shared = std::make_shared<Buffer>(std::move(message));
        request = std::make_shared<Request>(
            request->call(), [shared](Transport& net) { return send_damaged(net, std::move(*shared)); });
      }
      return requests.emplace_back(std::move(request));
    });
    EXPECT(!simulation.run().deadlock);
    REQUIRE(requests[0]->failure());
    EXPECT_EQ(requests[0]->failure()->peer, kDamaged);
    EXPECT(requests[0]->failure()->reason.find("rank 1 sent damaged sparse vectors") != std::string::npos);
    for (const auto& request : requests) EXPECT(request->failure().has_value());
  }
}

TEST("no rank is through before all have called") {
  for (const World world : kWorlds) {
    for (Rank absent = 0; absent < 4; ++absent) {
      const std::vector<SparseVector<float>> inputs = uniform_vectors<float>(4, 100, 0.2);
      std::vector<Result<float>> results;
      const Ended ended = run_ranks(world, 4, [&](Rank rank) -> RequestPtr {
        if (rank == absent) return nullptr;
        auto begun = make_all_gather(inputs[rank].clone(), SparseReduction{});
        results.push_back(begun.result);
        return begun.request;
      });
      EXPECT(ended.stuck);
      for (const auto& result : results) EXPECT(!result->has_value());
    }
  }
}

}  // namespace
