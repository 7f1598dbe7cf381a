// What must hold of every call of allreduce_oktopk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "collectives/topk/threshold.hpp"
#include "sparse_samples.hpp"
#include "testing.hpp"
#include "topk_calls.hpp"

namespace telegrad {

template <class V>
using Results = std::vector<OkTopkSum<V>>;

// By index: the sum in the order of ranks.
template <class V>
std::map<std::uint32_t, V> sum_of(const std::vector<Input<V>>& inputs, Reduction reduction) {
  std::map<std::uint32_t, V> sums;
  for (const auto& input : inputs) {
    for (std::size_t i = 0; i < input.indices.size(); ++i) {
      const auto [at, is_new] = sums.try_emplace(input.indices[i], input.values[i]);
      if (!is_new) at->second = kernels::plus(at->second, input.values[i]);
    }
  }
  if (reduction == Reduction::avg) {
    const auto factor = static_cast<kernels::Factor<V>>(1.0 / static_cast<double>(inputs.size()));
    for (auto& [index, value] : sums) value = kernels::times(value, factor);
  }
  return sums;
}

// The k largest, and what equals the least of them: as many of these as make 2k, the first ones.
template <class V>
Input<V> largest(const std::map<std::uint32_t, V>& sums, std::uint64_t k) {
  std::vector<std::uint64_t> keys;
  for (const auto& [index, value] : sums) keys.push_back(magnitude_key(value));
  std::ranges::sort(keys, std::greater<>());
  const std::uint64_t least = keys.size() < k ? 0 : keys[k - 1];
  const auto above = static_cast<std::uint64_t>(std::ranges::count_if(keys, [&](std::uint64_t key) { return key > least; }));
  std::uint64_t ties = 0;
  Input<V> kept;
  for (const auto& [index, value] : sums) {
    if (magnitude_key(value) < least) continue;
    if (magnitude_key(value) == least && above + ++ties > 2 * k) continue;
    kept.indices.push_back(index);
    kept.values.push_back(value);
  }
  return kept;
}

// What holds in every call: ranks agree, and every entry of a rank is either taken or handed back.
template <class V>
void check_call(const std::vector<Input<V>>& inputs, std::uint64_t n, const OkTopkSettings& settings, Reduction reduction,
                const Results<V>& results) {
  const auto sums = sum_of(inputs, reduction);
  std::uint64_t local_most = 0;
  for (const auto& input : inputs) local_most = std::max(local_most, static_cast<std::uint64_t>(input.indices.size()));
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const auto& [sum, left, state, report] = results[rank];
    EXPECT(!sum.is_dense());
    EXPECT_EQ(sum.dimension(), n);
    EXPECT(same_bits(sum, results[0].sum));
    EXPECT_EQ(state.digest(settings), results[0].state.digest(settings));
    EXPECT_EQ(report.local_most, local_most);
    EXPECT_EQ(report.selected, sum.nnz());
    EXPECT_EQ(report.exact, results[0].report.exact);
    const std::uint64_t most = std::max(local_most, report.selected);
    const auto size = static_cast<Rank>(results.size());
    EXPECT(report.words_most() <= oktopk_words_most(most, size));
    const OkTopkSteps steps{.cut = report.cut, .exact = report.exact, .balanced = report.balanced};
    EXPECT(report.bytes_most() <= oktopk_bytes_most<V>(most, settings.k, size, n, steps));
    EXPECT(report.selected <= 2 * settings.k);
    if (!report.exact) {  // then it is near k, or all there is
      EXPECT(report.selected <= settings.k + settings.k / 4);
      EXPECT(report.selected >= settings.k - settings.k / 4 || report.selected == sums.size());
    }
    bytes_sent += report.bytes.sent;
    bytes_received += report.bytes.received;
    sent += report.traffic.entries_sent;
    received += report.traffic.entries_received;
    Input<V> back;
    for (std::size_t i = 0; i < inputs[rank].indices.size(); ++i) {
      if (std::ranges::binary_search(sum.indices(), inputs[rank].indices[i])) continue;
      back.indices.push_back(inputs[rank].indices[i]);
      back.values.push_back(inputs[rank].values[i]);
    }
    EXPECT(same_bits(left, back.vector(n)));
  }
  EXPECT_EQ(sent, received);
  EXPECT_EQ(bytes_sent, bytes_received);
  for (std::size_t i = 0; i < results[0].sum.nnz(); ++i) {
    const auto at = sums.find(results[0].sum.indices()[i]);
    REQUIRE(at != sums.end());
    EXPECT(std::memcmp(&at->second, &results[0].sum.values()[i], sizeof(V)) == 0);
  }
  if (results[0].report.exact && settings.tensors.empty()) EXPECT(same_bits(results[0].sum, largest(sums, settings.k).vector(n)));
}

// As uniform(), of values that are sums of many.
template <class V>
Input<V> normal(std::uint64_t n, double density, Random& random) {
  Input<V> input = uniform<V>(n, density, random);
  for (V& value : input.values) {
    double sum = -4.0;
    for (int i = 0; i < 8; ++i) sum += random.uniform();
    value = static_cast<V>(static_cast<float>(sum));
  }
  return input;
}

}  // namespace telegrad
