// Calls of the allreduces that keep a part of the sum: which one follows from the settings.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "testing.hpp"
#include "world.hpp"

namespace telegrad {

inline constexpr World kWorlds[] = {World::simulated, World::local};

OkTopkState state_of(const OkTopkSettings&);
GTopkState state_of(const GTopkSettings&);
BoundedTopkState state_of(const BoundedTopkSettings&);
template <class Settings>
using StateOf = decltype(state_of(std::declval<Settings>()));

template <class V, class Settings>
std::vector<TopkResult<V, StateOf<Settings>>> call(World world, const std::vector<Input<V>>& inputs, std::uint64_t n,
                                                   const Settings& settings, const StateOf<Settings>& state,
                                                   Reduction reduction = Reduction::sum,
                                                   IndexFormat indices = IndexFormat::none, std::uint64_t seed = 0) {
  std::vector<std::shared_ptr<std::optional<TopkResult<V, StateOf<Settings>>>>> results;
  const Ended ended = run_ranks(
      world, static_cast<Rank>(inputs.size()),
      [&](Rank rank) {
        auto sum = make_all_reduce_topk(inputs[rank].vector(n), settings, state, reduction,
                                        {.indices = indices, .packs_values = indices == IndexFormat::packed});
        results.push_back(sum.result);
        return sum.request;
      },
      seed);
  REQUIRE(ended.all_succeeded());
  std::vector<TopkResult<V, StateOf<Settings>>> all;
  for (auto& result : results) all.push_back(std::move(**result));
  return all;
}

// Entries as a reference implementation has them.
template <class V>
using Sparse = std::map<std::uint32_t, V>;

template <class V>
Sparse<V> map_of(const SparseVector<V>& vector) {
  Sparse<V> map;
  for (std::size_t i = 0; i < vector.nnz(); ++i) map[vector.indices()[i]] = vector.values()[i];
  return map;
}
template <class V>
bool same(const Sparse<V>& a, const Sparse<V>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return x.first == y.first && std::memcmp(&x.second, &y.second, sizeof(V)) == 0;
  });
}

// The dense sum over ranks of what is in the inputs, minus what is in the result and in all that is left: zero everywhere
// where sums are exact.
template <class V, class State>
double lost_most(const std::vector<Input<V>>& inputs, std::uint64_t n, Reduction reduction,
                 const std::vector<TopkResult<V, State>>& results) {
  std::vector<double> lost(n);
  const double times = reduction == Reduction::avg ? static_cast<double>(inputs.size()) : 1.0;
  const auto add = [&](std::span<const std::uint32_t> indices, std::span<const V> values, double factor) {
    for (std::size_t i = 0; i < indices.size(); ++i) {
      lost[indices[i]] += factor * static_cast<double>(static_cast<kernels::Factor<V>>(values[i]));
    }
  };
  for (const auto& input : inputs) add(input.indices, input.values, 1.0);
  for (const auto& result : results) add(result.left.indices(), result.left.values(), -1.0);
  add(results[0].sum.indices(), results[0].sum.values(), -times);
  double most = 0.0;
  for (const double one : lost) most = std::max(most, std::abs(one));
  return most;
}

}  // namespace telegrad
