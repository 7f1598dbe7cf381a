// Sums, slices of sums, and copies of entries that a stream stages behind a gate: the bits of the same calls of vectors,
// the form that fits, and errors for what no vector is.
#include "session/staged.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "collectives/sparse/auto.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "testing.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr World kWorlds[] = {World::simulated, World::local};
constexpr std::int64_t kUnset = 0x5555'5555'5555'5555;

// What a rank's stream and the engine share. Entries of the sum lie where a dense one would.
template <class V>
struct Staged {
  Staged(std::uint64_t n, std::size_t room, std::size_t sum_room)
      : dimension(n), indices(room, 0xFFFF'FFFFU), values(room), dense(n), sum_indices(sum_room), sum_values(sum_room) {
    std::ranges::fill(std::as_writable_bytes(std::span(values)), std::byte{0xFF});
  }
  Staged(std::uint64_t n, const Input<V>& input, std::size_t spare, std::size_t sum_room)
      : Staged(n, input.indices.size() + spare, sum_room) {
    fill(input);
  }

  void fill(const Input<V>& input) {
    std::ranges::copy(input.indices, indices.begin());
    std::ranges::copy(input.values, values.begin());
    count = static_cast<std::int64_t>(input.indices.size());
  }
  StagedEntries<V> mine() const {
    return {.dimension = dimension, .count = &count, .indices = indices, .values = values};
  }
  StagedSum<V> sum() { return {.form = &form, .indices = sum_indices, .values = sum_values, .dense = dense}; }
  RequestPtr request(const SparseReduction& how) { return make_all_reduce_staged<V>(mine(), sum(), how); }
  RequestPtr gated(const SparseReduction& how) {
    RequestPtr made = request(how);
    made->set_gate({.ready = &ready,
                    .ready_value = 1,
                    .done = &done,
                    .done_value = 1,
                    .output = std::as_writable_bytes(std::span(&form, 1))});
    return made;
  }
  void open() { std::atomic_ref(ready).store(1, std::memory_order_release); }
  bool is_spoilt() const { return form == -1 && done == 1; }
  // The same bits as a sum of vectors that is sparse or dense.
  bool holds(const SparseVector<V>& sum) const {
    const auto same = [](std::span<const V> a, std::span<const V> b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
    };
    if (sum.is_dense()) return form == kDenseForm && same(dense, sum.values());
    return form == static_cast<std::int64_t>(sum.nnz()) &&
           std::ranges::equal(std::span(sum_indices).first(sum.nnz()), sum.indices()) &&
           same(std::span(sum_values).first(sum.nnz()), sum.values());
  }

  std::uint64_t dimension;
  std::int64_t count = kUnset;
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  std::int64_t form = kUnset;
  std::vector<V> dense;
  std::vector<std::uint32_t> sum_indices;
  std::vector<V> sum_values;
  std::uint32_t ready = 0;
  std::uint32_t done = 0;
};

template <class V>
std::vector<Input<V>> inputs_of(Rank size, std::uint64_t n, double density, std::uint64_t seed) {
  Random random(seed);
  std::vector<Input<V>> inputs;
  for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<V>(n, rank == 0 ? density / 3 : density, random));
  return inputs;
}

template <class V>
void check(World world, Rank size, std::uint64_t n, double density, const SparseReduction& how, std::uint64_t seed) {
  const auto inputs = inputs_of<V>(size, n, density, seed);
  std::vector<std::shared_ptr<std::optional<SparseVector<V>>>> sums;
  const Ended plain = run_ranks(
      world, size,
      [&](Rank rank) {
        auto sum = make_all_reduce(addend_of<V>(n, inputs[rank].indices, inputs[rank].values, how), how);
        sums.push_back(sum.result);
        return sum.request;
      },
      seed);
  REQUIRE(plain.all_succeeded());
  std::vector<Staged<V>> staged;
  for (Rank rank = 0; rank < size; ++rank) staged.emplace_back(n, inputs[rank], 5 * rank, n);
  const Ended ended = run_ranks(world, size, [&](Rank rank) { return staged[rank].request(how); }, seed);
  EXPECT(ended.all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) EXPECT(staged[rank].holds(**sums[rank]));
}

void run(LocalRanks& ranks, Rank size) {
  ranks.run();
  for (bool any = true; any;) {
    any = false;
    for (Rank rank = 0; rank < size; ++rank) any |= ranks.session(rank).open_gates(0.0);
    ranks.run();
  }
}

