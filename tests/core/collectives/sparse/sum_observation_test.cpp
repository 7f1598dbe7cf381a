// What sparse sums learn from earlier ones: from which, that they wait for it, and that no schedule changes any bit of a sum.
#include "testing.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "base/random.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/sparse/observation.hpp"
#include "session/reductions.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

std::atomic<std::ptrdiff_t> blocks_held = 0;  // by the whole program

}  // namespace

void* operator new(std::size_t bytes) {
  void* const block = std::malloc(bytes);
  if (block == nullptr) throw std::bad_alloc();
  ++blocks_held;
  return block;
}

void operator delete(void* block) noexcept {
  if (block != nullptr) --blocks_held;
  std::free(block);
}

void operator delete(void* block, std::size_t) noexcept { operator delete(block); }

namespace {

Task<void> take(SumObservation& observation, ReadyQueue& ready) { co_await observation.begin(ready); }

// One sum, begun by itself.
struct Begun {
  Begun(ObservedSums& sums, ReadyQueue& ready) : observation(sums.next()), task(take(*observation, ready)) {
    task.start();
  }
  std::shared_ptr<SumObservation> observation;
  Task<void> task;
};

void drain(ReadyQueue& ready) {
  std::vector<std::coroutine_handle<>> turn;
  ready.swap(turn);
  for (const auto coroutine : turn) coroutine.resume();
}

TEST("one after the other: of the one before at first, later of a fixed distance") {
  ReadyQueue ready;
  ObservedSums sums({.ranks = 0.25, .nodes = 0.5});
  for (int i = 0; i < 100; ++i) {
    Begun sum(sums, ready);
    EXPECT(sum.task.done());
    const int of = i - std::clamp(i / 2, 1, 16);
    EXPECT_EQ(sum.observation->expected().ranks, i == 0 ? 0.25 : of);
    EXPECT_EQ(sum.observation->expected().nodes, 0.5);  // never seen: as it was expected
    sum.observation->saw_ranks(i);
    sum.observation->end();
  }
}

TEST("in flight: a sum waits for the one that it learns from, and for no other") {
  ReadyQueue ready;
  ObservedSums sums({});
  std::vector<std::unique_ptr<Begun>> begun;
  for (int i = 0; i < 6; ++i) begun.push_back(std::make_unique<Begun>(sums, ready));
  const auto ends = [&](std::size_t i) {
    begun[i]->observation->saw_nodes(static_cast<double>(i) + 1.0);
    begun[i]->observation->end();
    drain(ready);
  };
  const auto waiting = [&] {
    std::vector<bool> found;
    for (const auto& sum : begun) found.push_back(!sum->task.done());
    return found;
  };
  EXPECT((waiting() == std::vector{false, true, true, true, true, true}));
  ends(0);
  EXPECT((waiting() == std::vector{false, false, true, true, true, true}));
  ends(1);
  EXPECT((waiting() == std::vector{false, false, false, true, true, true}));
  begun[4].reset();  // an operation that fails while it waits
  ends(2);
  EXPECT(begun[3]->task.done() && begun[3]->observation->expected().nodes == 3.0 && !begun[5]->task.done());
  begun[3]->observation->end();  // has seen nothing itself
  drain(ready);
  EXPECT(begun[5]->task.done() && begun[5]->observation->expected().nodes == 3.0);
}

TEST("a sum that is given up before it runs keeps nobody waiting") {
  ReadyQueue ready;
  ObservedSums sums({.ranks = 0.125});
  for (int i = 0; i < 5; ++i) sums.next();
  Begun sum(sums, ready);
  EXPECT(sum.task.done());
  EXPECT_EQ(sum.observation->expected().ranks, 0.125);
}

TEST("a sum that is given up before it runs keeps none of those before it") {
  ObservedSums sums({});
  const auto held_after = [&](int calls) {
    for (int i = 0; i < calls; ++i) sums.next();
    return blocks_held.load();
  };
  const std::ptrdiff_t held = held_after(100);
  EXPECT(held_after(1000) < held + 100);
}

TEST("however many are given up at once, freeing them takes no deep stack") {
  for (const bool newest_first : {false, true}) {
    ObservedSums sums({});
    std::vector<std::shared_ptr<SumObservation>> given_up;
    for (int i = 0; i < 500'000; ++i) given_up.push_back(sums.next());
    if (newest_first) std::ranges::reverse(given_up);
    for (auto& one : given_up) one.reset();
  }
}

// Where 2 of 5 calls in a row have vectors with equal indices, and costs are such that a sum of these is doubled, if that is
// expected, and one of others is split.
constexpr std::uint64_t kN = 2000;
constexpr Rank kRanks = 5;
constexpr std::size_t kCalls = 80;
constexpr NetworkCosts kCosts{.alpha_s = 1.0, .beta_s_per_byte = 1e-4, .gamma_s_per_byte = 0.0};

using Sums = std::vector<SparseSum<float>>;  // of one rank, in the order of calls

SparseVector<float> addend(std::size_t call, Rank rank) {
  Random places(call % 5 < 2 ? call + 1 : call * kRanks + rank + 1000);
  Random values(call * kRanks + rank + 1);
  std::vector<std::uint32_t> indices;
  std::vector<float> entries;
  for (std::uint32_t i = 0; i < kN; ++i) {
    if (places.uniform() >= 0.3) continue;
    indices.push_back(i);
    entries.push_back(static_cast<float>(values.uniform()) - 0.5F);
  }
  return SparseVector<float>::sparse(kN, indices, entries);
}

// Every rank has up to `in_flight` calls under way, and does something when its turn comes, which `seed` decides.
std::vector<Sums> run(Algorithm algorithm, std::size_t in_flight, std::uint64_t seed) {
  LocalRanks ranks(kRanks);
  std::vector<std::shared_ptr<SparseChoice>> choices;
  for (Rank rank = 0; rank < kRanks; ++rank) {
    choices.push_back(std::make_shared<SparseChoice>(AllreduceTable(kRanks), kCosts));
  }
  std::vector<Sums> called(kRanks);
  Random random(seed);
  const auto running = [](const Sums& sums) {
    return static_cast<std::size_t>(std::ranges::count_if(sums, [](const auto& sum) { return !sum.request->done(); }));
  };
  const auto is_over = [&](const Sums& sums) { return sums.size() == kCalls && running(sums) == 0; };
  for (std::size_t idle = 0; idle < 100'000 && !std::ranges::all_of(called, is_over);) {
    const auto rank = static_cast<Rank>(random.below(kRanks));
    Sums& mine = called[rank];
    ++idle;
    if (mine.size() < kCalls && running(mine) < in_flight && random.below(3) == 0) {
      mine.push_back(make_all_reduce(addend(mine.size(), rank), {.algorithm = algorithm, .choice = choices[rank]}));
      ranks.session(rank).begin(mine.back().request, 0.0);
      idle = 0;
    }
    if (ranks.turn(rank)) idle = 0;
  }
  return called;
}

bool same_bits(const SparseSum<float>& a, const SparseSum<float>& b) {
  REQUIRE(a.request->done() && !a.request->failure() && b.request->done() && !b.request->failure());
  std::array<std::vector<float>, 2> dense{std::vector<float>(kN), std::vector<float>(kN)};
  (**a.result).write_dense(dense[0]);
  (**b.result).write_dense(dense[1]);
  return std::memcmp(dense[0].data(), dense[1].data(), kN * sizeof(float)) == 0;
}

TEST("no schedule of sums in flight changes a bit, whatever they learn from each other") {
  const std::vector<Sums> doubled = run(Algorithm::recursive_doubling, 1, 1);
  const std::vector<Sums> split = run(Algorithm::split_allgather, 1, 1);
  const std::vector<Sums> first = run(Algorithm::automatic, 1, 1);
  std::size_t doubled_only = 0;
  std::size_t split_only = 0;
  for (std::size_t call = 0; call < kCalls; ++call) {
    const bool is_doubled = same_bits(first[0][call], doubled[0][call]);
    const bool is_split = same_bits(first[0][call], split[0][call]);
    doubled_only += is_doubled && !is_split ? 1 : 0;
    split_only += is_split && !is_doubled ? 1 : 0;
  }
  EXPECT(doubled_only >= 10 && split_only >= 10);  // what is learnt counts
  for (std::uint64_t seed = 2; seed < 14; ++seed) {
    const std::vector<Sums> sums = run(Algorithm::automatic, 1 + seed % 5 * 5, seed);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      REQUIRE(sums[rank].size() == kCalls);
      for (std::size_t call = 0; call < kCalls; ++call) EXPECT(same_bits(sums[rank][call], first[0][call]));
    }
  }
}

}  // namespace
