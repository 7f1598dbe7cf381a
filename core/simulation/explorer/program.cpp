#include "simulation/explorer/program.hpp"

#include <algorithm>
#include <cmath>

#include "simulation/explorer/calls.hpp"

namespace telegrad::explorer {
namespace {

struct Card {
  Trouble trouble;
  const char* name;
  int copies;  // in the deck that seeds draw from
};
// In the order of Trouble.
constexpr std::array<Card, kTroubles> kCards{{
    {Trouble::none, "none", 25},
    {Trouble::slow_link, "slow_link", 2},
    {Trouble::slow_rank, "slow_rank", 2},
    {Trouble::hold, "hold", 4},
    {Trouble::pause, "pause", 2},
    {Trouble::kill, "kill", 9},
    {Trouble::freeze, "freeze", 4},
    {Trouble::thaw, "thaw", 2},
    {Trouble::truncated, "truncated", 1},
    {Trouble::lengthened, "lengthened", 1},
    {Trouble::duplicated, "duplicated", 2},
    {Trouble::other_step, "other_step", 1},
    {Trouble::other_call, "other_call", 2},
    {Trouble::far_sequence, "far_sequence", 1},
    {Trouble::other_source, "other_source", 1},
    {Trouble::stray, "stray", 2},
    {Trouble::scrambled_head, "scrambled_head", 1},
    {Trouble::count, "count", 3},
    {Trouble::dtype, "dtype", 1},
    {Trouble::reduction, "reduction", 2},
    {Trouble::root, "root", 2},
    {Trouble::algorithm, "algorithm", 2},
    {Trouble::switch_factor, "switch_factor", 1},
    {Trouble::operation, "operation", 2},
    {Trouble::order, "order", 2},
    {Trouble::fewer, "fewer", 2},
    {Trouble::more, "more", 2},
    {Trouble::stop, "stop", 3},
    {Trouble::close, "close", 3},
    {Trouble::abort, "abort", 3},
}};

constexpr std::size_t deck_size() {
  std::size_t size = 0;
  for (const Card& card : kCards) size += static_cast<std::size_t>(card.copies);
  return size;
}

// Shuffled once: so many seeds one after another hold every trouble.
std::array<Trouble, deck_size()> make_deck() {
  std::array<Trouble, deck_size()> deck{};
  std::size_t next = 0;
  for (const Card& card : kCards) {
    for (int copy = 0; copy < card.copies; ++copy) deck[next++] = card.trouble;
  }
  Random random(0);
  for (std::size_t i = deck.size(); i > 1; --i) std::swap(deck[i - 1], deck[random.below(i)]);
  return deck;
}

SimCosts draw_costs(Chance& chance, Rank size) {
  SimCosts costs;
  costs.alpha_s = chance.magnitude(1e-7, 1e-4);
  costs.beta_s_per_byte = chance.happens(0.1) ? 0.0 : chance.magnitude(1e-11, 1e-8);
  if (chance.happens(0.2)) costs.beta_exchange_s_per_byte = costs.beta_s_per_byte * chance.between(1.0, 2.0);
  if (chance.happens(0.5)) costs.gamma_s_per_byte = chance.magnitude(1e-11, 1e-8);
  if (chance.happens(0.6)) costs.jitter = chance.magnitude(0.01, 10.0);
  if (chance.happens(0.3)) costs.compute_noise = chance.magnitude(0.01, 2.0);
  if (chance.happens(0.3)) costs.start_noise_s = costs.alpha_s * chance.magnitude(0.1, 30.0);
  if (size > 2 && chance.happens(0.25)) {
    costs.ranks_per_node = chance.integer<Rank>(2, std::min<Rank>(size, 8));
    costs.node_alpha_s = costs.alpha_s * chance.magnitude(0.05, 1.0);
    costs.node_beta_s_per_byte = costs.beta_s_per_byte * chance.magnitude(0.05, 1.0);
    costs.oversubscription = chance.between(1.0, costs.ranks_per_node);
  }
  return costs;
}

// Of one message of no bytes, at most.
double latency_s(const SimCosts& costs) { return costs.alpha_s * (1.0 + costs.jitter); }

// Of one byte in all that it passes, at most.
double byte_s(const SimCosts& costs) {
  const double beta = std::max(costs.beta_s_per_byte, costs.beta_exchange_s_per_byte);
  const double uplinks = costs.ranks_per_node > 1 ? 2.0 * costs.beta_s_per_byte * costs.oversubscription : 0.0;
  return beta + uplinks + costs.gamma_s_per_byte * (1.0 + costs.compute_noise);
}

// `net_s`: what the network and the processors need at most; `all_s`: with what ranks spend on their own affairs.
SessionOptions draw_session(Chance& chance, Trouble trouble, double net_s, double all_s) {
  SessionOptions session;
  session.epoch = chance.integer<std::uint32_t>(0, 7);
  session.communicator = chance.integer<std::uint32_t>(0, 7);
  session.agreement_s = net_s * chance.between(1.0, 3.0);
  session.dispute_s = all_s * chance.between(3.0, 10.0);
  session.probe_s = net_s * chance.magnitude(0.01, 1.0);
  session.timeout_s = all_s * chance.between(30.0, 60.0);
  session.heartbeat_s = net_s * chance.between(1.0, 6.0);
  session.liveness_timeout_s = net_s * chance.between(8.0, 25.0);
  if (trouble != Trouble::thaw && chance.happens(0.15)) {
    session.liveness_timeout_s.reset();
    if (chance.happens(0.5)) session.heartbeat_s = std::numeric_limits<double>::infinity();
  }
  return session;
}

// Both periods are short: every call may cut, find a threshold, do both or neither.
OkTopkSettings draw_topk(Chance& chance) {
  constexpr std::array kBalanceFactors{1.0, 1.5, 4.0, 1e6};
  return {.k = static_cast<std::uint64_t>(chance.magnitude(1.0, 3000.0)),
          .boundaries_every = chance.integer<std::uint64_t>(1, 4),
          .threshold_every = chance.integer<std::uint64_t>(1, 4),
          .balance_factor = chance.pick(kBalanceFactors),
          .as_published = chance.happens(0.2)};
}

// As in training: shares are large enough to go uncounted, and a state lasts for some calls. From its own seed: other
// programs stay what they are. Few ranks, since vectors are long.
bool draw_training(Chance own, Rank size, OkTopkSettings& settings) {
  constexpr Rank kRanksMost = 16;
  constexpr double kShare = 0.15;
  if (size > kRanksMost || !own.happens(kShare)) return false;
  settings.k = static_cast<std::uint64_t>(36.0 * size * own.magnitude(1.0, 3.0));
  settings.boundaries_every = own.integer<std::uint64_t>(3, 12);
  settings.threshold_every = own.integer<std::uint64_t>(3, 12);
  settings.as_published = false;
  return true;
}

// In half of the programs that may have them, with room between some. From its own seed, as above.
void draw_tensors(Chance own, const std::vector<PlannedCall>& calls, OkTopkSettings& settings) {
  if (settings.as_published || own.happens(0.5)) return;
  std::size_t longest = 0;
  for (const PlannedCall& call : calls) {
    if (call.operation == Operation::allreduce_topk) longest = std::max(longest, call.count);
  }
  for (std::size_t begin = 0; begin < longest && settings.tensors.size() < 8;) {
    const auto length = static_cast<std::size_t>(static_cast<double>(longest) * own.between(0.0, 0.6));
    const std::size_t end = std::min(longest, begin + 1 + length);
    settings.tensors.push_back({begin, end});
    begin = end + (own.happens(0.3) ? longest / 16 + 1 : 0);
  }
}

std::vector<Rank> draw_odd(Chance& chance, Rank size) {
  std::vector<Rank> all(size);
  for (Rank rank = 0; rank < size; ++rank) all[rank] = rank;
  for (Rank i = size; i > 1; --i) std::swap(all[i - 1], all[chance.integer<Rank>(0, i - 1)]);
  all.resize(size < 3 || chance.happens(0.75) ? 1 : chance.integer<Rank>(2, size - 1));
  std::ranges::sort(all);
  return all;
}

struct Total {
  double messages = 0.0;  // of one rank
  double time_s = 0.0;
};

// What the fault needs to strike while something is going on; moments are drawn a little beyond the end, too.
SimFault draw_fault(Chance& chance, const Program& program, const Total& total, double net_s) {
  SimFault fault{.rank = program.culprit};
  const double events = 2.2 * program.size * (total.messages + program.size);
  fault.at_event = static_cast<std::uint64_t>(events * chance.between(0.0, 1.0));
  fault.nth = static_cast<std::uint64_t>(chance.happens(0.3) ? chance.between(0.0, 4.0)
                                                             : total.messages * chance.between(0.0, 0.7));
  switch (program.trouble) {
    case Trouble::slow_link:
      fault.kind = SimFaultKind::slow_link;
      fault.peer = (fault.rank + chance.integer<Rank>(1, program.size - 1)) % program.size;
      fault.factor = chance.magnitude(1.5, 50.0);
      break;
    case Trouble::slow_rank:
      fault.kind = SimFaultKind::slow_rank;
      fault.factor = chance.magnitude(1.5, 50.0);
      break;
    case Trouble::hold:
      fault.kind = SimFaultKind::hold;
      fault.duration_s = net_s * chance.magnitude(0.001, 2.0);
      break;
    case Trouble::pause:
      fault.kind = SimFaultKind::freeze;
      fault.duration_s = net_s * chance.magnitude(0.01, 2.0);
      break;
    case Trouble::freeze: fault.kind = SimFaultKind::freeze; break;
    case Trouble::thaw:
      fault.kind = SimFaultKind::freeze;
      fault.duration_s = *program.session.liveness_timeout_s * chance.between(2.0, 4.0);
      break;
    case Trouble::kill:
      fault.kind = SimFaultKind::kill;
      if (chance.happens(0.7)) fault.detect_s = net_s * chance.magnitude(0.001, 2.0);
      break;
    default:
      fault.kind = SimFaultKind::damage;
      fault.damage = static_cast<SimDamage>(static_cast<int>(program.trouble) - static_cast<int>(Trouble::truncated));
      break;
  }
  return fault;
}

// Far more than ever happen: messages and acknowledgements of them, and heartbeats of everybody to everybody as long as
// there is any patience.
std::uint64_t events_most(const Program& program, const Total& total) {
  const double ranks = program.size;
  const double beats = program.until_s / std::min(program.session.heartbeat_s, program.until_s);
  return static_cast<std::uint64_t>(1e5 + 100.0 * ranks * (total.messages + ranks) + 4.0 * ranks * ranks * beats);
}

bool has_fault(Trouble trouble) { return trouble != Trouble::none && trouble <= Trouble::scrambled_head; }

}  // namespace

const char* name_of(Trouble trouble) { return kCards[static_cast<std::size_t>(trouble)].name; }

std::optional<Trouble> trouble_named(std::string_view name) {
  for (const Card& card : kCards) {
    if (name == card.name) return card.trouble;
  }
  return std::nullopt;
}

Trouble trouble_of(std::uint64_t seed) {
  static const auto deck = make_deck();
  return deck[seed % deck.size()];
}

Program draw(std::uint64_t seed, Rank first_ranks, Rank last_ranks) {
  Chance chance(seed);
  Program program{.seed = seed, .trouble = trouble_of(seed)};
  const double span = static_cast<double>(last_ranks - first_ranks) + 1.0;
  program.size = first_ranks + static_cast<Rank>(span * std::pow(chance.between(0.0, 1.0), 3.0));
  program.costs = draw_costs(chance, program.size);
  program.culprit = chance.integer<Rank>(0, program.size - 1);
  program.topk = draw_topk(chance);

  std::size_t at = 0;
  std::vector<PlannedCall> usual = draw_calls(chance, program.trouble, program.size, at);
  if (draw_training(Chance(mix(seed)), program.size, program.topk)) {
    train(usual, program.trouble, program.size, at, program.topk.k);
  }
  draw_tensors(Chance(mix(~seed)), usual, program.topk);
  program.calls.assign(program.size, usual);
  if (is_mismatch(program.trouble)) {
    const std::vector<Rank> odd = draw_odd(chance, program.size);
    program.culprit = odd.front();
    const std::uint64_t same = chance.seed();  // odd ranks mostly agree among themselves
    for (std::size_t turn = 0; turn < odd.size(); ++turn) {
      Chance its(same);
      program.calls[odd[turn]] = odd_calls(its, program.trouble, program.size, usual, at, turn);
    }
  }

  Total total;
  for (const PlannedCall& call : usual) {
    const Effort effort = effort_of(call, program.size);
    total.messages += effort.messages;
    total.time_s += (2.0 * effort.messages + 4.0) * latency_s(program.costs) +
                    3.0 * effort.bytes * byte_s(program.costs) + program.costs.start_noise_s;
  }
  // A program that is busy with its own affairs for longer than liveness_timeout_s is none the less alive. Rarely:
  // heartbeats are many.
  const bool dreams = program.size <= 12 && chance.happens(0.08);
  const double think_s = dreams ? total.time_s * chance.between(20.0, 60.0)
                                : chance.happens(0.5) ? 0.0 : total.time_s * chance.magnitude(0.001, 0.5);
  const auto most = static_cast<std::uint32_t>(usual.size() + 1);
  const bool all_at_once = chance.happens(0.3);
  for (Rank rank = 0; rank < program.size; ++rank) {
    program.window.push_back(all_at_once ? most : chance.integer<std::uint32_t>(1, most));
    program.think_s.push_back(think_s * chance.between(0.0, 1.0));
  }
  program.persists = chance.happens(0.5);
  program.parts = chance.happens(0.4);

  const double slowest = program.trouble == Trouble::slow_link || program.trouble == Trouble::slow_rank ? 50.0 : 1.0;
  const double net_s = total.time_s * slowest;
  program.busy_s = 3.0 * net_s + think_s * static_cast<double>(usual.size() + 2);
  program.session = draw_session(chance, program.trouble, net_s, program.busy_s);
  if (has_fault(program.trouble)) program.faults.push_back(draw_fault(chance, program, total, net_s));
  program.act_s = (total.time_s + think_s) * chance.between(0.0, 1.0) * chance.between(0.0, 1.0);
  program.until_s = 5.0 * (program.session.timeout_s + program.session.liveness_timeout_s.value_or(0.0) +
                           program.session.dispute_s + program.busy_s);
  program.events_most = events_most(program, total);
  return program;
}

std::optional<std::uint32_t> first_difference(const Program& program) {
  std::size_t most = 0;
  for (const auto& calls : program.calls) most = std::max(most, calls.size());
  for (std::size_t i = 0; i < most; ++i) {
    for (const auto& calls : program.calls) {
      const bool alike = i < calls.size() && i < program.calls[0].size() &&
                         calls[i].agrees(program.calls[0][i], program.size);
      if (!alike) return static_cast<std::uint32_t>(i);
    }
  }
  return std::nullopt;
}

}  // namespace telegrad::explorer
