// The ranks of a test, in one thread: over the virtual-time network, over the in-process one, or over that one where it
// says that it is memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "drivers/local/local_driver.hpp"
#include "session/session.hpp"
#include "simulation/simulation.hpp"

namespace telegrad {

enum class World { simulated, local, memory };

/// What rank r does; null: it never calls.
using Make = std::function<RequestPtr(Rank)>;

struct Ended {
  bool stuck = false;
  std::vector<RequestPtr> requests;
  bool all_succeeded() const {
    for (const auto& request : requests) {
      if (request && (!request->done() || request->failure())) return false;
    }
    return !stuck;
  }
};

/// One rank per session, each over its own driver; turns go round until nobody has anything to do.
class LocalRanks {
 public:
  explicit LocalRanks(Rank size, SessionOptions options = {}, bool shares_memory = false)
      : network_(std::make_shared<LocalNetwork>(size, shares_memory)) {
    for (Rank rank = 0; rank < size; ++rank) {
      drivers_.push_back(std::make_unique<LocalDriver>(network_, rank));
      sessions_.push_back(std::make_unique<Session>(*drivers_.back(), options));
    }
  }
  ~LocalRanks() {
    for (auto& driver : drivers_) driver->shut_down();
    for (auto& session : sessions_) session->release_quarantine();
  }
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  Session& session(Rank rank) { return *sessions_[rank]; }
  void run() {
    for (bool active = true; active;) {
      active = false;
      for (Rank rank = 0; rank < sessions_.size(); ++rank) active |= turn(rank);
    }
  }
  /// Of one rank alone; whether it had anything to do.
  bool turn(Rank rank) {
    const bool progressed = drivers_[rank]->progress();
    return sessions_[rank]->run_ready() || progressed;
  }

 private:
  std::shared_ptr<LocalNetwork> network_;
  std::vector<std::unique_ptr<LocalDriver>> drivers_;
  std::vector<std::unique_ptr<Session>> sessions_;
};

inline Ended run_ranks(World world, Rank size, const Make& make, std::uint64_t seed = 0) {
  Ended ended;
  for (Rank rank = 0; rank < size; ++rank) ended.requests.push_back(make(rank));
  if (world == World::simulated) {
    Simulation simulation(size, {.costs = {.gamma_s_per_byte = seed % 2 ? 1e-10 : 0.0, .jitter = 20.0}, .seed = seed});
    for (Rank rank = 0; rank < size; ++rank) {
      if (ended.requests[rank]) simulation.begin(rank, ended.requests[rank]);
    }
    ended.stuck = simulation.run().deadlock;
  } else {
    LocalRanks ranks(size, {}, world == World::memory);
    for (Rank rank = 0; rank < size; ++rank) {
      if (ended.requests[rank]) ranks.session(rank).begin(ended.requests[rank], 0.0);
    }
    ranks.run();
    for (const auto& request : ended.requests) ended.stuck |= request && !request->done();
  }
  return ended;
}

}  // namespace telegrad
