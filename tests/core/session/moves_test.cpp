// The collectives that move blocks, of equal lengths and of others: right on every number of ranks, in virtual time and in
// process.
#include "testing.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "collectives/dense/all_to_all_bruck.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/dense/allgather_bruck.hpp"
#include "collectives/dense/allgather_ring.hpp"
#include "collectives/dense/broadcast_chain.hpp"
#include "collectives/dense/gather_tree.hpp"
#include "collectives/dense/scatter_tree.hpp"
#include "collectives/support/partition.hpp"
#include "session/moves.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;
using Vector = std::vector<std::byte>;

Partition cut(const std::vector<std::uint64_t>& lengths) { return Partition(lengths); }

constexpr Rank kSizes[] = {1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 33};
constexpr World kWorlds[] = {World::simulated, World::local, World::memory};
constexpr std::byte kMark{0xa5};

// Byte i of what rank `from` has for rank `to`; no byte is the mark.
std::byte byte_of(Rank from, Rank to, std::size_t i) {
  return static_cast<std::byte>(mix((std::uint64_t{from} << 40) + (std::uint64_t{to} << 20) + i) % 165);
}

Vector block_of(Rank from, Rank to, std::size_t bytes) {
  Vector block(bytes);
  for (std::size_t i = 0; i < bytes; ++i) block[i] = byte_of(from, to, i);
  return block;
}

void append(Vector& all, const Vector& block) { all.insert(all.end(), block.begin(), block.end()); }

// Everybody's block for `to`.
Vector all_for(const Partition& blocks, Rank to) {
  Vector all;
  for (Rank from = 0; from < blocks.blocks(); ++from) append(all, block_of(from, to, blocks[from].size()));
  return all;
}

// Equal ones of every length at which the way changes; some empty; all in one rank's; all different.
std::vector<Partition> layouts(Rank size) {
  std::vector<Partition> layouts;
  for (const std::size_t bytes : {0UL, 1UL, 63UL, 512UL, 2049UL, 40'000UL}) {
    if (bytes * size > 700'000) continue;
    layouts.push_back(Partition(size * bytes, size));
  }
  std::vector<std::size_t> some(size);
  std::vector<std::size_t> one(size);
  std::vector<std::size_t> all(size);
  for (Rank rank = 0; rank < size; ++rank) {
    some[rank] = rank % 3 == 1 ? 300 + rank : 0;
    all[rank] = std::size_t{rank} * 7919 % 5000;
  }
  one[size / 2] = 900'001;
  for (const auto& sizes : {some, one, all}) layouts.emplace_back(sizes);
  return layouts;
}

void expect_same(const Vector& got, const Vector& wanted, const char* what, Rank size, Rank rank) {
  if (got == wanted) return;
  testing::fail(__FILE__, __LINE__,
                std::string(what) + ": P=" + std::to_string(size) + " rank " + std::to_string(rank));
}

RequestPtr request(Request::Body body) { return std::make_shared<Request>(Call{}, std::move(body)); }

TEST("blocks of all lengths alike and of others: where they are, and that layouts differ") {
  const Partition equal = Partition(3 * 5, 3);
  EXPECT_EQ(equal[2].begin, 10U);
  EXPECT_EQ(equal.count(), 15U);
  EXPECT_EQ(equal.digest(), 0U);
  EXPECT(cut({5, 5, 5}).alike());
  const Partition others = cut({0, 7, 2});
  EXPECT(others[0].size() == 0 && others[1].begin == 0 && others[1].end == 7 && others[2].end == 9);
  EXPECT_EQ(others.count(), 9U);
  EXPECT(!others.alike() && others.digest() != 0);
  EXPECT(others.digest() != cut({7, 0, 2}).digest());
  EXPECT(others.digest() != cut({0, 7, 2, 0}).digest());
  EXPECT_EQ(others.digest(), cut({0, 7, 2}).digest());
}

TEST("allgather of any layout, by the way that suits, by the ring and by Bruck's algorithm") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const Partition& blocks : layouts(size)) {
        const Vector expected = all_for(blocks, 0);
        for (const int way : {0, 1, 2}) {
          if (way != 0 && size == 1) continue;
          std::vector<Vector> mine;
          for (Rank rank = 0; rank < size; ++rank) mine.push_back(block_of(rank, 0, blocks[rank].size()));
          std::vector<Vector> all(size, Vector(blocks.count(), kMark));
          const auto make = [&](Rank rank) {
            if (way == 0) return make_all_gather(DType::u8, mine[rank], all[rank], blocks);
            return request([&, rank](Transport& net) {
              return way == 1 ? allgather_ring(net, mine[rank], all[rank], blocks)
                              : allgather_bruck(net, mine[rank], all[rank], blocks);
            });
          };
          EXPECT(run_ranks(world, size, make, size).all_succeeded());
          for (Rank rank = 0; rank < size; ++rank) expect_same(all[rank], expected, "allgather", size, rank);
        }
      }
    }
  }
}

