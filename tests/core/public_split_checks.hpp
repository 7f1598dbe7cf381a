#pragma once
// What communicators that are split from another must do, over any network; called on every rank of `comm`.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "telegrad/telegrad.hpp"
#include "testing.hpp"

namespace telegrad_checks {

using telegrad::Communicator;
using telegrad::Rank;

// The ranks of the parent, by rank of `part`.
inline std::vector<Rank> members(Communicator& part, Rank in_parent) {
  const std::vector<Rank> mine{in_parent};
  std::vector<Rank> all(part.size());
  part.all_gather(mine, all).wait();
  return all;
}

inline void check_groups(Communicator& comm) {
  const Rank rank = comm.rank(), size = comm.size();
  std::vector<Rank> alike, everybody;  // what naive counting says
  for (Rank peer = 0; peer < size; ++peer) {
    if (peer % 2 == rank % 2) alike.push_back(peer);
    everybody.insert(everybody.begin(), peer);
  }
  Communicator part = comm.split(rank % 2).value();
  EXPECT_EQ(part.driver(), comm.driver());
  EXPECT_EQ(part.size(), static_cast<Rank>(alike.size()));
  EXPECT_EQ(alike[part.rank()], rank);
  EXPECT_EQ(members(part, rank), alike);

  Communicator turned = comm.split(7, -static_cast<std::int64_t>(rank)).value();
  EXPECT_EQ(turned.rank(), size - 1 - rank);
  EXPECT_EQ(members(turned, rank), everybody);

  // Side by side: each sums among its own.
  Rank part_sum = 0, all_sum = 0;
  for (const Rank peer : alike) part_sum += peer;
  for (const Rank peer : everybody) all_sum += peer;
  std::vector<std::int64_t> mine(1000, rank), among(1000), over(1000), turned_over(1000);
  const telegrad::Work first = part.all_reduce(mine, among);
  const telegrad::Work second = comm.all_reduce(mine, over);
  const telegrad::Work third = turned.all_reduce(mine, turned_over);
  third.wait();
  second.wait();
  first.wait();
  EXPECT_EQ(among, std::vector<std::int64_t>(1000, part_sum));
  EXPECT_EQ(over, std::vector<std::int64_t>(1000, all_sum));
  EXPECT_EQ(turned_over, over);
  const auto entries = part.all_reduce(telegrad::SparseVector<float>(10, {3}, {1.0F})).result();
  EXPECT_EQ(entries.values()[0], static_cast<float>(alike.size()));

  // A part of a part, and ranks that join none.
  std::optional<Communicator> first_alone = part.split(part.rank() == 0 ? std::optional<std::uint64_t>(1) : std::nullopt);
  EXPECT_EQ(first_alone.has_value(), part.rank() == 0);
  if (first_alone) EXPECT_EQ(members(*first_alone, rank), (std::vector{rank}));
  EXPECT(!comm.split(std::nullopt));

  part.close();  // the others go on
  comm.all_reduce(mine, over).wait();
  EXPECT_EQ(over[0], static_cast<std::int64_t>(all_sum));
  turned.barrier().wait();
}

inline void check_failures(Communicator& comm) {
  Communicator part = comm.split(comm.rank() == 0 ? 4 : 5).value();
  Communicator nested = part.split(6).value();
  comm.barrier().wait();
  if (comm.rank() == comm.size() - 1) nested.abort("enough");
  if (comm.rank() != 0) {
    EXPECT_THROWS(telegrad::TransportError, "split(color=6) of split(color=5)", nested.barrier().wait());
  }
  std::vector<float> x(3, 1.0F);
  comm.all_reduce(x).wait();  // what ends one leaves the other usable
  part.all_reduce(x).wait();
  EXPECT_EQ(x[0], static_cast<float>(comm.size() * part.size()));
}

}  // namespace telegrad_checks
