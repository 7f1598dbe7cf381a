#pragma once
// A network in virtual time: an event heap, and the messages under way between the ranks' drivers. What things cost is
// SimPorts' business, what is written down SimRecord's. A send is done when its receiver has taken the message: stricter
// than real networks, so that deadlocks show.
//
// It must not know what an operation is, and reads no clock: the same seed gives the same events, byte for byte.

#include <bit>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "base/types.hpp"
#include "drivers/sim/sim_costs.hpp"
#include "drivers/sim/sim_faults.hpp"
#include "drivers/sim/sim_ports.hpp"
#include "drivers/sim/sim_record.hpp"
#include "transport/driver.hpp"

namespace telegrad {

class SimDriver;

struct SimNetworkOptions {
  SimCosts costs{};
  std::uint64_t seed = 0;
  std::vector<SimFault> faults{};
};

class SimNetwork {
 public:
  SimNetwork(Rank size, SimNetworkOptions options);
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

  /// A killed rank: none of its code runs any more.
  bool died(Rank rank) const { return ends_[rank].dead; }
  /// None of its code runs now.
  bool frozen(Rank rank) const { return now_s_ < ends_[rank].frozen_until_s; }
  /// Dead, or frozen for ever.
  bool gone(Rank rank) const {
    return died(rank) || ends_[rank].frozen_until_s == std::numeric_limits<double>::infinity();
  }
  /// A rank is killed, or freezes, now: for faults that nobody could say beforehand.
  void fail(const SimFault& fault);
  /// When the earliest event is; infinity if nothing is left to happen.
  double next_s() const {
    return heap_.empty() ? std::numeric_limits<double>::infinity() : heap_.front().time_s();
  }
  /// How many ranks have gone so far.
  std::size_t gone_ranks() const { return gone_ranks_; }

  std::uint64_t events() const { return events_; }
  /// Of all events so far: equal for equal histories.
  std::uint64_t trace_hash() const { return record_.hash(); }
  /// From now on every event adds a line to trace_text().
  void keep_trace_text() { record_.keep_text(); }
  const std::string& trace_text() const { return record_.text(); }
  void keep_timeline() { record_.keep_timeline(); }
  const std::vector<SimActivity>& timeline() const { return record_.timeline(); }
  void keep_links() { record_.keep_links(); }
  std::vector<SimLinkCounts> links() const { return record_.links(); }

 private:
  friend class SimDriver;

  // What few messages have.
  struct Rarity {
    double held_s = 0.0;
    std::optional<SimDamage> damage{};
    std::vector<std::byte> own{};  // where the bytes are not its sender's any more
    std::unique_ptr<Control> control{};
  };
  // Two cache lines, since thousands of ranks have millions.
  struct alignas(64) Message {
    Rank from = 0;
    Rank to = 0;
    ConstBytes bytes{};
    Pending* sender = nullptr;  // null: nobody waits for it
    double earliest_end_s = 0.0;
    std::unique_ptr<Rarity> rarity{};
    bool lost = false;  // its bytes have gone with its sender
    Envelope envelope{};

    Rarity& rare() {
      if (!rarity) rarity = std::make_unique<Rarity>();
      return *rarity;
    }
    const Control* control() const { return rarity ? rarity->control.get() : nullptr; }
    void own(ConstBytes content) {
      auto& copy = rare().own;
      copy.assign(content.begin(), content.end());
      bytes = copy;
    }
  };
  enum class Kind : std::uint8_t { departure, head, arrival, computed, alarm, loss, thaw };
  struct Event {
    std::uint64_t time_bits;  // of a double that is not negative: they are in the order of the times
    std::uint64_t order;      // the rank, then the sequence number
    void* subject;        // a Message, the Pending of a computation, or nothing
    std::uint64_t bytes_and_kind;  // loss: the rank that is lost, instead of bytes

    double time_s() const { return std::bit_cast<double>(time_bits); }
    Rank rank() const { return static_cast<Rank>(order >> kSequenceBits); }
    Kind kind() const { return static_cast<Kind>(bytes_and_kind & 0xff); }
    std::uint64_t bytes() const { return bytes_and_kind >> 8; }
    // Without a branch, which nothing could predict.
    bool before(const Event& other) const {
      const bool same_time = time_bits == other.time_bits;
      return static_cast<bool>((time_bits < other.time_bits) | (same_time & (order < other.order)));
    }
  };
  static constexpr int kSequenceBits = 44;
  struct End {
    std::unique_ptr<SimDriver> driver;
    EventSink* sink = nullptr;  // null: not yet attached, shut down or dead
    double frozen_until_s = 0.0;
    bool dead = false;
    SimCounts counts{};
  };

  // For the drivers.
  void send(Rank from, Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending);
  void send_control(Rank from, Rank to, const Control& control);
  void compute(Rank rank, std::size_t bytes, Pending& pending);
  void accept(Message& message, Bytes into, Pending& pending);
  void release(Message& message);
  void shut_down(Rank rank);

  Message& new_message(Rank from, Rank to);
  void push(double time_s, Rank rank, Kind kind, void* subject, std::uint64_t bytes);
  Event pop();
  void depart(Message& message);
  void leave_sender(Message& message, double start_s);
  void reach_receiver(Message& message);
  double in_order(Rank from, Rank to, double time_s);
  void announce(Message& message);
  void record(const Event& event);

  // sim_network_faults.cpp
  void plan_faults(const std::vector<SimFault>& faults);
  void mark_if_faulty(Message& message, std::uint64_t nth);
  void let_ranks_fail();
  void kill(const SimFault& fault);
  void freeze(const SimFault& fault);
  bool defer_if_frozen(const Event& event);
  bool damage(Message& message);
  void send_stray_before(const Message& message);

  Random random_;
  SimPorts ports_;
  SimRecord record_;
  double now_s_ = 0.0;
  std::vector<End> ends_;
  std::vector<Event> heap_;  // four children to a node
  std::uint64_t next_sequence_ = 0;
  std::deque<Message> messages_;  // never shrinks, so that addresses stay
  std::vector<Message*> free_;
  std::vector<Rank> touched_;
  std::uint64_t events_ = 0;
  std::unordered_map<std::uint64_t, double> last_control_s_;  // by sender and receiver: control messages keep their order
  bool keeps_control_order_;                                  // false: they do so by themselves
  std::vector<SimFault> failing_;                             // kills and freezes to come, the last one first
  std::vector<SimFault> faulty_messages_;
  std::size_t gone_ranks_ = 0;
};

}  // namespace telegrad
