// Sparse allreduce by split and allgather: right, the same bits on all ranks, few bytes, safe from damaged messages.
#include "testing.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "codec/wire.hpp"
#include "collectives/sparse/auto.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 32, 64};
constexpr World kWorlds[] = {World::simulated, World::local};

template <class V>
struct Sums {
  bool succeeded = false;
  std::vector<std::shared_ptr<std::optional<SparseVector<V>>>> results;
  const SparseVector<V>& of(Rank rank) const { return **results[rank]; }
};

template <class V>
Sums<V> run_sum(World world, const std::vector<Input<V>>& inputs, std::uint64_t n, const SparseReduction& how,
                std::uint64_t seed) {
  Sums<V> sums;
  const auto size = static_cast<Rank>(inputs.size());
  const Ended ended = run_ranks(
      world, size,
      [&](Rank rank) {
        auto sum = make_all_reduce(inputs[rank].vector(n), how);
        sums.results.push_back(sum.result);
        return sum.request;
      },
      seed);
  sums.succeeded = ended.all_succeeded();
  return sums;
}

constexpr Algorithm kAlgorithms[] = {Algorithm::split_allgather, Algorithm::split_dense_allgather, Algorithm::ring,
                                     Algorithm::recursive_doubling, Algorithm::automatic};

template <class V>
void check_way(World world, const std::vector<Input<V>>& inputs, std::uint64_t n, const SparseReduction& how,
               const std::vector<float>& expected, std::uint64_t seed) {
  const auto size = static_cast<Rank>(inputs.size());
  const Sums<V> sums = run_sum(world, inputs, n, how, seed);
  REQUIRE(sums.succeeded);
  for (Rank rank = 0; rank < size; ++rank) EXPECT(same_bits(sums.of(rank), sums.of(0)));
  std::vector<V> dense(n);
  sums.of(0).write_dense(dense, how.reduction);
  EXPECT(as_floats(std::span<const V>(dense)) == expected);

  std::vector<std::vector<V>> outputs(size, std::vector<V>(n, static_cast<V>(-77.0F)));
  const Ended ended = run_ranks(
      world, size,
      [&](Rank rank) {
        return make_all_reduce_into(inputs[rank].vector(n), std::span(outputs[rank]), how);
      },
      seed);
  EXPECT(ended.all_succeeded());
  for (const auto& output : outputs) EXPECT(as_floats(std::span<const V>(output)) == expected);
}

// By every algorithm, each with one of the formats of indices.
template <class V>
void check(World world, const std::vector<Input<V>>& inputs, std::uint64_t n, Reduction reduction, double factor,
           std::uint64_t seed) {
  constexpr IndexFormat kFormats[] = {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed};
  const std::vector<float> expected = dense_result(inputs, n, reduction);
  for (std::size_t way = 0; way < std::size(kAlgorithms); ++way) {
    const SparseReduction how{.reduction = reduction,
                              .switch_factor = factor,
                              .algorithm = kAlgorithms[way],
                              .wire = {.indices = kFormats[(seed + way) % std::size(kFormats)],
                                       .packs_values = seed / 3 % 2 == 0}};
    check_way(world, inputs, n, how, expected, seed);
  }
}

TEST("the sum is exact for every world, P, density and dtype, as a vector and written densely") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      if (TELEGRAD_SANITIZED && size > 8) continue;  // half an hour there, of what fewer ranks do as well
      for (const std::uint64_t n : {0UL, 1UL, 63UL, 1000UL, 5000UL}) {
        if (size > 16 && n > 1000) continue;
        for (const double density : {0.0, 0.01, 0.3, 1.0}) {
          Random random(size * 1000 + n);
          std::vector<Input<float>> inputs;
          std::vector<Input<bf16>> halves;
          for (Rank rank = 0; rank < size; ++rank) {
            inputs.push_back(uniform<float>(n, density, random));
            halves.push_back(uniform<bf16>(n, density, random));
          }
          check(world, inputs, n, Reduction::sum, 1.0, size);
          check(world, halves, n, Reduction::avg, 1.0, size + 1);
        }
      }
    }
  }
}