// One rank stages what is no vector; the other's gate stays shut.
void check_refused(const std::vector<std::uint32_t>& indices, std::int64_t count, const std::string& reason) {
  std::vector<Staged<float>> staged{Staged<float>(10, 4, 5), Staged<float>(10, 4, 5)};
  std::ranges::copy(indices, staged[1].indices.begin());
  LocalRanks ranks(2, {.agreement_s = 0.0});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 2; ++rank) {
    ranks.session(rank).begin(requests.emplace_back(staged[rank].gated({.algorithm = Algorithm::automatic})), 0.0);
  }
  staged[1].count = count;
  staged[1].open();
  run(ranks, 2);
  for (Rank rank = 0; rank < 2; ++rank) {
    REQUIRE(requests[rank]->done() && requests[rank]->failure());
    const Failure& failure = *requests[rank]->failure();
    EXPECT_EQ(failure.peer, 1U);
    if (failure.reason.find(reason) == std::string::npos) EXPECT_EQ(failure.reason, reason);
    EXPECT(staged[rank].is_spoilt());
    EXPECT(std::ranges::all_of(staged[rank].dense, [](float x) { return x == 0.0F; }));
  }
}

}  // namespace

TEST("every algorithm gives the bits and the form of a sum of vectors") {
  constexpr Algorithm kAlgorithms[] = {Algorithm::split_allgather, Algorithm::split_dense_allgather, Algorithm::ring,
                                       Algorithm::recursive_doubling, Algorithm::two_level, Algorithm::automatic};
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U, 8U}) {
      for (const std::uint64_t n : {0UL, 1UL, 700UL, 5000UL}) {
        for (const double density : {0.0, 0.02, 0.4, 1.0}) {
          for (const Algorithm algorithm : kAlgorithms) {
            check<float>(world, size, n, density, {.algorithm = algorithm, .wire = {.packs_values = size % 2 == 0}},
                         size * 100 + n);
          }
          check<bf16>(world, size, n, density, {.reduction = Reduction::avg, .algorithm = Algorithm::automatic}, n);
          check<float>(world, size, n, density, {.slices = Slices::balanced}, n + 1);
        }
      }
    }
  }
}

TEST("every reduction and dtype, and values that are rounded on the wire as those of a vector are") {
  for (const Rank size : {2U, 3U, 4U}) {
    for (const double density : {0.03, 0.6}) {
      for (const Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::prod, Reduction::min, Reduction::max,
                                        Reduction::max_abs}) {
        const SparseReduction how{.reduction = reduction, .algorithm = Algorithm::automatic};
        check<float>(World::local, size, 900, density, how, size);
        check<double>(World::local, size, 900, density, how, size);
        check<f16>(World::simulated, size, 900, density, how, size);
        check<bf16>(World::simulated, size, 900, density, how, size);
      }
      for (const ValueEncoding values : {ValueEncoding::bf16, ValueEncoding::int8, ValueEncoding::qsgd4}) {
        check<float>(World::local, size, 900, density,
                     {.algorithm = Algorithm::automatic, .wire = {.values = values, .key = {.seed = 3, .call = 7}}}, 1);
      }
    }
  }
}

