#pragma once
// When a message passes the ports of a simulated network, and how long work takes: the cost model alone, without
// messages. A message passes its sender's port out and, α later, its receiver's port in, each first come, first served;
// bytes flow through both at once (cut-through). Between nodes it also takes its share of the sender's uplink and of the
// receiver's: many messages share an uplink at once, so these hold up a message's end, not its head.

#include <cstddef>
#include <deque>
#include <vector>

#include "base/random.hpp"
#include "base/types.hpp"
#include "drivers/sim/sim_costs.hpp"
#include "drivers/sim/sim_faults.hpp"

namespace telegrad {

struct PortTime {
  double start_s = 0.0;
  double end_s = 0.0;
};

class SimPorts {
 public:
  SimPorts(Rank size, const SimCosts& costs);

  /// All the time from now on.
  void slow_down(const SimFault& fault);

  /// A message for `to` is handed to the port out of `from`.
  PortTime send(Rank from, Rank to, std::size_t bytes, double now_s);
  /// True if a message between the two passes uplinks: its sender's when it starts in the port out, its receiver's when
  /// its head is there. Each says when it is through with the message.
  bool has_uplinks(Rank from, Rank to) const { return two_levels() && !same_node(from, to); }
  double uplink_out_end_s(Rank from, std::size_t bytes, double now_s);
  double uplink_in_end_s(Rank to, std::size_t bytes, double now_s);
  /// From the head of a message leaving the last port on the sender's side to its coming to the receiver's side.
  double latency_s(Rank from, Rank to, Random& random) const;
  /// Its head is at the port in of `to`, and all of it cannot be there before `earliest_end_s`.
  PortTime receive(Rank from, Rank to, std::size_t bytes, double now_s, double earliest_end_s);
  PortTime compute(Rank rank, std::size_t bytes, double now_s, Random& random);
  /// False if work takes no time.
  bool computing_takes_time() const { return costs_.gamma_s_per_byte > 0.0; }

 private:
  struct Sent {
    Rank to = 0;
    double end_s = 0.0;
  };
  struct End {
    double out_free_s = 0.0;
    double in_free_s = 0.0;
    double processor_free_s = 0.0;
  };
  struct Uplink {
    double out_free_s = 0.0;
    double in_free_s = 0.0;
  };

  bool exchanges_cost() const { return costs_.beta_exchange_s_per_byte != costs_.beta_s_per_byte; }
  bool two_levels() const { return costs_.ranks_per_node > 1; }
  bool same_node(Rank a, Rank b) const { return a / costs_.ranks_per_node == b / costs_.ranks_per_node; }
  bool inside_node(Rank a, Rank b) const { return two_levels() && same_node(a, b); }
  bool sends_now(Rank from, Rank to, double now_s);
  double factor(Rank from, Rank to) const;
  double uplink_s(std::size_t bytes) const;

  SimCosts costs_;
  std::vector<End> ends_;
  std::vector<std::deque<Sent>> sends_;  // where exchanges cost something: in the port out of a rank, or queued for it
  std::vector<Uplink> uplinks_;  // by node
  std::vector<SimFault> slow_;
};

}  // namespace telegrad
