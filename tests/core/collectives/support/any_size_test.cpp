// Messages of a length that only their sender knows: between two ranks, to one and from another, and from all to all.
#include "testing.hpp"

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/support/allgather_any_size.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/support/pieces.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr World kWorlds[] = {World::simulated, World::local};
constexpr std::size_t kMost = 7 * kCardBytes;
// Around the length of a piece, of which 8 bytes of the first are a header.
constexpr std::size_t kLengths[] = {0,
                                    1,
                                    1000,
                                    kCardBytes - 9,
                                    kCardBytes - 8,
                                    kCardBytes - 1,
                                    kCardBytes,
                                    kCardBytes + 1,
                                    2 * kCardBytes - 8,
                                    2 * kCardBytes - 7,
                                    5 * kCardBytes + 11,
                                    kMost};

Buffer message_of(Rank rank, std::size_t length) {
  Buffer message(length);
  for (std::size_t i = 0; i < length; ++i) message.bytes()[i] = static_cast<std::byte>(rank + i % 251);
  return message;
}

bool is_message_of(Rank rank, std::size_t length, ConstBytes bytes) {
  const Buffer expected = message_of(rank, length);
  return bytes.size() == length && (length == 0 || std::memcmp(bytes.data(), expected.data(), length) == 0);
}

RequestPtr any_request(std::function<Task<void>(Transport&)> run) {
  return std::make_shared<Request>(Call{.operation = Operation::allgather}, std::move(run));
}

TEST("a message from one rank to another, of any length") {
  for (const World world : kWorlds) {
    for (const std::size_t length : kLengths) {
      Buffer got;
      const auto run = [&](Transport& net) -> Task<void> {
        const Buffer mine = message_of(7, length);
        if (net.rank() == 0) co_await send_any_size(net, 1, 5, mine.bytes());
        if (net.rank() == 1) got = co_await receive_any_size(net, 0, 5, kMost);
      };
      EXPECT(run_ranks(world, 2, [&](Rank) { return any_request(run); }, length).all_succeeded());
      EXPECT(is_message_of(7, length, got.bytes()));
    }
  }
}

TEST("every rank sends to the next while the one before sends to it, whatever their lengths") {
  constexpr std::size_t kCount = std::size(kLengths);
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 12U}) {
      for (const std::size_t shift : {1UL, 5UL}) {
        const auto length_of = [&](Rank rank) { return kLengths[rank * shift % kCount]; };
        std::vector<Buffer> got(size);
        const auto run = [&](Transport& net) -> Task<void> {
          const Rank rank = net.rank();
          const Buffer mine = message_of(rank, length_of(rank));
          got[rank] = co_await exchange_any_size(net, (rank + 1) % size, (rank + size - 1) % size, 0, mine.bytes(), kMost);
        };
        EXPECT(run_ranks(world, size, [&](Rank) { return any_request(run); }, shift).all_succeeded());
        for (Rank rank = 0; rank < size; ++rank) {
          const Rank left = (rank + size - 1) % size;
          EXPECT(is_message_of(left, length_of(left), got[rank].bytes()));
        }
      }
    }
  }
}

TEST("allgather of messages whose length only their sender knows: each is taken once, this rank's first") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U, 7U, 8U, 13U, 16U, 32U}) {
      for (const std::size_t longest : {1001UL, 200'001UL}) {
        const auto length_of = [&](Rank rank) { return std::size_t{rank} * (longest / 3 + 3) % longest; };
        std::vector<KeptMessages> all(size);
        std::vector<std::vector<Rank>> taken(size);
        const auto gather = [&](Transport& net) -> Task<void> {
          const Rank rank = net.rank();
          const auto take = [&taken, &length_of, rank](std::span<const Arrived> batch) -> Task<void> {
            for (const Arrived& one : batch) {
              EXPECT(is_message_of(one.source, length_of(one.source), one.bytes));
              taken[rank].push_back(one.source);
            }
            co_return;
          };
          const Taking taking{take};
          all[rank] = co_await allgather_any_size(net, message_of(rank, length_of(rank)), longest, 0, taking);
        };
        EXPECT(run_ranks(world, size, [&](Rank) { return any_request(gather); }, size).all_succeeded());
        for (Rank rank = 0; rank < size; ++rank) {
          const std::vector<ConstBytes> messages = all[rank].by_source(size);
          std::vector<Rank> expected;
          for (Rank hop = 0; hop < size; ++hop) {
            const Rank source = (rank + size - hop) % size;
            expected.push_back(source);
            EXPECT(is_message_of(source, length_of(source), messages[source]));
          }
          EXPECT(taken[rank] == expected);
        }
      }
    }
  }
}

