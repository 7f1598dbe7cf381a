#include "drivers/sim/sim_network.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <functional>

#include "base/check.hpp"
#include "drivers/sim/sim_driver.hpp"

namespace telegrad {

SimNetwork::SimNetwork(Rank size, SimCosts costs, std::uint64_t seed) : costs_(costs), random_(seed), ends_(size) {
  for (Rank rank = 0; rank < size; ++rank) ends_[rank].driver = std::make_unique<SimDriver>(*this, rank);
}

SimNetwork::~SimNetwork() = default;

void SimNetwork::push(double time_s, Rank rank, Kind kind, void* subject, std::size_t bytes) {
  heap_.push_back({time_s, rank, kind, next_sequence_++, subject, bytes});
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>{});
}

void SimNetwork::post(Rank from, Message message) {
  End& end = ends_[from];
  if (end.sink == nullptr) return;  // shut down: nobody hears of it
  const std::size_t length = message.bytes.size();
  if (message.control) {
    end.counts.control_messages_sent += 1;
  } else {
    end.counts.messages_sent += 1;
    end.counts.bytes_sent += length;
  }
  Message* slot = nullptr;
  if (free_.empty()) {
    slot = &messages_.emplace_back(std::move(message));
  } else {
    slot = free_.back();
    free_.pop_back();
    *slot = std::move(message);
  }
  const double start_s = std::max(now_s_, end.out_free_s);
  end.out_free_s = start_s + static_cast<double>(length) * costs_.beta_s_per_byte;
  double latency_s = costs_.alpha_s;
  if (costs_.jitter > 0.0) latency_s *= 1.0 + costs_.jitter * random_.uniform();
  push(start_s + latency_s, slot->to, Kind::head, slot, length);
}

void SimNetwork::compute(Rank rank, std::size_t bytes, Pending& pending) {
  if (costs_.gamma_s_per_byte == 0.0) {
    pending.complete(bytes);
    return;
  }
  End& end = ends_[rank];
  const double spent_s = static_cast<double>(bytes) * costs_.gamma_s_per_byte;
  end.processor_free_s = std::max(now_s_, end.processor_free_s) + spent_s;
  push(end.processor_free_s, rank, Kind::computed, &pending, bytes);
}

void SimNetwork::set_alarm(Rank rank, double at_s) { push(std::max(at_s, now_s_), rank, Kind::alarm, nullptr, 0); }

std::optional<SimNetwork::Happening> SimNetwork::step(double until_s) {
  if (heap_.empty() || heap_.front().time_s > until_s) return std::nullopt;
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>{});
  const Event event = heap_.back();
  heap_.pop_back();
  now_s_ = event.time_s;
  ++events_;
  record(event);

  End& end = ends_[event.rank];
  switch (event.kind) {
    case Kind::head:
      end.in_free_s =
          std::max(now_s_, end.in_free_s) + static_cast<double>(event.bytes) * costs_.beta_s_per_byte;
      push(end.in_free_s, event.rank, Kind::arrival, event.subject, event.bytes);
      break;
    case Kind::arrival:
      announce(*static_cast<Message*>(event.subject));
      touched_.push_back(event.rank);
      break;
    case Kind::computed:
      if (end.sink != nullptr) static_cast<Pending*>(event.subject)->complete(event.bytes);
      touched_.push_back(event.rank);
      break;
    case Kind::alarm: break;
  }
  return Happening{event.rank, event.kind == Kind::alarm};
}

void SimNetwork::announce(Message& message) {
  End& end = ends_[message.to];
  const bool lost = !message.control && message.sender == nullptr;  // the sender has shut down
  if (end.sink == nullptr || lost) {
    release(message);
  } else if (message.control) {
    const auto control = std::move(message.control);
    release(message);
    end.sink->on_control(*control);
  } else {
    end.counts.messages_received += 1;
    end.counts.bytes_received += message.bytes.size();
    end.sink->on_arrival({message.envelope, &message});
  }
}

void SimNetwork::accept(Message& message, Bytes into, Pending& pending) {
  const std::size_t length = message.bytes.size();
  TELEGRAD_CHECK(into.size() == length || (SizeOnly::active() && into.empty()));
  const std::size_t carried = SizeOnly::active() ? std::min(into.size(), Buffer::kHeadBytes) : length;
  if (message.sender != nullptr && carried > 0) std::memcpy(into.data(), message.bytes.data(), carried);
  if (message.sender != nullptr) pending.complete(length);
  release(message);
}

void SimNetwork::release(Message& message) {
  if (Pending* const sender = std::exchange(message.sender, nullptr)) {
    sender->complete(message.bytes.size());
    touched_.push_back(message.envelope.source);
  }
  message.control.reset();
  free_.push_back(&message);
}

// Its memory goes with it: what others have not yet taken is lost.
void SimNetwork::shut_down(Rank rank) {
  ends_[rank].sink = nullptr;
  for (Message& message : messages_) {
    if (message.sender != nullptr && message.envelope.source == rank) message.sender = nullptr;
  }
}

void SimNetwork::record(const Event& event) {
  const auto time_bits = std::bit_cast<std::uint64_t>(event.time_s);
  std::uint64_t content = (std::uint64_t{event.rank} << 8) | static_cast<std::uint64_t>(event.kind);
  const Envelope* envelope = nullptr;
  const Control* control = nullptr;
  if (event.kind == Kind::head || event.kind == Kind::arrival) {
    const auto& message = *static_cast<const Message*>(event.subject);
    control = message.control.get();
    if (control == nullptr) envelope = &message.envelope;
  }
  trace_hash_ = mix(trace_hash_ ^ time_bits) + content;
  trace_hash_ = mix(trace_hash_ ^ event.bytes);
  if (envelope != nullptr) {
    trace_hash_ = mix(trace_hash_ ^ ((std::uint64_t{envelope->source} << 32) | envelope->step)) + envelope->sequence;
  } else if (control != nullptr) {
    const auto kind = static_cast<std::uint64_t>(control->kind);
    trace_hash_ = mix(trace_hash_ ^ ((std::uint64_t{control->source} << 32) | kind));
  }
  if (!keeps_text_) return;

  static constexpr const char* kKindNames[] = {"head", "arrival", "computed", "alarm"};
  char line[192];
  std::snprintf(line, sizeof line, "%.9e rank %u %s", event.time_s, event.rank,
                kKindNames[static_cast<std::size_t>(event.kind)]);
  trace_text_ += line;
  if (envelope != nullptr) {
    std::snprintf(line, sizeof line, " from %u operation %u step %u bytes %zu", envelope->source, envelope->sequence,
                  envelope->step, event.bytes);
    trace_text_ += line;
  } else if (control != nullptr) {
    std::snprintf(line, sizeof line, " from %u control %d", control->source, static_cast<int>(control->kind));
    trace_text_ += line;
  } else if (event.kind == Kind::computed) {
    std::snprintf(line, sizeof line, " bytes %zu", event.bytes);
    trace_text_ += line;
  }
  trace_text_ += '\n';
}

}  // namespace telegrad
