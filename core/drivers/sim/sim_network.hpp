#pragma once
// A network in virtual time: an event heap, and for every rank one port out, one port in and one processor.
// Model: a message of b bytes leaves when the sender's port out is free and keeps it busy for b·β; its head is at the
// receiver α later, and b·β after that, once the port in is free, all of it has arrived. Work on b bytes takes b·γ.
// A send is done when its receiver has taken the message: stricter than real networks, so that deadlocks show.
//
// It must not know what an operation is, and reads no clock: the same seed gives the same events, byte for byte.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "base/types.hpp"
#include "transport/driver.hpp"

namespace telegrad {

class SimDriver;

struct SimCosts {
  double alpha_s = 1e-6;            // latency of a message
  double beta_s_per_byte = 1e-10;   // time of a byte in a port
  double gamma_s_per_byte = 0.0;    // time of a byte in the processor
  double jitter = 0.0;              // a message's latency is α·(1 + jitter·u), u uniform in [0, 1) by seed
};

/// What has passed one rank's ports. Control messages count apart and have no bytes.
struct SimCounts {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t control_messages_sent = 0;
};

class SimNetwork {
 public:
  SimNetwork(Rank size, SimCosts costs, std::uint64_t seed);
  ~SimNetwork();

  Rank size() const { return static_cast<Rank>(ends_.size()); }
  SimDriver& driver(Rank rank) { return *ends_[rank].driver; }
  double now_s() const { return now_s_; }
  const SimCounts& counts(Rank rank) const { return ends_[rank].counts; }

  struct Happening {
    Rank rank = kNoRank;
    bool alarm = false;
  };
  /// Lets the earliest event happen, if it is not later than `until_s`; nullopt: there is none.
  std::optional<Happening> step(double until_s);
  /// True if nothing is left to happen.
  bool idle() const { return heap_.empty(); }
  /// Ranks that were given something to do since the last call, in order; some perhaps twice.
  void take_touched(std::vector<Rank>& into) {
    into.clear();
    into.swap(touched_);
  }
  /// An event without content for `rank`, so that its session can look at the time.
  void set_alarm(Rank rank, double at_s);

  std::uint64_t events() const { return events_; }
  /// Of all events so far: equal for equal histories.
  std::uint64_t trace_hash() const { return trace_hash_; }
  /// From now on every event adds a line to trace_text().
  void keep_trace_text() { keeps_text_ = true; }
  const std::string& trace_text() const { return trace_text_; }

 private:
  friend class SimDriver;

  struct Message {
    Rank to = 0;
    Envelope envelope{};
    ConstBytes bytes{};
    Pending* sender = nullptr;  // null: nobody waits for it any more
    std::unique_ptr<Control> control{};
  };
  enum class Kind : std::uint8_t { head, arrival, computed, alarm };
  struct Event {
    double time_s;
    Rank rank;
    Kind kind;
    std::uint64_t sequence;
    void* subject;      // a Message, or the Pending of a computation
    std::size_t bytes;
    bool operator>(const Event& other) const {
      if (time_s != other.time_s) return time_s > other.time_s;
      if (rank != other.rank) return rank > other.rank;
      return sequence > other.sequence;
    }
  };
  struct End {
    std::unique_ptr<SimDriver> driver;
    EventSink* sink = nullptr;  // null: not yet attached, or shut down
    double out_free_s = 0.0;
    double in_free_s = 0.0;
    double processor_free_s = 0.0;
    SimCounts counts{};
  };

  void post(Rank from, Message message);
  void compute(Rank rank, std::size_t bytes, Pending& pending);
  void accept(Message& message, Bytes into, Pending& pending);
  void release(Message& message);
  void shut_down(Rank rank);

  void push(double time_s, Rank rank, Kind kind, void* subject, std::size_t bytes);
  void announce(Message& message);
  void record(const Event& event);

  SimCosts costs_;
  Random random_;
  double now_s_ = 0.0;
  std::vector<End> ends_;
  std::vector<Event> heap_;
  std::uint64_t next_sequence_ = 0;
  std::deque<Message> messages_;  // never shrinks, so that addresses stay
  std::vector<Message*> free_;
  std::vector<Rank> touched_;
  std::uint64_t events_ = 0;
  std::uint64_t trace_hash_ = 0;
  bool keeps_text_ = false;
  std::string trace_text_;
};

}  // namespace telegrad
