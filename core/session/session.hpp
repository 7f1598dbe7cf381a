#pragma once
// Session: one rank's protocol as a state machine. It numbers operations, matches messages, compares calls, keeps
// deadlines and heartbeats, and makes every failure final. It must not know of threads, clocks or networks: time is an
// argument and the network a Driver, so the simulator runs the same protocol.
//
// After a failure nothing of a session goes on, but for two cases. It tells its peers what it knows and listens to
// them for a moment, so that all survivors name the same culprit (Agreement); then every operation ends with that
// failure. After a mismatch the operations before it do go on, so that ranks which have not come to it yet still do,
// and can say what they call. Where a rank gives up, what it had finished goes on ("winding up"): what it knew by then,
// all learn.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "session/agreement.hpp"
#include "session/history.hpp"
#include "session/point_to_point.hpp"
#include "session/report.hpp"
#include "session/request.hpp"
#include "transport/driver.hpp"

namespace telegrad {

struct SessionOptions {
  std::uint32_t epoch = 0;
  std::uint32_t communicator = 0;
  double timeout_s = 1800.0;
  std::optional<double> liveness_timeout_s = 8.0;  // nullopt: a silent peer is never taken for dead
  double heartbeat_s = 1.0;    // at most; infinity: none
  double agreement_s = 0.05;   // after a failure: how long to listen to peers that have not said anything
  // After a mismatch: how long to listen to peers that have not called the operation. After a rank has given up: how long
  // what it had finished may go on.
  double dispute_s = 5.0;
  double probe_s = 0.02;       // how long an operation waits before it tells its call to whom it waits for
  double stall_s = std::numeric_limits<double>::infinity();  // when when_stalled() is called; at least 2 heartbeats
  // Of messages that came before this rank called what they are for, in bytes; a rank that sends more ends the job.
  std::size_t early_most_bytes = std::size_t{2} << 30;
  std::shared_ptr<const Group> group{};  // what errors say of a communicator that was split from another; null: of no such
  bool count_peers = false;    // counters for every peer; many simulated ranks would need the square of their number

  /// The same after a time-out, which ends a long wait anyway: longer, since it is worth knowing what a rank has not called
  /// that sleeps on a busy machine.
  double agreement_after_timeout_s() const {
    return std::max(agreement_s, std::min(10.0 * agreement_s, 0.1 * timeout_s));
  }
};

class Session final : public EventSink {
 public:
  Session(Driver& driver, SessionOptions options);
  ~Session() override;

  Rank rank() const { return driver_.rank(); }
  Rank size() const { return driver_.size(); }

  /// Greets the ranks that are 1, 2, 4, … further. joined() once those as far before this one have greeted it: of any
  /// two parts of the job's ranks, some rank of one then has heard one of the other.
  void join(double now_s);
  bool joined() const { return joining_ && unheard_.empty(); }
  /// The ranks whose greeting is awaited, as text.
  std::string missing() const;
  /// Begins an operation. Every rank begins the same ones in the same order, but for sends and receives between two.
  void begin(RequestPtr request, double now_s);
  /// Whether `request` has begun and is not over.
  bool holds(const Request& request) const;
  /// Gives the coroutines that can go on one turn; true if there were any.
  bool run_ready();
  bool has_ready() const { return !ready_.empty(); }
  /// How many operations wait for their gate (Request::set_gate), or for ranks that are far behind.
  std::size_t gates_shut() const { return gated_.size(); }
  /// Begins those that may by now; true if there were any. Whoever runs the session looks from time to time: nothing else
  /// tells. timeout_s runs from the opening of a gate on.
  bool open_gates(double now_s);
  /// Heartbeats and deadlines. To be called before what has arrived is looked at: a process that was frozen must not
  /// take part in anything any more.
  void on_time(double now_s);
  double next_deadline_s() const { return next_deadline_s_; }
  std::size_t running() const { return running_.size(); }
  /// Nothing of it is under way: what comes from the network meanwhile can wait a moment.
  bool is_quiet() const {
    return running_.empty() && ready_.empty() && joined() && !parting_ && agreement_.has_value() == failure_.has_value();
  }

