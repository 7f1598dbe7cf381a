// The rounds of allgather_bruck.cpp for messages of any lengths: ⌈log2 P⌉·α + Σ(k + 4)·β. A round's message has the lengths
// of those in it before them; a length of 0 says that there is one too long for that.
#include "collectives/support/allgather_short.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/check.hpp"
#include "collectives/support/any_size.hpp"

namespace telegrad {
namespace {

using Length = std::uint32_t;

std::size_t table_bytes(std::size_t messages) { return (messages * sizeof(Length) + 7) / 8 * 8; }
std::size_t most_bytes_of(std::size_t messages, std::size_t most) { return table_bytes(messages) + messages * most; }

Buffer packed(std::span<const ConstBytes> messages) {
  std::size_t size = table_bytes(messages.size());
  for (const ConstBytes& one : messages) size += one.size();
  Buffer whole(size);
  std::memset(whole.data(), 0, table_bytes(messages.size()));
  std::byte* next = whole.data() + table_bytes(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto length = static_cast<Length>(messages[i].size());
    std::memcpy(whole.data() + i * sizeof length, &length, sizeof length);
    if (length > 0) std::memcpy(next, messages[i].data(), length);
    next += length;
  }
  return whole;
}

// Appends `count` messages; false if they do not fit.
bool unpack(ConstBytes whole, std::size_t count, std::size_t most, std::vector<ConstBytes>& messages) {
  if (whole.size() < table_bytes(count)) return false;
  ConstBytes rest = whole.subspan(table_bytes(count));
  for (std::size_t i = 0; i < count; ++i) {
    Length length = 0;
    std::memcpy(&length, whole.data() + i * sizeof length, sizeof length);
    if (length > std::min(rest.size(), most) || length % 8 != 0) return false;
    messages.push_back(rest.first(length));
    rest = rest.subspan(length);
  }
  return rest.empty();
}

}  // namespace

Task<ShortMessages> allgather_short(Transport& net, ConstBytes mine, const char* content, Step first_step,
                                    std::size_t most) {
  TELEGRAD_CHECK(!mine.empty() && mine.size() % 8 == 0);
  const Rank rank = net.rank();
  const Rank size = net.size();
  ShortMessages all;
  std::vector<ConstBytes> known{mine.size() > most ? ConstBytes() : mine};  // of the ranks from this one on
  Step step = first_step;
  for (Rank have = 1; have < size;) {
    const Rank more = std::min(have, size - have);
    const Rank from = (rank + have) % size;
    Buffer leaving;
    std::size_t bytes = 0;
    for (Rank hops = 0; hops < more; ++hops) bytes += known[hops].size();
    co_await net.compute(bytes, [&] { leaving = packed(std::span(known).first(more)); });
    all.received.push_back(co_await exchange_any_size(net, (rank + size - have) % size, from, step, leaving.bytes(),
                                                      most_bytes_of(more, most)));
    if (!unpack(all.received.back().bytes(), more, most, known)) {
      co_await net.fail(from, "rank " + std::to_string(from) + " sent damaged " + content + ": their lengths do not fit");
    }
    step += any_size_steps(net, most_bytes_of(more, most));
    have += more;
  }
  all.by_rank.resize(size);
  for (Rank hops = 0; hops < size; ++hops) all.by_rank[(rank + hops) % size] = known[hops];
  co_return all;
}

Step short_message_steps(const Transport& net, std::size_t most) {
  Step steps = 0;
  for (Rank have = 1; have < net.size();) {
    const Rank more = std::min(have, net.size() - have);
    steps += any_size_steps(net, most_bytes_of(more, most));
    have += more;
  }
  return steps;
}

}  // namespace telegrad
