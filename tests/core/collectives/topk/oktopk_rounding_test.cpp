// Ok-Topk over wires that round: the top k of sums of what the wire has made of entries, against such sums made here; and
// what rounding loses is handed back.
#include "testing.hpp"

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "oktopk_calls.hpp"
#include "codec/wire.hpp"

namespace {

using namespace telegrad;

constexpr kernels::QuantisationKey kKey{.seed = 7, .call = 3};

struct Rounded {
  Results<float> results;
  std::vector<std::vector<float>> errors;  // by rank, of all indices
};

Rounded call_rounding(World world, const std::vector<Input<float>>& inputs, std::uint64_t n, const OkTopkSettings& settings,
                      const OkTopkState& state, Reduction reduction, const WireFormat& wire) {
  Rounded found;
  found.errors.assign(inputs.size(), std::vector<float>(n));
  std::vector<std::shared_ptr<std::optional<OkTopkSum<float>>>> results;
  const Ended ended = run_ranks(world, static_cast<Rank>(inputs.size()), [&](Rank rank) {
    auto sum = make_all_reduce_topk(inputs[rank].vector(n), settings, state, reduction, wire, found.errors[rank]);
    results.push_back(sum.result);
    return sum.request;
  });
  REQUIRE(ended.all_succeeded());
  for (auto& result : results) found.results.push_back(std::move(**result));
  return found;
}

// What a message of these entries, from `rank`, is read as, if the error of rounding is kept.
Input<float> through_the_wire(const Input<float>& entries, IndexRange range, WireFormat wire, Rank rank) {
  wire.key.rank = rank;
  std::vector<float> error(entries.values.size());
  const Buffer message = encode(SparseView<float>{range, false, entries.indices, entries.values}, wire, std::span(error));
  const Decoded<float> decoded = decode<float>(message.bytes(), range);
  const SparseView<float>& view = decoded.view();
  return {{view.indices.begin(), view.indices.end()}, {view.values.begin(), view.values.end()}};
}

Input<float> within(const Input<float>& input, IndexRange range) {
  Input<float> part;
  for (std::size_t i = 0; i < input.indices.size(); ++i) {
    if (input.indices[i] < range.begin || input.indices[i] >= range.end) continue;
    part.indices.push_back(input.indices[i]);
    part.values.push_back(input.values[i]);
  }
  return part;
}

// What a call that finds its threshold must give where no share is balanced and no slice takes several buckets.
Input<float> expected(const std::vector<Input<float>>& inputs, const std::vector<std::uint64_t>& lengths, std::uint64_t k,
                      Reduction reduction, const WireFormat& wire) {
  const Partition slices{std::span(lengths)};
  std::map<std::uint32_t, float> sums;
  for (Rank owner = 0; owner < inputs.size(); ++owner) {
    const IndexRange slice{slices[owner].begin, slices[owner].end};
    std::vector<Input<float>> shares;
    for (Rank rank = 0; rank < inputs.size(); ++rank) {
      const Input<float> share = within(inputs[rank], slice);
      shares.push_back(rank == owner ? share : through_the_wire(share, slice, wire, rank));
    }
    sums.merge(sum_of(shares, reduction));
  }
  const Input<float> kept = largest(sums, k);
  Input<float> result;
  for (Rank owner = 0; owner < inputs.size(); ++owner) {
    const IndexRange slice{slices[owner].begin, slices[owner].end};
    const Input<float> share = through_the_wire(within(kept, slice), slice, wire, owner);
    result.indices.insert(result.indices.end(), share.indices.begin(), share.indices.end());
    result.values.insert(result.values.end(), share.values.begin(), share.values.end());
  }
  return result;
}

// Ranks agree; and the sum, what is left and what rounding has lost are what was given.
void check_nothing_lost(const std::vector<Input<float>>& inputs, std::uint64_t n, Reduction reduction, const Rounded& found,
                        double tolerance) {
  const double weight = reduction == Reduction::avg ? static_cast<double>(inputs.size()) : 1.0;
  std::vector<double> balance(n);
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    const auto& [sum, left, state, report] = found.results[rank];
    EXPECT(same_bits(sum, found.results[0].sum));
    const std::uint64_t most = std::max(report.local_most, report.selected);
    EXPECT(report.words_most() <= oktopk_words_most(most, static_cast<Rank>(inputs.size())));
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) balance[inputs[rank].indices[i]] += inputs[rank].values[i];
    for (std::size_t i = 0; i < left.nnz(); ++i) {
      balance[left.indices()[i]] -= left.values()[i];
      EXPECT(!std::ranges::binary_search(sum.indices(), left.indices()[i]));
      const auto given = std::ranges::lower_bound(inputs[rank].indices, left.indices()[i]) - inputs[rank].indices.begin();
      EXPECT_EQ(inputs[rank].values[static_cast<std::size_t>(given)], left.values()[i]);
    }
    for (std::size_t i = 0; i < n; ++i) balance[i] -= found.errors[rank][i];
  }
  const SparseVector<float>& sum = found.results[0].sum;
  for (std::size_t i = 0; i < sum.nnz(); ++i) balance[sum.indices()[i]] -= weight * sum.values()[i];
  double worst = 0.0;
  for (const double one : balance) worst = std::max(worst, std::abs(one));
  EXPECT(worst <= tolerance);
}

