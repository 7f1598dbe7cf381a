#pragma once
// What things cost in virtual time. docs/explanation/simulation.md says what the model leaves out.

#include "base/types.hpp"

namespace telegrad {

/// Times of the plain network: a message of b bytes keeps its sender's port out, and α later its receiver's port in,
/// for b·β each; work on b bytes takes b·γ.
struct SimCosts {
  double alpha_s = 1e-6;           // latency of a message
  double beta_s_per_byte = 1e-10;  // time of a byte in a port
  /// Time of a byte in a port while the two ranks of a message send to each other at once; 0: beta_s_per_byte. Some
  /// networks lose duplex then.
  double beta_exchange_s_per_byte = 0.0;
  double gamma_s_per_byte = 0.0;  // time of a byte in the processor
  double jitter = 0.0;            // a message's latency is α·(1 + jitter·u), u uniform in [0, 1) by seed
  double compute_noise = 0.0;     // a slice of work takes b·γ·(1 + compute_noise·u)
  double start_noise_s = 0.0;     // a rank begins each operation u·start_noise_s late: stragglers

  /// Two levels: ranks [i·r, (i + 1)·r) are node i. Inside a node messages cost node_alpha_s and node_beta_s_per_byte;
  /// between nodes they cost what stands above, and pass their nodes' uplinks too, one out and one in per node, each of
  /// r/(β·oversubscription) bytes a second. 0 or 1 rank per node: one level.
  Rank ranks_per_node = 0;
  double node_alpha_s = 0.0;
  double node_beta_s_per_byte = 0.0;
  double oversubscription = 1.0;  // 1: an uplink carries what all ports of its node can; r: what one can
};

}  // namespace telegrad
