// Reductions of which a rank gets all or a block: right, with any root, with blocks of any lengths, on every number of
// ranks, and nothing else is written.
#include "testing.hpp"

#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "collectives/dense/reduce.hpp"
#include "collectives/dense/reduce_scatter.hpp"
#include "kernels/narrow.hpp"
#include "session/reductions.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 33, 64};
constexpr World kWorlds[] = {World::simulated, World::local, World::memory};
constexpr float kMark = -12345.0F;  // no sum has it

using Vectors = std::vector<std::vector<float>>;

float value_of(Rank rank, std::size_t i) { return static_cast<float>((rank * 5 + i * 3) % 7) - 3.0F; }

Vectors inputs_of(Rank size, std::size_t count) {
  Vectors inputs(size);
  for (Rank rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) inputs[rank].push_back(value_of(rank, i));
  }
  return inputs;
}

std::vector<float> sum_of(const Vectors& inputs, Reduction reduction) {
  std::vector<float> sum(inputs[0].size());
  for (const auto& input : inputs) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += input[i];
  }
  const float factor = reduction == Reduction::avg ? 1.0F / static_cast<float>(inputs.size()) : 1.0F;
  for (float& value : sum) value *= factor;
  return sum;
}

ConstBytes bytes_of(const std::vector<float>& values) { return std::as_bytes(std::span(values)); }
Bytes bytes_of(std::vector<float>& values) { return std::as_writable_bytes(std::span(values)); }

RequestPtr request_of(Operation operation, Request::Body body) {
  return std::make_shared<Request>(Call{.operation = operation, .dtype = DType::f32}, std::move(body));
}

enum class Reduce { chosen, tree, scatter_gather };
constexpr Reduce kReduces[] = {Reduce::chosen, Reduce::tree, Reduce::scatter_gather};

Task<void> run_reduce(Reduce way, Transport& net, Rank root, Reduction reduction, ConstBytes input, Bytes output) {
  switch (way) {
    case Reduce::tree: return reduce_tree(net, root, DType::f32, reduction, input, output);
    case Reduce::scatter_gather: return reduce_scatter_gather(net, root, DType::f32, reduction, input, output);
    case Reduce::chosen: break;
  }
  return reduce_to_root(net, root, DType::f32, reduction, input, output);
}

void check_reduce(Reduce way, World world, Rank size, Rank root, std::size_t count, Reduction reduction,
                  bool in_place) {
  const Vectors inputs = inputs_of(size, count);
  Vectors memory = inputs;
  Vectors outputs(size, std::vector<float>(count, kMark));
  const auto make = [&](Rank rank) {
    return request_of(Operation::reduce, [&, rank](Transport& net) {
      return run_reduce(way, net, root, reduction, bytes_of(memory[rank]),
                        bytes_of(in_place ? memory[rank] : outputs[rank]));
    });
  };
  EXPECT(run_ranks(world, size, make, size).all_succeeded());
  const std::vector<float> expected = sum_of(inputs, reduction);
  EXPECT((in_place ? memory : outputs)[root] == expected);
  for (Rank rank = 0; rank < size; ++rank) {
    if (rank != root || !in_place) EXPECT(memory[rank] == inputs[rank]);
    if (rank != root || in_place) EXPECT(outputs[rank] == std::vector<float>(count, kMark));
  }
}

TEST("reduce gives the root the sum and writes nowhere else: every way, world, P, root and length") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t count : {0UL, 1UL, 63UL, 1000UL, 20'011UL}) {
        if (size > 16 && count > 1000) continue;
        for (Rank root = 0; root < size; root += size > 8 ? 5 : 1) {
          for (const Reduce way : kReduces) {
            check_reduce(way, world, size, root, count, Reduction::sum, root % 2 == 0);
            check_reduce(way, world, size, root, count, Reduction::avg, root % 2 == 1);
          }
        }
      }
    }
  }
}