TEST("what rounding loses is what a vector's residual gets, as entries or densely") {
  constexpr std::uint64_t kN = 900;
  for (const Rank size : {1U, 2U, 3U}) {
    for (const double density : {0.0, 0.03, 0.6}) {
      for (const ValueEncoding values : {ValueEncoding::bf16, ValueEncoding::int8, ValueEncoding::qsgd4}) {
        const auto inputs = inputs_of<float>(size, kN, density, size);
        std::vector<std::vector<float>> residuals(size, std::vector<float>(kN));
        const auto how_of = [&](std::span<float> residual) {
          return SparseReduction{.reduction = Reduction::avg,
                                 .algorithm = Algorithm::automatic,
                                 .wire = {.values = values, .key = {.seed = 3, .call = 7}},
                                 .residual = residual};
        };
        const Ended plain = run_ranks(World::local, size, [&](Rank rank) {
          const SparseReduction how = how_of(residuals[rank]);
          return make_all_reduce(addend_of<float>(kN, inputs[rank].indices, inputs[rank].values, how), how).request;
        });
        REQUIRE(plain.all_succeeded());
        for (const std::size_t room : {std::size_t{0}, std::size_t{kN}}) {
          std::vector<Staged<float>> staged;
          struct Lost {
            std::int64_t form = kUnset;
            std::vector<std::uint32_t> indices;
            std::vector<float> values;
            std::vector<float> dense = std::vector<float>(kN, std::numeric_limits<float>::quiet_NaN());
          };
          std::vector<Lost> lost(size);
          for (Rank rank = 0; rank < size; ++rank) {
            staged.emplace_back(kN, inputs[rank], 2, kN);
            lost[rank].indices.resize(room);
            lost[rank].values.resize(room);
          }
          const Ended ended = run_ranks(World::local, size, [&](Rank rank) {
            Staged<float>& one = staged[rank];
            Lost& errors = lost[rank];
            return make_all_reduce_staged<float>(
                {.dimension = kN, .count = &one.count, .indices = one.indices, .values = one.values},
                {.form = &one.form, .indices = one.sum_indices, .values = one.sum_values, .dense = one.dense},
                how_of({}),
                {.form = &errors.form, .indices = errors.indices, .values = errors.values, .dense = errors.dense});
          });
          REQUIRE(ended.all_succeeded());
          for (Rank rank = 0; rank < size; ++rank) {
            const Lost& errors = lost[rank];
            EXPECT(errors.dense == residuals[rank]);
            const auto entries = static_cast<std::size_t>(kN - std::ranges::count(residuals[rank], 0.0F));
            EXPECT(density == 0.0 || size == 1 || values == ValueEncoding::bf16 || entries > 0);
            EXPECT_EQ(errors.form, entries > room ? kDenseForm : static_cast<std::int64_t>(entries));
            std::vector<float> scattered(kN);
            for (std::int64_t i = 0; i < errors.form; ++i) {
              const auto at = static_cast<std::size_t>(i);
              scattered[errors.indices[at]] = errors.values[at];
            }
            if (errors.form >= 0) EXPECT(scattered == residuals[rank]);
          }
        }
      }
    }
  }
}

namespace {

struct StagedLoss {
  explicit StagedLoss(std::uint64_t n) : indices(n), values(n), dense(n) {}
  StagedSum<float> where() { return {.form = &form, .indices = indices, .values = values, .dense = dense}; }
  std::vector<float> scattered() const {
    if (form == kDenseForm) return dense;
    std::vector<float> all(dense.size());
    for (std::size_t i = 0; i < static_cast<std::size_t>(form); ++i) all[indices[i]] = values[i];
    return all;
  }
  std::int64_t form = kUnset;
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
  std::vector<float> dense;
};

// The bits of the same call of vectors; what the sum does not keep is lost, beside errors of rounding.
template <class Settings, class State>
void check_topk(Rank size, const Settings& settings, const State& state, ValueEncoding values) {
  constexpr std::uint64_t kN = 900;
  const auto inputs = inputs_of<float>(size, kN, 0.1, size);
  const WireFormat wire{.values = values, .key = {.seed = 3, .call = 7}};
  const bool rounds = values != ValueEncoding::native;
  std::vector<std::vector<float>> expected(size, std::vector<float>(kN));
  std::vector<std::shared_ptr<std::optional<TopkResult<float, State>>>> results;
  const Ended plain = run_ranks(World::local, size, [&](Rank rank) {
    const auto residual = rounds ? std::span(expected[rank]) : std::span<float>{};
    auto sum = make_all_reduce_topk(inputs[rank].vector(kN), settings, state, Reduction::avg, wire, residual);
    results.push_back(sum.result);
    return sum.request;
  });
  REQUIRE(plain.all_succeeded());
  std::vector<Staged<float>> staged;
  std::vector<StagedLoss> lost(size, StagedLoss(kN));
  for (Rank rank = 0; rank < size; ++rank) staged.emplace_back(kN, inputs[rank], 3, kN);
  std::vector<std::shared_ptr<std::optional<TopkResult<float, State>>>> own;
  const Ended ended = run_ranks(World::local, size, [&](Rank rank) {
    Staged<float>& one = staged[rank];
    auto sum = make_all_reduce_topk_staged<float>(
        {.dimension = kN, .count = &one.count, .indices = one.indices, .values = one.values},
        {.form = &one.form, .indices = one.sum_indices, .values = one.sum_values, .dense = one.dense}, lost[rank].where(),
        settings, state, Reduction::avg, wire);
    own.push_back(sum.result);
    return sum.request;
  });
  REQUIRE(ended.all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) {
    const auto& result = **results[rank];
    EXPECT(staged[rank].holds(result.sum));
    for (std::size_t i = 0; i < result.left.nnz(); ++i) expected[rank][result.left.indices()[i]] += result.left.values()[i];
    EXPECT(lost[rank].scattered() == expected[rank]);
    EXPECT(size == 1 || result.left.nnz() > 0);
    EXPECT_EQ((**own[rank]).state.digest(settings), result.state.digest(settings));
  }
}

}  // namespace

