#pragma once
// When a message passes the ports of a simulated network, and how long work takes: the cost model alone, without
// messages. Stages of a message: its sender's port out; between nodes the sender's uplink out and the receiver's uplink
// in; its receiver's port in. Bytes flow through all of them at once (cut-through): each stage begins when its port is
// free and the one before has begun, and none ends before the one before. Ports are first come, first served.

#include <cstddef>
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
  /// True if a message between the two passes uplinks: out() at its start in the port out, in() when its head is there.
  bool has_uplinks(Rank from, Rank to) const { return two_levels() && !same_node(from, to); }
  PortTime uplink_out(Rank from, std::size_t bytes, double now_s);
  PortTime uplink_in(Rank to, std::size_t bytes, double now_s);
  /// From the head of a message leaving the last port on the sender's side to its coming to the receiver's side.
  double latency_s(Rank from, Rank to, Random& random) const;
  /// Its head is at the port in of `to`, and it cannot be over before `earliest_end_s`.
  PortTime receive(Rank from, Rank to, std::size_t bytes, double now_s, double earliest_end_s);
  PortTime compute(Rank rank, std::size_t bytes, double now_s, Random& random);
  /// False if work takes no time.
  bool computing_takes_time() const { return costs_.gamma_s_per_byte > 0.0; }

 private:
  struct End {
    double out_free_s = 0.0;
    double in_free_s = 0.0;
    double processor_free_s = 0.0;
    Rank sends_to = kNoRank;  // last
  };
  struct Uplink {
    double out_free_s = 0.0;
    double in_free_s = 0.0;
  };

  bool two_levels() const { return costs_.ranks_per_node > 1; }
  bool same_node(Rank a, Rank b) const { return a / costs_.ranks_per_node == b / costs_.ranks_per_node; }
  bool inside_node(Rank a, Rank b) const { return two_levels() && same_node(a, b); }
  double factor(Rank from, Rank to) const;
  double uplink_s(std::size_t bytes) const;

  SimCosts costs_;
  std::vector<End> ends_;
  std::vector<Uplink> uplinks_;  // by node
  std::vector<SimFault> slow_;
};

}  // namespace telegrad
