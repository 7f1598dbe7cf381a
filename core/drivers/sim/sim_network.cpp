#include "drivers/sim/sim_network.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/check.hpp"
#include "drivers/sim/sim_driver.hpp"

namespace telegrad {

SimNetwork::SimNetwork(Rank size, SimNetworkOptions options)
    : random_(options.seed),
      ports_(size, options.costs),
      ends_(size),
      keeps_control_order_(options.costs.jitter > 0.0 || !options.faults.empty()) {
  for (Rank rank = 0; rank < size; ++rank) ends_[rank].driver = std::make_unique<SimDriver>(*this, rank);
  plan_faults(options.faults);
}

SimNetwork::~SimNetwork() = default;

// A heap with four children to a node: half as deep as a binary one, and the children of a node are neighbours.
void SimNetwork::push(double time_s, Rank rank, Kind kind, void* subject, std::uint64_t bytes) {
  const std::uint64_t order = (std::uint64_t{rank} << kSequenceBits) | next_sequence_++;
  const Event event{std::bit_cast<std::uint64_t>(time_s), order, subject,
                    (bytes << 8) | static_cast<std::uint64_t>(kind)};
  std::size_t hole = heap_.size();
  heap_.push_back(event);
  while (hole > 0) {
    const std::size_t parent = (hole - 1) / 4;
    if (!event.before(heap_[parent])) break;
    heap_[hole] = heap_[parent];
    hole = parent;
  }
  heap_[hole] = event;
}

SimNetwork::Event SimNetwork::pop() {
  const Event first = heap_.front();
  const Event last = heap_.back();
  heap_.pop_back();
  const std::size_t size = heap_.size();
  if (size == 0) return first;
  std::size_t hole = 0;
  for (std::size_t child = 1; child < size; child = 4 * hole + 1) {
    const std::size_t end = std::min(child + 4, size);
    std::size_t least = child;
    for (std::size_t other = child + 1; other < end; ++other) {
      least = heap_[other].before(heap_[least]) ? other : least;
    }
    if (!heap_[least].before(last)) break;
    heap_[hole] = heap_[least];
    hole = least;
  }
  heap_[hole] = last;
  return first;
}

SimNetwork::Message& SimNetwork::new_message(Rank from, Rank to) {
  Message* message = nullptr;
  if (free_.empty()) {
    message = &messages_.emplace_back();
  } else {
    message = free_.back();
    free_.pop_back();
  }
  message->from = from;
  message->to = to;
  return *message;
}

void SimNetwork::send(Rank from, Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) {
  End& end = ends_[from];
  if (end.sink == nullptr) return;  // shut down: nobody hears of it
  Message& message = new_message(from, to);
  message.envelope = envelope;
  message.bytes = bytes;
  message.sender = &pending;
  if (!faulty_messages_.empty()) mark_if_faulty(message, end.counts.messages_sent);
  end.counts.messages_sent += 1;
  end.counts.bytes_sent += bytes.size();
  record_.message(from, to, bytes.size());
  const PortTime port = ports_.send(from, to, bytes.size(), now_s_);
  record_.activity({SimActivity::Kind::send, from, to, envelope.sequence, envelope.step, bytes.size(), port.start_s,
                    port.end_s});
  if (!ports_.has_uplinks(from, to)) {
    leave_sender(message, port.start_s);
  } else if (port.start_s > now_s_) {
    push(port.start_s, from, Kind::departure, &message, bytes.size());
  } else {
    depart(message);
  }
}

// Through an uplink.
void SimNetwork::depart(Message& message) {
  message.earliest_end_s = ports_.uplink_out_end_s(message.from, message.bytes.size(), now_s_);
  leave_sender(message, now_s_);
}

void SimNetwork::leave_sender(Message& message, double start_s) {
  const double held_s = message.rarity ? message.rarity->held_s : 0.0;
  const double latency_s = ports_.latency_s(message.from, message.to, random_) + held_s;
  if (message.earliest_end_s > 0.0) message.earliest_end_s += latency_s;
  push(start_s + latency_s, message.to, Kind::head, &message, message.bytes.size());
}

void SimNetwork::reach_receiver(Message& message) {
  const std::size_t bytes = message.bytes.size();
  if (ports_.has_uplinks(message.from, message.to)) {
    message.earliest_end_s = std::max(message.earliest_end_s, ports_.uplink_in_end_s(message.to, bytes, now_s_));
  }
  const PortTime port = ports_.receive(message.from, message.to, bytes, now_s_, message.earliest_end_s);
  record_.activity({SimActivity::Kind::receive, message.to, message.from, message.envelope.sequence,
                    message.envelope.step, bytes, port.start_s, port.end_s});
  push(port.end_s, message.to, Kind::arrival, &message, bytes);
}

// They have neither bytes nor ports: they go beside the data.
void SimNetwork::send_control(Rank from, Rank to, const Control& control) {
  End& end = ends_[from];
  if (end.sink == nullptr) return;
  end.counts.control_messages_sent += 1;
  Message& message = new_message(from, to);
  message.rare().control = std::make_unique<Control>(control);
  push(in_order(from, to, now_s_ + ports_.latency_s(from, to, random_)), to, Kind::arrival, &message, 0);
}

double SimNetwork::in_order(Rank from, Rank to, double time_s) {
  if (!keeps_control_order_) return time_s;
  double& last_s = last_control_s_[(std::uint64_t{from} << 32) | to];
  return last_s = std::max(last_s, time_s);
}

void SimNetwork::compute(Rank rank, std::size_t bytes, Pending& pending) {
  if (!ports_.computing_takes_time()) {
    pending.complete(bytes);
    return;
  }
  const PortTime spent = ports_.compute(rank, bytes, now_s_, random_);
  record_.activity({.kind = SimActivity::Kind::compute,
                    .rank = rank,
                    .bytes = bytes,
                    .start_s = spent.start_s,
                    .end_s = spent.end_s});
  push(spent.end_s, rank, Kind::computed, &pending, bytes);
}

void SimNetwork::set_alarm(Rank rank, double at_s) { push(std::max(at_s, now_s_), rank, Kind::alarm, nullptr, 0); }

std::optional<SimNetwork::Happening> SimNetwork::step(double until_s) {
  if (heap_.empty() || heap_.front().time_s() > until_s) return std::nullopt;
  const Event event = pop();
  if (!heap_.empty()) __builtin_prefetch(heap_.front().subject);  // with thousands of ranks it has left the caches
  now_s_ = event.time_s();
  ++events_;
  record(event);
  if (!failing_.empty()) let_ranks_fail();

  const Rank rank = event.rank();
  End& end = ends_[rank];
  if (defer_if_frozen(event)) return Happening{rank, false};
  const auto message = [&]() -> Message& { return *static_cast<Message*>(event.subject); };
  switch (event.kind()) {
    case Kind::departure: depart(message()); break;
    case Kind::head: reach_receiver(message()); break;
    case Kind::arrival:
      announce(message());
      touched_.push_back(rank);
      break;
    case Kind::computed:
      if (end.sink != nullptr) static_cast<Pending*>(event.subject)->complete(event.bytes());
      touched_.push_back(rank);
      break;
    case Kind::loss: {
      const auto lost = static_cast<Rank>(event.bytes());
      if (end.sink != nullptr) end.sink->on_peer_failed(lost, "rank " + std::to_string(lost) + "'s process has ended");
      touched_.push_back(rank);
      break;
    }
    case Kind::alarm:
    case Kind::thaw: break;
  }
  return Happening{rank, event.kind() == Kind::alarm || event.kind() == Kind::thaw};
}

void SimNetwork::announce(Message& message) {
  End& end = ends_[message.to];
  if (end.sink == nullptr || message.lost) {
    // What was sent to a process that has ended is never taken.
    if (end.dead) message.sender = nullptr;
    release(message);
  } else if (message.control() != nullptr) {
    const auto control = std::move(message.rarity->control);
    release(message);
    end.sink->on_control(*control);
  } else {
    bool twice = false;
    if (message.rarity && message.rarity->damage) {
      if (message.rarity->damage == SimDamage::stray) send_stray_before(message);
      twice = damage(message);
    }
    end.counts.messages_received += 1;
    end.counts.bytes_received += message.bytes.size();
    if (twice) {
      Message& again = new_message(message.from, message.to);
      again.envelope = message.envelope;
      again.own(message.bytes);
      push(now_s_ + ports_.latency_s(message.from, message.to, random_), message.to, Kind::arrival, &again,
           again.bytes.size());
    }
    end.sink->on_arrival({message.envelope, &message});
  }
}

void SimNetwork::accept(Message& message, Bytes into, Pending& pending) {
  TELEGRAD_CHECK(into.size() == message.envelope.length || (SizeOnly::active() && into.empty()));
  if (message.lost) {  // never completes
    release(message);
    return;
  }
  std::size_t there = std::min(into.size(), message.bytes.size());
  if (SizeOnly::active()) {
    there = SizeOnly::there(there);
  } else if (there < into.size()) {
    std::memset(into.data() + there, 0xa5, into.size() - there);  // a damaged message may claim more than it has
  }
  if (there > 0) std::memcpy(into.data(), message.bytes.data(), there);
  pending.complete(message.envelope.length);
  release(message);
}

void SimNetwork::release(Message& message) {
  if (Pending* const sender = std::exchange(message.sender, nullptr)) {
    sender->complete(message.bytes.size());
    touched_.push_back(message.from);
  }
  message.rarity.reset();
  message.bytes = {};
  message.lost = false;
  message.earliest_end_s = 0.0;
  free_.push_back(&message);
}

// Its memory goes with it: what others have not yet taken is lost.
void SimNetwork::shut_down(Rank rank) {
  ends_[rank].sink = nullptr;
  for (Message& message : messages_) {
    if (message.sender == nullptr || message.from != rank) continue;
    message.sender = nullptr;
    message.lost = true;
  }
}

void SimNetwork::record(const Event& event) {
  const Message* message = nullptr;
  switch (event.kind()) {
    case Kind::departure:
    case Kind::head:
    case Kind::arrival: message = static_cast<const Message*>(event.subject); break;
    default: break;
  }
  const Control* const control = message != nullptr ? message->control() : nullptr;
  std::uint64_t what = 0;
  if (control != nullptr) {
    constexpr std::uint64_t kIsControl = std::uint64_t{1} << 31;
    what = (std::uint64_t{control->source} << 32) | kIsControl | static_cast<std::uint64_t>(control->kind);
  } else if (message != nullptr) {
    what = (std::uint64_t{message->from} << 32) + (std::uint64_t{message->envelope.sequence} << 16) +
           message->envelope.step;
  }
  record_.event(event.time_s(), what, event.bytes_and_kind ^ (std::uint64_t{event.rank()} << kSequenceBits));
  if (!record_.keeps_text()) return;

  static constexpr const char* kKindNames[] = {"departure", "head", "arrival", "computed", "alarm", "loss", "thaw"};
  char line[192];
  int length = std::snprintf(line, sizeof line, "%.9e rank %u %s", event.time_s(), event.rank(),
                             kKindNames[static_cast<std::size_t>(event.kind())]);
  char* const rest = line + length;
  const std::size_t left = sizeof line - static_cast<std::size_t>(length);
  if (control != nullptr) {
    std::snprintf(rest, left, " from %u control %d", control->source, static_cast<int>(control->kind));
  } else if (message != nullptr) {
    std::snprintf(rest, left, " from %u operation %u step %u bytes %zu", message->from, message->envelope.sequence,
                  message->envelope.step, message->bytes.size());
  } else if (event.kind() == Kind::computed) {
    std::snprintf(rest, left, " bytes %lu", static_cast<unsigned long>(event.bytes()));
  } else if (event.kind() == Kind::loss) {
    std::snprintf(rest, left, " of rank %lu", static_cast<unsigned long>(event.bytes()));
  }
  record_.line(line);
}

}  // namespace telegrad
