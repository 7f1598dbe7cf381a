// Virtual time: costs equal their closed forms, histories repeat, and nothing hangs.
#include "testing.hpp"

#include <bit>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collectives/dense/allgather.hpp"
#include "collectives/dense/allreduce_recursive_doubling.hpp"
#include "collectives/dense/allreduce_ring.hpp"
#include "collectives/dense/barrier.hpp"
#include "collectives/dense/broadcast.hpp"
#include "simulation/simulation.hpp"

namespace {

using namespace telegrad;

constexpr SimCosts kPlain{.alpha_s = 10e-6, .beta_s_per_byte = 1e-9};

Call allreduce_call(Algorithm algorithm, std::size_t count) {
  return {.operation = Operation::allreduce,
          .dtype = DType::f32,
          .reduction = Reduction::sum,
          .algorithm = algorithm,
          .count = count};
}

// Every rank's vector; all ones.
struct Vectors {
  Vectors(Rank size, std::size_t count) : rows(size, std::vector<float>(count, 1.0F)) {}
  Bytes of(Rank rank) { return std::as_writable_bytes(std::span(rows[rank])); }
  std::vector<std::vector<float>> rows;
};

RequestPtr ring(Vectors& vectors, Rank rank, LaneTuning tuning = {}) {
  const Bytes mine = vectors.of(rank);
  return std::make_shared<Request>(allreduce_call(Algorithm::ring, mine.size() / 4), [=](Transport& net) {
    return allreduce_ring(net, DType::f32, Reduction::sum, mine, mine, tuning);
  });
}

RequestPtr doubling(Vectors& vectors, Rank rank) {
  const Bytes mine = vectors.of(rank);
  return std::make_shared<Request>(allreduce_call(Algorithm::recursive_doubling, mine.size() / 4), [=](Transport& net) {
    return allreduce_recursive_doubling(net, DType::f32, Reduction::sum, mine, mine);
  });
}

RequestPtr operation(Operation operation, Request::Body body) {
  return std::make_shared<Request>(Call{.operation = operation}, std::move(body));
}

double log2_of(Rank size) { return std::log2(static_cast<double>(size)); }

void expect_close(double measured_s, double expected_s) { EXPECT_NEAR(measured_s / expected_s, 1.0, 0.01); }

constexpr Rank kSizes[] = {2, 3, 4, 7, 8, 16, 32, 64};
// Divisible by every size above, so that all blocks are equal.
constexpr std::size_t kCount = 64 * 3 * 7 * 10;

TEST("ring allreduce takes 2(P-1)(α + n/P·β) + (P-1)/P·nγ, and sends 2(P-1)/P·n bytes") {
  for (const double gamma : {0.0, 5e-10}) {
    for (const Rank size : kSizes) {
      Vectors vectors(size, kCount);
      SimCosts costs = kPlain;
      costs.gamma_s_per_byte = gamma;
      Simulation simulation(size, {.costs = costs});
      simulation.begin_all([&](Rank rank) { return ring(vectors, rank, {.lanes = 1}); });
      const Outcome outcome = simulation.run();
      EXPECT(!outcome.deadlock);
      const double block = 4.0 * kCount / size;
      expect_close(outcome.finish_s, 2.0 * (size - 1) * (costs.alpha_s + block * costs.beta_s_per_byte) +
                                         (size - 1) * block * gamma);
      for (Rank rank = 0; rank < size; ++rank) {
        const SimCounts& counts = simulation.network().counts(rank);
        EXPECT_EQ(counts.bytes_sent, 2 * (size - 1) * (4 * kCount / size));
        EXPECT_EQ(counts.bytes_received, counts.bytes_sent);
        EXPECT_EQ(counts.messages_sent, 2 * (size - 1));
        EXPECT_EQ(simulation.session(rank).counters().bytes_sent, counts.bytes_sent);
        EXPECT_EQ(vectors.rows[rank], std::vector<float>(kCount, static_cast<float>(size)));
      }
    }
  }
}

TEST("recursive doubling takes log2(P)(α + nβ + nγ), and sends n·log2(P) bytes") {
  for (const double gamma : {0.0, 5e-10}) {
    for (const Rank size : {2U, 4U, 8U, 16U, 64U, 256U}) {
      Vectors vectors(size, 1000);
      SimCosts costs = kPlain;
      costs.gamma_s_per_byte = gamma;
      Simulation simulation(size, {.costs = costs});
      simulation.begin_all([&](Rank rank) { return doubling(vectors, rank); });
      const Outcome outcome = simulation.run();
      EXPECT(!outcome.deadlock);
      const double bytes = 4000.0;
      expect_close(outcome.finish_s,
                   log2_of(size) * (costs.alpha_s + bytes * (costs.beta_s_per_byte + costs.gamma_s_per_byte)));
      for (Rank rank = 0; rank < size; ++rank) {
        EXPECT_EQ(simulation.network().counts(rank).bytes_sent, 4000 * static_cast<unsigned>(std::countr_zero(size)));
      }
    }
  }
}

TEST("recursive doubling folds and unfolds where P is not a power of two") {
  for (const Rank size : {3U, 5U, 6U, 7U, 12U, 33U}) {
    Vectors vectors(size, 1000);
    Simulation simulation(size, {.costs = kPlain});
    simulation.begin_all([&](Rank rank) { return doubling(vectors, rank); });
    const double rounds = 2.0 + std::floor(log2_of(size));
    expect_close(simulation.run().finish_s, rounds * (kPlain.alpha_s + 4000.0 * kPlain.beta_s_per_byte));
  }
}

TEST("allgather takes ceil(log2 P)α + (P-1)nβ where blocks are short, where they are long (P-1)(α + nβ)") {
  for (const std::size_t block : {8UL, 60'000UL}) {
    for (const Rank size : kSizes) {
      std::vector<std::vector<std::byte>> all(size, std::vector<std::byte>(size * block));
      const std::vector<std::byte> mine(block);
      Simulation simulation(size, {.costs = kPlain});
      simulation.begin_all([&](Rank rank) {
        return operation(Operation::allgather, [&, rank](Transport& net) {
          return allgather(net, mine, all[rank], Partition(size * block, size));
        });
      });
      const double rounds = std::ceil(log2_of(size));
      const double bytes_s = (size - 1) * static_cast<double>(block) * kPlain.beta_s_per_byte;
      const double measured_s = simulation.run().finish_s;
      if (block == 8) {
        expect_close(measured_s, rounds * kPlain.alpha_s + bytes_s);
      } else {  // all have called after as many latencies as there are rounds, of which a block's way hides two
        EXPECT(measured_s > 0.999 * ((size - 1) * kPlain.alpha_s + bytes_s));
        EXPECT(measured_s < 1.001 * ((size - 1 + std::max(0.0, rounds - 2)) * kPlain.alpha_s + bytes_s));
      }
    }
  }
}

TEST("broadcast takes ceil(log2 P)(α + nβ), less for long vectors, barrier ceil(log2 P)·α") {
  for (const Rank size : kSizes) {
    const double rounds = std::ceil(log2_of(size));
    for (const std::size_t bytes : {16UL, 1'000'000UL}) {
      std::vector<std::vector<std::byte>> data(size, std::vector<std::byte>(bytes));
      Simulation simulation(size, {.costs = kPlain});
      simulation.begin_all([&](Rank rank) {
        return operation(Operation::broadcast, [&, rank](Transport& net) { return broadcast(net, 0, data[rank]); });
      });
      const double expected_s = rounds * (kPlain.alpha_s + static_cast<double>(bytes) * kPlain.beta_s_per_byte);
      const double measured_s = simulation.run().finish_s;
      EXPECT(measured_s <= expected_s * 1.01);
      if (std::has_single_bit(size) && (size == 2 || bytes == 16)) expect_close(measured_s, expected_s);
      if (size > 4 && bytes > 16) EXPECT(measured_s < 0.7 * expected_s);
    }
    Simulation simulation(size, {.costs = kPlain});
    simulation.begin_all(
        [](Rank) { return operation(Operation::barrier, [](Transport& net) { return barrier(net); }); });
    expect_close(simulation.run().finish_s, rounds * kPlain.alpha_s);
  }
}

TEST("segments hide additions and latencies of a long ring, and are not slower than their bytes allow") {
  constexpr std::size_t kLong = std::size_t{4} << 20;  // 16 MiB
  constexpr Rank kRanks = 4;
  const SimCosts costs{.alpha_s = 2e-6, .beta_s_per_byte = 1e-10, .gamma_s_per_byte = 1e-10};
  const auto measure = [&](LaneTuning tuning) {
    Vectors vectors(kRanks, kLong);
    Simulation simulation(kRanks, {.costs = costs});
    simulation.begin_all([&](Rank rank) { return ring(vectors, rank, tuning); });
    const double finish_s = simulation.run().finish_s;
    EXPECT_EQ(vectors.rows[1], std::vector<float>(kLong, 4.0F));
    return finish_s;
  };
  const double whole_s = measure({.message_bytes = 4 * kLong, .lanes = 1});
  const double segmented_s = measure({});
  const double bytes_s = 2.0 * 3 / 4 * 4 * kLong * costs.beta_s_per_byte;
  EXPECT(segmented_s >= bytes_s);
  EXPECT(segmented_s < 0.85 * whole_s);
  EXPECT(segmented_s < 1.15 * bytes_s);
}

TEST("one port in: messages of many senders to one rank queue up") {
  constexpr Rank kRanks = 5;
  constexpr std::size_t kBytes = 100'000;
  const std::vector<std::byte> data(kBytes);
  std::vector<Buffer> received;
  for (Rank rank = 1; rank < kRanks; ++rank) received.emplace_back(kBytes);
  const auto gather = [&](Transport& net) -> Task<void> {
    if (net.rank() != 0) {
      co_await net.send(0, 0, data);
      co_return;
    }
    for (Rank rank = 1; rank < kRanks; ++rank) co_await net.receive(rank, 0, received[rank - 1].bytes());
  };
  Simulation simulation(kRanks, {.costs = kPlain});
  simulation.begin_all([&](Rank) { return operation(Operation::allgather, gather); });
  EXPECT_NEAR(simulation.run().finish_s, kPlain.alpha_s + 4 * kBytes * kPlain.beta_s_per_byte, 1e-12);
}

TEST("a send is over only when its receiver has taken it") {
  const std::vector<std::byte> data(10);
  Buffer into(10);
  const auto body = [&](Transport& net) -> Task<void> {
    if (net.rank() == 0) {
      co_await net.send(1, 0, data);
    } else {
      co_await net.receive(0, 0, into.bytes());
    }
  };
  Simulation simulation(2, {.costs = kPlain});
  simulation.begin(0, operation(Operation::broadcast, body));
  simulation.begin(1, operation(Operation::broadcast, body), 0.5);
  EXPECT_NEAR(simulation.run().finish_s, 0.5, 1e-12);
  EXPECT_NEAR(simulation.finish_s(0), 0.5, 1e-12);
}

struct History {
  std::uint64_t hash;
  std::string text;
  double finish_s;
};

History history(std::uint64_t seed) {
  constexpr Rank kRanks = 7;
  Vectors vectors(kRanks, 1000);
  SimCosts costs = kPlain;
  costs.gamma_s_per_byte = 1e-9;
  costs.jitter = 3.0;
  Simulation simulation(kRanks, {.costs = costs, .seed = seed, .clocks = true});
  simulation.network().keep_trace_text();
  simulation.begin_all([&](Rank rank) { return ring(vectors, rank); });
  simulation.begin_all([&](Rank rank) { return doubling(vectors, rank); });
  const double finish_s = simulation.run().finish_s;
  return {simulation.network().trace_hash(), simulation.network().trace_text(), finish_s};
}

TEST("the same seed gives the same history, byte for byte; another seed another one") {
  const History first = history(1);
  const History again = history(1);
  EXPECT_EQ(first.hash, again.hash);
  EXPECT(first.text == again.text);
  EXPECT(first.text.find("from 0 operation 0 step 0 bytes") != std::string::npos);
  EXPECT_EQ(first.finish_s, again.finish_s);
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) hashes.insert(history(seed).hash);
  EXPECT_EQ(hashes.size(), 10);
}

TEST("a deadlock is found when nothing can happen any more, and says who is in what") {
  const std::vector<std::byte> data(1000);
  Buffer into(1000);
  const auto body = [&](Transport& net) -> Task<void> {
    co_await net.send(1 - net.rank(), 0, data);  // both: a real network might have buffered it
    co_await net.receive(1 - net.rank(), 0, into.bytes());
  };
  Simulation simulation(2, {.costs = kPlain});
  simulation.begin_all([&](Rank) { return operation(Operation::broadcast, body); });
  const Outcome outcome = simulation.run();
  EXPECT(outcome.deadlock);
  EXPECT(outcome.unfinished.find("rank 0: broadcast(") != std::string::npos);
  EXPECT(outcome.unfinished.find("rank 1: broadcast(") != std::string::npos);
}

TEST("a run can be halted at a virtual time, and goes on from there") {
  Vectors vectors(4, kCount);
  Simulation simulation(4, {.costs = kPlain});
  simulation.begin_all([&](Rank rank) { return ring(vectors, rank); });
  const Outcome halted = simulation.run(1e-5);
  EXPECT(!halted.deadlock);
  EXPECT(!halted.unfinished.empty());
  EXPECT(simulation.now_s() <= 1e-5);
  const Outcome outcome = simulation.run();
  EXPECT(outcome.unfinished.empty());
  EXPECT_EQ(vectors.rows[3], std::vector<float>(kCount, 4.0F));
}

TEST("ranks that call different things all learn of the mismatch") {
  for (const Rank size : {2U, 3U, 8U}) {
    for (Rank odd = 0; odd < size; ++odd) {
      Vectors vectors(size, 100);
      vectors.rows[odd].resize(101, 1.0F);
      Simulation simulation(size, {.costs = kPlain});
      std::vector<RequestPtr> requests;
      simulation.begin_all([&](Rank rank) { return requests.emplace_back(doubling(vectors, rank)); });
      EXPECT(!simulation.run().deadlock);
      for (Rank rank = 0; rank < size; ++rank) {
        REQUIRE(requests[rank]->failure());
        EXPECT_EQ(requests[rank]->failure()->kind, FailureKind::mismatched_call);
        EXPECT(requests[rank]->failure()->message().find("count=101") != std::string::npos);
        EXPECT_EQ(vectors.rows[rank], std::vector<float>(rank == odd ? 101 : 100, 1.0F));
      }
    }
  }
}

TEST("a ring that meets a doubling is a mismatch, not a hang") {
  Vectors vectors(4, 100);
  Simulation simulation(4, {.costs = kPlain});
  std::vector<RequestPtr> requests;
  simulation.begin_all(
      [&](Rank rank) { return requests.emplace_back(rank == 2 ? ring(vectors, rank) : doubling(vectors, rank)); });
  EXPECT(!simulation.run().deadlock);
  for (const auto& request : requests) {
    REQUIRE(request->failure());
    EXPECT_EQ(request->failure()->kind, FailureKind::mismatched_call);
  }
}

}  // namespace
