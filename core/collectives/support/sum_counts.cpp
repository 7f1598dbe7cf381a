// Recursive doubling: log2 P (α + n·β), and two messages more for the ranks beyond a power of two. Halving, then Bruck's
// rounds: 2 ceil(log2 P)·α + 2n·β. n is in bytes, and grows with the counts' logarithm.
#include "collectives/support/sum_counts.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "codec/short_numbers.hpp"
#include "codec/varint.hpp"
#include "collectives/support/halving.hpp"
#include "collectives/support/partition.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kDoubledMost = 256;  // counts

std::uint64_t rounds_of(Rank ranks) { return std::bit_width(ranks - 1); }

Transport::Failing fail_damaged_counts(Transport& net, Rank from) {
  return net.fail(from, "rank " + std::to_string(from) + " sent damaged counts");
}

struct Links {
  Transport& net;
  SparseTraffic& traffic;
  std::size_t most;  // bytes of a message

  Task<void> send(Rank to, Step step, Buffer message) {
    traffic.control_bytes_sent += message.size();
    co_await net.send(to, step, message.bytes());
  }
  Task<Buffer> receive(Rank from, Step step) {
    Buffer message = co_await net.receive_any_size(from, step, most);
    traffic.control_bytes_received += message.size();
    co_return message;
  }
  Task<Buffer> exchange(Rank to, Rank from, Step step, Buffer message) {
    auto sending = net.send(to, step, message.bytes());
    traffic.control_bytes_sent += message.size();
    Buffer received = co_await receive(from, step);
    co_await sending;
    co_return received;
  }
};

// `say()`: what this rank has, as a message. `add(message)`: takes another's in; false if it is damaged. `forget()`: what
// this rank has is in the message that it gets next.
template <class Say, class Add, class Forget>
Task<void> double_up(Links links, Step first_step, Say say, Add add, Forget forget) {
  Transport& net = links.net;
  const Rank rank = net.rank();
  const Rank members = std::bit_floor(net.size());
  const Rank pairs = net.size() - members;  // of ranks, of which only the even one is a member
  const bool folded = rank < 2 * pairs;
  const Step fold = first_step;
  const Step unfold = first_step + 1;
  const auto take = [&](Rank from, Buffer message) -> Task<void> {
    bool is_whole = false;
    co_await net.compute(message.size(), [&] { is_whole = add(message.bytes()); });
    if (!is_whole) co_await fail_damaged_counts(net, from);
  };
  if (folded && rank % 2 == 1) {
    co_await links.send(rank - 1, fold, say());
    Buffer all = co_await links.receive(rank - 1, unfold);
    forget();
    co_await take(rank - 1, std::move(all));
    co_return;
  }
  if (folded) {
    Buffer other = co_await links.receive(rank + 1, fold);
    co_await take(rank + 1, std::move(other));
  }
  const Rank self = folded ? rank / 2 : rank - pairs;
  Step step = first_step + 2;
  for (Rank distance = 1; distance < members; distance *= 2, ++step) {
    const Rank member = self ^ distance;
    const Rank partner = member < pairs ? 2 * member : member + pairs;
    Buffer other = co_await links.exchange(partner, partner, step, say());
    co_await take(partner, std::move(other));
  }
  if (folded) co_await links.send(rank + 1, unfold, say());
}

// Of a count that one rank or all of them have.
std::uint64_t most_of(Rank ranks, bool is_maximum, std::uint64_t most) { return is_maximum ? most : ranks * most; }

// Counts in blocks, one for each rank, of which a rank's own comes first.
class Blocks {
 public:
  Blocks(Transport& net, std::span<std::uint64_t> counts, std::size_t maxima, std::uint64_t most)
      : net_(net), counts_(counts), first_maximum_(counts.size() - maxima), most_(most), blocks_(counts.size(), net.size()) {}

  Task<void> sum(Links links, Step first_step) {
    const Rank rank = net_.rank();
    const Rank size = net_.size();
    Step step = first_step;
    for (Rank round = 0; round < halving_rounds(size); ++round, ++step) {
      const HalvingRound now = halving_round(size, round);
      const Rank from = (rank + size - now.distance) % size;
      const Buffer message =
          co_await links.exchange((rank + now.distance) % size, from, step, message_of(now.distance, now.reach));
      std::vector<std::uint64_t> theirs(count_of(0, now.blocks()));
      if (!decode_counts(message.bytes(), theirs)) co_await fail_damaged_counts(net_, from);
      if (!are_possible(0, now.blocks(), theirs)) co_await fail_damaged_counts(net_, from);
      std::size_t next = 0;
      for_each(0, now.blocks(), [&](std::size_t i) {
        const std::uint64_t count = theirs[next++];
        counts_[i] = i < first_maximum_ ? counts_[i] + count : std::max(counts_[i], count);
      });
    }
    for (Rank have = 1; have < size; ++step) {
      const Rank more = std::min(have, size - have);
      const Rank from = (rank + have) % size;
      const Buffer message = co_await links.exchange((rank + size - have) % size, from, step, message_of(0, more));
      std::vector<std::uint64_t> theirs(count_of(have, have + more));
      if (!decode_counts(message.bytes(), theirs)) co_await fail_damaged_counts(net_, from);
      if (!are_possible(have, have + more, theirs)) co_await fail_damaged_counts(net_, from);
      std::size_t next = 0;
      for_each(have, have + more, [&](std::size_t i) { counts_[i] = theirs[next++]; });
      have += more;
    }
  }

