// Counts and keys of all ranks, for every number of them; and who sends what is none.
#include "testing.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "codec/short_numbers.hpp"
#include "collectives/support/sum_counts.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;
using Counts = std::vector<std::uint64_t>;

constexpr World kWorlds[] = {World::simulated, World::local};
constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 33};

RequestPtr request_of(std::function<Task<void>(Transport&)> run) {
  return std::make_shared<Request>(Call{.operation = Operation::allgather}, std::move(run));
}

Counts drawn(std::size_t size, Random& random) {
  Counts counts(size);
  for (auto& count : counts) count = random.below(3) == 0 ? random.below(100'000) : 0;
  return counts;
}

std::uint64_t total_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}); }

TEST("sums and maxima of few and of many counts, within the bytes that are promised") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t length : {0U, 1U, 30U, 256U, 257U, 1000U}) {
        for (const std::size_t maxima : {std::size_t{0}, std::min<std::size_t>(length, 2)}) {
          Random random(size + length);
          std::vector<Counts> counts;
          Counts expected(length);
          std::uint64_t total = 0;
          for (Rank rank = 0; rank < size; ++rank) {
            counts.push_back(drawn(length, random));
            total += total_of(counts[rank]);
            for (std::size_t i = 0; i < length; ++i) {
              const std::uint64_t count = counts[rank][i];
              expected[i] = i < length - maxima ? expected[i] + count : std::max(expected[i], count);
            }
          }
          std::vector<SparseTraffic> traffic(size);
          std::vector<Transport::MovedBytes> moved(size);
          const auto run = [&](Transport& net) -> Task<void> {
            co_await sum_counts(net, counts[net.rank()], maxima, 100'000, traffic[net.rank()], 7);
            moved[net.rank()] = net.moved();
          };
          EXPECT(run_ranks(world, size, [&](Rank) { return request_of(run); }, size).all_succeeded());
          for (Rank rank = 0; rank < size; ++rank) {
            EXPECT(counts[rank] == expected);
            EXPECT_EQ(traffic[rank].control_bytes_sent, moved[rank].sent);
            EXPECT_EQ(traffic[rank].control_bytes_received, moved[rank].received);
            EXPECT(std::max(moved[rank].sent, moved[rank].received) <= sum_counts_bytes_most(length, size, total));
          }
        }
      }
    }
  }
}

TEST("every rank gets every rank's counts, and all keys in order") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t length : {1U, 3U}) {
        Random random(size);
        std::vector<Counts> counts;
        Counts all;
        std::vector<Counts> keys;
        Counts all_keys;
        for (Rank rank = 0; rank < size; ++rank) {
          counts.push_back(drawn(length, random));
          all.insert(all.end(), counts[rank].begin(), counts[rank].end());
          keys.push_back(drawn(random.below(5), random));
          all_keys.insert(all_keys.end(), keys[rank].begin(), keys[rank].end());
        }
        std::ranges::sort(all_keys);
        const std::size_t keys_most = std::bit_width(size) * most_key_bytes(all_keys.size());
        std::vector<Counts> found(size);
        std::vector<SparseTraffic> traffic(size);
        const auto run = [&](Transport& net) -> Task<void> {
          found[net.rank()] = co_await gather_counts(net, counts[net.rank()], traffic[net.rank()], 0);
          co_await merge_keys(net, keys[net.rank()], all_keys.size(), traffic[net.rank()], kGatherCountsSteps);
        };
        EXPECT(run_ranks(world, size, [&](Rank) { return request_of(run); }, size).all_succeeded());
        for (Rank rank = 0; rank < size; ++rank) {
          EXPECT(found[rank] == all);
          EXPECT(traffic[rank].control_bytes_sent <= gather_counts_bytes_most(length, size, total_of(all)) + keys_most);
          EXPECT(keys[rank] == all_keys);
        }
      }
    }
  }
}

TEST("a rank whose counts are damaged ends the operation, and is named") {
  enum class What { few, many, gathered, merged };
  for (const World world : kWorlds) {
    for (const What what : {What::few, What::many, What::gathered, What::merged}) {
      const auto run = [&](Transport& net) -> Task<void> {
        SparseTraffic traffic;
        if (net.rank() == 1) {  // the second of two: its first message goes to the other one at the step of the first round
          const Counts one(what == What::merged ? 0 : 1);
          Buffer damaged = what == What::merged ? encode_keys(Counts{1, 2, 3}) : encode_counts(one);
          const Step step = what == What::many || what == What::gathered ? 0 : 2;
          co_await net.send(0, step, damaged.bytes());
          co_return;
        }
        Counts counts(what == What::many ? 1000 : 9);
        if (what == What::gathered) {
          co_await gather_counts(net, counts, traffic, 0);
        } else if (what == What::merged) {
          Counts keys{4};
          co_await merge_keys(net, keys, 2, traffic, 0);
        } else {
          co_await sum_counts(net, counts, 0, 5, traffic, 0);
        }
      };
      const Ended ended = run_ranks(world, 2, [&](Rank) { return request_of(run); });
      REQUIRE(ended.requests[0]->failure().has_value());
      EXPECT_EQ(ended.requests[0]->failure()->reason.find("rank 1 sent damaged counts") != std::string::npos, true);
      EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
    }
  }
}

TEST("a count that no rank can have ends the sum before it is used, and its sender is named") {
  for (const World world : kWorlds) {
    for (const std::size_t length : {9U, 1000U}) {
      for (const std::size_t maxima : {0U, 9U}) {
        for (const bool lies : {false, true}) {
          const std::uint64_t most = 5;
          const auto run = [&](Transport& net) -> Task<void> {
            SparseTraffic traffic;
            const std::uint64_t worst = maxima > 0 ? most : 2 * most;  // of two ranks
            Counts counts(length, net.rank() == 1 ? worst + (lies ? 1 : 0) : 0);
            co_await sum_counts(net, counts, maxima == 0 ? 0 : length, net.rank() == 1 ? 100 : most, traffic, 0);
          };
          const Ended ended = run_ranks(world, 2, [&](Rank) { return request_of(run); });
          EXPECT_EQ(ended.requests[0]->failure().has_value(), lies);
          if (!lies) continue;
          EXPECT(ended.requests[0]->failure()->reason.find("rank 1 sent damaged counts") != std::string::npos);
          EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
        }
      }
    }
  }
}

}  // namespace