TEST("allgather tells of others' blocks as they come: each byte once, in order, and there") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 8U}) {
      std::vector<Partition> all_layouts = layouts(size);
      all_layouts.push_back(Partition(size * std::size_t{300'000}, size));
      for (const Partition& blocks : all_layouts) {
        std::vector<Vector> mine, all(size, Vector(blocks.count(), kMark)), taken(size, Vector(blocks.count(), kMark));
        for (Rank rank = 0; rank < size; ++rank) mine.push_back(block_of(rank, 0, blocks[rank].size()));
        std::vector<std::vector<std::size_t>> ends(size);
        for (Rank owner = 0; owner < size; ++owner) ends[0].push_back(blocks[owner].begin);
        std::ranges::fill(ends, ends[0]);
        bool in_order = true;
        const auto make = [&](Rank rank) {
          const TakePart take = [&, rank](Rank owner, Range part) -> Task<void> {
            in_order = in_order && owner != rank && part.begin == ends[rank][owner] && part.size() > 0;
            ends[rank][owner] = part.end;
            std::copy_n(all[rank].begin() + static_cast<std::ptrdiff_t>(part.begin), part.size(),
                        taken[rank].begin() + static_cast<std::ptrdiff_t>(part.begin));
            co_return;
          };
          return request([&, rank, take](Transport& net) { return allgather(net, mine[rank], all[rank], blocks, take); });
        };
        EXPECT(run_ranks(world, size, make, size).all_succeeded());
        EXPECT(in_order);
        for (Rank rank = 0; rank < size; ++rank) {
          std::ranges::copy(mine[rank], taken[rank].begin() + static_cast<std::ptrdiff_t>(blocks[rank].begin));
          expect_same(taken[rank], all_for(blocks, 0), "what allgather told of", size, rank);
        }
      }
    }
  }
}

TEST("gather and scatter of any layout, to and from any root, in place on the root and not") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const Partition& blocks : layouts(size)) {
        for (Rank root = 0; root < size; root += size > 8 ? 5 : 1) {
          const Vector expected = all_for(blocks, 0);
          const bool in_place = root % 2 == 1;
          std::vector<Vector> mine;
          for (Rank rank = 0; rank < size; ++rank) mine.push_back(block_of(rank, 0, blocks[rank].size()));
          const Range own = blocks[root];
          Vector all(blocks.count(), kMark);
          if (in_place) std::ranges::copy(mine[root], all.begin() + static_cast<std::ptrdiff_t>(own.begin));
          const auto gathers = [&](Rank rank) {
            if (rank != root) return make_gather(DType::u8, mine[rank], {}, blocks, root);
            const ConstBytes from = in_place ? ConstBytes(all).subspan(own.begin, own.size()) : ConstBytes(mine[rank]);
            return make_gather(DType::u8, from, all, blocks, root);
          };
          EXPECT(run_ranks(world, size, gathers, size).all_succeeded());
          expect_same(all, expected, "gather", size, root);

          std::vector<Vector> parts;
          for (Rank rank = 0; rank < size; ++rank) parts.emplace_back(blocks[rank].size(), kMark);
          const auto scatters = [&](Rank rank) {
            if (rank != root) return make_scatter(DType::u8, {}, parts[rank], blocks, root);
            const Bytes into = in_place ? Bytes(all).subspan(own.begin, own.size()) : Bytes(parts[rank]);
            return make_scatter(DType::u8, all, into, blocks, root);
          };
          EXPECT(run_ranks(world, size, scatters, size).all_succeeded());
          EXPECT(all == expected);
          for (Rank rank = 0; rank < size; ++rank) {
            if (rank != root || !in_place) expect_same(parts[rank], mine[rank], "scatter", size, rank);
          }
        }
      }
    }
  }
}