// Of all 64 bits, compared bit for bit with arithmetic on one rank.
void expect_any_integers(World world, Rank size, double density, const SparseReduction& how) {
  constexpr std::uint64_t kRange = 900;
  constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
  Random random(size);
  const auto combined = [&](std::uint64_t a, std::uint64_t b) {
    const std::uint64_t flip = how.is_unsigned ? 0 : kSign;
    switch (how.reduction) {
      case Reduction::min: return std::min(a ^ flip, b ^ flip) ^ flip;
      case Reduction::max: return std::max(a ^ flip, b ^ flip) ^ flip;
      case Reduction::prod: return a * b;
      default: return a + b;
    }
  };
  const std::uint64_t highest = how.is_unsigned ? ~std::uint64_t{0} : kSign - 1;
  const std::uint64_t none = how.reduction == Reduction::prod  ? 1
                             : how.reduction == Reduction::min ? highest
                             : how.reduction == Reduction::max ? ~highest
                                                               : 0;
  std::vector<std::uint64_t> expected(kRange, none);
  std::vector<Input<std::int64_t>> inputs(size);
  for (auto& input : inputs) {
    for (std::uint32_t i = 0; i < kRange; ++i) {
      if (random.uniform() >= density) continue;
      const std::uint64_t value = random.below(std::uint64_t{1} << 32) << 32 | random.below(std::uint64_t{1} << 32);
      input.indices.push_back(i);
      input.values.push_back(static_cast<std::int64_t>(value));
      expected[i] = combined(expected[i], value);
    }
  }
  const Sums<std::int64_t> sums = run_sum(world, inputs, kRange, how, size);
  REQUIRE(sums.succeeded);
  const auto same = [&](std::uint32_t index, std::int64_t value) { return static_cast<std::uint64_t>(value) == expected[index]; };
  for (Rank rank = 0; rank < size; ++rank) {
    const SparseVector<std::int64_t>& sum = sums.of(rank);
    EXPECT(same_bits(sum, sums.of(0)));
    for (std::uint32_t i = 0; i < sum.nnz(); ++i) EXPECT(same(sum.is_dense() ? i : sum.indices()[i], sum.values()[i]));
  }
  std::vector<std::vector<std::int64_t>> outputs(size, std::vector<std::int64_t>(kRange, 7));
  const Ended ended = run_ranks(
      world, size, [&](Rank rank) { return make_all_reduce_into(inputs[rank].vector(kRange), std::span(outputs[rank]), how); },
      size);
  EXPECT(ended.all_succeeded());
  for (const auto& output : outputs) {
    for (std::uint32_t i = 0; i < kRange; ++i) EXPECT(same(i, output[i]));
  }
}

TEST("every reduction of every dtype, with the neutral element where no rank has an entry") {
  constexpr Reduction kReductions[] = {Reduction::sum, Reduction::avg, Reduction::prod,
                                       Reduction::min, Reduction::max, Reduction::max_abs};
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U, 8U}) {
      for (const double density : {0.02, 0.5}) {  // a sparse result and a dense one
        for (const Reduction reduction : kReductions) {
          const auto run = [&]<class V>(V) {
            Random random(size);
            std::vector<Input<V>> inputs;
            for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<V>(700, density, random));
            check(world, inputs, 700, reduction, 1.0, size);
          };
          run(float{});
          run(double{});
          run(bf16{});
          run(f16{});
          if (reduction == Reduction::avg) continue;
          run(std::int32_t{});
          run(std::int64_t{});
        }
      }
    }
  }
}

