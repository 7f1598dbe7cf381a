// Averages of 16-bit floats: those of finite f16 are finite whatever way they are formed, have the same bits everywhere, and
// are rounded as often as sums, the last time as they are divided.
#include "testing.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "collectives/dense/allreduce_direct.hpp"
#include "collectives/dense/allreduce_rabenseifner.hpp"
#include "collectives/dense/allreduce_recursive_doubling.hpp"
#include "collectives/dense/allreduce_ring.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/dense/reduce.hpp"
#include "collectives/dense/reduce_scatter.hpp"
#include "collectives/support/nodes.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 33, 64};
constexpr float kLargest = 65504.0F;

enum class Way {
  ring,
  segmented_ring,
  doubling,
  doubling_in_lanes,
  rabenseifner,
  in_pairs,        // nodes of two ranks; of an odd number of ranks the last is alone
  in_dealt_nodes,  // as many nodes as make no two of them alike where that can be
  tree,
  scatter_gather,
  scatter_halving,
  scatter_ring,
  direct,
};
constexpr Way kWays[] = {Way::ring,           Way::segmented_ring, Way::doubling,       Way::doubling_in_lanes,
                         Way::rabenseifner,   Way::in_pairs,       Way::in_dealt_nodes, Way::tree,
                         Way::scatter_gather, Way::scatter_halving, Way::scatter_ring, Way::direct};
bool has_nodes(Way way) { return way == Way::in_pairs || way == Way::in_dealt_nodes; }
bool has_root(Way way) { return way == Way::tree || way == Way::scatter_gather; }
bool scatters(Way way) { return way == Way::scatter_halving || way == Way::scatter_ring; }

Nodes nodes_of(Way way, Rank size) {
  std::vector<std::uint32_t> labels;
  for (Rank rank = 0; rank < size; ++rank) labels.push_back(way == Way::in_pairs ? rank / 2 : std::bit_width(rank + 1));
  return Nodes(std::span<const std::uint32_t>(labels));
}

/// What each rank ends with. A rank of a reduce_scatter: its block, where it belongs in the whole.
template <class V>
std::vector<std::vector<V>> reduced(Way way, World world, const std::vector<std::vector<V>>& inputs,
                                    Reduction reduction = Reduction::avg) {
  constexpr auto kDtype = dtype_of<V>;
  const auto size = static_cast<Rank>(inputs.size());
  const Partition blocks(inputs[0].size(), size);
  const Nodes nodes = nodes_of(way, size);
  std::vector<std::vector<V>> outputs(size, std::vector<V>(inputs[0].size()));
  const auto make = [&](Rank rank) {
    const Call call{.operation = Operation::allreduce, .dtype = kDtype, .reduction = reduction};
    return std::make_shared<Request>(call, [&, rank](Transport& net) {
      const ConstBytes in = std::as_bytes(std::span(inputs[rank]));
      const Bytes out = std::as_writable_bytes(std::span(outputs[rank]));
      const Bytes block = elements(out, kDtype, blocks[rank]);
      const LaneTuning lanes{.message_bytes = 64, .lanes = 3};
      switch (way) {
        case Way::ring: return allreduce_ring(net, kDtype, reduction, in, out);
        case Way::segmented_ring: return allreduce_ring(net, kDtype, reduction, in, out, lanes);
        case Way::doubling: return allreduce_recursive_doubling(net, kDtype, reduction, in, out);
        case Way::doubling_in_lanes: return allreduce_recursive_doubling(net, kDtype, reduction, in, out, lanes);
        case Way::direct:
          if (size > 1) return allreduce_direct(net, kDtype, reduction, in, out);
          [[fallthrough]];
        case Way::rabenseifner: return allreduce_rabenseifner(net, kDtype, reduction, in, out);
        case Way::in_pairs:
        case Way::in_dealt_nodes: return allreduce_two_level(net, nodes, kDtype, reduction, in, out, {.part_bytes = 128});
        case Way::tree: return reduce_tree(net, size / 2, kDtype, reduction, in, out);
        case Way::scatter_gather: return reduce_scatter_gather(net, size / 2, kDtype, reduction, in, out);
        case Way::scatter_halving: return reduce_scatter_halving(net, kDtype, reduction, in, blocks, block);
        case Way::scatter_ring: break;
      }
      return reduce_scatter_ring(net, kDtype, reduction, in, blocks, block);
    });
  };
  EXPECT(run_ranks(world, size, make, size).all_succeeded());
  if (has_root(way)) return {outputs[size / 2]};
  if (!scatters(way)) return outputs;
  for (Rank rank = 1; rank < size; ++rank) {
    const Range block = blocks[rank];
    std::copy_n(outputs[rank].begin() + static_cast<std::ptrdiff_t>(block.begin), block.size(),
                outputs[0].begin() + static_cast<std::ptrdiff_t>(block.begin));
  }
  return {outputs[0]};
}

template <class Body>
void for_each_way(Body body) {
  for (const Way way : kWays) {
    for (const Rank size : kSizes) {
      if (!has_nodes(way) || nodes_of(way, size).two_level()) body(way, size);
    }
  }
}