  /// Stops, here and on every other rank. The first failure counts, unless a peer knows the cause better.
  void fail(Failure failure);
  /// The same for what this rank has thrown: most likely it is out of memory.
  void fail(const std::exception& thrown);
  /// This rank's program ends it. What it has finished, the others finish too.
  void give_up(std::string reason);
  /// True once something has failed, also while the ranks do not yet agree on what.
  bool failing() const { return agreement_.has_value(); }
  /// What all agree on; empty until then.
  const std::optional<Failure>& failure() const { return failure_; }
  /// Called once an operation has timed out, before anybody hears of it; what it returns is added to the reason.
  void when_timed_out(std::function<std::string()> callback) { timed_out_ = std::move(callback); }
  /// Called with a sentence once the oldest operation has waited for stall_s: which ranks have not called it, and their
  /// last calls. Without one (empty) where a lower rank of this host says the same, and on a rank that others have waited
  /// for so long. Each call doubles the time to the next one.
  void when_stalled(std::function<void(const std::string&)> callback) { stalled_ = std::move(callback); }
  /// What that sentence ends with, for operations from here on: the likely mistake of ranks that call nothing any more
  /// (`at_once`), or not until later. "{}" in it stands for these ranks.
  void hint_at_stalls(std::string at_once, std::string later) {
    stall_hint_ = {next_sequence_, std::move(at_once), std::move(later)};
  }

  /// Says goodbye; parted() once every peer has too, or has failed.
  void part();
  bool parted() const { return parted_ == size(); }
  /// After Driver::shut_down(): frees what was kept for the network. What is not finished by then fails.
  void release_quarantine();

  void on_arrival(const Arrival& arrival) override;
  void on_control(const Control& control) override;
  void on_peer_failed(Rank peer, const std::string& reason) override;
  void on_damage(const std::string& reason) override;

  struct Traffic {
    std::uint64_t messages_sent = 0;
    std::uint64_t messages_received = 0;
    std::uint64_t bytes_sent = 0;
    std::uint64_t bytes_received = 0;
  };
  /// Of operations' messages; heartbeats and the like are not counted.
  struct Counters : Traffic {
    std::uint64_t operations = 0;
    std::vector<Traffic> peers{};  // by rank; empty without SessionOptions::count_peers
  };
  const Counters& counters() const { return counters_; }
  SessionReport report(double now_s) const;

 private:
  class RunningOperation;
  struct Peer {
    bool parted = false;
    bool failed = false;
    bool said_goodbye = false;
    double heard_s = 0.0;  // when, last
    std::optional<std::uint32_t> called{};  // operations; once parted: all that it will ever call
    std::optional<Call> last_call{};        // operation `called` - 1, if it has told
    std::uint32_t messages = 0;             // to this rank, outside operations; once parted: all there will be
  };
  class Peers {  // without memory until something is known of one: it would be the square of the ranks' number
   public:
    explicit Peers(Rank size) : size_(size) {}
    Peer& operator[](Rank rank) {
      if (known_.empty()) known_.resize(size_);
      return known_[rank];
    }
    const Peer& operator[](Rank rank) const {
      static const Peer stranger;
      return known_.empty() ? stranger : known_[rank];
    }

   private:
    Rank size_;
    std::vector<Peer> known_;
  };
  struct Announced {
    Rank source;
    Call call;
    double since_s;
  };

  static Task<void> run(Session& session, RunningOperation& running);
  Failure failure_of(const RunningOperation& running, FailureKind kind, Rank peer, std::string reason) const;
  void finish_running();
  void fail_if_thrown();
  std::string reason_of(const std::exception& thrown) const;
  bool fail_if_abandoned(const RunningOperation& running);
  bool agrees(const RunningOperation& running, Rank source, const Call& call);
  bool fail_if_full(Rank source);
  void take_announced_call(Rank source, std::uint32_t sequence, const Call& call);
  void start(RunningOperation& running);
  bool waits_at_gate(RunningOperation& running);
  bool is_gate_shut(const RunningOperation& running, std::size_t before) const;  // of gated_ so many were called before it
  bool is_far_ahead(const RunningOperation& running);
  std::optional<Rank> far_behind(std::uint32_t sequence);
  void tell_how_far();
  void refuse(Request& request, std::uint32_t sequence) const;

  // session_messages.cpp
  void begin_message(RequestPtr request, double now_s);
  void start_message(RunningOperation& running);
  void take_message(const Arrival& arrival);
  void post_receive(const PointToPoint::Receive& posted);
  void receive(const Arrival& arrival, const PointToPoint::Receive& posted);
  void fail_if_nothing_comes(Rank source);
  bool sends_no_more(Rank source) const;
  void fail_if_nobody_sends();
  std::string mistagged(Rank source) const;
  void discard_unclaimed();
  void discard_messages();
  bool sends_to(Rank peer) const;