TEST("top-k sums give the bits of vectors, and give back what they do not keep") {
  for (const Rank size : {1U, 2U, 3U, 4U}) {
    check_topk(size, OkTopkSettings{.k = 40}, OkTopkState{}, ValueEncoding::native);
    check_topk(size, OkTopkSettings{.k = 40}, OkTopkState{}, ValueEncoding::int8);
    check_topk(size, GTopkSettings{.k = 40}, GTopkState{}, ValueEncoding::native);
    check_topk(size, BoundedTopkSettings{.k = 40}, BoundedTopkState{}, ValueEncoding::native);
  }
}

TEST("an average of gathered entries adds them in the order of ranks") {
  constexpr std::uint64_t kN = 900;
  for (const Rank size : {1U, 2U, 3U, 5U}) {
    const auto inputs = inputs_of<float>(size, kN, 0.1, size);
    for (const std::size_t room : {std::size_t{0}, std::size_t{kN}}) {
      std::vector<Staged<float>> staged;
      for (Rank rank = 0; rank < size; ++rank) staged.emplace_back(kN, inputs[rank], 3, room);
      const Ended ended = run_ranks(World::local, size, [&](Rank rank) {
        Staged<float>& one = staged[rank];
        return make_average_gathered_staged<float>(
            {.dimension = kN, .count = &one.count, .indices = one.indices, .values = one.values},
            {.form = &one.form, .indices = one.sum_indices, .values = one.sum_values, .dense = one.dense}, {});
      });
      REQUIRE(ended.all_succeeded());
      std::vector<float> expected(kN);
      for (const auto& input : inputs) {
        for (std::size_t i = 0; i < input.indices.size(); ++i) expected[input.indices[i]] += input.values[i];
      }
      for (float& one : expected) one /= static_cast<float>(size);
      for (const Staged<float>& one : staged) {
        std::vector<float> found(kN);
        if (room == 0) found = one.dense;
        for (std::int64_t i = 0; i < one.form; ++i) {
          found[one.sum_indices[static_cast<std::size_t>(i)]] = one.sum_values[static_cast<std::size_t>(i)];
        }
        EXPECT(one.form == kDenseForm ? room == 0 : room > 0);
        EXPECT(found == expected);
      }
    }
  }
}

