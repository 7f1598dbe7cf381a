// Averages of f16 vectors: right where sums would leave the type's range, by every algorithm, and the same bits everywhere.
#include "testing.hpp"

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "codec/sparse_vector.hpp"
#include "collectives/sparse/auto.hpp"
#include "collectives/support/nodes.hpp"
#include "session/reductions.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr std::uint64_t kDimension = 700;
constexpr float kLarge = 60'000.0F;
constexpr World kWorlds[] = {World::simulated, World::local, World::memory};
constexpr Algorithm kAlgorithms[] = {Algorithm::automatic, Algorithm::split_allgather, Algorithm::split_dense_allgather,
                                     Algorithm::ring,      Algorithm::recursive_doubling, Algorithm::two_level};

// All ranks have every `step`-th element; rank r those besides whose index is r modulo 13.
bool has(Rank rank, std::uint64_t i, std::uint64_t step) { return i % step == 0 || i % 13 == rank; }

struct Entries {
  std::vector<std::uint32_t> indices;
  std::vector<f16> values;
};

Entries entries_of(Rank rank, std::uint64_t step) {
  Entries mine;
  for (std::uint32_t i = 0; i < kDimension; ++i) {
    if (!has(rank, i, step)) continue;
    mine.indices.push_back(i);
    mine.values.push_back(f16(i % 2 == 0 ? kLarge : -kLarge));
  }
  return mine;
}

float average_at(Rank size, std::uint64_t i, std::uint64_t step) {
  float sum = 0.0F;
  for (Rank rank = 0; rank < size; ++rank) sum += has(rank, i, step) ? (i % 2 == 0 ? kLarge : -kLarge) : 0.0F;
  return static_cast<float>(f16(sum * (1.0F / static_cast<float>(size))));
}

SparseReduction average_by(Algorithm algorithm, Rank size, World world) {
  std::vector<std::uint32_t> labels;
  for (Rank rank = 0; rank < size; ++rank) labels.push_back(rank / 2);
  auto nodes = std::make_shared<const Nodes>(std::span<const std::uint32_t>(labels), world == World::memory);
  return {.reduction = Reduction::avg, .algorithm = algorithm, .nodes = std::move(nodes)};
}

void check(World world, Rank size, Algorithm algorithm, std::uint64_t step, bool into) {
  const SparseReduction how = average_by(algorithm, size, world);
  std::vector<SparseSum<f16>> sums(size);
  std::vector<std::vector<f16>> outputs(size, std::vector<f16>(kDimension, f16(-99.0F)));
  std::vector<Entries> entries;
  for (Rank rank = 0; rank < size; ++rank) entries.push_back(entries_of(rank, step));
  const auto make = [&](Rank rank) -> RequestPtr {
    auto mine = addend_of<f16>(kDimension, entries[rank].indices, entries[rank].values, how);
    if (into) return make_all_reduce_into(std::move(mine), std::span<f16>(outputs[rank]), how);
    sums[rank] = make_all_reduce(std::move(mine), how);
    return sums[rank].request;
  };
  REQUIRE(run_ranks(world, size, make, size).all_succeeded());
  for (Rank rank = 0; rank < size; ++rank) {
    if (into) continue;
    (*sums[rank].result)->write_dense(outputs[rank], Reduction::avg);
    EXPECT_EQ((*sums[rank].result)->is_dense(), (*sums[0].result)->is_dense());
  }
  for (Rank rank = 0; rank < size; ++rank) {
    EXPECT(std::memcmp(outputs[rank].data(), outputs[0].data(), kDimension * sizeof(f16)) == 0);
  }
  for (std::uint64_t i = 0; i < kDimension; ++i) {
    EXPECT_EQ(static_cast<float>(outputs[0][i]), average_at(size, i, step));
  }
}

TEST("averages of f16 vectors are those of f32 rounded once: every algorithm, world and density, to vectors and dense") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 7U, 8U}) {
      for (const Algorithm algorithm : kAlgorithms) {
        for (const std::uint64_t step : {50U, 2U, 1U}) {
          for (const bool into : {false, true}) check(world, size, algorithm, step, into);
        }
      }
    }
  }
}

TEST("a rank's slice of an average of f16 vectors, too") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 3U, 4U, 8U}) {
      for (const std::uint64_t step : {50U, 1U}) {
        const Partition slices(kDimension, size);
        std::vector<SparseSum<f16>> sums(size);
        const auto make = [&](Rank rank) {
          const Entries mine = entries_of(rank, step);
          sums[rank] = make_reduce_scatter(SparseVector<f16>::sparse(kDimension, mine.indices, mine.values), slices,
                                           SparseReduction{.reduction = Reduction::avg});
          return sums[rank].request;
        };
        REQUIRE(run_ranks(world, size, make, size).all_succeeded());
        for (Rank rank = 0; rank < size; ++rank) {
          std::vector<f16> whole(kDimension);
          (*sums[rank].result)->write_dense(whole, Reduction::avg);
          for (std::size_t i = slices[rank].begin; i < slices[rank].end; ++i) {
            EXPECT_EQ(static_cast<float>(whole[i]), average_at(size, i, step));
          }
        }
      }
    }
  }
}

}  // namespace