TEST("gather and scatter by trees of few ranks too") {
  for (const Rank size : {2U, 3U, 5U, 6U, 8U, 11U}) {
    for (Rank root = 0; root < size; ++root) {
      const Partition blocks = Partition(size * 10, size);
      const Vector expected = all_for(blocks, 0);
      std::vector<Vector> mine;
      for (Rank rank = 0; rank < size; ++rank) mine.push_back(block_of(rank, 0, 10));
      Vector all(blocks.count(), kMark);
      const auto gathers = [&](Rank rank) {
        return request([&, rank](Transport& net) {
          return gather_tree(net, root, mine[rank], rank == root ? Bytes(all) : Bytes{});
        });
      };
      EXPECT(run_ranks(World::simulated, size, gathers, size).all_succeeded());
      expect_same(all, expected, "gather_tree", size, root);
      std::vector<Vector> parts(size, Vector(10, kMark));
      const auto scatters = [&](Rank rank) {
        return request([&, rank](Transport& net) {
          return scatter_tree(net, root, rank == root ? ConstBytes(all) : ConstBytes{}, parts[rank]);
        });
      };
      EXPECT(run_ranks(World::simulated, size, scatters, size).all_succeeded());
      EXPECT(parts == mine);
    }
  }
}

TEST("all_to_all of equal blocks, by the way that suits and by Bruck's algorithm") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      for (const std::size_t bytes : {0UL, 1UL, 63UL, 512UL, 513UL, 40'000UL, 600'000UL}) {
        if (bytes * size * size > 12'000'000) continue;
        for (const bool bruck : {false, true}) {
          if (bruck && bytes > 513) continue;
          std::vector<Vector> input(size);
          for (Rank from = 0; from < size; ++from) {
            for (Rank to = 0; to < size; ++to) append(input[from], block_of(from, to, bytes));
          }
          std::vector<Vector> output(size, Vector(size * bytes, kMark));
          const auto make = [&](Rank rank) {
            if (!bruck) return make_all_to_all(size, DType::u8, input[rank], output[rank]);
            return request([&, rank](Transport& net) { return all_to_all_bruck(net, input[rank], output[rank]); });
          };
          EXPECT(run_ranks(world, size, make, size).all_succeeded());
          for (Rank to = 0; to < size; ++to) {
            expect_same(output[to], all_for(Partition(size * bytes, size), to), "all_to_all", size, to);
          }
        }
      }
    }
  }
}

// What rank `from` has for rank `to`, in bytes: often nothing.
std::size_t length_of(Rank from, Rank to) {
  const std::uint64_t drawn = mix(std::uint64_t{from} * 1000 + to);
  return drawn % 3 == 0 ? 0 : drawn % 9 == 1 ? 70'000 : drawn % 300;
}

TEST("all_to_all_v: every pair has a length of its own") {
  for (const World world : kWorlds) {
    for (const Rank size : kSizes) {
      if (size > 17) continue;
      std::vector<Vector> input(size);
      std::vector<Partition> sent;
      std::vector<Partition> received;
      for (Rank rank = 0; rank < size; ++rank) {
        std::vector<std::size_t> leaving;
        std::vector<std::size_t> coming;
        for (Rank other = 0; other < size; ++other) {
          leaving.push_back(length_of(rank, other));
          coming.push_back(length_of(other, rank));
          append(input[rank], block_of(rank, other, leaving.back()));
        }
        sent.emplace_back(leaving);
        received.emplace_back(coming);
      }
      std::vector<Vector> output;
      for (Rank rank = 0; rank < size; ++rank) output.emplace_back(received[rank].count(), kMark);
      const auto make = [&](Rank rank) {
        return make_all_to_all_v(DType::u8, input[rank], output[rank], sent[rank], received[rank]);
      };
      EXPECT(run_ranks(world, size, make, size).all_succeeded());
      for (Rank to = 0; to < size; ++to) expect_same(output[to], all_for(received[to], to), "all_to_all_v", size, to);
    }
  }
}

TEST("a block of an all_to_all_v that is not as long as its receiver says ends it everywhere") {
  std::vector<Vector> input(3, Vector(30));
  std::vector<Vector> output(3, Vector(30));
  const auto make = [&](Rank rank) {
    const Partition even = cut({10, 10, 10});
    return make_all_to_all_v(DType::u8, input[rank], output[rank], rank == 1 ? cut({9, 10, 11}) : even, even);
  };
  const Ended ended = run_ranks(World::simulated, 3, make);
  for (const Rank receiver : {0U, 2U}) {
    REQUIRE(ended.requests[receiver]->failure());
    const std::string& reason = ended.requests[receiver]->failure()->reason;
    EXPECT(reason.find("the block of rank 1 for rank ") != std::string::npos);
    EXPECT(reason.find("bytes instead of 10: compare send_counts[") != std::string::npos);
    EXPECT(reason.find("] on rank 1 with receive_counts[1] on rank ") != std::string::npos);
  }
}