std::string reason_of(const Ended& ended, Rank rank) {
  return ended.requests[rank]->failure() ? ended.requests[rank]->failure()->reason : "";
}

TEST("a message longer than agreed ends the operation with an error") {
  for (const std::size_t most : {std::size_t{100}, 3 * kCardBytes}) {
    const auto gather = [&](Transport& net) -> Task<void> {
      const auto ignore = [](std::span<const Arrived>) -> Task<void> { co_return; };
      const Taking taking{ignore};
      co_await allgather_any_size(net, Buffer(net.rank() == 2 ? most + 1 : 5), most, 0, taking);
    };
    const Ended ended = run_ranks(World::simulated, 4, [&](Rank) { return any_request(gather); });
    for (Rank rank = 0; rank < 4; ++rank) {
      EXPECT(ended.requests[rank]->failure());
      EXPECT(reason_of(ended, 3).find(std::to_string(most)) != std::string::npos);
    }
  }
}

// Of a first piece: that others follow, and the length of the whole.
void put_first_word(Buffer& first, std::uint64_t length) {
  const std::uint64_t word = std::uint64_t{0xffff} << 48 | length;
  std::memcpy(first.data(), &word, sizeof word);
}

TEST("a first piece whose length cannot be ends the operation and names its sender") {
  for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{kCardBytes} - 1, std::uint64_t{kMost} + 1, ~std::uint64_t{0}}) {
    const auto run = [&](Transport& net) -> Task<void> {
      if (net.rank() == 0) {
        Buffer first = message_of(0, kCardBytes);
        put_first_word(first, length);
        co_await net.send(1, 0, first.bytes());
      } else {
        co_await receive_any_size(net, 0, 0, kMost);
      }
    };
    const Ended ended = run_ranks(World::simulated, 2, [&](Rank) { return any_request(run); });
    EXPECT(reason_of(ended, 1).find("rank 0 sent a damaged message") != std::string::npos);
  }
}

TEST("a first piece that does not say that others follow ends the operation") {
  const auto run = [&](Transport& net) -> Task<void> {
    if (net.rank() == 0) co_await net.send(1, 0, message_of(0, kCardBytes).bytes());
    if (net.rank() == 1) co_await receive_any_size(net, 0, 0, kMost);
  };
  const Ended ended = run_ranks(World::simulated, 2, [&](Rank) { return any_request(run); });
  EXPECT(reason_of(ended, 1).find("rank 0 sent a damaged message") != std::string::npos);
}

TEST("what is left of a first piece is not passed on round a ring") {
  const auto run = [&](Transport& net) -> Task<void> {
    if (net.rank() == 0) {
      Buffer first = message_of(0, 100);
      put_first_word(first, kMost);
      co_await net.send(1, 0, first.bytes());
      co_await receive_any_size(net, 1, 0, kMost);  // which never comes
    } else {
      const auto ignore = [](std::span<const Arrived>) -> Task<void> { co_return; };
      const Taking taking{ignore};
      co_await allgather_any_size(net, message_of(net.rank(), 5), kMost, 0, taking);
    }
  };
  const Ended ended = run_ranks(World::simulated, 3, [&](Rank) { return any_request(run); });
  EXPECT(reason_of(ended, 1).find("rank 0 sent a damaged message") != std::string::npos);
}

// Who takes it for the whole waits for its own pieces to be taken, and the other one likewise.
TEST("what is left of a first piece is not taken for a whole message") {
  for (const std::size_t left : {std::size_t{8}, kCardBytes - 1}) {
    const auto run = [&](Transport& net) -> Task<void> {
      const Buffer mine = message_of(net.rank(), kMost);
      if (net.rank() == 0) {
        Buffer first = message_of(0, left);
        put_first_word(first, kMost);
        co_await net.send(1, 0, first.bytes());
        co_await receive_any_size(net, 1, 0, kMost);
      } else {
        co_await exchange_any_size(net, 0, 0, 0, mine.bytes(), kMost);
      }
    };
    const Ended ended = run_ranks(World::simulated, 2, [&](Rank) { return any_request(run); });
    EXPECT(reason_of(ended, 1).find("others are to follow its first " + std::to_string(left)) != std::string::npos);
  }
}

}  // namespace