// `share(rank, i)` of each rank.
template <class V, class Share>
std::vector<std::vector<V>> inputs_of(Rank size, std::size_t count, const Share& share) {
  std::vector<std::vector<V>> inputs(size);
  for (Rank rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) inputs[rank].push_back(V(static_cast<float>(share(rank, i))));
  }
  return inputs;
}

// How often an element is rounded at most. On nodes once more, since there are two reductions.
double roundings(Way way, Rank size) {
  const bool round_a_ring = way == Way::ring || way == Way::segmented_ring || way == Way::scatter_ring;
  return size == 1 ? 0.0 : round_a_ring ? size - 1.0 : std::bit_width(size - 1) + (has_nodes(way) ? 1.0 : 0.0);
}

// Near the average in doubles and the same bits everywhere, in both worlds. `distance`: from an average to the next f16.
void check_near(Way way, const std::vector<std::vector<f16>>& inputs, double distance) {
  const auto size = static_cast<Rank>(inputs.size());
  for (const World world : {World::simulated, World::local}) {
    const auto results = reduced(way, world, inputs);
    for (const auto& result : results) {
      EXPECT(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(f16)) == 0);
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < inputs[0].size(); ++i) {
      double sum = 0.0;
      for (const auto& input : inputs) sum += static_cast<double>(static_cast<float>(input[i]));
      worst = std::max(worst, std::abs(static_cast<double>(static_cast<float>(results[0][i])) - sum / size));
    }
    if (worst <= roundings(way, size) * distance * 0.501) continue;
    testing::fail(__FILE__, __LINE__, "way " + std::to_string(static_cast<int>(way)) + ", P=" + std::to_string(size) +
                                          ": off by " + std::to_string(worst));
  }
}

TEST("averages of f16 up to the largest stay in the type's range, near the exact ones, the same bits on all ranks") {
  for_each_way([](Way way, Rank size) {
    check_near(way, inputs_of<f16>(size, 131, [](Rank, std::size_t i) { return i % 2 == 0 ? kLargest : -kLargest; }), 32.0);
    Random random(size);
    const auto any = [&](Rank, std::size_t i) { return (i % 2 ? 1 : -1) * (65'000.0 - 40'000.0 * random.uniform()); };
    check_near(way, inputs_of<f16>(size, 131, any), 32.0);
  });
}

TEST("averages of f16 below the smallest normal one lose a step of 2^-24 at each rounding at most") {
  for_each_way([](Way way, Rank size) {
    Random random(size);
    const auto tiny = [&](Rank, std::size_t) { return (random.uniform() - 0.5) * 0x1p-14; };
    check_near(way, inputs_of<f16>(size, 131, tiny), 0x1p-24);
  });
}

TEST("an infinity among f16 makes the average infinite, opposite ones NaN, on all ranks") {
  for_each_way([](Way way, Rank size) {
    if (size == 1) return;
    const auto inputs = inputs_of<f16>(size, 66, [&](Rank rank, std::size_t i) {
      if (rank + 1 == size && i % 2 == 0) return HUGE_VALF;
      return rank == 0 && i % 3 == 0 ? -HUGE_VALF : 1.0F;
    });
    for (const auto& result : reduced(way, World::local, inputs)) {
      for (std::size_t i = 0; i < result.size(); ++i) {
        const auto value = static_cast<float>(result[i]);
        EXPECT(i % 6 == 0   ? std::isnan(value)
               : i % 2 == 0 ? value == HUGE_VALF
               : i % 3 == 0 ? value == -HUGE_VALF
                            : std::abs(value - 1.0F) < 1e-2F);
      }
    }
  });
}

// Two ranks have `twice`, one `once`; whichever two meet first, their sum need not be rounded.
template <class V>
void check_rounded_once(float twice, float once, float average) {
  for (const Way way : kWays) {
    if (std::is_same_v<V, bf16> && has_nodes(way)) continue;  // those sum, and divide in the end
    for (Rank odd = 0; odd < 3; ++odd) {
      const auto inputs = inputs_of<V>(3, 131, [&](Rank rank, std::size_t) { return rank == odd ? once : twice; });
      for (const auto& result : reduced(way, World::local, inputs)) {
        for (const V value : result) EXPECT_EQ(static_cast<float>(value), average);
      }
    }
  }
}

TEST("an average is divided before the last sum is rounded, on every way: short and long vectors are no two things") {
  check_rounded_once<f16>(1024.0F, 1.0F, 683.0F);  // 2049 would become 2048
  check_rounded_once<bf16>(128.0F, 5.0F, 87.0F);   // 261 would become 260
}

TEST("where nothing comes near the ends of f16's range, an average has the bits of the sum over P = 2^m") {
  for_each_way([](Way way, Rank size) {
    // Nodes that differ go in f32.
    if (!std::has_single_bit(size) || way == Way::in_dealt_nodes) return;
    Random random(size);
    const auto value = [&](Rank, std::size_t) { return std::round((random.uniform() - 0.5) * 800.0) / 8.0; };
    const auto inputs = inputs_of<f16>(size, 131, value);
    const auto sums = reduced(way, World::local, inputs, Reduction::sum);
    const auto averages = reduced(way, World::local, inputs, Reduction::avg);
    for (std::size_t i = 0; i < 131; ++i) {
      EXPECT_EQ(static_cast<float>(averages[0][i]), static_cast<float>(sums[0][i]) / static_cast<float>(size));
    }
  });
}

}  // namespace
