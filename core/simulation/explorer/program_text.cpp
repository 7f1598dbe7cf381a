// A program as people read it.
#include <cstdarg>
#include <cstdio>

#include "simulation/explorer/program.hpp"

namespace telegrad::explorer {
namespace {

[[gnu::format(printf, 2, 3)]] void append(std::string& text, const char* format, ...) {
  char line[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  text += line;
}

void append_fault(std::string& text, const SimFault& fault) {
  switch (fault.kind) {
    case SimFaultKind::kill:
      append(text, " after %llu events, noticed within %.4g s", static_cast<unsigned long long>(fault.at_event),
             fault.detect_s);
      break;
    case SimFaultKind::freeze:
      append(text, " after %llu events, for %.4g s", static_cast<unsigned long long>(fault.at_event), fault.duration_s);
      break;
    case SimFaultKind::slow_link: append(text, ", to rank %u by a factor of %.4g", fault.peer, fault.factor); break;
    case SimFaultKind::slow_rank: append(text, " by a factor of %.4g", fault.factor); break;
    case SimFaultKind::hold:
      append(text, ", its data message %llu for %.4g s", static_cast<unsigned long long>(fault.nth), fault.duration_s);
      break;
    case SimFaultKind::damage:
      append(text, ", its data message %llu", static_cast<unsigned long long>(fault.nth));
      break;
  }
}

}  // namespace

std::string describe(const PlannedCall& call) {
  std::string text = name_of(call.operation);
  if (call.operation == Operation::barrier) return text;
  append(text, "(%zu %s", call.count, name_of(call.dtype));
  if (call.is_exchange()) {
    append(text, " to the rank %u ahead, tag %u)", call.root, call.tag);
    return text;
  }
  if (call.root != kNoRank) append(text, ", root %u", call.root);
  if (call.reduction != Reduction::none) append(text, ", %s", name_of(call.reduction));
  if (call.rounded) append(text, " of floats that are rounded");
  if (call.operation == Operation::allreduce) append(text, ", %s", name_of(call.algorithm));
  if (call.operation == Operation::sparse_allreduce) append(text, ", %s", name_of(call.algorithm));
  if (call.is_sparse()) {
    const bool switches = call.reduction != Reduction::none && call.operation != Operation::allreduce_topk;
    if (switches) append(text, ", switch_factor %g", call.switch_factor);
    if (call.slices == Slices::balanced) append(text, ", balanced slices");
    if (call.indices != IndexFormat::none) append(text, ", indices %s", name_of(call.indices));
  }
  if (call.entries > 0) append(text, ", about %zu entries", call.entries);
  if (call.is_encoded()) append(text, ", values %s", name_of(call.wire_values()));
  if (!call.nodes.empty()) append(text, ", nodes");
  for (const std::uint32_t node : call.nodes) append(text, " %u", node);
  if (call.uneven) append(text, ", blocks of unlike lengths");
  if (call.tuning) append(text, ", messages of %zu bytes, %zu lanes", call.tuning->message_bytes, call.tuning->lanes);
  return text + ")";
}

std::string describe(const Program& program) {
  std::string text;
  append(text, "seed %llu: %u ranks, %s", static_cast<unsigned long long>(program.seed), program.size,
         name_of(program.trouble));
  if (program.culprit != kNoRank && program.trouble != Trouble::none) append(text, " of rank %u", program.culprit);
  for (const SimFault& fault : program.faults) append_fault(text, fault);
  if (program.trouble == Trouble::abort || program.trouble == Trouble::close) append(text, " at %.4g s", program.act_s);
  const SimCosts& costs = program.costs;
  append(text, "\nalpha %.4g s, beta %.4g s/byte (exchange %.4g), gamma %.4g s/byte (noise %.3g), jitter %.3g",
         costs.alpha_s, costs.beta_s_per_byte, costs.beta_exchange_s_per_byte, costs.gamma_s_per_byte,
         costs.compute_noise, costs.jitter);
  append(text, "\nstart noise %.4g s, %u ranks per node (alpha %.4g s, beta %.4g s/byte), oversubscription %.3g",
         costs.start_noise_s, costs.ranks_per_node, costs.node_alpha_s, costs.node_beta_s_per_byte,
         costs.oversubscription);
  const SessionOptions& session = program.session;
  append(text, "\ntimeout %.4g s, liveness %.4g s, heartbeat %.4g s, agreement %.4g s, dispute %.4g s, probe %.4g s",
         session.timeout_s, session.liveness_timeout_s.value_or(0.0), session.heartbeat_s, session.agreement_s,
         session.dispute_s, session.probe_s);
  const OkTopkSettings& topk = program.topk;
  append(text, "\nkept of a sum %llu, boundaries every %llu, thresholds every %llu calls, balance factor %g%s",
         static_cast<unsigned long long>(topk.k), static_cast<unsigned long long>(topk.boundaries_every),
         static_cast<unsigned long long>(topk.threshold_every), topk.balance_factor,
         topk.as_published ? ", as published" : "");
  for (const IndexRange& tensor : topk.tensors) {
    append(text, "%s[%zu, %zu)", &tensor == topk.tensors.data() ? "\ncompared as tensors of " : ", ",
           static_cast<std::size_t>(tensor.begin), static_cast<std::size_t>(tensor.end));
  }
  append(text, "\nranks%s go on calling after a failure, and%s say goodbye when they are through",
         program.persists ? "" : " do not", program.parts ? "" : " do not");
  for (Rank rank = 0; rank < program.size; ++rank) {
    append(text, "\nrank %u: %u in flight, thinks for %.4g s", rank, program.window[rank], program.think_s[rank]);
    const auto& calls = program.calls[rank];
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const auto& first = program.calls[0];
      const bool shown = rank == 0 || i >= first.size() || !calls[i].agrees(first[i], program.size);
      if (shown) append(text, "\n  %zu: %s", i, describe(calls[i]).c_str());
    }
    if (calls.size() < program.calls[0].size()) append(text, "\n  %zu: nothing more", calls.size());
  }
  return text;
}

}  // namespace telegrad::explorer
