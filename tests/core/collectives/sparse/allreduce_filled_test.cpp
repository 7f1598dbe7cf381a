// Sums of filled vectors: the dense sum, the same bits everywhere, and safe from what is
// damaged.
#include "testing.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/slices.hpp"
#include "collectives/dense/allreduce_ring.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/sparse/filled.hpp"
#include "collectives/support/any_size.hpp"
#include "kernels/marks.hpp"
#include "kernels/operations.hpp"
#include "kernels/scatter.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr std::uint64_t kN = 400'003;  // several blocks in a slice of two, and a last one that is no whole word
constexpr Reduction kReductions[] = {Reduction::sum, Reduction::avg, Reduction::prod,
                                     Reduction::min, Reduction::max, Reduction::max_abs};

constexpr World kWorlds[] = {World::memory, World::local, World::simulated};

template <class V>
std::vector<std::vector<V>> sums_of(const std::vector<SparseVector<V>>& vectors, Reduction reduction,
                                    World world = World::memory) {
  const auto n = static_cast<std::size_t>(vectors[0].dimension());
  std::vector<std::vector<V>> outputs(vectors.size(), std::vector<V>(n, static_cast<V>(-77.0F)));
  const Ended ended = run_ranks(world, static_cast<Rank>(vectors.size()), [&](Rank rank) {
    return std::make_shared<Request>(Call{.operation = Operation::sparse_allreduce}, [&, rank](Transport& net) {
      return allreduce_filled(net, vectors[rank].view(), reduction, std::span(outputs[rank]));
    });
  });
  REQUIRE(ended.all_succeeded());
  return outputs;
}

template <class V>
std::vector<std::uint64_t> marks_of(const Input<V>& input, std::uint64_t n) {
  std::vector<std::uint64_t> marks(kernels::mark_words(static_cast<std::size_t>(n)));
  REQUIRE(kernels::mark(input.indices, 0, static_cast<std::size_t>(n), marks));
  return marks;
}

// The vectors of some ranks have marks.
template <class V>
void check(const std::vector<Input<V>>& inputs, std::uint64_t n, Reduction reduction, Rank dense_rank = ~Rank{0}) {
  std::vector<SparseVector<V>> vectors;
  std::deque<std::vector<std::uint64_t>> marks;
  for (const Input<V>& input : inputs) {
    const bool is_marked = vectors.size() % 3 != 1 && vectors.size() != dense_rank;
    if (is_marked) marks.push_back(marks_of(input, n));
    vectors.push_back(is_marked ? SparseVector<V>::borrow_sparse(n, input.indices, input.values, marks.back())
                                : input.vector(n));
  }
  if (dense_rank < vectors.size()) vectors[dense_rank].to_dense(reduction);
  const auto expected = dense_result(inputs, n, reduction);
  for (const World world : kWorlds) {
    const auto outputs = sums_of(vectors, reduction, world);
    EXPECT(as_floats(std::span<const V>(outputs[0])) == expected);
    for (const auto& output : outputs) {
      EXPECT(std::ranges::equal(std::as_bytes(std::span(output)), std::as_bytes(std::span(outputs[0]))));
    }
  }
}

template <class V>
std::vector<Input<V>> inputs_of(Rank size, double density, std::uint64_t n = kN) {
  Random random(size + 17);
  std::vector<Input<V>> inputs;
  for (Rank rank = 0; rank < size; ++rank) inputs.push_back(uniform<V>(n, density, random));
  return inputs;
}

TEST("the sum is the dense one for any number of ranks, and densities alike and unlike") {
  for (const Rank size : {Rank{2}, Rank{3}, Rank{4}, Rank{5}, Rank{8}}) {
    for (const double density : {0.0, 0.01, 0.6, 1.0}) check(inputs_of<float>(size, density), kN, Reduction::sum);
    auto unlike = inputs_of<float>(size, 0.5);
    unlike[0] = {};
    unlike[1] = {};
    for (std::uint32_t i = 0; i < 5000; ++i) {  // all in one block, at its end
      unlike[1].indices.push_back(static_cast<std::uint32_t>(kN) - 5000 + i);
      unlike[1].values.push_back(2.0F);
    }
    check(unlike, kN, Reduction::sum);
    check(unlike, kN, Reduction::sum, size - 1);
    check(unlike, kN, Reduction::max, 0);
  }
}

