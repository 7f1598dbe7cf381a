#include "collectives/support/lanes.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/support/pieces.hpp"

namespace telegrad {
namespace {

using Run = std::function<Task<void>(std::size_t segment, LaneScratch& scratch)>;

Task<void> run_lane(Lanes lanes, std::size_t lane, std::size_t scratch_bytes, const Run& run) {
  LaneScratch scratch{Buffer(scratch_bytes), Buffer(scratch_bytes)};
  for (std::size_t segment = lane; segment < lanes.segments; segment += lanes.lanes) co_await run(segment, scratch);
}

}  // namespace

Lanes::Lanes(const Transport& net, std::size_t bytes, LaneTuning tuning) {
  const std::size_t suiting = net.shares_memory() ? kMemoryMessageBytes : kCardBytes;
  const std::size_t message_bytes = tuning.message_bytes == 0 ? suiting : tuning.message_bytes;
  segments = std::clamp<std::size_t>((bytes + message_bytes - 1) / message_bytes, 1,
                                     std::max<std::size_t>(1, tuning.segments_most));
  lanes = std::clamp<std::size_t>(tuning.lanes, 1, segments);
  segments += (lanes - segments % lanes) % lanes;
}

Task<void> run_lanes(Lanes lanes, std::size_t scratch_bytes, Run run) {
  std::vector<Task<void>> running;
  for (std::size_t lane = 0; lane < lanes.lanes; ++lane) running.push_back(run_lane(lanes, lane, scratch_bytes, run));
  co_await when_all(std::move(running));
}

}  // namespace telegrad
