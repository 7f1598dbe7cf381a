#include "simulation/simulation.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.hpp"
#include "drivers/sim/sim_driver.hpp"

namespace telegrad {

Simulation::Simulation(Rank size, SimulationOptions options)
    : network_(size, {.costs = options.costs, .seed = options.seed, .faults = options.faults}),
      random_(mix(options.seed) + 1),
      start_noise_s_(options.costs.start_noise_s),
      clocks_(options.clocks),
      size_only_(options.size_only),
      ranks_(size) {
  TELEGRAD_CHECK(!size_only_ || options.faults.empty());
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
  if (start_noise_s_ > 0.0) at_s = std::max(at_s, now_s()) + start_noise_s_ * random_.uniform();
  plan(rank, {.at_s = at_s, .request = std::move(request)});
}

void Simulation::begin_when_idle(Rank rank, RequestPtr request) {
  plan(rank, {.at_s = 0.0, .request = std::move(request), .when_idle = true});
}

void Simulation::act(Rank rank, std::function<void(Session&)> action, double at_s) {
  plan(rank, {.at_s = at_s, .request = nullptr, .action = std::move(action)});
}

void Simulation::plan(Rank rank, Call call) {
  auto& calls = ranks_[rank].to_begin;
  call.at_s = std::max({call.at_s, now_s(), advanced_s_, calls.empty() ? 0.0 : calls.back().at_s});
  network_.set_alarm(rank, call.at_s);
  calls.push_back(std::move(call));
  ++unfinished_;
}

void Simulation::begin_all(const std::function<RequestPtr(Rank)>& make, double at_s) {
  for (Rank rank = 0; rank < size(); ++rank) begin(rank, make(rank), at_s);
}

Outcome Simulation::run(double until_s, std::uint64_t events_most) {
  std::optional<SizeOnly> size_only;
  if (size_only_) size_only.emplace();
  while (unfinished_ > 0 && network_.events() < events_most) {
    if (!step(until_s)) break;
  }
  Outcome outcome;
  outcome.deadlock = unfinished_ > 0 && network_.idle();
  for (Rank rank = 0; rank < size(); ++rank) {
    outcome.finish_s = std::max(outcome.finish_s, ranks_[rank].finish_s);
    if (ranks_[rank].gone) continue;
    for (const RequestPtr& request : ranks_[rank].running) {
      outcome.unfinished += "rank " + std::to_string(rank) + ": " + describe(request->call()) + "\n";
    }
  }
  return outcome;
}

bool Simulation::step(double until_s) {
  const auto happened = network_.step(until_s);
  if (!happened) return false;
  if (network_.gone_ranks() != gone_) give_up_the_gone();
  if (happened->alarm) wake(happened->rank);
  settle();
  return true;
}

bool Simulation::advance(double until_s) {
  const std::size_t before = over_;
  while (over_ == before && step(until_s)) {
  }
  advanced_s_ = std::max(advanced_s_, over_ == before ? until_s : now_s());
  return over_ != before;
}

void Simulation::shut_down(Rank rank) { network_.driver(rank).shut_down(); }

// Their requests stay: the network may still point into what they hold.
void Simulation::give_up_the_gone() {
  for (Rank rank = 0; rank < size(); ++rank) {
    Participant& self = ranks_[rank];
    if (!network_.gone(rank) || std::exchange(self.gone, true)) continue;
    ++gone_;
    unfinished_ -= self.running.size() + self.to_begin.size();
    self.to_begin.clear();
  }
}

void Simulation::wake(Rank rank) {
  Participant& self = ranks_[rank];
  if (self.gone || frozen(rank)) return;
  if (now_s() >= self.alarm_s) self.alarm_s = kForever_s;
  if (clocks_) self.session->on_time(now_s());  // first of all: it may have been frozen
  while (!self.to_begin.empty() && self.to_begin.front().at_s <= now_s()) {
    if (self.to_begin.front().when_idle && !self.running.empty()) break;
    Call call = std::move(self.to_begin.front());
    self.to_begin.pop_front();
    if (call.request == nullptr) {
      call.action(*self.session);
      --unfinished_;
      continue;
    }
    self.running.push_back(call.request);
    self.session->begin(std::move(call.request), now_s());
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
  if (self.gone || frozen(rank)) return;
  while (self.session->run_ready()) {
  }
  if (clocks_) set_alarm(rank);
  if (self.session->running() == self.running.size()) return;  // none is over
  const auto over = std::erase_if(self.running, [](const RequestPtr& request) { return request->done(); });
  if (over == 0) return;
  unfinished_ -= over;
  over_ += over;
  self.finish_s = now_s();
  if (!self.to_begin.empty() && self.to_begin.front().when_idle) network_.set_alarm(rank, now_s());
}

}  // namespace telegrad
