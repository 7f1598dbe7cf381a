// Every dense collective, on every number of ranks, in virtual time and in process: right, the same bits everywhere.
#include "testing.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/dense/allreduce.hpp"
#include "collectives/dense/allreduce_direct.hpp"
#include "collectives/dense/allreduce_rabenseifner.hpp"
#include "collectives/dense/allreduce_recursive_doubling.hpp"
#include "collectives/dense/allreduce_ring.hpp"
#include "collectives/dense/barrier.hpp"
#include "collectives/dense/broadcast.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/dense/reduce_in_order.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 32, 64};
constexpr std::size_t kCounts[] = {0, 1, 63, 1000, 4099};
constexpr World kWorlds[] = {World::simulated, World::local, World::memory};

// A ring in one piece, one in many small segments, recursive doubling, halving with doubling, and all with all.
enum class Way { ring, segmented_ring, recursive_doubling, rabenseifner, direct };
constexpr Way kWays[] = {Way::ring, Way::segmented_ring, Way::recursive_doubling, Way::rabenseifner, Way::direct};

Task<void> run_allreduce(Way way, Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  switch (way) {
    case Way::ring: return allreduce_ring(net, dtype, reduction, input, output);
    case Way::segmented_ring:
      return allreduce_ring(net, dtype, reduction, input, output, {.message_bytes = 64, .lanes = 3});
    case Way::rabenseifner: return allreduce_rabenseifner(net, dtype, reduction, input, output);
    case Way::direct:
      if (net.size() == 1) break;
      return allreduce_direct(net, dtype, reduction, input, output);
    case Way::recursive_doubling: break;
  }
  return allreduce_recursive_doubling(net, dtype, reduction, input, output);
}

template <class V>
struct Vectors {
  std::vector<std::vector<V>> inputs;
  std::vector<std::vector<V>> outputs;

  // `value(rank, i)` everywhere; outputs are full of a mark that no sum has.
  template <class Value>
  Vectors(Rank size, std::size_t count, bool in_place, Value value) : inputs(size) {
    for (Rank rank = 0; rank < size; ++rank) {
      for (std::size_t i = 0; i < count; ++i) inputs[rank].push_back(static_cast<V>(value(rank, i)));
    }
    if (!in_place) outputs.assign(size, std::vector<V>(count, static_cast<V>(kMark)));
  }
  ConstBytes input(Rank rank) const { return std::as_bytes(std::span(inputs[rank])); }
  Bytes output(Rank rank) { return std::as_writable_bytes(std::span(result(rank))); }
  std::vector<V>& result(Rank rank) { return outputs.empty() ? inputs[rank] : outputs[rank]; }

  static constexpr float kMark = -12345.0F;
};

template <class V>
RequestPtr allreduce_request(Way way, Vectors<V>& vectors, Reduction reduction, Rank rank) {
  const Call call{.operation = Operation::allreduce, .dtype = dtype_of<V>, .reduction = reduction};
  return std::make_shared<Request>(call, [&vectors, way, reduction, rank](Transport& net) {
    return run_allreduce(way, net, dtype_of<V>, reduction, vectors.input(rank), vectors.output(rank));
  });
}

// Small are products too.
float small_integer(Reduction reduction, Rank rank, std::size_t i) {
  if (reduction == Reduction::prod) return rank % 16 == i % 16 ? 2.0F : (rank + i) % 3 == 0 ? -1.0F : 1.0F;
  return static_cast<float>((rank * 5 + i * 3) % 7) - 3.0F;
}

// Exact also in bf16: sums of integers below 256.
template <class V>
V expected_result(Reduction reduction, Rank size, std::size_t i) {
  float result = small_integer(reduction, 0, i);
  for (Rank rank = 1; rank < size; ++rank) {
    const float value = small_integer(reduction, rank, i);
    switch (reduction) {
      case Reduction::prod: result *= value; break;
      case Reduction::min: result = std::min(result, value); break;
      case Reduction::max: result = std::max(result, value); break;
      case Reduction::max_abs:
        if (std::abs(result) <= std::abs(value)) result = result == -value ? std::abs(value) : value;
        break;
      default: result += value;
    }
  }
  if (reduction != Reduction::avg) return static_cast<V>(result);
  using Wide = std::conditional_t<std::is_same_v<V, double>, double, float>;
  return static_cast<V>(static_cast<Wide>(result) * (Wide{1} / static_cast<Wide>(size)));
}