TEST("every reduction and dtype") {
  for (const Reduction reduction : kReductions) {
    check(inputs_of<float>(3, 0.6), kN, reduction);
    check(inputs_of<float>(2, 0.3), kN, reduction, 1);
    check(inputs_of<double>(3, 0.6), kN, reduction);
    if (reduction != Reduction::prod) check(inputs_of<bf16>(4, 0.6, 700'001), 700'001, reduction);
    if (reduction != Reduction::prod) check(inputs_of<f16>(4, 0.6, 700'001), 700'001, reduction);
  }
}

TEST("awkward values have the bits that the first rank's have when they are made dense and others' are added in order") {
  constexpr std::uint64_t kShort = 80'000;
  std::mt19937 random(8);
  for (const Reduction reduction : kReductions) {
    std::vector<SparseVector<float>> vectors;
    for (int rank = 0; rank < 4; ++rank) {
      const auto indices = samples::random_indices(random, 0, kShort, 0.5);
      vectors.push_back(SparseVector<float>::sparse(kShort, indices, samples::awkward_values<float>(random, indices.size())));
    }
    OwnedSlice<float> expected = dense_slice(vectors[0].view(), reduction);
    for (const auto& vector : std::span(vectors).subspan(1)) {
      kernels::scatter_reduce(reduction, expected.values.span(), vector.view().entries());
    }
    if (reduction == Reduction::avg) scale(expected, 0.25);
    for (const auto& output : sums_of(vectors, reduction)) {
      EXPECT(std::ranges::equal(std::as_bytes(std::span(output)), std::as_bytes(expected.values.span())));
    }
  }
}

TEST("only long vectors of not too many ranks are summed so") {
  EXPECT(is_for_filling(4, 1 << 20));
  EXPECT(is_for_filling(4, 1 << 18));
  EXPECT(!is_for_filling(4, (1 << 18) - 4));
  EXPECT(!is_for_filling(1, 1 << 20));
  EXPECT(is_for_filling(64, 1 << 30));
  EXPECT(!is_for_filling(65, 1 << 30));
}

// What a caller's arrays become while the collective runs; rank 1's.
void check_own(const std::function<void(std::vector<std::uint32_t>&)>& damage) {
  auto inputs = inputs_of<float>(3, 0.6);
  damage(inputs[1].indices);
  std::vector<std::vector<float>> outputs(3, std::vector<float>(kN));
  const Ended ended = run_ranks(World::memory, 3, [&](Rank rank) {
    const auto vector = std::make_shared<SparseVector<float>>(
        SparseVector<float>::borrow_sparse(kN, inputs[rank].indices, inputs[rank].values));
    return std::make_shared<Request>(Call{.operation = Operation::sparse_allreduce}, [&, rank, vector](Transport& net) {
      return allreduce_filled(net, vector->view(), Reduction::sum, std::span(outputs[rank]));
    });
  });
  for (const RequestPtr& request : ended.requests) {
    REQUIRE(request->failure());
    EXPECT_EQ(request->failure()->peer, 1U);
    EXPECT(request->failure()->reason.find("rank 1 gave indices that are not strictly increasing") != std::string::npos);
  }
}

TEST("indices that are no vector's end the operation, wherever they are wrong") {
  check_own([](auto& indices) { std::swap(indices[100], indices[101]); });
  check_own([](auto& indices) { indices.back() = static_cast<std::uint32_t>(kN); });
  check_own([](auto& indices) { indices[indices.size() / 2] = 0xffffffffU; });
  check_own([](auto& indices) { indices[indices.size() / 3] = 5; });
  check_own([](auto& indices) { std::ranges::reverse(indices); });
  check_own([](auto& indices) { std::ranges::fill(indices, 7U); });
}

TEST("marks of other indices end the operation") {
  const auto inputs = inputs_of<float>(3, 0.6);
  auto marks = marks_of(inputs[1], kN);
  const auto outcome = [&] {
    std::vector<std::vector<float>> outputs(3, std::vector<float>(kN));
    return run_ranks(World::memory, 3, [&](Rank rank) {
      const auto vector = std::make_shared<SparseVector<float>>(SparseVector<float>::borrow_sparse(
          kN, inputs[rank].indices, inputs[rank].values,
          rank == 1 ? std::span<const std::uint64_t>(marks) : std::span<const std::uint64_t>()));
      return std::make_shared<Request>(Call{.operation = Operation::sparse_allreduce}, [&, rank, vector](Transport& net) {
        return allreduce_filled(net, vector->view(), Reduction::sum, std::span(outputs[rank]));
      });
    });
  };
  EXPECT(outcome().all_succeeded());
  const std::uint64_t right = marks[1000];
  marks[1000] = right & (right - 1);
  for (const RequestPtr& request : outcome().requests) EXPECT(request->failure() && request->failure()->peer == 1U);
  marks[1000] = right;
  std::ranges::fill(marks, ~std::uint64_t{0});
  for (const RequestPtr& request : outcome().requests) EXPECT(request->failure() && request->failure()->peer == 1U);
}

// A rank that sends what it likes to rank 0, as the first block of its slice.
Task<void> send_damage(Transport& net, int damage) {
  const std::size_t elements = std::min<std::size_t>(65'536, kN / 3 + 1);
  std::vector<std::uint64_t> marks(kernels::mark_words(elements), 0x5555555555555555U);
  std::vector<float> values(elements / 2, 1.0F);
  if (damage == 0) values.resize(values.size() - 1);
  if (damage == 1) marks.back() |= 2;
  if (damage == 2) marks.pop_back();
  if (damage == 3) marks.clear();  // densely, with half of the values
  auto sending = net.send(0, 0, std::as_bytes(std::span(marks)));
  auto values_sending = net.send(0, 1, std::as_bytes(std::span(values)));
  co_await sending;
  co_await values_sending;
  co_await net.receive_any_size(0, 9999, 0);  // never comes
}

TEST("damaged marks and values end the operation, and name their sender") {
  for (int damage = 0; damage < 4; ++damage) {
    const auto inputs = inputs_of<float>(3, 0.6);
    std::vector<std::vector<float>> outputs(3, std::vector<float>(kN));
    const Ended ended = run_ranks(World::memory, 3, [&](Rank rank) {
      return std::make_shared<Request>(
          Call{.operation = Operation::sparse_allreduce}, [&, rank](Transport& net) -> Task<void> {
            if (rank == 2) return send_damage(net, damage);
            return allreduce_filled(net, SparseView<float>{{0, kN}, false, inputs[rank].indices, inputs[rank].values},
                                    Reduction::sum, std::span(outputs[rank]));
          });
    });
    REQUIRE(ended.requests[0]->failure());
    EXPECT_EQ(ended.requests[0]->failure()->peer, 2U);
    EXPECT(ended.requests[0]->failure()->reason.find("rank 2 sent damaged entries") != std::string::npos);
  }
}

// Rank 1's first message is a verdict that cannot be rank 0's.
Task<void> say_filled(Transport& net, std::size_t most) {
  const std::uint32_t words[] = {kVectorMagic, static_cast<std::uint32_t>(SparseVerdict::filled)};
  const Step round = (Step{1} << 31) + 2 * any_size_steps(net, most);
  const auto message = std::as_bytes(std::span(words));
  const Buffer other = co_await exchange_any_size(net, 0, 0, round, message, most);
  co_await net.receive_any_size(0, 9999, 0);  // never comes
}

TEST("a verdict that short sums cannot have is damage, and names its sender") {
  const std::size_t most = most_bytes<float>(IndexRange{0, 100});
  const Ended ended = run_ranks(World::memory, 2, [&](Rank rank) {
    const SparseReduction how{.algorithm = Algorithm::automatic,
                              .choice = std::make_shared<SparseChoice>(AllreduceTable(2))};
    const std::vector<std::uint32_t> indices{1, 5};
    const std::vector<float> values{1.0F, 2.0F};
    const RequestPtr sum = make_all_reduce(SparseVector<float>::sparse(100, indices, values), how).request;
    if (rank == 0) return sum;
    return std::make_shared<Request>(sum->call(), [most](Transport& net) { return say_filled(net, most); });
  });
  REQUIRE(ended.requests[0]->failure());
  EXPECT_EQ(ended.requests[0]->failure()->peer, 1U);
  EXPECT(ended.requests[0]->failure()->reason.find("rank 1 sent") != std::string::npos);
}

std::shared_ptr<SparseChoice> choice_of(Rank size, std::optional<NetworkCosts> costs = {}) {
  return std::make_shared<SparseChoice>(AllreduceTable(size), costs);
}

TEST("an open sum borrows its entries, and is right whether it goes densely or not") {
  constexpr NetworkCosts kLatency{.alpha_s = 1.0, .beta_s_per_byte = 1e-15, .gamma_s_per_byte = 0.0};
  for (const Rank size : {Rank{2}, Rank{3}, Rank{4}}) {
    for (const double density : {0.1, 0.4, 0.9, 1.0}) {
      for (const bool one_has_few : {false, true}) {
        auto inputs = inputs_of<float>(size, density);
        Random random(4);
        if (one_has_few) inputs[size - 1] = uniform<float>(kN, 0.001, random);
        std::vector<std::vector<std::uint64_t>> all_marks;
        for (const Input<float>& input : inputs) all_marks.push_back(marks_of(input, kN));
        const auto expected = dense_result(inputs, kN, Reduction::sum);
        const std::optional<NetworkCosts> costs = size == 3 ? std::optional(kLatency) : std::nullopt;
        for (const World world : kWorlds) {
          std::vector<std::shared_ptr<std::optional<SparseVector<float>>>> results;
          const Ended ended = run_ranks(world, size, [&](Rank rank) {
            const SparseReduction how{.algorithm = Algorithm::automatic, .choice = choice_of(size, costs)};
            const Input<float>& mine = inputs[rank];
            const auto marks = rank == 1 ? std::span<const std::uint64_t>() : std::span<const std::uint64_t>(all_marks[rank]);
            auto sum = make_all_reduce(addend_of<float>(kN, mine.indices, mine.values, how, marks), how);
            results.push_back(sum.result);
            return sum.request;
          });
          REQUIRE(ended.all_succeeded());
          for (const auto& result : results) {
            EXPECT(same_bits(**result, **results[0]));
            std::vector<float> dense(kN);
            (**result).write_dense(dense);
            EXPECT(dense == expected);
          }
        }
      }
    }
  }
}

// Costs of a network on which nearly full vectors of 4 ranks go densely by the ring.
SparseReduction goes_round_a_ring(double entries) {
  constexpr NetworkCosts kSlow{.alpha_s = 1e-9, .beta_s_per_byte = 1e-6, .gamma_s_per_byte = 1e-10};
  const AllreduceTable table(4, {{0, Algorithm::ring}});
  const SparseReduction how{.algorithm = Algorithm::automatic, .choice = std::make_shared<SparseChoice>(table, kSlow)};
  const SparseSumShape shape{.ranks = 4, .dimension = kN, .fills = true};
  const SparseDecision decision(*how.choice, shape, 0.0, false);
  REQUIRE(decision.alone(entries, false) == SparseVerdict::dense);
  REQUIRE(decision.dense_algorithm() == Algorithm::ring);
  return how;
}

TEST("borrowed entries are added to what comes round a ring") {
  const auto inputs = inputs_of<float>(4, 0.97);
  const auto expected = dense_result(inputs, kN, Reduction::sum);
  const auto entries = static_cast<double>(inputs[0].indices.size());
  for (const World world : {World::local, World::simulated}) {
    for (const bool marked : {false, true}) {
      std::vector<std::vector<std::uint64_t>> marks(4);
      std::vector<std::vector<float>> outputs(4, std::vector<float>(kN));
      const Ended ended = run_ranks(world, 4, [&](Rank rank) {
        const Input<float>& mine = inputs[rank];
        if (marked) marks[rank] = marks_of(mine, kN);
        const SparseReduction how = goes_round_a_ring(entries);
        return make_all_reduce_into(addend_of<float>(kN, mine.indices, mine.values, how, marks[rank]), std::span(outputs[rank]), how);
      });
      REQUIRE(ended.all_succeeded());
      for (const auto& output : outputs) EXPECT(output == expected);
    }
  }
}

// Of entries that are added to what comes round the ring, and of the vectors that they are.
template <class V>
void expect_bits_of_vectors(Rank size, Reduction reduction) {
  constexpr NetworkCosts kSlow{.alpha_s = 1e-9, .beta_s_per_byte = 1e-6, .gamma_s_per_byte = 1e-10};
  const AllreduceTable table(size, {{0, Algorithm::ring}});
  const auto inputs = inputs_of<V>(size, 0.97);
  std::vector<std::vector<V>> outputs(size, std::vector<V>(kN));
  std::vector<std::vector<V>> vectors(size, std::vector<V>(kN, kernels::absent_element<V>(reduction)));
  std::vector<char> borrowed(size);
  const Ended ended = run_ranks(World::local, size, [&](Rank rank) {
    const Input<V>& mine = inputs[rank];
    const SparseReduction how{.reduction = reduction, .algorithm = Algorithm::automatic, .choice = std::make_shared<SparseChoice>(table, kSlow)};
    auto addend = addend_of<V>(kN, mine.indices, mine.values, how, {});
    borrowed[rank] = addend.is_borrowed() && !addend.is_dense() ? 1 : 0;
    return make_all_reduce_into(std::move(addend), std::span(outputs[rank]), how);
  });
  REQUIRE(ended.all_succeeded());
  EXPECT_EQ(std::ranges::count(borrowed, 1), std::ptrdiff_t{size});
  const Ended densely = run_ranks(World::local, size, [&](Rank rank) {
    const Input<V>& mine = inputs[rank];
    for (std::size_t i = 0; i < mine.indices.size(); ++i) vectors[rank][mine.indices[i]] = mine.values[i];
    const Bytes whole = std::as_writable_bytes(std::span(vectors[rank]));
    const Call call{.operation = Operation::allreduce, .dtype = dtype_of<V>, .reduction = reduction};
    return std::make_shared<Request>(
        call, [=](Transport& net) { return allreduce_ring(net, dtype_of<V>, reduction, whole, whole); });
  });
  REQUIRE(densely.all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) EXPECT(samples::bits(outputs[rank]) == samples::bits(vectors[rank]));
}

TEST("round a ring borrowed entries have the bits of vectors, whatever their type, reduction and number of ranks") {
  for (const Rank size : {Rank{2}, Rank{3}, Rank{5}}) {
    for (const Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::prod, Reduction::min, Reduction::max_abs}) {
      expect_bits_of_vectors<float>(size, reduction);
      expect_bits_of_vectors<bf16>(size, reduction);
    }
    expect_bits_of_vectors<double>(size, Reduction::avg);
    expect_bits_of_vectors<f16>(size, Reduction::max);
  }
}

TEST("borrowed indices that are wrong end a sum that goes round a ring, wherever they are") {
  const auto check = [](const std::function<void(std::vector<std::uint32_t>&)>& damage, bool marked) {
    auto inputs = inputs_of<float>(4, 0.97);
    const auto entries = static_cast<double>(inputs[0].indices.size());
    const auto marks = marked ? marks_of(inputs[1], kN) : std::vector<std::uint64_t>();
    damage(inputs[1].indices);
    std::vector<std::vector<float>> outputs(4, std::vector<float>(kN));
    const Ended ended = run_ranks(World::local, 4, [&](Rank rank) {
      const Input<float>& mine = inputs[rank];
      const SparseReduction how = goes_round_a_ring(entries);
      const auto its = rank == 1 ? std::span<const std::uint64_t>(marks) : std::span<const std::uint64_t>();
      return make_all_reduce_into(addend_of<float>(kN, mine.indices, mine.values, how, its), std::span(outputs[rank]), how);
    });
    for (const RequestPtr& request : ended.requests) {
      REQUIRE(request->failure());
      EXPECT_EQ(request->failure()->peer, 1U);
    }
  };
  check([](auto& indices) { std::swap(indices[100], indices[101]); }, false);
  check([](auto& indices) { indices.back() = static_cast<std::uint32_t>(kN); }, false);
  check([](auto& indices) { indices[indices.size() / 2] = 0xffffffffU; }, false);
  check([](auto& indices) { indices[indices.size() / 3] = 5; }, false);
  check([](auto& indices) { std::ranges::reverse(indices); }, false);
  check([](auto& indices) { std::ranges::fill(indices, 7U); }, false);
  // Of other indices than those that are marked it is noticed where pieces do not have as many.
  check([](auto& indices) { std::ranges::fill(indices, 7U); }, true);
  check([](auto& indices) { for (auto& index : indices) index = index < 30 ? 0 : index - 30; }, true);
}

// All of a vector's elements, added up.
double total_of(std::span<const float> vector) { return std::accumulate(vector.begin(), vector.end(), 0.0); }

TEST("of indices that change while a vector goes round a ring each entry is used once, or the sum fails") {
  auto inputs = inputs_of<float>(4, 0.97);
  while (inputs[1].indices.back() >= kN - 2) {  // so that they may be raised
    inputs[1].indices.pop_back();
    inputs[1].values.pop_back();
  }
  const auto entries = static_cast<double>(inputs[0].indices.size());
  const auto expected = dense_result(inputs, kN, Reduction::sum);
  const auto marks = marks_of(inputs[1], kN);
  for (const bool marked : {false, true}) {
    int failed = 0, ended = 0;
    for (int turn = 0; turn < 200; ++turn) {
      auto indices = inputs[1].indices;
      std::vector<std::vector<float>> outputs(4, std::vector<float>(kN));
      LocalRanks ranks(4, {}, false);
      std::vector<RequestPtr> requests;
      for (Rank rank = 0; rank < 4; ++rank) {
        const SparseReduction how = goes_round_a_ring(entries);
        const auto its = rank == 1 && marked ? std::span<const std::uint64_t>(marks) : std::span<const std::uint64_t>();
        const std::vector<std::uint32_t>& mine = rank == 1 ? indices : inputs[rank].indices;
        requests.push_back(make_all_reduce_into(addend_of<float>(kN, mine, inputs[rank].values, how, its), std::span(outputs[rank]), how));
        ranks.session(rank).begin(requests[rank], 0.0);
      }
      int turns = 0;
      for (bool active = true; active;) {
        active = false;
        for (Rank rank = 0; rank < 4; ++rank, ++turns) {
          if (turns == turn) std::ranges::for_each(indices, [](std::uint32_t& index) { ++index; });
          active |= ranks.turn(rank);
        }
      }
      const bool fails = std::ranges::any_of(requests, [](const auto& request) { return request->failure().has_value(); });
      failed += fails ? 1 : 0;
      ended += turns > turn ? 1 : 0;
      if (fails) continue;
      EXPECT_EQ(total_of(outputs[0]), total_of(expected));
      if (marked) EXPECT(outputs[0] == expected);
    }
    EXPECT(failed > 10 && failed < ended);
  }
}

TEST("an addend is borrowed only where it can be checked as it is read") {
  const auto input = inputs_of<float>(1, 0.5)[0];
  const auto few = inputs_of<float>(1, 0.01)[0];
  SparseReduction how{.algorithm = Algorithm::automatic, .choice = choice_of(4)};
  const auto borrows = [&](const Input<float>& of) {
    return addend_of<float>(kN, of.indices, of.values, how).is_borrowed();
  };
  EXPECT(borrows(input));
  EXPECT(!borrows(few));
  how.wire.values = ValueEncoding::bf16;
  EXPECT(!borrows(input));
  how.wire.values = ValueEncoding::native;
  how.algorithm = Algorithm::split_allgather;
  EXPECT(!borrows(input));
  how = {.algorithm = Algorithm::automatic, .choice = choice_of(65)};
  EXPECT(!borrows(input));
  how = {.algorithm = Algorithm::automatic};
  EXPECT(!borrows(input));
  const auto full = inputs_of<float>(1, 1.0)[0];
  const auto whole = addend_of<float>(kN, full.indices, full.values, how);
  EXPECT(whole.is_dense() && whole.values().data() == full.values.data());
}

}  // namespace