double errors_of(const Rounded& found) {
  double total = 0.0;
  for (const auto& errors : found.errors) {
    for (const float error : errors) total += std::abs(error);
  }
  return total;
}

// Whole numbers that no format of 16 bits has all of: their sums and what rounding to 16 bits loses are exact.
Input<float> whole_numbers(std::uint64_t n, double density, Random& random) {
  Input<float> input = uniform<float>(n, density, random);
  for (float& value : input.values) value = static_cast<float>(random.below(20'001)) - 10'000.0F;
  return input;
}

constexpr ValueEncoding kEncodings[] = {ValueEncoding::bf16,  ValueEncoding::f16,   ValueEncoding::int8, ValueEncoding::qsgd8,
                                        ValueEncoding::qsgd4, ValueEncoding::mean,  ValueEncoding::e3m0, ValueEncoding::codebook2};

TEST("the top k of sums of rounded entries, rounded; nothing is lost") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 4U, 5U, 8U}) {
      for (const ValueEncoding encoding : kEncodings) {
        for (const Reduction reduction : {Reduction::sum, Reduction::avg}) {
          Random random(size);
          std::vector<Input<float>> inputs;
          for (Rank rank = 0; rank < size; ++rank) inputs.push_back(whole_numbers(3000, 0.1, random));
          if (encoding == ValueEncoding::mean) {
            for (Input<float>& input : inputs) {
              for (float& value : input.values) value = std::abs(value) + 1.0F;
            }
          }
          const OkTopkSettings settings{.k = 250, .balance_factor = 100.0};
          const WireFormat wire{.indices = IndexFormat::packed, .values = encoding, .key = kKey, .packs_values = true};
          const Rounded found = call_rounding(world, inputs, 3000, settings, {}, reduction, wire);
          const auto& lengths = found.results[0].state.lengths;
          EXPECT(same_bits(found.results[0].sum, expected(inputs, lengths, 250, reduction, wire).vector(3000)));
          EXPECT(found.results[0].report.exact);
          const bool exact = reduction == Reduction::sum && (encoding == ValueEncoding::bf16 || encoding == ValueEncoding::f16);
          check_nothing_lost(inputs, 3000, reduction, found, exact ? 0.0 : 0.05);
          EXPECT(errors_of(found) > 0.0);
        }
      }
    }
  }
}