TEST("entries beyond a slice of work, in order or not") {
  constexpr std::uint64_t kN = 400'000;
  for (const double density : {0.25, 0.75}) {
    check<float>(World::local, 2, kN, density, {.algorithm = Algorithm::automatic}, 2);
  }
  constexpr std::uint32_t kSlice = Transport::kSliceBytes / sizeof(std::uint32_t);
  for (const std::uint32_t at : {kSlice - 1, kSlice, kSlice + 1, 2 * kSlice, 199'999U}) {
    Input<float> input{std::vector<std::uint32_t>(200'000), std::vector<float>(200'000, 1.0F)};
    for (std::uint32_t i = 0; i < 200'000; ++i) input.indices[i] = 2 * i;
    input.indices[at] = input.indices[at - 1];
    Staged<float> staged(kN, input, 0, kN);
    const RequestPtr request = staged.request({});
    LocalRanks ranks(1, {.agreement_s = 0.0});
    ranks.session(0).begin(request, 0.0);
    ranks.run();
    REQUIRE(request->done() && request->failure());
    EXPECT(request->failure()->reason.find("indices[" + std::to_string(at) + "]") != std::string::npos);
  }
}

TEST("a sum of more entries than there is room for becomes dense") {
  constexpr std::uint64_t kN = 1000;
  const auto inputs = inputs_of<float>(3, kN, 0.1, 9);
  const std::vector<float> expected = dense_result(inputs, kN, Reduction::min);
  const auto entries = static_cast<std::size_t>(
      std::ranges::count_if(expected, [](float x) { return x != std::numeric_limits<float>::infinity(); }));
  for (const std::size_t room : {std::size_t{0}, entries - 1, entries}) {
    std::vector<Staged<float>> staged;
    for (const auto& input : inputs) staged.emplace_back(kN, input, 0, room);
    const Ended ended = run_ranks(World::local, 3, [&](Rank rank) {
      return staged[rank].request({.reduction = Reduction::min, .switch_factor = 1e9});
    });
    EXPECT(ended.all_succeeded());
    for (const auto& one : staged) {
      EXPECT_EQ(one.form, room < entries ? kDenseForm : static_cast<std::int64_t>(entries));
      if (room < entries) EXPECT(one.dense == expected);
    }
  }
}

namespace {

// The bits of the same call of vectors, whose indices count from the beginning of the whole; `room`: for entries.
template <class V>
void check_slices(World world, const Partition& slices, double density, const SparseReduction& how, std::size_t room,
                  std::uint64_t seed) {
  const std::uint64_t n = slices.count();
  const auto size = static_cast<Rank>(slices.blocks());
  const auto inputs = inputs_of<V>(size, n, density, seed);
  std::vector<std::shared_ptr<std::optional<SparseVector<V>>>> sums;
  const Ended plain = run_ranks(
      world, size,
      [&](Rank rank) {
        auto begun = make_reduce_scatter(inputs[rank].vector(n), slices, how);
        sums.push_back(begun.result);
        return begun.request;
      },
      seed);
  REQUIRE(plain.all_succeeded());
  std::vector<Staged<V>> staged;
  for (Rank rank = 0; rank < size; ++rank) {
    staged.emplace_back(n, inputs[rank], 3 * rank, room);
    staged[rank].dense.resize(slices[rank].size());
  }
  const Ended ended = run_ranks(
      world, size,
      [&](Rank rank) { return make_reduce_scatter_staged<V>(staged[rank].mine(), slices, staged[rank].sum(), how); },
      seed);
  REQUIRE(ended.all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) {
    const SparseVector<V>& wanted = **sums[rank];
    std::vector<std::uint32_t> indices(wanted.indices().begin(), wanted.indices().end());
    for (std::uint32_t& index : indices) index -= static_cast<std::uint32_t>(slices[rank].begin);
    const auto slice = SparseVector<V>::sparse(slices[rank].size(), indices, wanted.values());
    if (indices.size() <= room) {
      EXPECT(staged[rank].holds(slice));
    } else {
      std::vector<V> dense(slices[rank].size());
      slice.write_dense(dense, how.reduction);
      EXPECT(staged[rank].holds(SparseVector<V>::dense(dense)));
    }
  }
}

}  // namespace

TEST("slices of a sum have the bits of a sum of vectors, and count from their own beginning") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 5U}) {
      for (const std::uint64_t n : {0UL, 3UL, 900UL}) {
        std::vector<std::uint64_t> lengths(size);
        lengths[size - 1] = n / 3;
        lengths[0] += n - n / 3;
        for (const Partition& slices : {Partition(n, size), Partition(std::span<const std::uint64_t>(lengths))}) {
          for (const double density : {0.0, 0.05, 1.0}) {
            for (const std::size_t room : {std::size_t{0}, std::size_t{20}, std::size_t{n}}) {
              check_slices<float>(world, slices, density, {.wire = {.packs_values = size % 2 == 0}}, room, size + n);
            }
            check_slices<bf16>(world, slices, density, {.reduction = Reduction::avg}, n, n + 1);
            check_slices<double>(world, slices, density, {.reduction = Reduction::max}, 20, n + 2);
          }
        }
      }
    }
  }
}