 private:
  template <class Work>
  void for_each(Rank first, Rank last, Work work) const {
    for (Rank hops = first; hops < last; ++hops) {
      const Range block = blocks_[(net_.rank() + hops) % net_.size()];
      for (std::size_t i = block.begin; i < block.end; ++i) work(i);
    }
  }
  bool are_possible(Rank first, Rank last, std::span<const std::uint64_t> theirs) const {
    std::size_t next = 0;
    bool all = true;
    for_each(first, last, [&](std::size_t i) {
      all = theirs[next++] <= most_of(net_.size(), i >= first_maximum_, most_) && all;
    });
    return all;
  }
  std::size_t count_of(Rank first, Rank last) const {
    std::size_t count = 0;
    for (Rank hops = first; hops < last; ++hops) count += blocks_[(net_.rank() + hops) % net_.size()].size();
    return count;
  }
  Buffer message_of(Rank first, Rank last) const {
    std::vector<std::uint64_t> counts;
    for_each(first, last, [&](std::size_t i) { counts.push_back(counts_[i]); });
    return encode_counts(counts);
  }

  Transport& net_;
  std::span<std::uint64_t> counts_;
  std::size_t first_maximum_;
  std::uint64_t most_;
  Partition blocks_;
};

}  // namespace

Task<void> sum_counts(Transport& net, std::span<std::uint64_t> counts, std::size_t maxima, std::uint64_t most,
                      SparseTraffic& traffic, Step first_step) {
  TELEGRAD_CHECK(maxima <= counts.size());
  Links links{net, traffic, most_count_bytes(counts.size())};
  if (net.size() == 1) co_return;
  if (counts.size() > kDoubledMost) {
    Blocks blocks(net, counts, maxima, most);
    co_await blocks.sum(links, first_step);
    co_return;
  }
  std::vector<std::uint64_t> theirs(counts.size());
  co_await double_up(
      links, first_step, [&] { return encode_counts(counts); },
      [&](ConstBytes message) {
        if (!decode_counts(message, theirs)) return false;
        const std::size_t sums = counts.size() - maxima;
        for (std::size_t i = 0; i < counts.size(); ++i) {
          if (theirs[i] > most_of(net.size(), i >= sums, most)) return false;
        }
        for (std::size_t i = 0; i < sums; ++i) counts[i] += theirs[i];
        for (std::size_t i = sums; i < counts.size(); ++i) counts[i] = std::max(counts[i], theirs[i]);
        return true;
      },
      [&] { std::ranges::fill(counts, std::uint64_t{0}); });
}

std::uint64_t sum_counts_bytes_most(std::size_t counts, Rank ranks, std::uint64_t total) {
  return (counts > kDoubledMost ? 2 : rounds_of(ranks)) * varints_bytes_most(counts, total + counts);
}

std::uint64_t gather_counts_bytes_most(std::size_t counts, Rank ranks, std::uint64_t total) {
  return varints_bytes_most(counts * ranks, rounds_of(ranks) * total + counts * ranks);
}

Task<std::vector<std::uint64_t>> gather_counts(Transport& net, std::span<const std::uint64_t> mine, SparseTraffic& traffic,
                                               Step first_step) {
  const Rank rank = net.rank();
  const Rank size = net.size();
  Links links{net, traffic, most_count_bytes(mine.size() * size)};
  std::vector<std::uint64_t> known(mine.begin(), mine.end());  // of the ranks from this one on
  Step step = first_step;
  for (Rank have = 1; have < size; ++step) {
    const Rank more = std::min(have, size - have);
    const Rank from = (rank + have) % size;
    const Buffer message = co_await links.exchange((rank + size - have) % size, from, step,
                                                   encode_counts(std::span(known).first(more * mine.size())));
    std::vector<std::uint64_t> theirs(more * mine.size());
    if (!decode_counts(message.bytes(), theirs)) co_await fail_damaged_counts(net, from);
    known.insert(known.end(), theirs.begin(), theirs.end());
    have += more;
  }
  std::ranges::rotate(known, known.end() - static_cast<std::ptrdiff_t>(rank * mine.size()));
  co_return known;
}

Task<void> merge_keys(Transport& net, std::vector<std::uint64_t>& keys, std::size_t total, SparseTraffic& traffic,
                      Step first_step) {
  std::ranges::sort(keys);
  Links links{net, traffic, most_key_bytes(total)};
  co_await double_up(
      links, first_step, [&] { return encode_keys(keys); },
      [&](ConstBytes message) {
        const auto own = static_cast<std::ptrdiff_t>(keys.size());
        if (keys.size() > total || !decode_keys(message, total - keys.size(), keys)) return false;
        std::ranges::inplace_merge(keys, keys.begin() + own);
        return true;
      },
      [&] { keys.clear(); });
}

}  // namespace telegrad