TEST("integers wrap round, and of unsigned ones minima and maxima are those of unsigned order") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U}) {
      for (const double density : {0.02, 0.7}) {
        for (const Reduction reduction : {Reduction::sum, Reduction::prod, Reduction::min, Reduction::max}) {
          for (const bool is_unsigned : {false, true}) {
            for (const Algorithm algorithm : kAlgorithms) {
              expect_any_integers(world, size, density,
                                  {.reduction = reduction, .algorithm = algorithm, .is_unsigned = is_unsigned});
            }
          }
        }
      }
    }
  }
}

TEST("ranks may hold any number of entries: none, one rank all, all in one slice, all the same") {
  constexpr std::uint64_t kN = 4000;
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      Random random(size);
      std::vector<Input<float>> empty(size);
      check(world, empty, kN, Reduction::sum, 1.0, 1);

      std::vector<Input<float>> one_rank(size);
      one_rank[size / 2] = uniform<float>(kN, 0.2, random);
      check(world, one_rank, kN, Reduction::avg, 1.0, 2);

      std::vector<Input<float>> one_slice(size);
      for (auto& input : one_slice) {
        for (std::uint32_t i = 100; i < 100 + kN / size / 2; ++i) {
          input.indices.push_back(i);
          input.values.push_back(2.0F);
        }
      }
      check(world, one_slice, kN, Reduction::sum, 1.0, 3);

      const std::vector<Input<float>> same(size, uniform<float>(kN, 0.1, random));
      check(world, same, kN, Reduction::sum, 1.0, 4);
    }
  }
}

TEST("the switching factor moves the switch to dense, not the sum") {
  constexpr std::uint64_t kN = 1000;
  Random random(1);
  std::vector<Input<float>> inputs;
  for (Rank rank = 0; rank < 5; ++rank) inputs.push_back(uniform<float>(kN, 0.05, random));
  for (const double factor : {0.0, 0.1, 1.0, 100.0}) {
    check(World::simulated, inputs, kN, Reduction::sum, factor, 1);
    const Sums<float> sums = run_sum(World::simulated, inputs, kN, {.reduction = Reduction::sum, .switch_factor = factor}, 1);
    EXPECT_EQ(sums.of(3).is_dense(), factor < 0.5);
  }
}

TEST("a long sum, reduced in parts") {
  constexpr std::uint64_t kN = 3'000'000;
  Random random(9);
  std::vector<Input<float>> inputs;
  for (Rank rank = 0; rank < 3; ++rank) inputs.push_back(uniform<float>(kN, 0.04 * (1 + rank), random));
  check(World::simulated, inputs, kN, Reduction::avg, 1.0, 1);
  inputs[1] = uniform<float>(kN, 0.9, random);
  check(World::local, inputs, kN, Reduction::sum, 1.0, 1);
}

TEST("slices so long that ranks tell each other ahead what theirs hold") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U}) {
      const std::uint64_t n = std::uint64_t{270'000} * size;
      for (const double density : {0.0, 0.00001, 0.02}) {
        Random random(size);
        std::vector<Input<float>> inputs;
        std::vector<Input<bf16>> halves;
        for (Rank rank = 0; rank < size; ++rank) {
          inputs.push_back(uniform<float>(n, rank == 1 ? 4 * density : density, random));
          halves.push_back(uniform<bf16>(n, density, random));
        }
        check(world, inputs, n, Reduction::sum, 1.0, size);
        check(world, halves, n, Reduction::max, density < 0.01 ? 1.0 : 0.05, size);
      }
    }
  }
}

