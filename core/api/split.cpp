// split(): communicators of some of a communicator's ranks, which find each other over that one.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "api/joined.hpp"
#include "progress/communicator.hpp"

namespace telegrad::api {
namespace {

constexpr std::int64_t kNoGroup = -1;
constexpr std::int64_t kNotMade = 0;
constexpr std::int64_t kAddressMost = 1 << 20;  // bytes; UCX's has some hundred for each of its networks

// Every rank's `mine`, one behind the other, all of one length.
template <class T>
std::vector<T> gathered(Communicator& comm, const std::vector<T>& mine) {
  std::vector<T> all(mine.size() * comm.size());
  comm.all_gather(mine, all).wait();
  return all;
}

// Ranks of the parent, in the order of their ranks in the group: by key, then by rank.
std::vector<Rank> members_of(Communicator& comm, std::int64_t color, std::int64_t key) {
  const std::vector<std::int64_t> wishes = gathered(comm, std::vector{color, key});
  std::vector<Rank> members;
  for (Rank rank = 0; rank < comm.size(); ++rank) {
    if (wishes[2 * rank] == color) members.push_back(rank);
  }
  std::ranges::stable_sort(members, {}, [&](Rank rank) { return wishes[2 * rank + 1]; });
  return members;
}

[[noreturn]] void miss(const Communicator& comm, Rank member) {
  throw TransportError("rank " + std::to_string(comm.rank()) + ": rank " + std::to_string(member) +
                           " could not open its network for the group that it shares with this one: look at the log of "
                           "that rank",
                       {.rank = comm.rank(), .peer = member, .operation = "split"});
}

// The bytes of `members`, in their order; every rank gives its own.
std::vector<std::vector<std::byte>> told(Communicator& comm, ConstBytes mine, const std::vector<Rank>& members) {
  const auto lengths = gathered(comm, std::vector{static_cast<std::int64_t>(mine.size())});
  for (Rank rank = 0; rank < comm.size(); ++rank) {  // which all ranks see alike
    if (lengths[rank] >= 0 && lengths[rank] <= kAddressMost) continue;
    throw TransportError("rank " + std::to_string(comm.rank()) + ": rank " + std::to_string(rank) +
                             " says that its address has " + std::to_string(lengths[rank]) +
                             " bytes: install the same telegrad on all hosts",
                         {.rank = comm.rank(), .peer = rank, .operation = "split"});
  }
  std::vector<std::byte> padded(static_cast<std::size_t>(std::ranges::max(lengths)));
  std::ranges::copy(mine, padded.begin());
  const std::vector<std::byte> table = gathered(comm, padded);
  std::vector<std::vector<std::byte>> all;
  for (const Rank member : members) {
    const auto first = table.begin() + static_cast<std::ptrdiff_t>(member * padded.size());
    all.emplace_back(first, first + lengths[member]);
  }
  return all;
}

// Over the network of the parent. `group` null: this rank has none, but others' addresses go over all ranks.
detail::CorePtr connected(Communicator& comm, const detail::Joined& parent, Rank rank,
                          const std::shared_ptr<const Group>& group) {
  if (!group) {
    told(comm, {}, {});
    return nullptr;
  }
  const std::vector<Rank>& members = group->parent_ranks;
  bool swapped = false;
  const auto swap = [&](ConstBytes mine) {
    swapped = true;
    auto addresses = told(comm, mine, members);
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (addresses[i].empty()) miss(comm, members[i]);
    }
    return addresses;
  };
  CommunicatorOptions options = detail::own_options(parent.options);
  options.session.group = group;
  try {
    return parent.connect(rank, static_cast<Rank>(members.size()), std::move(options), swap);
  } catch (...) {
    if (!swapped) told(comm, {}, {});  // the others wait for an address, and are to hear that there is none
    throw;
  }
}

// In this process: the group's first rank makes the ends of all.
detail::CorePtr shared(Communicator& comm, const detail::Joined& parent, Rank rank,
                       const std::shared_ptr<const Group>& group) {
  detail::LocalEnds& ends = *parent.ends;
  std::int64_t token = kNotMade;
  std::exception_ptr failure;
  if (group && rank == 0) {
    try {
      auto made = detail::made_local(static_cast<Rank>(group->parent_ranks.size()), parent.options, group);
      const std::scoped_lock lock(ends.mutex);
      token = ++ends.tokens;
      ends.made.emplace(token, std::move(made));
    } catch (...) {
      failure = std::current_exception();
    }
  }
  const std::vector<std::int64_t> tokens = gathered(comm, std::vector{token});
  if (failure) std::rethrow_exception(failure);
  if (!group) return nullptr;
  const Rank first = group->parent_ranks.front();
  if (tokens[first] == kNotMade) miss(comm, first);
  const std::scoped_lock lock(ends.mutex);
  const auto found = ends.made.find(tokens[first]);
  auto own = std::move(found->second[rank]);
  if (std::ranges::none_of(found->second, [](const auto& end) { return end != nullptr; })) ends.made.erase(found);
  return own;
}

}  // namespace

std::optional<Communicator> Communicator::split(std::optional<std::uint64_t> color, std::int64_t key) {
  if (color && *color > std::numeric_limits<std::int64_t>::max()) {
    throw std::invalid_argument("color=" + std::to_string(*color) +
                                " must be below 2^63, or empty: this rank joins no group");
  }
  const std::int64_t wish = color ? static_cast<std::int64_t>(*color) : kNoGroup;
  const std::vector<Rank> members = members_of(*this, wish, key);
  auto joined = std::make_shared<detail::Joined>();
  std::shared_ptr<const Group> group;
  Rank own = 0;
  if (color) {
    joined->group = "split(color=" + std::to_string(*color) + ")";
    if (!state()->group.empty()) joined->group += " of " + state()->group;
    group = std::make_shared<const Group>(joined->group, members);
    own = static_cast<Rank>(std::ranges::find(members, rank()) - members.begin());
  }
  joined->core = detail::translated([&] {
    try {
      return state()->connect ? connected(*this, *state(), own, group) : shared(*this, *state(), own, group);
    } catch (const telegrad::TransportError& error) {  // of a driver that could not be opened, which knows of no groups
      Failure failure = error.failure();
      failure.group = group;
      throw telegrad::TransportError(std::move(failure));
    }
  });
  if (!color) return std::nullopt;
  joined->options = state()->options;
  joined->connect = state()->connect;
  joined->ends = state()->ends;
  return Communicator(std::move(joined));
}

}  // namespace telegrad::api