TEST("16-bit floats that meet on a rank of the tree are rounded once, as they leave it, also where they are averaged") {
  // Of four ranks, 1 tells 0, 3 tells 2, and 2 tells 0. Rounded step by step, in bf16 256 + 1 would be 256, and + 2 258.
  constexpr float kShares[] = {256.0F, 1.0F, 1.0F, 1.0F};
  struct Sum {
    DType dtype;
    Reduction reduction;
    float expected;
  };
  for (const auto& [dtype, reduction, expected] :
       {Sum{DType::bf16, Reduction::sum, 260.0F}, Sum{DType::bf16, Reduction::avg, 65.0F},
        Sum{DType::bf16, Reduction::min, 1.0F}, Sum{DType::f16, Reduction::sum, 259.0F},
        Sum{DType::f16, Reduction::avg, 64.75F}, Sum{DType::f16, Reduction::prod, 256.0F}}) {
    constexpr std::size_t kCount = 100;
    std::vector<std::vector<std::byte>> inputs(4, std::vector<std::byte>(2 * kCount));
    for (Rank rank = 0; rank < 4; ++rank) {
      kernels::narrow(dtype, std::vector<float>(kCount, kShares[rank]), inputs[rank]);
    }
    std::vector<std::byte> output(2 * kCount);
    const auto make = [&, dtype = dtype, reduction = reduction](Rank rank) {
      return request_of(Operation::reduce, [&, dtype, reduction, rank](Transport& net) {
        return reduce_tree(net, 0, dtype, reduction, inputs[rank], rank == 0 ? Bytes(output) : Bytes());
      });
    };
    EXPECT(run_ranks(World::simulated, 4, make, 4).all_succeeded());
    std::vector<float> found(kCount);
    kernels::widen(dtype, output, found);
    EXPECT(found == std::vector<float>(kCount, expected));
  }
}

TEST("short vectors go up a tree, long ones are scattered and gathered, and it depends on P") {
  for (const Rank size : {2U, 3U, 64U, 4096U}) {
    EXPECT(reduces_by_tree(size, 0));
    EXPECT(reduces_by_tree(size, 4096));
    EXPECT(!reduces_by_tree(size, std::size_t{4} << 20));
  }
  EXPECT(!reduces_by_tree(4, 100'000) && reduces_by_tree(4096, 100'000));
}

TEST("the root's output stays untouched as long as one rank has not called reduce") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 4U, 5U, 8U}) {
      for (Rank absent = 0; absent < size; ++absent) {
        for (const Reduce way : {Reduce::tree, Reduce::scatter_gather}) {
          const Rank root = (absent + 1) % size;
          const Vectors inputs = inputs_of(size, 200);
          Vectors memory = inputs;
          run_ranks(world, size, [&](Rank rank) -> RequestPtr {
            if (rank == absent) return nullptr;
            return request_of(Operation::reduce, [&, rank](Transport& net) {
              return run_reduce(way, net, root, Reduction::sum, bytes_of(memory[rank]), bytes_of(memory[rank]));
            });
          });
          EXPECT(memory == inputs);
        }
      }
    }
  }
}

enum class Scatter { chosen, halving, ring, segmented_ring };
constexpr Scatter kScatters[] = {Scatter::chosen, Scatter::halving, Scatter::ring, Scatter::segmented_ring};

Task<void> run_scatter(Scatter way, Transport& net, Reduction reduction, ConstBytes input, const Partition& partition,
                       Bytes mine) {
  switch (way) {
    case Scatter::halving: return reduce_scatter_halving(net, DType::f32, reduction, input, partition, mine);
    case Scatter::ring: return reduce_scatter_ring(net, DType::f32, reduction, input, partition, mine);
    case Scatter::segmented_ring:
      return reduce_scatter_ring(net, DType::f32, reduction, input, partition, mine, {.message_bytes = 64, .lanes = 3});
    case Scatter::chosen: break;
  }
  return reduce_scatter(net, DType::f32, reduction, input, partition, mine);
}

// Of the `pattern`-th kind, about `count` in all.
std::vector<std::uint64_t> lengths_of(Rank size, std::size_t count, int pattern) {
  std::vector<std::uint64_t> lengths(size);
  for (Rank rank = 0; rank < size; ++rank) {
    switch (pattern) {
      case 0: lengths[rank] = count / size; break;
      case 1: lengths[rank] = rank == size / 2 ? count : 0; break;
      case 2: lengths[rank] = rank % 3 == 0 ? 0 : (rank * 7 + 1) % 5 * count / size; break;
      default: lengths[rank] = rank + 1 == size ? count : rank % 2; break;
    }
  }
  return lengths;
}

