#include "simulation/explorer/judge.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <span>
#include <utility>

#include "simulation/explorer/values.hpp"

namespace telegrad::explorer {
namespace {

std::string name_of_call(Rank rank, std::size_t index) {
  return "rank " + std::to_string(rank) + ", operation " + std::to_string(index);
}

const char* name_of_kind(FailureKind kind) {
  switch (kind) {
    case FailureKind::transport: return "transport";
    case FailureKind::peer_failed: return "peer_failed";
    case FailureKind::timeout: return "timeout";
    case FailureKind::mismatched_call: return "mismatched_call";
  }
  return "unknown";
}

std::string text_of(const Failure& failure) {
  return std::string(name_of_kind(failure.kind)) + ": " + failure.message();
}

// Where the first wrong bytes are, and what is there.
std::string difference(const std::vector<std::byte>& got, const std::vector<std::byte>& wanted) {
  if (got.size() != wanted.size()) {
    return std::to_string(got.size()) + " bytes instead of " + std::to_string(wanted.size());
  }
  const auto at = static_cast<std::size_t>(std::ranges::mismatch(got, wanted).in1 - got.begin());
  return "byte " + std::to_string(at) + " of " + std::to_string(got.size()) + " is " +
         std::to_string(static_cast<int>(got[at])) + " instead of " + std::to_string(static_cast<int>(wanted[at]));
}

std::string text_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

// A result that is a sparse vector, written densely.
std::vector<std::byte> written_densely(const PlannedCall& plan, const SeenCall& call) {
  const std::size_t element = size_of(plan.dtype);
  std::vector<std::byte> dense(plan.bytes());
  for (std::size_t i = 0; i < plan.count; ++i) {
    put_value(plan.dtype, dense.data() + i * element, static_cast<double>(absent_value(plan.reduction)));
  }
  for (std::size_t i = 0; i < call.indices.size(); ++i) {
    std::copy_n(call.values.begin() + static_cast<std::ptrdiff_t>(i * element), element,
                dense.begin() + static_cast<std::ptrdiff_t>(call.indices[i] * element));
  }
  return dense;
}

class Judge {
 public:
  Judge(const Program& program, const Seen& seen) : program_(program), seen_(seen), blame_(blame_of(program, seen)) {}

  Verdict verdict() {
    std::size_t most = 0;
    for (const auto& calls : program_.calls) most = std::max(most, calls.size());
    for (std::size_t index = 0; index < most; ++index) look_at_results(index);
    if (seen_.events >= program_.events_most) {
      find(Sort::hang, "the network is still busy after " + std::to_string(seen_.events) + " events");
    }
    for (Rank rank = 0; rank < program_.size; ++rank) look_at_ends(rank);
    look_at_verdicts();
    std::ranges::stable_sort(verdict_.findings, {}, &Finding::sort);
    verdict_.error_named = failed_ && verdict_.findings.empty();
    return std::move(verdict_);
  }

 private:
  void find(Sort sort, std::string text) { verdict_.findings.push_back({sort, std::move(text)}); }
  bool survives(Rank rank) const { return !seen_.ranks[rank].died && !seen_.ranks[rank].frozen; }