template <class V>
void check_integers(Way way, World world, Rank size, std::size_t count, Reduction reduction, bool in_place,
                    std::uint64_t seed) {
  const auto value = [reduction](Rank rank, std::size_t i) { return small_integer(reduction, rank, i); };
  std::vector<V> expected;
  for (std::size_t i = 0; i < count; ++i) expected.push_back(expected_result<V>(reduction, size, i));
  Vectors<V> vectors(size, count, in_place, value);
  const auto make = [&](Rank rank) { return allreduce_request(way, vectors, reduction, rank); };
  EXPECT(run_ranks(world, size, make, seed).all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) {
    if (vectors.result(rank) == expected) continue;
    EXPECT_EQ(count, 0);
    testing::fail(__FILE__, __LINE__, "P=" + std::to_string(size) + " rank " + std::to_string(rank) + " way " +
                                          std::to_string(static_cast<int>(way)));
    return;
  }
  if (in_place) return;
  for (Rank rank = 0; rank < size; ++rank) {  // inputs stay as they were
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT(static_cast<float>(vectors.inputs[rank][i]) == value(rank, i));
    }
  }
}

TEST("allreduce of integers is exact: every way, world, P, length, dtype, sum and mean, in place and not") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t count : kCounts) {
        if (size >= 32 && count > 1000) continue;
        for (const Way way : kWays) {
          if (way == Way::segmented_ring && size * count > 60'000) continue;
          check_integers<float>(way, world, size, count, Reduction::sum, true, size);
          check_integers<float>(way, world, size, count, Reduction::avg, false, size + 1);
          check_integers<bf16>(way, world, size, count, Reduction::sum, false, size + 2);
          check_integers<bf16>(way, world, size, count, Reduction::avg, true, size + 3);
        }
      }
    }
  }
}

// A vector whose elements are written or added when it is asked for them, some at a time, and which counts how often it is.
class Maker final : public InputMaker {
 public:
  Maker(Transport& net, std::size_t count, Rank rank) : net_(net), rank_(rank), asked_(count) {}

  Task<void> make(Range elements, Bytes out) override { return reduce(elements, {}, out); }
  Task<void> reduce(Range elements, ConstBytes partial, Bytes out) override {
    EXPECT_EQ(out.size(), elements.size() * sizeof(float));
    const auto* const before = reinterpret_cast<const float*>(partial.data());
    auto* const result = reinterpret_cast<float*>(out.data());
    for (std::size_t begin = 0; begin < elements.size(); begin += kAtOnce) {
      co_await net_.compute(kAtOnce * sizeof(float), [&] {
        for (std::size_t i = begin; i < std::min(begin + kAtOnce, elements.size()); ++i) {
          const float own = small_integer(Reduction::sum, rank_, elements.begin + i);
          result[i] = partial.empty() ? own : before[i] + own;
          ++asked_[elements.begin + i];
        }
      });
    }
  }
  bool asked_once_for_all() const { return std::ranges::count(asked_, 1) == std::ssize(asked_); }

 private:
  static constexpr std::size_t kAtOnce = 50;

  Transport& net_;
  const Rank rank_;
  std::vector<int> asked_;
};