TEST("any floats: near the sum, and the same bits on all ranks under any schedule") {
  constexpr std::uint64_t kN = 2000;
  for (const Rank size : {2U, 3U, 8U, 13U}) {
    Random random(size);
    std::vector<Input<float>> inputs;
    for (Rank rank = 0; rank < size; ++rank) {
      inputs.push_back(uniform<float>(kN, 0.3, random));
      for (float& value : inputs.back().values) {
        value = static_cast<float>((random.uniform() - 0.5) * std::exp2(static_cast<double>(random.below(30))));
      }
    }
    std::vector<double> sum(kN);
    std::vector<double> magnitude(kN);
    for (const auto& input : inputs) {
      for (std::size_t i = 0; i < input.indices.size(); ++i) {
        sum[input.indices[i]] += static_cast<double>(input.values[i]);
        magnitude[input.indices[i]] += std::abs(static_cast<double>(input.values[i]));
      }
    }
    std::optional<SparseVector<float>> first;
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      const Sums<float> sums = run_sum(World::simulated, inputs, kN, {.reduction = Reduction::sum, .switch_factor = 1.0}, seed);
      REQUIRE(sums.succeeded);
      if (!first) first = sums.of(0).clone();
      for (Rank rank = 0; rank < size; ++rank) EXPECT(same_bits(sums.of(rank), *first));
    }
    std::vector<float> dense(kN);
    first->write_dense(dense);
    for (std::size_t i = 0; i < kN; ++i) {
      EXPECT(std::abs(static_cast<double>(dense[i]) - sum[i]) <= 0x1p-24 * size * magnitude[i]);
    }
  }
}

TEST("no rank sends or receives more than the theory says") {
  constexpr std::uint64_t kN = 200'000;
  for (const Rank size : {2U, 4U, 8U, 16U}) {
    Random random(size);
    std::vector<Input<float>> inputs;
    std::vector<bool> in_union(kN);
    for (Rank rank = 0; rank < size; ++rank) {
      inputs.push_back(uniform<float>(kN, 0.01, random));
      for (const std::uint32_t index : inputs.back().indices) in_union[index] = true;
    }
    const auto k = 0.01 * kN;
    const auto sum_entries = static_cast<double>(std::ranges::count(in_union, true));
    Simulation simulation(size, {});
    simulation.begin_all([&](Rank rank) {
      return make_all_reduce(inputs[rank].vector(kN), SparseReduction{}).request;
    });
    EXPECT(!simulation.run().deadlock);
    const double entries = (k + sum_entries) * (size - 1) / size;
    for (Rank rank = 0; rank < size; ++rank) {
      const SimCounts& counts = simulation.network().counts(rank);
      const double overhead = 2.0 * (size - 1) * 64.0;  // headers, block counts, padding
      // At most 6 bytes an entry: 2 of index, 4 of value. The shares of uniform entries differ by a few percent.
      EXPECT(static_cast<double>(counts.bytes_sent) <= 1.1 * 6.0 * entries + overhead);
      EXPECT(static_cast<double>(counts.bytes_received) <= 1.1 * 6.0 * entries + overhead);
      EXPECT(static_cast<double>(counts.bytes_sent) >= 0.9 * 6.0 * entries);
      EXPECT_EQ(counts.messages_sent, 2 * (size - 1));
    }
  }
}

// Values packed and slices long: messages leave out what their receiver gave.
constexpr WireFormat kLeavesOut{.indices = IndexFormat::packed, .packs_values = true};

template <class V>
void check_leaving_out(World world, Rank size, std::uint64_t n, double density, Reduction reduction) {
  Random random(size);
  std::vector<Input<V>> inputs;
  for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<V>(n, rank == 1 ? 6 * density : density, random));
  if (size > 3) {
    inputs[3] = inputs[0];  // what two gave alike is no longer what either gave
    inputs[2] = uniform<V>(n, 0.0, random);
  }
  if (size > 4) inputs[4] = uniform<V>(n, 0.8, random);  // whose shares go as vectors
  const SparseReduction how{.reduction = reduction, .wire = kLeavesOut};
  check_way(world, inputs, n, how, dense_result(inputs, n, reduction), size);
}

