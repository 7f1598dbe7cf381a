// What goes wrong in a SimNetwork: see sim_faults.hpp.
#include <algorithm>

#include "drivers/sim/sim_driver.hpp"
#include "drivers/sim/sim_network.hpp"

namespace telegrad {
namespace {

// What a sender has handed over for good: real networks copy messages up to about this size at once.
constexpr std::size_t kEagerBytes = std::size_t{8} << 10;

}  // namespace

void SimNetwork::plan_faults(const std::vector<SimFault>& faults) {
  for (const SimFault& fault : faults) {
    switch (fault.kind) {
      case SimFaultKind::kill:
      case SimFaultKind::freeze: failing_.push_back(fault); break;
      case SimFaultKind::slow_link:
      case SimFaultKind::slow_rank: ports_.slow_down(fault); break;
      case SimFaultKind::hold:
      case SimFaultKind::damage: faulty_messages_.push_back(fault); break;
    }
  }
  std::ranges::stable_sort(failing_, std::ranges::greater{}, &SimFault::at_event);
}

void SimNetwork::mark_if_faulty(Message& message, std::uint64_t nth) {
  for (const SimFault& fault : faulty_messages_) {
    if (fault.rank != message.from || fault.nth != nth) continue;
    if (fault.kind == SimFaultKind::hold) {
      message.rare().held_s += fault.duration_s;
    } else {
      message.rare().damage = fault.damage;
    }
  }
}

void SimNetwork::let_ranks_fail() {
  while (!failing_.empty() && failing_.back().at_event <= events_) {
    const SimFault fault = failing_.back();
    failing_.pop_back();
    fail(fault);
  }
}

void SimNetwork::fail(const SimFault& fault) {
  if (gone(fault.rank)) return;
  if (fault.kind == SimFaultKind::kill) {
    kill(fault);
  } else {
    freeze(fault);
  }
  if (gone(fault.rank)) ++gone_ranks_;
}

// Of what is under way, the network has some already; the rest was still to be fetched from the process's memory.
void SimNetwork::kill(const SimFault& fault) {
  End& end = ends_[fault.rank];
  end.dead = true;
  end.sink = nullptr;
  for (Message& message : messages_) {
    if (message.sender == nullptr || message.from != fault.rank) continue;
    message.sender = nullptr;
    const bool handed_over = message.bytes.size() <= kEagerBytes && random_.below(2) == 0;
    if (!handed_over) {
      message.lost = true;
    } else {
      message.own(message.bytes);
    }
  }
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer == fault.rank) continue;
    const double noticed_s = now_s_ + random_.uniform() * fault.detect_s;
    push(in_order(fault.rank, peer, noticed_s), peer, Kind::loss, nullptr, fault.rank);
  }
}

void SimNetwork::freeze(const SimFault& fault) {
  End& end = ends_[fault.rank];
  end.frozen_until_s = std::max(end.frozen_until_s, now_s_ + fault.duration_s);
  // Before all that is deferred to then: the first thing that a process does is to look at the time.
  if (!gone(fault.rank)) push(end.frozen_until_s, fault.rank, Kind::thaw, nullptr, 0);
}

// The network goes on; what the rank itself would do waits.
bool SimNetwork::defer_if_frozen(const Event& event) {
  const Rank rank = event.rank();
  if (!frozen(rank)) return false;
  switch (event.kind()) {
    case Kind::departure:
    case Kind::head: return false;
    default: break;
  }
  if (!gone(rank)) push(ends_[rank].frozen_until_s, rank, event.kind(), event.subject, event.bytes());
  return true;
}

void SimNetwork::send_stray_before(const Message& message) {
  Message& stray = new_message(message.from, message.to);
  stray.envelope = message.envelope;
  std::uint32_t& origin = random_.below(2) == 0 ? stray.envelope.epoch : stray.envelope.communicator;
  origin += static_cast<std::uint32_t>(1 + random_.below(1000));
  stray.own(message.bytes);
  for (std::byte& byte : stray.rarity->own) byte = static_cast<std::byte>(random_.below(256));
  ends_[message.to].sink->on_arrival({stray.envelope, &stray});
}

// True if it is to arrive a second time.
bool SimNetwork::damage(Message& message) {
  Envelope& envelope = message.envelope;
  switch (*std::exchange(message.rarity->damage, std::nullopt)) {
    case SimDamage::truncated:
      envelope.length -= std::min<std::uint64_t>(envelope.length, 1 + random_.below(16));
      break;
    case SimDamage::lengthened: envelope.length += 1 + random_.below(16); break;
    case SimDamage::duplicated: return true;
    case SimDamage::stray: break;
    case SimDamage::other_step: envelope.step += static_cast<Step>(1 + random_.below(1000)); break;
    case SimDamage::other_call: envelope.call.count += 1; break;
    case SimDamage::far_sequence:
      envelope.sequence += static_cast<std::uint32_t>((1U << 21) + random_.below(1U << 29));
      break;
    case SimDamage::other_source:
      envelope.source = static_cast<Rank>((envelope.source + 1 + random_.below(size())) % size());
      break;
    case SimDamage::scrambled_head:
      message.own(message.bytes);
      for (std::size_t i = 0; i < std::min<std::size_t>(32, message.bytes.size()); ++i) {
        message.rarity->own[i] = static_cast<std::byte>(random_.below(256));
      }
      break;
  }
  return false;
}

}  // namespace telegrad