TEST("an input that is held otherwise is asked for once, and for nothing else, and a mean of it is divided") {
  for (const World world : kWorlds) {
    for (const Rank size : {Rank{1}, Rank{2}, Rank{3}, Rank{8}}) {
      for (const std::size_t count : {std::size_t{5}, std::size_t{1000}, std::size_t{4099}}) {
        for (const Algorithm algorithm : kAllreduceAlgorithms) {
          for (const bool segmented : {false, true}) {
            if (segmented && algorithm != Algorithm::ring) continue;
            const Reduction reduction = segmented || size == 8 ? Reduction::avg : Reduction::sum;
            Vectors<float> vectors(size, count, true, [](Rank, std::size_t) { return Vectors<float>::kMark; });
            std::vector<char> once(size);
            const auto ended = run_ranks(world, size, [&](Rank rank) {
              const Call call{.operation = Operation::allreduce, .dtype = DType::f32, .reduction = reduction};
              return std::make_shared<Request>(call, [&, rank](Transport& net) -> Task<void> {
                Maker maker(net, count, rank);
                const Bytes whole = vectors.output(rank);
                const LaneTuning lanes{.message_bytes = 64, .lanes = 3};
                if (segmented) {
                  co_await allreduce_ring(net, DType::f32, reduction, whole, whole, lanes, &maker);
                } else {
                  co_await allreduce(net, algorithm, DType::f32, reduction, whole, whole, &maker);
                }
                once[rank] = maker.asked_once_for_all() ? 1 : 0;
              });
            });
            EXPECT(ended.all_succeeded());
            EXPECT_EQ(std::ranges::count(once, 1), std::ptrdiff_t{size});
            for (Rank rank = 0; rank < size; ++rank) {
              for (std::size_t i = 0; i < count; ++i) {
                EXPECT_EQ(vectors.result(rank)[i], expected_result<float>(reduction, size, i));
              }
            }
          }
        }
      }
    }
  }
}

TEST("every reduction of every dtype is exact on integers") {
  constexpr Reduction kReductions[] = {Reduction::sum, Reduction::avg, Reduction::prod,
                                       Reduction::min, Reduction::max, Reduction::max_abs};
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 7U, 13U, 64U}) {
      for (const Way way : kWays) {
        for (const Reduction reduction : kReductions) {
          const auto check = [&]<class V>(V) {
            check_integers<V>(way, world, size, 333, reduction, size % 2 == 0, size);
          };
          check(float{});
          check(double{});
          check(f16{});
          check(bf16{});
          if (reduction == Reduction::avg) continue;  // floats only
          check(std::int32_t{});
          check(std::int64_t{});
        }
      }
    }
  }
}

TEST("a long allreduce, in the segments, lanes and pieces of the default tuning, is exact") {
  for (const World world : kWorlds) {
    for (const Way way : {Way::ring, Way::recursive_doubling, Way::rabenseifner}) {
      for (const Rank size : {2U, 3U, 4U, 5U}) {
        check_integers<float>(way, world, size, 1'500'007, Reduction::sum, true, size);
        check_integers<bf16>(way, world, size, 1'000'007, Reduction::avg, false, size);
      }
    }
  }
}

template <class V>
void check_bits(Way way, Rank size, std::uint64_t seed) {
  Random random(seed);
  Vectors<V> vectors(size, 777, true, [&](Rank, std::size_t) {
    return static_cast<float>((random.uniform() - 0.5) * std::exp2(static_cast<double>(random.below(30))));
  });
  std::vector<double> sums(777);
  std::vector<double> magnitudes(777);
  for (const auto& input : vectors.inputs) {
    for (std::size_t i = 0; i < input.size(); ++i) {
      sums[i] += static_cast<double>(static_cast<float>(input[i]));
      magnitudes[i] += std::abs(static_cast<double>(static_cast<float>(input[i])));
    }
  }
  const auto make = [&](Rank rank) { return allreduce_request(way, vectors, Reduction::sum, rank); };
  EXPECT(run_ranks(World::simulated, size, make, seed).all_succeeded());
  for (Rank rank = 1; rank < size; ++rank) {
    EXPECT(std::memcmp(vectors.inputs[rank].data(), vectors.inputs[0].data(), 777 * sizeof(V)) == 0);
  }
  const double epsilon = sizeof(V) == 4 ? 0x1p-24 : 0x1p-8;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto sum = static_cast<double>(static_cast<float>(vectors.inputs[0][i]));
    EXPECT(std::abs(sum - sums[i]) <= epsilon * static_cast<double>(size) * magnitudes[i]);
  }
}

TEST("allreduce of any floats: near the sum, and the same bits on all ranks under any schedule") {
  for (const Way way : kWays) {
    for (const Rank size : kSizes) {
      for (std::uint64_t seed = 0; seed < 5; ++seed) {
        check_bits<float>(way, size, seed);
        check_bits<bf16>(way, size, seed);
      }
    }
  }
}