TEST("reduce_scatter gives every rank its block and leaves inputs alone: every way, world, P, and blocks of any lengths") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t count : {0UL, 1UL, 64UL, 3001UL, 50'000UL}) {
        if (count > 4000 && size > 8) continue;
        for (int pattern = 0; pattern < 4; ++pattern) {
          const Partition partition{std::span<const std::uint64_t>(lengths_of(size, count, pattern))};
          for (const Scatter way : kScatters) {
            if (way == Scatter::segmented_ring && (size > 16 || count > 4000)) continue;
            const Reduction reduction = pattern % 2 == 0 ? Reduction::sum : Reduction::avg;
            const Vectors inputs = inputs_of(size, partition.count());
            Vectors memory = inputs;
            Vectors outputs(size);
            for (Rank rank = 0; rank < size; ++rank) outputs[rank].assign(partition[rank].size(), kMark);
            const auto make = [&](Rank rank) {
              return request_of(Operation::reduce_scatter, [&, rank](Transport& net) {
                return run_scatter(way, net, reduction, bytes_of(memory[rank]), partition, bytes_of(outputs[rank]));
              });
            };
            EXPECT(run_ranks(world, size, make, size).all_succeeded());
            const std::vector<float> sum = sum_of(inputs, reduction);
            for (Rank rank = 0; rank < size; ++rank) {
              const Range block = partition[rank];
              EXPECT(std::ranges::equal(outputs[rank], std::span(sum).subspan(block.begin, block.size())));
            }
            EXPECT(memory == inputs);
          }
        }
      }
    }
  }
}

TEST("a long reduce_scatter and a long reduce, in the segments and pieces of the default tuning, are exact") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 4U}) {
      check_reduce(Reduce::chosen, world, size, size - 1, 1'000'003, Reduction::sum, true);
      const Partition partition(1'000'003, size);
      const Vectors inputs = inputs_of(size, partition.count());
      for (const Scatter way : {Scatter::chosen, Scatter::halving, Scatter::ring}) {
        Vectors outputs(size);
        for (Rank rank = 0; rank < size; ++rank) outputs[rank].assign(partition[rank].size(), kMark);
        const auto make = [&](Rank rank) {
          return request_of(Operation::reduce_scatter, [&, rank](Transport& net) {
            return run_scatter(way, net, Reduction::sum, bytes_of(inputs[rank]), partition, bytes_of(outputs[rank]));
          });
        };
        EXPECT(run_ranks(world, size, make, size).all_succeeded());
        const std::vector<float> sum = sum_of(inputs, Reduction::sum);
        for (Rank rank = 0; rank < size; ++rank) {
          const Range block = partition[rank];
          EXPECT(std::ranges::equal(outputs[rank], std::span(sum).subspan(block.begin, block.size())));
        }
      }
    }
  }
}

TEST("a rank's block stays untouched as long as one rank has not called reduce_scatter") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 5U, 8U}) {
      for (Rank absent = 0; absent < size; ++absent) {
        for (const Scatter way : {Scatter::halving, Scatter::ring, Scatter::segmented_ring}) {
          const Partition partition(200, size);
          const Vectors inputs = inputs_of(size, partition.count());
          Vectors outputs(size);
          for (Rank rank = 0; rank < size; ++rank) outputs[rank].assign(partition[rank].size(), kMark);
          const Vectors before = outputs;
          const Ended ended = run_ranks(world, size, [&](Rank rank) -> RequestPtr {
            if (rank == absent) return nullptr;
            return request_of(Operation::reduce_scatter, [&, rank](Transport& net) {
              return run_scatter(way, net, Reduction::sum, bytes_of(inputs[rank]), partition, bytes_of(outputs[rank]));
            });
          });
          EXPECT(ended.stuck);
          EXPECT(outputs == before);
        }
      }
    }
  }
}

TEST("blocks of other lengths are another call, blocks that are alike are not") {
  std::vector<float> input(9);
  std::vector<float> mine(9);
  const auto layout_of = [&](std::vector<std::uint64_t> lengths) {
    const Partition partition{std::span<const std::uint64_t>(lengths)};
    return make_reduce_scatter({.input = bytes_of(input), .output = bytes_of(mine)}, partition)->call().layout;
  };
  EXPECT_EQ(layout_of({3, 3, 3}), 0);
  EXPECT(layout_of({2, 3, 4}) != 0);
  EXPECT(layout_of({2, 3, 4}) != layout_of({2, 4, 3}));
  EXPECT(layout_of({0, 0, 9}) != layout_of({0, 9, 0}));
}

}  // namespace