TEST("a rank has all ranks' entries, each behind the other's room") {
  constexpr std::uint64_t kN = 700;
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 6U}) {
      for (const double density : {0.0, 0.1, 1.0}) {
        for (const ValueEncoding values : {ValueEncoding::native, ValueEncoding::int8}) {
          const auto inputs = inputs_of<float>(size, kN, density, size);
          const SparseReduction how{.wire = {.values = values, .key = {.seed = 3, .call = 7}}};
          std::vector<std::shared_ptr<std::optional<std::vector<SparseVector<float>>>>> gathered;
          const Ended plain = run_ranks(world, size, [&](Rank rank) {
            auto begun = make_all_gather(inputs[rank].vector(kN), how);
            gathered.push_back(begun.result);
            return begun.request;
          });
          REQUIRE(plain.all_succeeded());
          std::vector<Staged<float>> staged;
          std::vector<std::vector<std::int64_t>> counts(size, std::vector<std::int64_t>(size, kUnset));
          for (Rank rank = 0; rank < size; ++rank) staged.emplace_back(kN, inputs[rank], rank, size * kN);
          const Ended ended = run_ranks(world, size, [&](Rank rank) {
            StagedSum<float> all = staged[rank].sum();
            all.form = counts[rank].data();
            return make_all_gather_staged<float>(staged[rank].mine(), all, how);
          });
          REQUIRE(ended.all_succeeded());
          for (Rank rank = 0; rank < size; ++rank) {
            for (Rank source = 0; source < size; ++source) {
              const SparseVector<float>& wanted = (**gathered[rank])[source];
              EXPECT_EQ(counts[rank][source], static_cast<std::int64_t>(wanted.nnz()));
              const std::size_t first = source * kN;
              EXPECT(std::ranges::equal(std::span(staged[rank].sum_indices).subspan(first, wanted.nnz()), wanted.indices()));
              EXPECT(std::ranges::equal(std::span(staged[rank].sum_values).subspan(first, wanted.nnz()), wanted.values()));
            }
          }
        }
      }
    }
  }
}

TEST("what a gather's wire loses is what a vector's residual gets") {
  constexpr std::uint64_t kN = 700;
  const auto inputs = inputs_of<float>(2, kN, 0.2, 9);
  std::vector<std::vector<float>> residuals(2, std::vector<float>(kN));
  SparseReduction how{.wire = {.values = ValueEncoding::int8, .key = {.seed = 3, .call = 7}}};
  const Ended plain = run_ranks(World::local, 2, [&](Rank rank) {
    SparseReduction own = how;
    own.residual = residuals[rank];
    return make_all_gather(inputs[rank].vector(kN), own).request;
  });
  REQUIRE(plain.all_succeeded());
  std::vector<Staged<float>> staged;
  std::vector<StagedLoss> lost(2, StagedLoss(kN));
  std::vector<std::vector<std::int64_t>> counts(2, std::vector<std::int64_t>(2, kUnset));
  for (Rank rank = 0; rank < 2; ++rank) staged.emplace_back(kN, inputs[rank], 0, 2 * kN);
  const Ended ended = run_ranks(World::local, 2, [&](Rank rank) {
    StagedSum<float> all = staged[rank].sum();
    all.form = counts[rank].data();
    return make_all_gather_staged<float>(staged[rank].mine(), all, how, lost[rank].where());
  });
  REQUIRE(ended.all_succeeded());
  for (Rank rank = 0; rank < 2; ++rank) {
    EXPECT(std::ranges::count(residuals[rank], 0.0F) < static_cast<std::ptrdiff_t>(kN));
    EXPECT(lost[rank].scattered() == residuals[rank]);
  }
}

TEST("a rank with more entries than there is room for ends a gather on all ranks") {
  std::vector<Staged<float>> staged{Staged<float>(10, 4, 6), Staged<float>(10, 4, 6)};
  std::vector<std::vector<std::int64_t>> counts(2, std::vector<std::int64_t>(2, kUnset));
  LocalRanks ranks(2, {.agreement_s = 0.0});
  std::vector<RequestPtr> requests;
  staged[0].fill({{1, 2}, {1.0F, 2.0F}});
  staged[1].fill({{1, 2, 5, 7}, {1.0F, 2.0F, 3.0F, 4.0F}});
  for (Rank rank = 0; rank < 2; ++rank) {
    StagedSum<float> all = staged[rank].sum();
    all.form = counts[rank].data();
    requests.push_back(make_all_gather_staged<float>(staged[rank].mine(), all, {}));
    requests[rank]->set_gate({.ready = &staged[rank].ready,
                              .ready_value = 1,
                              .done = &staged[rank].done,
                              .done_value = 1,
                              .output = std::as_writable_bytes(std::span(counts[rank]))});
    ranks.session(rank).begin(requests[rank], 0.0);
    staged[rank].open();
  }
  run(ranks, 2);
  for (Rank rank = 0; rank < 2; ++rank) {
    REQUIRE(requests[rank]->done() && requests[rank]->failure());
    const std::string& reason = requests[rank]->failure()->reason;
    EXPECT(reason.find("rank 1 has 4 entries, but rank ") != std::string::npos);
    EXPECT(reason.find(" has room for 3 of each: give tensors of the same length on all ranks") != std::string::npos);
    EXPECT(counts[rank] == std::vector<std::int64_t>(2, -1));
    EXPECT_EQ(staged[rank].done, 1U);
  }
}