TEST("who cuts a vector otherwise than the others is told so") {
  const std::vector<Partition> cuts{cut({4, 8, 12}), cut({4, 8, 12}), cut({8, 4, 12})};
  std::vector<Vector> whole(3, Vector(24));
  std::vector<Vector> part(3, Vector(12));
  for (const int operation : {0, 1, 2}) {
    const auto make = [&](Rank rank) {
      const Bytes all = rank == 0 || operation == 0 ? Bytes(whole[rank]) : Bytes{};
      const Bytes mine = Bytes(part[rank]).first(cuts[rank][rank].size());
      if (operation == 0) return make_all_gather(DType::f32, mine, all, cuts[rank]);
      return operation == 1 ? make_gather(DType::f32, mine, all, cuts[rank], 0)
                            : make_scatter(DType::f32, all, mine, cuts[rank], 0);
    };
    const Ended ended = run_ranks(World::simulated, 3, make);
    const Rank receiver = operation == 2 ? 2 : 0;  // the others may be through before they hear of it
    REQUIRE(ended.requests[receiver]->failure());
    EXPECT(ended.requests[receiver]->failure()->kind == FailureKind::mismatched_call);
    EXPECT(ended.requests[receiver]->failure()->reason.find("counts=#") != std::string::npos);
  }
}

TEST("outputs stay untouched as long as one rank has not called") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 4U, 5U, 8U, 16U}) {
      for (Rank absent = 0; absent < size; absent += size > 8 ? 5 : 1) {
        for (const std::size_t bytes : {7UL, 70'000UL}) {
          const Vector mine(size * bytes, std::byte{1});
          std::vector<Vector> all(size, Vector(size * bytes, kMark));
          std::vector<Vector> exchanged = all;
          std::vector<Vector> exchanged_v = all;
          std::vector<std::size_t> lengths(size, bytes);
          const std::vector<Vector> untouched = all;
          const auto gathers = [&](Rank rank) -> RequestPtr {
            const Partition blocks = Partition(size * bytes, size);
            return rank == absent ? nullptr
                                  : make_all_gather(DType::u8, ConstBytes(mine).first(bytes), all[rank], blocks);
          };
          const auto exchanges = [&](Rank rank) -> RequestPtr {
            return rank == absent ? nullptr : make_all_to_all(size, DType::u8, mine, exchanged[rank]);
          };
          const auto exchanges_v = [&](Rank rank) -> RequestPtr {
            return rank == absent
                       ? nullptr
                       : make_all_to_all_v(DType::u8, mine, exchanged_v[rank], Partition(lengths), Partition(lengths));
          };
          EXPECT(run_ranks(world, size, gathers).stuck && all == untouched);
          EXPECT(run_ranks(world, size, exchanges).stuck && exchanged == untouched);
          EXPECT(run_ranks(world, size, exchanges_v).stuck && exchanged_v == untouched);
        }
      }
    }
  }
}

TEST("broadcast along a chain gives the root's data to every rank, from every root") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 4U, 5U, 8U, 13U}) {
      for (Rank root = 0; root < size; ++root) {
        const std::size_t bytes = root == 0 ? 1'000'001 : 70'000 + root;
        std::vector<Vector> data(size, Vector(bytes, kMark));
        data[root] = block_of(root, 0, bytes);
        const auto make = [&](Rank rank) {
          return request([&, rank](Transport& net) { return broadcast_chain(net, root, data[rank]); });
        };
        EXPECT(run_ranks(world, size, make, root).all_succeeded());
        for (const Vector& received : data) EXPECT(received == data[root]);
      }
    }
  }
  EXPECT(!broadcast_goes_by_chain(2, false, 1 << 24) && !broadcast_goes_by_chain(8, false, 4096));
  EXPECT(broadcast_goes_by_chain(3, false, 1 << 20) && broadcast_goes_by_chain(8, false, 1 << 20));
  EXPECT(broadcast_goes_by_chain(4096, false, 1 << 26) && !broadcast_goes_by_chain(4096, false, 1 << 20));
}

}  // namespace