  // The calls that met as operation `index`; null: a rank that has none.
  void look_at_results(std::size_t index) {
    std::vector<const PlannedCall*> planned(program_.size);
    std::vector<const SeenCall*> calls(program_.size);
    Rank latest = 0;
    bool alike = true;
    double all_began_s = 0.0;
    for (Rank rank = 0; rank < program_.size; ++rank) {
      if (index >= program_.calls[rank].size()) {
        alike = false;
        all_began_s = kNever_s;
        latest = rank;
        continue;
      }
      planned[rank] = &program_.calls[rank][index];
      calls[rank] = &seen_.ranks[rank].calls[index];
      if (planned[0] == nullptr || !planned[rank]->agrees(*planned[0], program_.size)) alike = false;
      if (calls[rank]->began_s > all_began_s) latest = rank;
      all_began_s = std::max(all_began_s, calls[rank]->began_s);
    }
    std::optional<Expected> expected;
    std::optional<bool> dense;
    first_rounded_.reset();
    first_topk_.reset();
    for (Rank rank = 0; rank < program_.size; ++rank) {
      if (calls[rank] == nullptr) continue;
      const PlannedCall& plan = *planned[rank];
      const SeenCall& call = *calls[rank];
      verdict_.calls += call.called ? 1 : 0;
      look_at_input(rank, index, plan, call);
      if (call.failure && call.topk) find(Sort::wrong_result, name_of_call(rank, index) + ": failed, and has a result");
      if (plan.is_exchange()) {
        if (call.succeeded()) look_at_message(rank, index, *planned[rank], calls);
        continue;
      }
      if (plan.is_rooted()) {
        const bool gathers = plan.operation == Operation::gather;
        if (call.succeeded() && !gathers) look_at_broadcast(rank, index, planned, calls);
        if (call.succeeded() && gathers && rank == plan.root) look_at_gather(rank, index, planned, calls);
        if (call.succeeded() && gathers && rank != plan.root) ++verdict_.results;  // which is none
        continue;
      }
      const bool gives = plan.operation == Operation::reduce && plan.root != rank;
      if (!alike || all_began_s == kNever_s || gives) look_untouched(rank, index, plan, call);
      if (!call.succeeded()) continue;
      if (gives) {  // it has sent what it had, and may know nothing of the others
        ++verdict_.results;
        continue;
      }
      if (!alike) {
        find(Sort::wrong_result, name_of_call(rank, index) + ": succeeded, though not all ranks called it alike");
      } else if (call.done_s < all_began_s) {
        find(Sort::wrong_result, name_of_call(rank, index) + ": succeeded before rank " + std::to_string(latest) +
                                     " had called it");
      } else {
        if (!expected || plan.operation == Operation::all_to_all) expected = expect(rank, plan, planned);
        look_at_result(rank, index, plan, call, *expected);
        if (!call.dense_result || plan.operation != Operation::sparse_allreduce) continue;
        if (dense && *dense != *call.dense_result) {
          find(Sort::wrong_result, name_of_call(rank, index) + ": the result is dense on one rank, sparse on another");
        }
        dense = call.dense_result;
      }
    }
    if (alike) look_at_lost(index, planned, calls);
  }

  // Of a sum of which a part is kept, if it has succeeded everywhere.
  void look_at_lost(std::size_t index, const std::vector<const PlannedCall*>& planned,
                    const std::vector<const SeenCall*>& calls) {
    std::vector<TopkPart> parts;
    for (Rank rank = 0; rank < program_.size; ++rank) {
      const SeenCall& call = *calls[rank];
      if (!planned[rank]->keeps_lost() || !call.succeeded() || !call.topk) return;
      parts.push_back({*planned[rank], *call.topk, call.lost});
    }
    const std::string fault = fault_of_balance(parts, {calls[0]->indices, calls[0]->values});
    if (!fault.empty()) find(Sort::wrong_result, "operation " + std::to_string(index) + ": " + fault);
  }

  // On `rank`, where that makes a difference.
  Expected expect(Rank rank, const PlannedCall& plan, const std::vector<const PlannedCall*>& planned) const {
    if (plan.operation == Operation::sparse_allgather) return expected_vectors(program_.size, planned);
    if (!plan.has_blocks()) {
      return plan.operation == Operation::barrier ? Expected{} : expected_sum(plan, program_.size, planned);
    }
    Expected expected;
    for (Rank source = 0; source < program_.size; ++source) {
      const Contribution share(*planned[source], source, program_.size);
      const Partition blocks = plan.blocks(program_.size, source);
      const bool to_each = plan.operation == Operation::all_to_all;
      const std::size_t first = to_each ? blocks[rank].begin : 0;
      const std::size_t length = blocks[to_each ? rank : source].size();
      for (std::size_t i = 0; i < length; ++i) expected.dense.push_back(share.byte(first + i));
    }
    return expected;
  }

  void look_at_message(Rank rank, std::size_t index, const PlannedCall& plan,
                       const std::vector<const SeenCall*>& calls) {
    const SeenCall& sent = *calls[plan.source(rank, program_.size)];
    if (calls[rank]->done_s < sent.began_s) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": a message came before it was sent");
      return;
    }
    ++verdict_.results;
    compare(rank, index, calls[rank]->output, sent.before);
  }

