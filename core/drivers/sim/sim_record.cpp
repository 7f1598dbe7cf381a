#include "drivers/sim/sim_record.hpp"

#include <algorithm>
#include <bit>
#include <tuple>

#include "base/random.hpp"

namespace telegrad {

void SimRecord::event(double time_s, std::uint64_t first_word, std::uint64_t second_word) {
  hash_ = mix(hash_ ^ std::bit_cast<std::uint64_t>(time_s)) + first_word;
  hash_ = mix(hash_ ^ second_word);
}

void SimRecord::message(Rank from, Rank to, std::uint64_t bytes) {
  if (!keeps_links_) return;
  SimLinkCounts& link = links_[(std::uint64_t{from} << 32) | to];
  link.from = from;
  link.to = to;
  link.messages += 1;
  link.bytes += bytes;
}

std::vector<SimLinkCounts> SimRecord::links() const {
  std::vector<SimLinkCounts> sorted;
  sorted.reserve(links_.size());
  for (const auto& [key, link] : links_) sorted.push_back(link);
  std::ranges::sort(sorted, {}, [](const SimLinkCounts& link) { return std::tuple(link.from, link.to); });
  return sorted;
}

}  // namespace telegrad