TEST("entries are read once the gate is open, and ranks with vectors of their own may call the same") {
  constexpr std::uint64_t kN = 2000;
  const auto inputs = inputs_of<float>(3, kN, 0.05, 4);
  const SparseReduction how{.algorithm = Algorithm::automatic};
  std::vector<Staged<float>> staged;
  for (const auto& input : inputs) staged.emplace_back(kN, input.indices.size() + 3, kN);
  auto host = make_all_reduce(inputs[1].vector(kN), how);
  LocalRanks ranks(3);
  const std::vector<RequestPtr> requests{staged[0].gated(how), host.request, staged[2].gated(how)};
  for (Rank rank = 0; rank < 3; ++rank) ranks.session(rank).begin(requests[rank], 0.0);
  run(ranks, 3);
  for (const Rank rank : {0U, 2U}) {
    EXPECT(!requests[1]->done());
    staged[rank].fill(inputs[rank]);
    staged[rank].open();
    run(ranks, 3);
  }
  for (const auto& request : requests) {
    REQUIRE(request->done());
    request->rethrow();
  }
  for (const Rank rank : {0U, 2U}) {
    EXPECT(staged[rank].holds(**host.result));
    EXPECT_EQ(staged[rank].done, 1U);
  }
}

TEST("a count that the memory does not hold ends the operation on all ranks") {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  const std::string remedy = "entries, but there is room for 0 to 4: select no more, or give longer tensors";
  check_refused({1, 2, 3, 4}, 5, "the device counts 5 " + remedy);
  check_refused({1, 2, 3, 4}, -1, "the device counts -1 " + remedy);
  check_refused({1, 2, 3, 4}, kLeast, "the device counts " + std::to_string(kLeast) + " " + remedy);
}

TEST("indices out of order or range end the operation on all ranks") {
  const std::string what = "the device's entries are no sparse vector: ";
  check_refused({1, 3, 3, 4}, 4, what + "indices[2] = 3 is not above indices[1] = 3");
  check_refused({5, 1}, 2, what + "indices[1] = 1 is not above indices[0] = 5");
  check_refused({0, 9, 10, 11}, 4, what + "indices[2] = 10 is out of range: the dimension is 10");
  check_refused({0xFFFF'FFFF}, 1, what + "indices[0] = 4294967295 is out of range");
}

TEST("a peer that fails while gates are shut, or one that has not called, lets streams go on") {
  std::vector<Staged<float>> staged(2, Staged<float>(10, 4, 5));
  LocalRanks ranks(2, {.agreement_s = 0.0});
  std::vector<RequestPtr> requests;
  for (Staged<float>& one : staged) ranks.session(0).begin(requests.emplace_back(one.gated({})), 0.0);
  staged[1].count = 0;
  staged[1].open();
  run(ranks, 2);
  EXPECT(!requests[1]->done());
  ranks.session(0).on_peer_failed(1, "its process is gone");
  for (std::size_t i = 0; i < 2; ++i) {
    REQUIRE(requests[i]->done() && requests[i]->failure());
    EXPECT_EQ(requests[i]->failure()->peer, 1U);
    EXPECT(staged[i].is_spoilt());
  }
}

TEST("ranks that stage entries of vectors of other lengths find out") {
  std::vector<Staged<float>> staged{Staged<float>(10, 4, 5), Staged<float>(11, 4, 5)};
  LocalRanks ranks(2, {.agreement_s = 0.0});
  std::vector<RequestPtr> requests;
  for (Rank rank = 0; rank < 2; ++rank) {
    ranks.session(rank).begin(requests.emplace_back(staged[rank].gated({})), 0.0);
  }
  staged[0].fill({{1}, {2.0F}});
  staged[0].open();
  run(ranks, 2);
  for (Rank rank = 0; rank < 2; ++rank) {
    REQUIRE(requests[rank]->done() && requests[rank]->failure());
    EXPECT_EQ(requests[rank]->failure()->kind, FailureKind::mismatched_call);
    EXPECT(staged[rank].is_spoilt());
  }
}