TEST("few ranks are not sent the values that they gave: every sum is right, also where some hold the same, much or nothing") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U, 8U}) {
      for (const Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::max}) {
        const double density = reduction == Reduction::avg ? 0.02 : 0.003;
        check_leaving_out<float>(world, size, std::uint64_t{140'000} * size, density, reduction);
        if (size < 4) check_leaving_out<bf16>(world, size, std::uint64_t{180'000} * size, density, reduction);
      }
    }
  }
}

TEST("of values, few ranks receive what they do not have, and hardly more: K - k") {
  for (const Rank size : {2U, 4U, 7U, 8U}) {
    const std::uint64_t n = std::uint64_t{140'000} * size;
    Random random(size);
    std::vector<Input<float>> inputs;
    std::vector<std::size_t> in_union(n);
    for (Rank rank = 0; rank < size; ++rank) {
      inputs.push_back(uniform<float>(n, 0.01, random));
      // Fractions at random, so that only exponents can be packed.
      for (float& value : inputs.back().values) value = static_cast<float>(1.0 + random.uniform());
      for (const std::uint32_t index : inputs.back().indices) ++in_union[index];
    }
    const auto sum_entries = static_cast<double>(n - static_cast<std::uint64_t>(std::ranges::count(in_union, 0U)));
    Simulation simulation(size, {});
    simulation.begin_all([&](Rank rank) {
      const Reduction reduction = size == 4 ? Reduction::avg : Reduction::sum;
      return make_all_reduce(inputs[rank].vector(n), SparseReduction{.reduction = reduction, .wire = kLeavesOut}).request;
    });
    EXPECT(!simulation.run().deadlock);
    for (Rank rank = 0; rank < size; ++rank) {
      const auto k = static_cast<double>(inputs[rank].indices.size());
      const auto all_but_one = (size - 1.0) / size;
      // Indices of shares and of sums, at most 9 and 8.6 bits each, a bit for each own entry; 3 bytes of a value.
      const double index_bytes = all_but_one * (9.0 * k + 8.6 * sum_entries) / 8.0 + k / 8.0;
      const double value_bytes = 3.02 * (sum_entries - k);
      const double overhead = 2.0 * (size - 1) * 160.0;
      // Where several ranks have an index, its sum comes to those that gave addends, too.
      double shared = 0.0;
      for (const std::uint32_t index : inputs[rank].indices) shared += in_union[index] > 1 ? 1.0 : 0.0;
      const auto received = static_cast<double>(simulation.network().counts(rank).bytes_received);
      EXPECT(received <= 1.02 * (index_bytes + value_bytes + 3.02 * 2.0 * shared) + overhead);
    }
  }
}

TEST("a dense output stays untouched as long as one rank has not called") {
  constexpr std::uint64_t kN = 500;
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 5U, 8U}) {
      for (Rank absent = 0; absent < size; ++absent) {
        Random random(absent);
        const Input<float> input = uniform<float>(kN, 0.1, random);
        std::vector<std::vector<float>> outputs(size, std::vector<float>(kN, -77.0F));
        const Ended ended = run_ranks(world, size, [&](Rank rank) -> RequestPtr {
          if (rank == absent) return nullptr;
          return make_all_reduce_into(input.vector(kN), std::span(outputs[rank]), {});
        });
        EXPECT(ended.stuck);
        for (const auto& output : outputs) EXPECT(output == std::vector<float>(kN, -77.0F));
      }
    }
  }
}

// What a damaged rank does: the protocol of the split, with its own bytes.
Task<void> send_damaged(Transport& net, Buffer message) {
  for (Rank to = 0; to < net.size(); ++to) {
    if (to != net.rank()) co_await net.send(to, 0, message.bytes());
  }
  co_await net.receive_any_size(0, 9999, 0);  // never comes
}

