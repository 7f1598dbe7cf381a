#pragma once
// Simulation: the Sessions of all ranks over one SimNetwork, in one thread and in virtual time. What runs is the
// protocol and the collectives that run on a real network; only the driver differs.

#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "drivers/sim/sim_network.hpp"
#include "session/session.hpp"

namespace telegrad {

struct SimulationOptions {
  SimCosts costs{};
  std::uint64_t seed = 0;
  SessionOptions session{};
  /// Join, heartbeats, time-outs and liveness, as an engine would drive them. Without them an operation that cannot go
  /// on is not timed out but found out: nothing is left to happen.
  bool clocks = false;
  /// What goes wrong. A rank that is killed or frozen for ever has nothing unfinished.
  std::vector<SimFault> faults{};
  /// Messages carry their size, and of a payload only the first Buffer::kHeadBytes, and those only into buffers that the
  /// session makes; work takes its time but is not run. Memory that callers pass need not be there.
  /// Not together with faults.
  bool size_only = false;
};

/// What run() found.
struct Outcome {
  bool deadlock = false;   // something is unfinished, and nothing can happen any more
  std::string unfinished;  // then: which rank is in which call
  double finish_s = 0.0;   // when the last rank's last operation was over
};

class Simulation {
 public:
  static constexpr double kForever_s = std::numeric_limits<double>::infinity();

  Simulation(Rank size, SimulationOptions options);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  Rank size() const { return network_.size(); }
  SimNetwork& network() { return network_; }
  Session& session(Rank rank) { return *ranks_[rank].session; }
  double now_s() const { return network_.now_s(); }

  /// `rank` begins `request` at virtual time `at_s`, or now if that has passed; a rank's operations begin in the order
  /// of these calls.
  void begin(Rank rank, RequestPtr request, double at_s = 0.0);
  /// As begin(), once all that the rank has begun is over.
  void begin_when_idle(Rank rank, RequestPtr request);
  /// Every rank begins the request that `make` gives for it.
  void begin_all(const std::function<RequestPtr(Rank)>& make, double at_s = 0.0);
  /// `rank` does something else with its session, in the order of its operations: aborts, parts.
  void act(Rank rank, std::function<void(Session&)> action, double at_s = 0.0);
  /// Until every operation is over, nothing can happen any more, virtual time passes `until_s`, or the network has had
  /// `events_most` events in all.
  Outcome run(double until_s = kForever_s, std::uint64_t events_most = std::numeric_limits<std::uint64_t>::max());
  /// For a caller that has a clock of its own: until an operation is over (true), or virtual time comes to `until_s`,
  /// before which nothing begins from now on. Heartbeats go on where no operation runs, too.
  bool advance(double until_s);
  /// `rank` has closed its communicator: nothing reaches it any more.
  void shut_down(Rank rank);
  bool died(Rank rank) const { return network_.died(rank); }
  bool frozen(Rank rank) const { return network_.frozen(rank); }
  /// When the last operation of `rank` was over; 0 if it had none.
  double finish_s(Rank rank) const { return ranks_[rank].finish_s; }

 private:
  struct Call {
    double at_s;
    RequestPtr request;  // or else:
    std::function<void(Session&)> action{};
    bool when_idle = false;
  };
  struct Participant {
    std::unique_ptr<Session> session;
    std::vector<RequestPtr> running{};
    bool gone = false;
    double finish_s = 0.0;
    double alarm_s = kForever_s;  // the earliest one set
    std::deque<Call> to_begin{};
  };

  void plan(Rank rank, Call call);
  bool step(double until_s);
  void wake(Rank rank);
  void give_up_the_gone();
  void settle();
  void settle(Rank rank);
  void set_alarm(Rank rank);

  SimNetwork network_;  // before the sessions, which lie on it
  Random random_;
  double start_noise_s_;
  bool clocks_;
  bool size_only_;
  std::vector<Participant> ranks_;
  std::size_t gone_ = 0;
  std::vector<Rank> touched_;
  std::size_t unfinished_ = 0;
  std::size_t over_ = 0;      // operations
  double advanced_s_ = 0.0;
};

}  // namespace telegrad
