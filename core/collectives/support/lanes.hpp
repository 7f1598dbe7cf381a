#pragma once
// A long vector cut into segments, each of which is reduced by itself; a few of them (lanes) are on their way at once, so
// that one adds while others send and receive. How a segment is reduced, this must not know.

#include <array>
#include <cstddef>
#include <functional>
#include <limits>

#include "base/buffer.hpp"
#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// Messages of one segment within a host: shorter ones cost more turns, longer ones leave the caches.
inline constexpr std::size_t kMemoryMessageBytes = std::size_t{256} << 10;

/// How long vectors are cut. All ranks use the same.
struct LaneTuning {
  /// A vector is cut into segments such that messages are about this long at most; 0: as suits the network.
  std::size_t message_bytes = 0;
  /// But into so many segments at most: then messages are longer.
  std::size_t segments_most = std::numeric_limits<std::size_t>::max();
  /// How many segments are on their way at once.
  std::size_t lanes = 2;
};

struct Lanes {
  /// For a vector of which one message per step would have `bytes` bytes on this network. Segments are a multiple of
  /// lanes, so that no lane is left alone in the end.
  Lanes(const Transport& net, std::size_t bytes, LaneTuning tuning);

  std::size_t segments;
  std::size_t lanes;
};

/// Of one lane.
using LaneScratch = std::array<Buffer, 2>;

/// `run` for every segment, as many at once as there are lanes, each lane with scratch of its own: twice
/// `scratch_bytes`.
Task<void> run_lanes(Lanes lanes, std::size_t scratch_bytes,
                     std::function<Task<void>(std::size_t segment, LaneScratch& scratch)> run);

}  // namespace telegrad