TEST("NaN and infinity anywhere reach every rank with the same bits") {
  for (const Way way : kWays) {
    for (const Rank size : {2U, 3U, 5U, 8U}) {
      Vectors<float> vectors(size, 10, true, [&](Rank rank, std::size_t i) {
        if (i < 3) return std::bit_cast<float>(0x7fc00000U + rank);  // NaNs with payloads
        if (i == 5) return rank % 2 ? HUGE_VALF : -HUGE_VALF;
        return i == 7 && rank == 1 ? HUGE_VALF : 1.0F;
      });
      const auto make = [&](Rank rank) { return allreduce_request(way, vectors, Reduction::sum, rank); };
      EXPECT(run_ranks(World::simulated, size, make).all_succeeded());
      for (Rank rank = 0; rank < size; ++rank) {
        EXPECT(std::isnan(vectors.inputs[rank][0]) && std::isnan(vectors.inputs[rank][5]));
        EXPECT_EQ(vectors.inputs[rank][7], HUGE_VALF);
        EXPECT(std::memcmp(vectors.inputs[rank].data(), vectors.inputs[0].data(), 40) == 0);
      }
    }
  }
}

TEST("the caller's buffers stay untouched as long as one rank has not called") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 4U, 5U, 8U}) {
      for (Rank absent = 0; absent < size; ++absent) {
        for (const Way way : kWays) {
          for (const bool in_place : {true, false}) {
            Vectors<float> vectors(size, 200, in_place, [](Rank rank, std::size_t i) {
              return small_integer(Reduction::sum, rank, i);
            });
            const Vectors<float> before = vectors;
            const Ended ended = run_ranks(world, size, [&](Rank rank) {
              return rank == absent ? nullptr : allreduce_request(way, vectors, Reduction::sum, rank);
            });
            EXPECT(ended.stuck);
            EXPECT(vectors.inputs == before.inputs && vectors.outputs == before.outputs);
          }
        }
        std::vector<std::vector<int>> all(size, std::vector<int>(50 * size, -1));
        const auto untouched = all;
        const std::vector<int> mine(50, 7);
        const Ended ended = run_ranks(world, size, [&](Rank rank) -> RequestPtr {
          if (rank == absent) return nullptr;
          return std::make_shared<Request>(Call{.operation = Operation::allgather}, [&, rank](Transport& net) {
            return allgather(net, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all[rank])),
                             Partition(size * (mine.size() * sizeof(int)), size));
          });
        });
        EXPECT(ended.stuck);
        EXPECT(all == untouched);
      }
    }
  }
}

TEST("allgather puts every rank's block in its place, in place and not, also of no bytes") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t block : {0UL, 1UL, 63UL, 5000UL}) {
        const bool in_place = size % 2 == 0;
        std::vector<std::uint32_t> expected;
        std::vector<std::vector<std::uint32_t>> mine(size);
        for (std::uint32_t rank = 0; rank < size; ++rank) {
          for (std::uint32_t i = 0; i < block; ++i) mine[rank].push_back(rank * 100'000 + i);
          expected.insert(expected.end(), mine[rank].begin(), mine[rank].end());
        }
        std::vector<std::vector<std::uint32_t>> all(size, std::vector<std::uint32_t>(size * block));
        const auto make = [&](Rank rank) {
          if (in_place) std::ranges::copy(mine[rank], all[rank].begin() + static_cast<std::ptrdiff_t>(rank * block));
          return std::make_shared<Request>(Call{.operation = Operation::allgather}, [&, rank](Transport& net) {
            const Bytes into = std::as_writable_bytes(std::span(all[rank]));
            const ConstBytes from = in_place ? ConstBytes(into.subspan(4 * rank * block, 4 * block))
                                             : std::as_bytes(std::span(mine[rank]));
            return allgather(net, from, into, Partition(size * (4 * block), size));
          });
        };
        EXPECT(run_ranks(world, size, make, size).all_succeeded());
        for (const auto& result : all) EXPECT(result == expected);
      }
    }
  }
}

TEST("broadcast gives the root's data to every rank, from every root") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (Rank root = 0; root < size; root += size > 16 ? 11 : 1) {
        for (const std::size_t count : {0UL, 1UL, 1000UL, 70'000UL}) {
          if (count > 1000 && (root != 0 || size > 16)) continue;
          std::vector<std::vector<std::byte>> data(size, std::vector<std::byte>(count));
          data[root].assign(count, std::byte{0x5a});
          const auto make = [&](Rank rank) {
            return std::make_shared<Request>(Call{.operation = Operation::broadcast, .root = root},
                                             [&, rank](Transport& net) { return broadcast(net, root, data[rank]); });
          };
          EXPECT(run_ranks(world, size, make, root).all_succeeded());
          for (const auto& received : data) EXPECT(received == data[root]);
        }
      }
    }
  }
}

