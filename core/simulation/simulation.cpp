#include "simulation/simulation.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "drivers/sim/sim_driver.hpp"

namespace telegrad {

Simulation::Simulation(Rank size, SimulationOptions options)
    : network_(size, options.costs, options.seed), clocks_(options.clocks), size_only_(options.size_only),
      ranks_(size) {
  for (Rank rank = 0; rank < size; ++rank) {
    ranks_[rank].session = std::make_unique<Session>(network_.driver(rank), options.session);
  }
  if (!clocks_) return;
  for (Rank rank = 0; rank < size; ++rank) {
    ranks_[rank].session->join(now_s());
    set_alarm(rank);
  }
}

Simulation::~Simulation() = default;

void Simulation::begin(Rank rank, RequestPtr request, double at_s) {
  auto& calls = ranks_[rank].to_begin;
  at_s = std::max({at_s, now_s(), calls.empty() ? 0.0 : calls.back().at_s});
  calls.push_back({at_s, std::move(request)});
  ++unfinished_;
  network_.set_alarm(rank, at_s);
}

void Simulation::begin_all(const std::function<RequestPtr(Rank)>& make, double at_s) {
  for (Rank rank = 0; rank < size(); ++rank) begin(rank, make(rank), at_s);
}

Outcome Simulation::run(double until_s) {
  std::optional<SizeOnly> size_only;
  if (size_only_) size_only.emplace();
  while (unfinished_ > 0) {
    const auto happened = network_.step(until_s);
    if (!happened) break;
    if (happened->alarm) wake(happened->rank);
    settle();
  }
  Outcome outcome;
  outcome.deadlock = unfinished_ > 0 && network_.idle();
  for (Rank rank = 0; rank < size(); ++rank) {
    outcome.finish_s = std::max(outcome.finish_s, ranks_[rank].finish_s);
    for (const RequestPtr& request : ranks_[rank].running) {
      outcome.unfinished += "rank " + std::to_string(rank) + ": " + describe(request->call()) + "\n";
    }
  }
  return outcome;
}

void Simulation::wake(Rank rank) {
  Participant& self = ranks_[rank];
  if (now_s() >= self.alarm_s) self.alarm_s = kForever_s;
  while (!self.to_begin.empty() && self.to_begin.front().at_s <= now_s()) {
    RequestPtr request = std::move(self.to_begin.front().request);
    self.to_begin.pop_front();
    self.running.push_back(request);
    self.session->begin(std::move(request), now_s());
  }
  if (clocks_) {
    self.session->on_time(now_s());
    set_alarm(rank);
  }
  settle(rank);
}

void Simulation::set_alarm(Rank rank) {
  Participant& self = ranks_[rank];
  const double deadline_s = self.session->next_deadline_s();
  if (deadline_s >= self.alarm_s) return;
  self.alarm_s = deadline_s;
  network_.set_alarm(rank, deadline_s);
}

void Simulation::settle() {
  for (network_.take_touched(touched_); !touched_.empty(); network_.take_touched(touched_)) {
    for (const Rank rank : touched_) settle(rank);
  }
}

void Simulation::settle(Rank rank) {
  Participant& self = ranks_[rank];
  while (self.session->run_ready()) {
  }
  if (clocks_) set_alarm(rank);
  const auto over = std::erase_if(self.running, [](const RequestPtr& request) { return request->done(); });
  if (over == 0) return;
  unfinished_ -= over;
  self.finish_s = now_s();
}

}  // namespace telegrad
