#pragma once
// Session: one rank's protocol as a state machine. It numbers operations, matches messages, compares calls, keeps
// deadlines and heartbeats, and makes every failure final. It must not know of threads, clocks or networks: time is an
// argument and the network a Driver, so the simulator runs the same protocol.

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "session/request.hpp"
#include "transport/driver.hpp"

namespace telegrad {

struct SessionOptions {
  std::uint32_t epoch = 0;
  std::uint32_t communicator = 0;
  double timeout_s = 1800.0;
  std::optional<double> liveness_timeout_s = 8.0;  // nullopt: a silent peer is never taken for dead
  double heartbeat_s = 1.0;
};

class Session final : public EventSink {
 public:
  Session(Driver& driver, SessionOptions options);
  ~Session() override;

  Rank rank() const { return driver_.rank(); }
  Rank size() const { return driver_.size(); }

  /// Greets all peers; joined() once all have greeted back.
  void join(double now_s);
  bool joined() const { return greeted_ == size(); }
  /// The ranks that have not greeted, as text.
  std::string missing() const;
  /// Begins an operation. Every rank begins the same ones in the same order.
  void begin(RequestPtr request, double now_s);
  /// Gives the coroutines that can go on one turn; true if there were any.
  bool run_ready();
  bool has_ready() const { return !ready_.empty(); }
  /// Heartbeats and deadlines.
  void on_time(double now_s);
  double next_deadline_s() const { return next_deadline_s_; }
  std::size_t running() const { return jobs_.size(); }

  /// Ends everything with this failure, here and on every other rank; only the first one counts.
  void fail(Failure failure);
  const std::optional<Failure>& failure() const { return failure_; }

  /// Says goodbye; parted() once every peer has too, or has failed.
  void part();
  bool parted() const { return parted_ == size(); }
  /// After Driver::shut_down(): frees what was kept for the network.
  void release_quarantine();

  void on_arrival(const Arrival& arrival) override;
  void on_control(const Control& control) override;
  void on_peer_failed(Rank peer, const std::string& reason) override;
  void on_damage(const std::string& reason) override;

  struct Counters {
    std::uint64_t operations = 0;
    std::uint64_t messages_sent = 0;
    std::uint64_t messages_received = 0;
    std::uint64_t bytes_sent = 0;
    std::uint64_t bytes_received = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  class Job;
  struct Peer {
    bool greeted = false;
    bool parted = false;
    bool failed = false;
    bool heard = true;  // since the last look
    double last_heard_s = 0.0;
    std::uint32_t ends_at = 0;  // once parted: the first operation that this peer will never call
  };

  static Task<void> run(Session& session, Job& job);
  Failure failure_of(const Job& job, FailureKind kind, Rank peer, std::string reason) const;
  void check_liveness(double now_s);
  void finish_jobs();
  bool fail_if_abandoned(const Job& job);
  void look_at_deadlines(double now_s);
  bool agrees(Job& job, const Envelope& envelope);
  void broadcast(const Control& control);

  Driver& driver_;
  SessionOptions options_;
  ReadyQueue ready_;
  std::vector<std::coroutine_handle<>> turn_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Job>> jobs_;  // by sequence number
  std::vector<std::unique_ptr<Job>> quarantine_;                  // failed, perhaps still in the network's hands
  std::vector<Job*> finished_;
  std::unordered_map<std::uint32_t, std::vector<Arrival>> early_;  // operations that this rank has not begun
  std::vector<Peer> peers_;
  std::optional<Failure> failure_;
  Counters counters_;
  std::uint32_t next_sequence_ = 0;
  Rank greeted_ = 0;
  Rank parted_ = 0;
  bool parting_ = false;
  bool running_turn_ = false;
  double next_heartbeat_s_ = 0.0;
  double next_deadline_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace telegrad
