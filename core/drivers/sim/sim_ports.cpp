#include "drivers/sim/sim_ports.hpp"

#include <algorithm>

namespace telegrad {

SimPorts::SimPorts(Rank size, const SimCosts& costs) : costs_(costs), ends_(size) {
  if (two_levels()) uplinks_.resize((size + costs.ranks_per_node - 1) / costs.ranks_per_node);
  if (costs_.beta_exchange_s_per_byte <= 0.0) costs_.beta_exchange_s_per_byte = costs_.beta_s_per_byte;
  if (exchanges_cost()) sends_.resize(size);
}

void SimPorts::slow_down(const SimFault& fault) { slow_.push_back(fault); }

double SimPorts::factor(Rank from, Rank to) const {
  double factor = 1.0;
  for (const SimFault& fault : slow_) {
    const bool link = fault.kind == SimFaultKind::slow_link && fault.rank == from && fault.peer == to;
    const bool rank = fault.kind == SimFaultKind::slow_rank && (fault.rank == from || fault.rank == to);
    if (link || rank) factor *= fault.factor;
  }
  return factor;
}

PortTime SimPorts::send(Rank from, Rank to, std::size_t bytes, double now_s) {
  End& end = ends_[from];
  const double beta = inside_node(from, to) ? costs_.node_beta_s_per_byte : costs_.beta_s_per_byte;
  const double start_s = std::max(now_s, end.out_free_s);
  end.out_free_s = start_s + static_cast<double>(bytes) * beta * factor(from, to);
  if (exchanges_cost() && bytes > 0) sends_[from].push_back({to, end.out_free_s});
  return {start_s, end.out_free_s};
}

// True if `to` is who the port out of `from` is busy with.
bool SimPorts::sends_now(Rank from, Rank to, double now_s) {
  auto& sends = sends_[from];
  while (!sends.empty() && sends.front().end_s <= now_s) sends.pop_front();
  return !sends.empty() && sends.front().to == to;
}

double SimPorts::uplink_s(std::size_t bytes) const {
  return static_cast<double>(bytes) * costs_.beta_s_per_byte * costs_.oversubscription / costs_.ranks_per_node;
}

double SimPorts::uplink_out_end_s(Rank from, std::size_t bytes, double now_s) {
  double& free_s = uplinks_[from / costs_.ranks_per_node].out_free_s;
  return free_s = std::max(now_s, free_s) + uplink_s(bytes);
}

double SimPorts::uplink_in_end_s(Rank to, std::size_t bytes, double now_s) {
  double& free_s = uplinks_[to / costs_.ranks_per_node].in_free_s;
  return free_s = std::max(now_s, free_s) + uplink_s(bytes);
}

double SimPorts::latency_s(Rank from, Rank to, Random& random) const {
  double latency_s = inside_node(from, to) ? costs_.node_alpha_s : costs_.alpha_s;
  if (costs_.jitter > 0.0) latency_s *= 1.0 + costs_.jitter * random.uniform();
  return latency_s * factor(from, to);
}

PortTime SimPorts::receive(Rank from, Rank to, std::size_t bytes, double now_s, double earliest_end_s) {
  End& end = ends_[to];
  double beta = costs_.beta_s_per_byte;
  if (inside_node(from, to)) {
    beta = costs_.node_beta_s_per_byte;
  } else if (exchanges_cost() && sends_now(to, from, now_s)) {
    beta = costs_.beta_exchange_s_per_byte;
  }
  const double start_s = std::max(now_s, end.in_free_s);
  end.in_free_s = start_s + static_cast<double>(bytes) * beta * factor(from, to);
  return {start_s, std::max(end.in_free_s, earliest_end_s)};
}

PortTime SimPorts::compute(Rank rank, std::size_t bytes, double now_s, Random& random) {
  double spent_s = static_cast<double>(bytes) * costs_.gamma_s_per_byte;
  if (costs_.compute_noise > 0.0) spent_s *= 1.0 + costs_.compute_noise * random.uniform();
  for (const SimFault& fault : slow_) {
    if (fault.kind == SimFaultKind::slow_rank && fault.rank == rank) spent_s *= fault.factor;
  }
  double& free_s = ends_[rank].processor_free_s;
  const double start_s = std::max(now_s, free_s);
  return {start_s, free_s = start_s + spent_s};
}

}  // namespace telegrad