  // session_failure.cpp
  bool frozen(std::uint32_t sequence) const {
    return all_frozen_ || (frozen_from_ && !precedes(sequence, *frozen_from_));
  }
  void stop(Statement mine);
  void stop_winding_up();
  void stop_if_wound_up();
  void dispute(Statement mine);
  void freeze_from(std::uint32_t sequence);
  void freeze_all();
  void put_away_frozen();
  RunningOperation* find_running(std::uint32_t sequence) const;  // null: none
  const RunningOperation* running_of(std::uint32_t sequence) const;  // running or in quarantine; null: neither
  const Call* call_of(std::uint32_t sequence) const;
  void say(Statement mine);
  void say_if_called();
  void listen(double most_s);
  void hear_abort(const Control& control);
  void look_further_back(Statement& timed_out) const;
  std::uint32_t first_unfinished() const;
  void conclude_if_agreed();
  void conclude();

  // session_stall.cpp
  void look_for_stalls(double now_s);
  std::string stall_text(const RunningOperation& running, double now_s) const;
  std::string who_is_missing(const RunningOperation& running) const;
  bool tells_for_its_host(const RunningOperation& running) const;

  // session_time.cpp
  void check_liveness(double now_s);
  void look_at_deadlines(double now_s);
  void beat();
  void beat_on(double now_s);
  bool watches() const { return joining_; }  // over its peers: since join()
  void wake_at(double when_s) { next_deadline_s_ = std::min(next_deadline_s_, when_s); }
  void send(Rank peer, Control control);
  void broadcast(const Control& control);

  void count_sent(Rank to, std::uint64_t bytes) {
    counters_.messages_sent += 1;
    counters_.bytes_sent += bytes;
    if (counters_.peers.empty()) return;
    counters_.peers[to].messages_sent += 1;
    counters_.peers[to].bytes_sent += bytes;
  }
  void count_received(Rank from, std::uint64_t bytes) {
    counters_.messages_received += 1;
    counters_.bytes_received += bytes;
    if (counters_.peers.empty()) return;
    counters_.peers[from].messages_received += 1;
    counters_.peers[from].bytes_received += bytes;
  }

  Driver& driver_;
  SessionOptions options_;
  ReadyQueue ready_;
  std::vector<std::coroutine_handle<>> turn_;
  std::vector<std::pair<std::uint32_t, std::unique_ptr<RunningOperation>>> running_;  // with their sequence numbers
  std::vector<std::unique_ptr<RunningOperation>> quarantine_;                  // failed, perhaps still in the network's hands
  std::vector<std::pair<std::uint32_t, RequestPtr>> refused_;     // begun too late, before the verdict
  std::vector<RunningOperation*> finished_;
  std::vector<RunningOperation*> gated_;  // of running_, oldest first: they have not been started
  std::uint32_t called_by_all_ = 0;  // operations, at least
  std::unordered_map<std::uint32_t, std::vector<Arrival>> early_;        // operations that this rank has not begun
  std::size_t early_bytes_ = 0;  // of memory that they take
  std::unordered_map<std::uint32_t, std::vector<Announced>> announced_;  // the same, of peers that wait in them
  Peers peers_;
  PointToPoint point_to_point_;
  History history_;
  std::optional<Agreement> agreement_;
  Statement to_say_;                          // in a dispute, once this rank has called the operation; or once wound up
  std::optional<std::uint32_t> frozen_from_;  // in a dispute or winding up: what was called from here on does not go on
  bool winding_up_ = false;                   // a rank has given up: what it had finished goes on
  bool all_frozen_ = false;
  std::optional<double> listen_s_;  // not yet begun
  double listen_until_s_ = std::numeric_limits<double>::infinity();
  std::optional<Failure> failure_;
  std::function<std::string()> timed_out_;
  std::function<void(const std::string&)> stalled_;
  struct {
    std::uint32_t from = 0;  // operation
    std::string at_once{}, later{};
  } stall_hint_;
  double stall_s_ = 0.0;                              // of operations that begin now
  std::optional<std::uint32_t> waited_for_in_;        // the operation of which the last stall was reported here
  Counters counters_;
  std::uint32_t next_sequence_ = 0;
  std::uint32_t refused_since_ = 0;  // calls after the verdict: they have numbers, but nobody hears of them
  std::uint64_t completed_ = 0;
  bool joining_ = false;
  std::vector<Rank> unheard_;  // of those whose greeting is awaited
  Rank parted_ = 0;
  bool parting_ = false;
  bool running_turn_ = false;
  double now_s_ = 0.0;  // of the last call that told the time
  double last_tick_s_ = 0.0;  // of the last on_time()
  double last_look_s_ = 0.0;
  double next_heartbeat_s_ = std::numeric_limits<double>::infinity();
  double next_deadline_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace telegrad