TEST("nothing is lost where shares are made alike, go in buckets, or thresholds are reused") {
  for (const World world : kWorlds) {
    for (const ValueEncoding encoding : {ValueEncoding::bf16, ValueEncoding::int8}) {
      const WireFormat wire{.indices = IndexFormat::packed, .values = encoding, .key = kKey};
      Random random(1);
      const double tolerance = encoding == ValueEncoding::bf16 ? 0.0 : 0.05;
      // Sums that count lie in one slice.
      std::vector<Input<float>> inputs;
      for (Rank rank = 0; rank < 5; ++rank) {
        inputs.push_back(whole_numbers(2000, 0.2, random));
        for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
          if (inputs[rank].indices[i] >= 300) inputs[rank].values[i] = std::round(inputs[rank].values[i] / 1000.0F);
        }
      }
      const OkTopkSettings settings{.k = 60, .balance_factor = 1.5};
      Rounded found = call_rounding(world, inputs, 2000, settings, {}, Reduction::sum, wire);
      EXPECT(found.results[0].report.balanced);
      check_nothing_lost(inputs, 2000, Reduction::sum, found, tolerance);
      // The next call reuses what this one has left.
      for (Input<float>& input : inputs) input = whole_numbers(2000, 0.2, random);
      found = call_rounding(world, inputs, 2000, settings, found.results[0].state, Reduction::sum, wire);
      check_nothing_lost(inputs, 2000, Reduction::sum, found, tolerance);
      // Shares of more than a bucket.
      inputs.clear();
      for (Rank rank = 0; rank < 2; ++rank) inputs.push_back(whole_numbers(400'000, 0.5, random));
      found = call_rounding(world, inputs, 400'000, {.k = 100'000}, {}, Reduction::sum, wire);
      check_nothing_lost(inputs, 400'000, Reduction::sum, found, tolerance);
      EXPECT(errors_of(found) > 0.0);
    }
  }
}

TEST("nothing is lost or handed back twice where entries went in vain, and go again unrounded") {
  constexpr std::uint64_t kN = 8000;
  const WireFormat wire{.values = ValueEncoding::bf16, .key = kKey};
  // Of so many entries shares are not short, of a quarter of them they are.
  const OkTopkSettings settings{.k = 320};
  for (const World world : kWorlds) {
    Random random(3);
    std::vector<Input<float>> inputs;
    for (Rank rank = 0; rank < 8; ++rank) inputs.push_back(whole_numbers(kN, 0.04, random));
    Rounded found = call_rounding(world, inputs, kN, settings, {}, Reduction::sum, wire);
    REQUIRE(found.results[0].state.spread);
    EXPECT(errors_of(found) > 0.0);
    for (Input<float>& input : inputs) input = whole_numbers(kN, 0.01, random);
    for (std::uint32_t& index : inputs[5].indices) index /= 8;  // all for the first owner
    const auto [gone, end] = std::ranges::unique(inputs[5].indices);
    inputs[5].indices.erase(gone, end);
    inputs[5].values.resize(inputs[5].indices.size());
    found = call_rounding(world, inputs, kN, settings, found.results[0].state, Reduction::sum, wire);
    EXPECT(found.results[0].report.cut);
    check_nothing_lost(inputs, kN, Reduction::sum, found, 0.0);
  }
}

TEST("as published: the threshold is of the sums themselves") {
  Random random(2);
  std::vector<Input<float>> inputs;
  for (Rank rank = 0; rank < 4; ++rank) inputs.push_back(whole_numbers(3000, 0.1, random));
  const OkTopkSettings settings{.k = 250, .balance_factor = 100.0, .as_published = true};
  const WireFormat wire{.values = ValueEncoding::int8, .key = kKey};
  const Rounded found = call_rounding(World::local, inputs, 3000, settings, {}, Reduction::sum, wire);
  const auto& lengths = found.results[0].state.lengths;
  EXPECT(same_bits(found.results[0].sum, expected(inputs, lengths, 250, Reduction::sum, wire).vector(3000)));
}

TEST("ranks that round otherwise do not call the same") {
  const auto wire_of = [](ValueEncoding values) {
    const WireFormat wire{.values = values};
    return make_all_reduce_topk(SparseVector<float>(100), OkTopkSettings{.k = 5}, OkTopkState{}, Reduction::sum, wire)
        .request->call()
        .wire;
  };
  EXPECT(wire_of(ValueEncoding::bf16) != wire_of(ValueEncoding::native));
  EXPECT(wire_of(ValueEncoding::bf16) != wire_of(ValueEncoding::int8));
}

}  // namespace
