#pragma once
// What goes wrong in a simulated network, said beforehand, so that the same seed and faults give the same history.

#include <cstdint>
#include <limits>

#include "base/types.hpp"

namespace telegrad {

/// Each is a thing that real drivers let happen.
enum class SimFaultKind : std::uint8_t {
  kill,       // `rank` is gone after `at_event` events; what it had not handed over is lost; peers notice within detect_s
  freeze,     // `rank` does nothing from then on, for `duration_s`; nobody is told
  slow_link,  // messages from `rank` to `peer` take `factor` times as long, latency included, all the time
  slow_rank,  // the work and all messages of `rank` take `factor` times as long, all the time
  hold,       // the `nth` data message of `rank` arrives `duration_s` later than it would; others may overtake it
  damage,     // the `nth` data message of `rank` arrives with `damage`
};

enum class SimDamage : std::uint8_t {
  truncated,       // some bytes less, and an envelope that says so
  lengthened,      // some bytes more, and an envelope that says so
  duplicated,      // it arrives twice
  other_step,      // the envelope's step is another one
  other_call,      // the envelope's call differs
  far_sequence,    // the envelope's operation is far in the future
  other_source,    // the envelope names another sender that exists
  stray,           // just before it, noise that claims to be it but comes from another epoch or communicator
  scrambled_head,  // the first bytes of the payload are noise: for payloads that carry a header of their own
};

struct SimFault {
  SimFaultKind kind = SimFaultKind::kill;
  Rank rank = 0;
  Rank peer = kNoRank;         // slow_link
  std::uint64_t at_event = 0;  // kill, freeze
  std::uint64_t nth = 0;       // hold, damage: counted from 0 over all data messages that `rank` sends
  SimDamage damage = SimDamage::truncated;
  double duration_s = std::numeric_limits<double>::infinity();  // freeze, hold
  double factor = 1.0;                                          // slow_link, slow_rank
  double detect_s = 0.0;  // kill: each peer's driver notices u·detect_s after the death, u uniform in [0, 1) by seed
};

}  // namespace telegrad
