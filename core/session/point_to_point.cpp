#include "session/point_to_point.hpp"

#include "session/agreement.hpp"

namespace telegrad {

PointToPoint::Taken PointToPoint::take(const Arrival& arrival) {
  Pair& pair = pairs_[arrival.envelope.source];
  const std::uint32_t number = arrival.envelope.sequence;
  if (precedes(number, pair.come)) return Taken::twice;
  if (number - pair.come > kAheadMost) return Taken::from_afar;
  return pair.ahead.emplace(number, arrival).second ? Taken::yes : Taken::twice;
}

std::optional<PointToPoint::Met> PointToPoint::next(Rank source) {
  Pair& pair = pairs_[source];
  for (auto at = pair.ahead.find(pair.come); at != pair.ahead.end(); at = pair.ahead.find(pair.come)) {
    const Arrival arrival = at->second;
    pair.ahead.erase(at);
    ++pair.come;
    if (auto met = match(arrival)) return met;
  }
  return std::nullopt;
}

std::optional<PointToPoint::Met> PointToPoint::match(const Arrival& arrival) {
  const auto found = queues_.try_emplace({arrival.envelope.source, arrival.envelope.step}).first;
  Queues& queues = found->second;
  if (queues.receives.empty()) {
    queues.arrivals.push(arrival);
    return std::nullopt;
  }
  Met met{arrival, queues.receives.pop()};
  if (queues.empty()) queues_.erase(found);
  return met;
}

std::optional<Arrival> PointToPoint::post(const Receive& receive) {
  const auto found = queues_.try_emplace({receive.call.root, static_cast<Step>(receive.call.layout)}).first;
  Queues& queues = found->second;
  if (queues.arrivals.empty()) {
    queues.receives.push(receive);
    return std::nullopt;
  }
  const Arrival arrival = queues.arrivals.pop();
  if (queues.empty()) queues_.erase(found);
  return arrival;
}

const PointToPoint::Receive* PointToPoint::waiting_for(Rank source) const {
  for (auto at = queues_.lower_bound({source, 0}); at != queues_.end() && at->first.first == source; ++at) {
    if (!at->second.receives.empty()) return &at->second.receives.front();
  }
  return nullptr;
}

std::size_t PointToPoint::count_waiting_for(Rank source) const {
  std::size_t count = 0;
  for (auto at = queues_.lower_bound({source, 0}); at != queues_.end() && at->first.first == source; ++at) {
    count += at->second.receives.size();
  }
  return count;
}

const Arrival* PointToPoint::unclaimed(Rank source) const {
  const Arrival* oldest = nullptr;
  for (auto at = queues_.lower_bound({source, 0}); at != queues_.end() && at->first.first == source; ++at) {
    if (at->second.arrivals.empty()) continue;
    const Arrival& first = at->second.arrivals.front();
    if (oldest == nullptr || first.envelope.sequence - oldest->envelope.sequence > (std::uint32_t{1} << 31)) {
      oldest = &first;
    }
  }
  return oldest;
}

}  // namespace telegrad
