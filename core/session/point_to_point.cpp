#include "session/point_to_point.hpp"

#include "session/agreement.hpp"

namespace telegrad {

PointToPoint::Taken PointToPoint::take(const Arrival& arrival) {
  Pair& pair = pairs_[arrival.envelope.source];
  const std::uint32_t number = arrival.envelope.sequence;
  if (precedes(number, pair.come)) return Taken::twice;
  if (number - pair.come > kAheadMost) return Taken::from_afar;
  if (!pair.ahead.emplace(number, arrival).second) return Taken::twice;
  memory_ += arrival.memory();
  return Taken::yes;
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
  const Step tag = arrival.envelope.step;
  Place chosen = queues_.end();
  for (const Rank from : {arrival.envelope.source, kNoRank}) {
    const auto found = queues_.find({from, tag});
    if (found == queues_.end() || found->second.receives.empty()) continue;
    const auto older = [&] { return found->second.receives.front().number < chosen->second.receives.front().number; };
    if (chosen == queues_.end() || older()) chosen = found;
  }
  if (chosen == queues_.end()) {
    queues_[{arrival.envelope.source, tag}].arrivals.push({arrival, numbered_++});
    return std::nullopt;
  }
  Met met{leave(arrival), chosen->second.receives.pop().value};
  drop_if_empty(chosen);
  return met;
}

std::optional<Arrival> PointToPoint::post(const Receive& receive) {
  const Key key{receive.call.root, static_cast<Step>(receive.call.layout)};
  const Place found = key.first == kNoRank ? first_come(key.second) : queues_.find(key);
  if (found == queues_.end() || found->second.arrivals.empty()) {
    queues_[key].receives.push({receive, numbered_++});
    return std::nullopt;
  }
  const Arrival arrival = found->second.arrivals.pop().value;
  leave(arrival);
  drop_if_empty(found);
  return arrival;
}

PointToPoint::Place PointToPoint::first_come(Step step) {
  Place first = queues_.end();
  for (auto at = queues_.begin(); at != queues_.end(); ++at) {
    if (at->first.second != step || at->second.arrivals.empty()) continue;
    if (first == queues_.end() || at->second.arrivals.front().number < first->second.arrivals.front().number) first = at;
  }
  return first;
}

const PointToPoint::Receive* PointToPoint::waiting_for(Rank source) const {
  for (auto at = queues_.lower_bound({source, 0}); at != queues_.end() && at->first.first == source; ++at) {
    if (!at->second.receives.empty()) return &at->second.receives.front().value;
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
    const Arrival& first = at->second.arrivals.front().value;
    if (oldest == nullptr || first.envelope.sequence - oldest->envelope.sequence > (std::uint32_t{1} << 31)) {
      oldest = &first;
    }
  }
  return oldest;
}

}  // namespace telegrad