  void look_at_result(Rank rank, std::size_t index, const PlannedCall& plan, const SeenCall& call,
                      const Expected& expected) {
    ++verdict_.results;
    if (plan.operation == Operation::allreduce_topk) {
      look_at_topk(rank, index, plan, call, expected);
      return;
    }
    const bool vector = plan.is_sparse() && call.output.empty() && plan.count != 0;
    if (vector && !call.dense_result) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": succeeded without a result");
    } else if (plan.operation == Operation::sparse_allgather) {
      if (call.indices != expected.indices) {
        find(Sort::wrong_result, name_of_call(rank, index) + ": other entries than the ranks have: " +
                                     std::to_string(call.indices.size()) + " instead of " +
                                     std::to_string(expected.indices.size()) + ", or others");
      } else {
        compare(rank, index, call.values, expected.dense);
      }
    } else if (plan.operation == Operation::sparse_reduce_scatter) {
      look_at_slice(rank, index, plan, call, expected);
    } else if (plan.operation == Operation::reduce_scatter) {
      const Range block = plan.partition(program_.size)[rank];
      const auto first = expected.dense.begin() + static_cast<std::ptrdiff_t>(block.begin * size_of(plan.dtype));
      compare(rank, index, call.output, {first, first + static_cast<std::ptrdiff_t>(block.size() * size_of(plan.dtype))});
    } else if (!call.dense_result) {
      compare(rank, index, plan, call.result(), expected);
    } else if (*call.dense_result) {
      compare(rank, index, plan, call.values, expected);
    } else if (call.indices != expected.indices || call.values.size() != call.indices.size() * size_of(plan.dtype)) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": the indices are wrong: " +
                                   std::to_string(call.indices.size()) + " instead of " +
                                   std::to_string(expected.indices.size()) + ", or others");
    } else {
      compare(rank, index, plan, written_densely(plan, call), expected);
    }
  }

  void look_at_topk(Rank rank, std::size_t index, const PlannedCall& plan, const SeenCall& call,
                    const Expected& expected) {
    std::string fault = "succeeded without a result";
    if (call.topk) fault = fault_of_topk(program_, plan, rank, *call.topk, {call.indices, call.values}, expected);
    if (fault.empty() && first_topk_) {
      const SeenCall& first = seen_.ranks[*first_topk_].calls[index];
      const auto digest_of = [this](const SeenCall& one) { return one.topk->after.digest(program_.topk); };
      if (call.indices != first.indices || call.values != first.values || digest_of(call) != digest_of(first)) {
        fault = "not the sum and the state that rank " + std::to_string(*first_topk_) + " has";
      }
    }
    if (!fault.empty()) find(Sort::wrong_result, name_of_call(rank, index) + ": " + fault);
    if (!first_topk_ && call.topk) first_topk_ = rank;
  }

  // Where it went dense on its way, entries are missing whose reduction is what stands where nobody has one.
  void look_at_slice(Rank rank, std::size_t index, const PlannedCall& plan, const SeenCall& call,
                     const Expected& expected) {
    const Range slice = plan.partition(program_.size)[rank];
    const bool within = std::ranges::all_of(call.indices, [&](std::uint32_t at) {
      return at >= slice.begin && at < slice.end && std::ranges::binary_search(expected.indices, at);
    });
    if (!within || call.dense_result.value_or(false) ||
        call.values.size() != call.indices.size() * size_of(plan.dtype)) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": entries that are not in its slice of the sum");
      return;
    }
    std::vector<std::byte> wanted(plan.bytes());
    const std::size_t element = size_of(plan.dtype);
    const auto absent = static_cast<double>(absent_value(plan.reduction));
    for (std::size_t i = 0; i < plan.count; ++i) (void)put_value(plan.dtype, wanted.data() + i * element, absent);
    std::copy(expected.dense.begin() + static_cast<std::ptrdiff_t>(slice.begin * element),
              expected.dense.begin() + static_cast<std::ptrdiff_t>(slice.end * element),
              wanted.begin() + static_cast<std::ptrdiff_t>(slice.begin * element));
    compare(rank, index, written_densely(plan, call), wanted);
  }

  void compare(Rank rank, std::size_t index, const PlannedCall& plan, std::vector<std::byte> got,
               const Expected& expected) {
    if (expected.errors_most.empty()) {
      compare(rank, index, got, expected.dense);
    } else if (got.size() != plan.bytes()) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": " + std::to_string(got.size()) + " bytes instead of " +
                                   std::to_string(plan.bytes()));
    } else if (!first_rounded_) {
      look_at_rounding(rank, index, plan, got, expected);
      first_rounded_ = {rank, std::move(got)};
    } else if (got != first_rounded_->second) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": not the bits that rank " +
                                   std::to_string(first_rounded_->first) + " has: " +
                                   difference(got, first_rounded_->second));
      look_at_rounding(rank, index, plan, got, expected);
    }
  }

  void look_at_rounding(Rank rank, std::size_t index, const PlannedCall& plan, const std::vector<std::byte>& got,
                        const Expected& expected) {
    for (std::size_t i = 0; i < plan.count; ++i) {
      const double value = value_at(plan.dtype, got.data() + i * size_of(plan.dtype));
      if (std::abs(value - expected.sums[i]) <= expected.errors_most[i]) continue;  // false for what is no number
      find(Sort::wrong_result, name_of_call(rank, index) + ": element " + std::to_string(i) + " is " + text_of(value) +
                                   ", more than " + text_of(expected.errors_most[i]) + " off " +
                                   text_of(expected.sums[i]));
      return;
    }
  }

  void compare(Rank rank, std::size_t index, const std::vector<std::byte>& got, const std::vector<std::byte>& wanted) {
    if (got == wanted) return;
    find(Sort::wrong_result, name_of_call(rank, index) + ": " + difference(got, wanted));
  }

  // Whoever has sent may be through; the root has heard from all.
  void look_at_gather(Rank root, std::size_t index, const std::vector<const PlannedCall*>& planned,
                      const std::vector<const SeenCall*>& calls) {
    for (Rank rank = 0; rank < program_.size; ++rank) {
      if (planned[rank] == nullptr || !planned[rank]->agrees(*planned[root], program_.size)) {
        find(Sort::wrong_result, name_of_call(root, index) + ": succeeded, though not all ranks called it alike");
        return;
      }
      if (calls[root]->done_s < calls[rank]->began_s) {
        find(Sort::wrong_result, name_of_call(root, index) + ": succeeded before rank " + std::to_string(rank) +
                                     " had called it");
        return;
      }
    }
    ++verdict_.results;
    compare(root, index, calls[root]->output, expect(root, *planned[root], planned).dense);
  }

  // Also of a scatter. Messages go down a tree, and calls are compared at each hop: who succeeded agrees with the root.
  void look_at_broadcast(Rank rank, std::size_t index, const std::vector<const PlannedCall*>& planned,
                         const std::vector<const SeenCall*>& calls) {
    const PlannedCall& plan = *planned[rank];
    const PlannedCall* const root = planned[plan.root];
    if (root == nullptr || !root->agrees(plan, program_.size)) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": succeeded, though the root called something else");
    } else if (calls[rank]->done_s < calls[plan.root]->began_s) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": succeeded before the root had called it");
    } else {
      ++verdict_.results;
      if (plan.operation == Operation::scatter) {
        const Range block = plan.blocks(program_.size)[rank];
        const auto all = calls[plan.root]->before.begin();
        compare(rank, index, calls[rank]->output,
                {all + static_cast<std::ptrdiff_t>(block.begin), all + static_cast<std::ptrdiff_t>(block.end)});
      } else {
        compare(rank, index, calls[rank]->memory, calls[plan.root]->before);
      }
    }
  }

  // Nobody writes into an input.
  void look_at_input(Rank rank, std::size_t index, const PlannedCall& plan, const SeenCall& call) {
    const bool only_read = !call.in_place || (plan.operation == Operation::broadcast && plan.root == rank) ||
                           (plan.operation == Operation::reduce && plan.root != rank);
    if (only_read && call.memory != call.before) {
      find(Sort::wrong_result, name_of_call(rank, index) + ": the input has changed: " +
                                   difference(call.memory, call.before));
    }
  }

  // Before it has heard from all ranks, no rank writes: so not where one did not call it, or something else.
  void look_untouched(Rank rank, std::size_t index, const PlannedCall& plan, const SeenCall& call) {
    const bool changed = call.in_place ? call.memory != call.before
                                       : std::ranges::any_of(call.output, [](auto byte) { return byte != kPoison; });
    if (!changed || plan.is_rooted()) return;
    find(Sort::wrong_result,
         name_of_call(rank, index) + ": the output was written before all ranks had called it, or is not the root's");
  }

  void look_at_ends(Rank rank) {
    const SeenRank& seen = seen_.ranks[rank];
    if (!survives(rank)) return;
    if (seen.failing && !seen.verdict) {
      find(Sort::hang, "rank " + std::to_string(rank) + ": has stopped, and never learns why");
    }
    bool failed = false;
    for (std::size_t index = 0; index < seen.calls.size(); ++index) {
      const SeenCall& call = seen.calls[index];
      if (!call.called) {
        const bool gave_up = rank == program_.culprit &&
                             (program_.trouble == Trouble::abort || program_.trouble == Trouble::close);
        if (!failed && !gave_up) find(Sort::hang, name_of_call(rank, index) + ": was never reached");
      } else if (!call.done) {
        find(Sort::hang, name_of_call(rank, index) + ": never ends");
      } else if (call.failure) {
        failed = failed_ = true;
        look_at_failure(rank, index, *call.failure);
        if (program_.trouble == Trouble::abort && finished_before_it_gave_up(index)) {
          find(Sort::wrong_error, name_of_call(rank, index) + ": the rank that gave up had finished it, and all were in it");
        }
      }
      failed = failed || call.failure.has_value();
    }
  }

  // What the culprit knew by then, the others are to learn: its answers to all may have been the last thing it did.
  bool finished_before_it_gave_up(std::size_t index) const {
    const auto through = std::span(seen_.ranks[program_.culprit].calls).first(index + 1);
    const auto by_then = [&](const SeenRank& seen) { return seen.calls[index].began_s < program_.act_s; };
    return !program_.calls[program_.culprit][index].is_exchange() && std::ranges::all_of(seen_.ranks, by_then) &&
           std::ranges::all_of(through, [](const SeenCall& call) { return call.succeeded(); });
  }

  // Exchanges have none, and say how many operations came before.
  std::uint32_t number_of(Rank rank, std::size_t index) const {
    const auto before = std::span(program_.calls[rank]).first(index);
    return static_cast<std::uint32_t>(
        std::ranges::count_if(before, [](const PlannedCall& call) { return !call.is_exchange(); }));
  }

  void look_at_failure(Rank rank, std::size_t index, const Failure& failure) {
    const std::string where = name_of_call(rank, index) + ": ";
    if (failure.rank != rank) find(Sort::wrong_error, where + "reported by another rank: " + text_of(failure));
    if (failure.sequence != number_of(rank, index)) find(Sort::wrong_error, where + "under another number: " + text_of(failure));
    if (rank == blame_.exempt) return;
    look_at_blame(where, failure);
    // Whoever knows of a failure tells the others: only what nobody can know before takes until a call's time is up.
    const bool in_time = failure.kind == FailureKind::timeout || seen_.ranks[rank].calls[index].done_s < deadline_s();
    if (!in_time) find(Sort::wrong_error, where + "only when time was up: " + text_of(failure));
  }

  void look_at_blame(const std::string& where, const Failure& failure) {
    if (blame_.kinds.empty()) {
      find(Sort::wrong_error, where + "nothing had happened, but " + text_of(failure));
      return;
    }
    if (std::ranges::find(blame_.kinds, failure.kind) == blame_.kinds.end()) {
      find(Sort::wrong_error, where + "not the right kind: " + text_of(failure));
    }
    if (blame_.anybody || std::ranges::find(blame_.culprits, failure.peer) != blame_.culprits.end()) return;
    if (is_damage(program_.trouble) && names_as_well_as_it_can(failure)) return;
    find(Sort::wrong_error, where + "not the culprit: " + text_of(failure));
  }

  // Before that no call can have timed out.
  double deadline_s() const { return program_.session.timeout_s; }

  // A slice of a sparse sum, or a gathered vector, goes round a ring and is looked into at the end, and samples of indices
  // go through other hands too: whether their owner or a rank in between has damaged them, no receiver can know.
  static bool names_as_well_as_it_can(const Failure& failure) {
    for (const char* what : {" sent damaged sums: ", " sent damaged sparse vectors: ", " sent damaged samples of"}) {
      if (failure.reason.find(what) != std::string::npos) return true;
    }
    return false;
  }

  // Who is through with everything and has said goodbye: nobody asks it any more.
  bool departed(const SeenRank& seen) const {
    return program_.parts && std::ranges::all_of(seen.calls, [](const SeenCall& call) { return call.succeeded(); });
  }

  // Also those whose operations were all over before the failure have an opinion.
  void look_at_verdicts() {
    const Failure* first = nullptr;
    for (Rank rank = 0; rank < program_.size; ++rank) {
      const SeenRank& seen = seen_.ranks[rank];
      if (!survives(rank) || rank == blame_.exempt || !seen.verdict || departed(seen)) continue;
      const std::string where = "rank " + std::to_string(rank) + ": ";
      look_at_blame(where, *seen.verdict);
      if (first == nullptr) first = &*seen.verdict;
      if (seen.verdict->kind == first->kind && seen.verdict->peer == first->peer) continue;
      find(Sort::wrong_error, where + "disagrees with rank " + std::to_string(first->rank) + ": " +
                                  text_of(*seen.verdict) + "; " + text_of(*first));
    }
  }

  const Program& program_;
  const Seen& seen_;
  const Blame blame_;
  Verdict verdict_;
  bool failed_ = false;
  std::optional<Rank> first_topk_;  // of one operation: who has kept a part of its sum
  std::optional<std::pair<Rank, std::vector<std::byte>>> first_rounded_;  // of one operation: who had it, densely
};

}  // namespace

const char* name_of(Sort sort) {
  switch (sort) {
    case Sort::hang: return "hang";
    case Sort::wrong_result: return "wrong result";
    case Sort::wrong_error: return "wrong error";
  }
  return "unknown";
}

Verdict judge(const Program& program, const Seen& seen) { return Judge(program, seen).verdict(); }

}  // namespace telegrad::explorer