TEST("damaged entries end the operation on all ranks, and name their sender") {
  constexpr std::uint64_t kN = 300;
  constexpr Rank kDamaged = 2;
  for (int damage = 0; damage < 3; ++damage) {
    Random random(3);
    const Input<float> input = uniform<float>(kN, 0.2, random);
    Buffer message = encode(input.vector(kN).slice(0, 100));
    if (damage == 0) message.data()[0] ^= std::byte{1};             // magic
    if (damage == 1) message.truncate(message.size() - 8);          // cut short
    if (damage == 2) message.data()[40] = message.data()[32];       // an index twice, or out of order
    std::vector<RequestPtr> requests;
    Simulation simulation(3, {});
    simulation.begin_all([&](Rank rank) {
      auto request = make_all_reduce(input.vector(kN), SparseReduction{}).request;
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
    EXPECT(requests[0]->failure()->reason.find("rank 2 sent damaged entries") != std::string::npos);
    for (const auto& request : requests) EXPECT(request->failure().has_value());
  }
}

TEST("a share longer than any encoding of its slice is refused") {
  std::vector<RequestPtr> requests;
  Simulation simulation(2, {});
  simulation.begin_all([&](Rank rank) {
    auto request = make_all_reduce(SparseVector<float>(100), SparseReduction{}).request;
    if (rank == 1) {
      request = std::make_shared<Request>(request->call(),
                                          [](Transport& net) { return send_damaged(net, Buffer(32 + 50 * 8 + 17)); });
    }
    return requests.emplace_back(std::move(request));
  });
  EXPECT(!simulation.run().deadlock);
  REQUIRE(requests[0]->failure());
  EXPECT_EQ(requests[0]->failure()->peer, 1);
  EXPECT(requests[0]->failure()->reason.find("at most 448") != std::string::npos);
}

TEST("a negative switching factor is that rank's failure, before anything is sent") {
  const auto make = [](Rank) { return make_all_reduce(SparseVector<float>(10), SparseReduction{.switch_factor = -1.0}).request; };
  const Ended ended = run_ranks(World::simulated, 2, make);
  for (const auto& request : ended.requests) REQUIRE(request->failure());
}

TEST("only so many messages are under way, and a rank that has not called holds nobody up before its turn") {
  constexpr Rank kRanks = 200;
  constexpr Rank kAbsent = 5;
  constexpr std::uint64_t kWindow = 64;
  Simulation simulation(kRanks, {});
  for (Rank rank = 0; rank < kRanks; ++rank) {
    if (rank == kAbsent) continue;
    simulation.begin(rank, make_all_reduce(SparseVector<float>(1000), SparseReduction{}).request);
  }
  EXPECT(simulation.run().deadlock);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    if (rank == kAbsent) continue;
    const Rank before_it = (kAbsent + kRanks - rank - 1) % kRanks;  // ranks to which a share leaves earlier
    const std::uint64_t sent = simulation.network().counts(rank).messages_sent;
    EXPECT(sent > before_it);
    EXPECT(sent <= std::min<std::uint64_t>(before_it + kWindow, kRanks - 1));
  }
}

TEST("256 ranks run in about a second of real time") {
  constexpr Rank kRanks = 256;
  constexpr std::uint64_t kN = 100'000;
  Random random(5);
  std::vector<Input<float>> inputs;
  for (Rank rank = 0; rank < kRanks; ++rank) inputs.push_back(uniform<float>(kN, 0.01, random));
  Simulation simulation(kRanks, {});
  std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
  simulation.begin_all([&](Rank rank) {
    auto sum = make_all_reduce(inputs[rank].vector(kN), SparseReduction{});
    results.push_back(sum.result);
    return sum.request;
  });
  const auto start = std::chrono::steady_clock::now();
  EXPECT(!simulation.run().deadlock);
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  std::cout << "  " << simulation.network().events() << " events in " << spent.count() << " s" << std::endl;
  EXPECT(spent.count() < 30.0);  // a hang or a quadratic loop, not a slow machine
  std::vector<float> dense(kN);
  (*results[77])->write_dense(dense);
  EXPECT(dense == dense_result(inputs, kN, Reduction::sum));
}

}  // namespace