TEST("a broadcast of another length than the root's is an error") {
  std::vector<std::byte> longer(9);
  std::vector<std::byte> shorter(8);
  const auto make = [&](Rank rank) {
    return std::make_shared<Request>(Call{.operation = Operation::broadcast}, [&, rank](Transport& net) {
      return broadcast(net, 0, rank == 0 ? longer : shorter);
    });
  };
  const Ended ended = run_ranks(World::simulated, 2, make);
  REQUIRE(ended.requests[1]->failure());
  EXPECT(ended.requests[1]->failure()->reason.find("9 bytes instead of 8") != std::string::npos);
}

TEST("a reduction of the caller's own is evaluated from rank 0 to the last, on all ranks alike") {
  struct Map {  // x -> factor · x + shift: maps compose, and do not commute
    std::uint32_t factor, shift;
    bool operator==(const Map&) const = default;
  };
  const api::CustomReduction<Map> compose("compose", Map{1, 0}, [](const Map& first, const Map& then) {
    return Map{first.factor * then.factor, first.shift * then.factor + then.shift};
  });
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t count : {0UL, 1UL, 63UL, 1000UL}) {
        std::vector<std::vector<Map>> in(size), all(size, std::vector<Map>(count)), root = all, own(size);
        for (Rank rank = 0; rank < size; ++rank) {
          for (std::uint32_t i = 0; i < count; ++i) in[rank].push_back({2 * (rank + i) + 1, rank * 7 + i});
        }
        std::vector<Map> expected(count);
        for (std::size_t i = 0; i < count; ++i) {
          expected[i] = in[0][i];
          for (Rank rank = 1; rank < size; ++rank) {
            const Map then = in[rank][i];
            expected[i] = {expected[i].factor * then.factor, expected[i].shift * then.factor + then.shift};
          }
        }
        const Partition partition(count, size);
        const Rank to = size / 2;
        for (const Operation operation : {Operation::allreduce, Operation::reduce, Operation::reduce_scatter}) {
          const auto make = [&](Rank rank) {
            own[rank].resize(partition[rank].size());
            return std::make_shared<Request>(Call{.operation = operation}, [&, rank, operation](Transport& net) {
              const GivenReduction& how = *compose.given();
              const ConstBytes mine = std::as_bytes(std::span(in[rank]));
              const auto bytes = [](std::vector<Map>& maps) { return std::as_writable_bytes(std::span(maps)); };
              if (operation == Operation::allreduce) return allreduce_in_order(net, how, mine, bytes(all[rank]));
              if (operation == Operation::reduce) return reduce_in_order(net, how, to, mine, bytes(root[rank]));
              return reduce_scatter_in_order(net, how, mine, partition, bytes(own[rank]));
            });
          };
          EXPECT(run_ranks(world, size, make, size).all_succeeded());
        }
        for (Rank rank = 0; rank < size; ++rank) {
          EXPECT(all[rank] == expected);
          const auto part = std::span(expected).subspan(partition[rank].begin, partition[rank].size());
          EXPECT(std::ranges::equal(own[rank], part));
          EXPECT((root[rank] == expected) == (rank == to || count == 0));
        }
      }
    }
  }
}

TEST("no rank leaves a barrier before the last has come") {
  for (const Rank size : kSizes) {
    for (Rank late = 0; late < size; late += size > 16 ? 7 : 1) {
      Simulation simulation(size, {});
      for (Rank rank = 0; rank < size; ++rank) {
        auto request = std::make_shared<Request>(Call{.operation = Operation::barrier},
                                                 [](Transport& net) { return barrier(net); });
        simulation.begin(rank, std::move(request), rank == late ? 1.0 : 0.0);
      }
      EXPECT(!simulation.run().deadlock);
      for (Rank rank = 0; rank < size; ++rank) EXPECT(simulation.finish_s(rank) >= 1.0);
    }
  }
}

}  // namespace
