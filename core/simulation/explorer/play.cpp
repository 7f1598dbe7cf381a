#include "simulation/explorer/play.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/check.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/dense/allreduce_recursive_doubling.hpp"
#include "collectives/dense/allreduce_ring.hpp"
#include "collectives/dense/allreduce_two_level.hpp"
#include "collectives/sparse/auto.hpp"
#include "kernels/marks.hpp"
#include "session/messages.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "simulation/explorer/drawing.hpp"
#include "simulation/explorer/values.hpp"

namespace telegrad::explorer {
namespace {

SimulationOptions options_of(const Program& program) {
  return {.costs = program.costs, .seed = program.seed, .session = program.session, .clocks = true,
          .faults = program.faults};
}

// A rank's entries, as a program has them.
template <class V>
struct OwnEntries {
  OwnEntries(const PlannedCall& call, const Contribution& share) {
    for (std::uint32_t i = 0; i < call.count; ++i) {
      if (!share.has(i)) continue;
      indices.push_back(i);
      (void)put_value(dtype_of<V>, reinterpret_cast<std::byte*>(&values.emplace_back()), share.value(i));
    }
  }

  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  std::vector<std::uint64_t> marks;
};

// Reads a result that is a vector, or vectors, once there is one.
using ReadResult = std::function<void(SeenCall&)>;

template <class V>
ReadResult reader(std::shared_ptr<std::optional<SparseVector<V>>> result) {
  return [result = std::move(result)](SeenCall& seen) {
    if (!*result) return;
    const SparseVector<V>& vector = **result;
    seen.dense_result = vector.is_dense();
    seen.indices.assign(vector.indices().begin(), vector.indices().end());
    const auto bytes = std::as_bytes(vector.values());
    seen.values.assign(bytes.begin(), bytes.end());
  };
}

// One rank's vector behind another's: see expected_vectors().
template <class V>
ReadResult reader(std::shared_ptr<std::optional<std::vector<SparseVector<V>>>> result) {
  return [result = std::move(result)](SeenCall& seen) {
    if (!*result) return;
    seen.dense_result = false;
    std::uint64_t first = 0;
    for (const SparseVector<V>& vector : **result) {
      const std::span<const V> values = vector.values();
      for (std::size_t i = 0; i < values.size(); ++i) {
        seen.indices.push_back(static_cast<std::uint32_t>(first + (vector.is_dense() ? i : vector.indices()[i])));
      }
      const auto bytes = std::as_bytes(values);
      seen.values.insert(seen.values.end(), bytes.begin(), bytes.end());
      first += vector.dimension();
    }
  };
}

// What a rank's stream puts there and takes, in place of vectors. `results`: of as many vectors, of `room` entries each.
template <class V>
struct StagedCall {
  StagedCall(OwnEntries<V> given, std::size_t results, std::size_t room)
      : own(std::move(given)),
        count(static_cast<std::int64_t>(own.indices.size())),
        forms(results),
        indices(results * room),
        values(results * room),
        dense(room) {
    own.indices.resize(own.indices.size() + own.indices.size() % 3, ~std::uint32_t{0});  // more than it counts
    own.values.resize(own.indices.size());
  }
  StagedEntries<V> mine(std::uint64_t dimension) const { return {dimension, &count, own.indices, own.values}; }
  StagedSum<V> taken() { return {forms.data(), indices, values, dense}; }

  OwnEntries<V> own;
  std::int64_t count;
  std::vector<std::int64_t> forms;
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  std::vector<V> dense;
};

// `first`: the element of the first vector's index 0; those of each vector are `dimension` behind the one before.
template <class V>
ReadResult reader(std::shared_ptr<StagedCall<V>> staged, std::uint64_t first, std::uint64_t dimension) {
  return [=](SeenCall& seen) {
    seen.dense_result = false;
    const std::size_t room = staged->indices.size() / staged->forms.size();
    for (std::size_t i = 0; i < staged->forms.size(); ++i) {
      const auto count = static_cast<std::size_t>(staged->forms[i]);
      for (const std::uint32_t index : std::span(staged->indices).subspan(i * room, count)) {
        seen.indices.push_back(static_cast<std::uint32_t>(first + i * dimension + index));
      }
      const auto bytes = std::as_bytes(std::span(staged->values).subspan(i * room, count));
      seen.values.insert(seen.values.end(), bytes.begin(), bytes.end());
    }
  };
}

template <class V>
ReadResult reader(std::shared_ptr<std::optional<OkTopkSum<V>>> result, OkTopkState before) {
  return [result = std::move(result), before = std::move(before)](SeenCall& seen) {
    if (!*result) return;
    const OkTopkSum<V>& kept = **result;
    seen.indices.assign(kept.sum.indices().begin(), kept.sum.indices().end());
    const auto values = std::as_bytes(kept.sum.values());
    seen.values.assign(values.begin(), values.end());
    const auto left = std::as_bytes(kept.left.values());
    seen.topk = SeenTopk{.left_indices = {kept.left.indices().begin(), kept.left.indices().end()},
                         .left_values = {left.begin(), left.end()},
                         .report = kept.report,
                         .before = before,
                         .after = kept.state};
  };
}

class Play {
 public:
  explicit Play(const Program& program)
      : program_(program), simulation_(program.size, options_of(program)), ranks_(program.size) {
    seen_.ranks.resize(program.size);
    for (Rank rank = 0; rank < program.size; ++rank) {
      ranks_[rank].chance = Chance(program.seed * 0x10001 + rank);
      seen_.ranks[rank].calls.resize(program.calls[rank].size());
      ranks_[rank].requests.resize(program.calls[rank].size());
      ranks_[rank].sends.resize(program.calls[rank].size());
      ranks_[rank].readers.resize(program.calls[rank].size());
    }
  }

  Seen run(bool keep_trace) {
    if (keep_trace) simulation_.network().keep_trace_text();
    for (Rank rank = 0; rank < program_.size; ++rank) go_on(rank);
    if (program_.trouble == Trouble::abort || program_.trouble == Trouble::close) {
      simulation_.run(program_.act_s, program_.events_most);
      act();
    }
    simulation_.run(program_.until_s, program_.events_most);
    let_ranks_agree();
    collect();
    return std::move(seen_);
  }

 private:
  struct Caller {
    Chance chance{0};
    std::vector<RequestPtr> requests;
    std::vector<RequestPtr> sends;  // beside the receive of an exchange
    std::vector<ReadResult> readers;
    std::size_t next = 0;       // call
    std::size_t in_flight = 0;
    bool stopped = false;       // calls nothing more
    OkTopkState topk{};         // what the last call that had one has left
    bool state_in_use = false;
    std::map<std::array<std::uint64_t, 3>, std::shared_ptr<SparseChoice>> choices{};  // by what costs follow from
  };

  // Calls what the rank may have in flight.
  void go_on(Rank rank) {
    Caller& caller = ranks_[rank];
    const auto& calls = program_.calls[rank];
    while (!caller.stopped && caller.next < calls.size() && caller.in_flight < program_.window[rank]) {
      const bool uses_state = calls[caller.next].operation == Operation::allreduce_topk;
      if (uses_state && caller.state_in_use) return;  // one call at a time
      caller.state_in_use = caller.state_in_use || uses_state;
      const std::size_t index = caller.next++;
      ++caller.in_flight;
      const double at_s = simulation_.now_s() + program_.think_s[rank] * caller.chance.between(0.0, 1.0);
      caller.requests[index] = make_request(rank, index);
      seen_.ranks[rank].calls[index].called = true;
      seen_.ranks[rank].calls[index].called_s = at_s;
      for (const RequestPtr& request : {caller.sends[index], caller.requests[index]}) {
        if (!request) continue;
        request->when_done([this, rank, index] { over(rank, index); });
        simulation_.begin(rank, request, at_s);
      }
    }
  }

  void over(Rank rank, std::size_t index) {
    Caller& caller = ranks_[rank];
    const RequestPtr& send = caller.sends[index];
    if (send && !(send->done() && caller.requests[index]->done())) return;
    SeenCall& call = seen_.ranks[rank].calls[index];
    call.done = true;
    call.done_s = simulation_.now_s();
    call.failure = caller.requests[index]->failure();
    if (send && !call.failure) call.failure = send->failure();
    --caller.in_flight;
    if (program_.calls[rank][index].operation == Operation::allreduce_topk) {
      caller.readers[index](call);
      caller.state_in_use = false;
      if (call.topk && !call.failure) caller.topk = call.topk->after;
    }
    if (call.failure && !program_.persists) caller.stopped = true;
    go_on(rank);
    const bool through = !caller.stopped && caller.next == caller.requests.size() && caller.in_flight == 0;
    if (through && !call.failure && program_.parts) simulation_.act(rank, [](Session& session) { session.part(); });
  }

  // Its program gives up, or closes the communicator before the others do.
  void act() {
    const Rank rank = program_.culprit;
    ranks_[rank].stopped = true;
    const bool aborts = program_.trouble == Trouble::abort;
    simulation_.act(rank, [aborts, closes = !aborts || program_.parts](Session& session) {
      if (aborts) session.give_up("the program gave up");
      if (closes) session.part();
    });
  }

  // A rank whose operations were all over before a failure needs time to hear what the others agree on.
  void let_ranks_agree() {
    const SessionOptions& session = program_.session;
    const double most_s = 2.0 * (session.agreement_after_timeout_s() + session.dispute_s) + program_.busy_s;
    for (double wait_s = session.agreement_s; wait_s < most_s; wait_s *= 2.0) {
      const auto rank = first_unaware();
      if (!rank || simulation_.network().idle()) return;
      const double end_s = simulation_.now_s() + wait_s;
      simulation_.act(*rank, [](Session&) {}, end_s);
      simulation_.run(end_s + wait_s, program_.events_most);
    }
  }

  // Its session has stopped and does not know why.
  std::optional<Rank> first_unaware() {
    for (Rank rank = 0; rank < program_.size; ++rank) {
      const Session& session = simulation_.session(rank);
      if (session.failing() && !session.failure() && !simulation_.died(rank) && !simulation_.frozen(rank)) return rank;
    }
    return std::nullopt;
  }

  RequestPtr make_request(Rank rank, std::size_t index) {
    const PlannedCall& call = program_.calls[rank][index];
    SeenCall& seen = seen_.ranks[rank].calls[index];
    const Contribution share(call, rank, program_.size);
    if (call.is_exchange()) return make_exchange(call, share, seen, rank, index);
    const RequestPtr inner = call.is_sparse() ? make_sparse(call, share, seen, rank, index)
                                              : make_dense(call, share, seen, rank);
    seen.before = seen.memory;
    return noting_begin(inner, seen);
  }

  RequestPtr noting_begin(const RequestPtr& inner, SeenCall& seen) {
    return std::make_shared<Request>(inner->call(), [this, inner, &seen](Transport& net) {
      seen.began_s = simulation_.now_s();
      return inner->start(net);
    });
  }

  // The receive; the send lies beside it.
  RequestPtr make_exchange(const PlannedCall& call, const Contribution& share, SeenCall& seen, Rank rank,
                           std::size_t index) {
    fill(seen, share, call.bytes(), call.bytes());
    seen.before = seen.memory;
    const Rank to = (rank + call.root) % program_.size;
    ranks_[rank].sends[index] = noting_begin(make_send(call.dtype, seen.memory, to, call.tag), seen);
    return make_receive(call.dtype, seen.output, call.source(rank, program_.size), call.tag);
  }

  static void put_values(const PlannedCall& call, const Contribution& share, SeenCall& seen) {
    std::byte* next = seen.memory.data();
    for (std::size_t i = 0; i < call.count; ++i) next += put_value(call.dtype, next, share.value(i));
  }

  RequestPtr make_dense(const PlannedCall& call, const Contribution& share, SeenCall& seen, Rank rank) {
    const Rank size = program_.size;
    const std::size_t bytes = call.bytes();
    const Partition blocks = call.has_blocks() ? call.blocks(size, rank) : Partition(size * bytes, size);
    const bool apart = (call.has_blocks() && call.operation != Operation::allgather) ||
                       call.operation == Operation::reduce_scatter;
    seen.in_place = (share.in_place() && !apart) || call.operation == Operation::broadcast;
    seen.memory.resize(bytes);
    switch (call.operation) {
      case Operation::reduce: {
        put_values(call, share, seen);
        if (!seen.in_place) seen.output.assign(bytes, kPoison);
        const Bytes output = seen.in_place ? seen.memory : seen.output;
        return make_reduce(size, {seen.memory, output, call.dtype, call.reduction}, call.root);
      }
      case Operation::reduce_scatter: {
        put_values(call, share, seen);
        Partition partition = call.partition(size);
        seen.output.assign(partition[rank].size() * size_of(call.dtype), kPoison);
        return make_reduce_scatter({seen.memory, seen.output, call.dtype, call.reduction}, std::move(partition));
      }
      case Operation::allreduce: {
        put_values(call, share, seen);
        if (!seen.in_place) seen.output.assign(bytes, kPoison);
        const Bytes output = seen.in_place ? seen.memory : seen.output;
        if (call.is_encoded()) {
          const QuantisedSum how{.encoding = call.wire_values(), .key = {.seed = call.count}, .reduction = call.reduction};
          return make_all_reduce_quantised({seen.memory, output, call.dtype, call.reduction}, how, {});
        }
        const RequestPtr request =
            make_all_reduce(size, {seen.memory, output, call.dtype, call.reduction, call.algorithm, nodes_of(call, rank)});
        if (!call.tuning) return request;
        if (call.algorithm == Algorithm::two_level) {
          const auto nodes = nodes_of(call, rank);
          return std::make_shared<Request>(request->call(), [&call, &seen, output, nodes](Transport& net) {
            const TwoLevelTuning tuning{.part_bytes = call.tuning->message_bytes};
            return allreduce_two_level(net, *nodes, call.dtype, call.reduction, seen.memory, output, tuning);
          });
        }
        const bool ring = request->call().algorithm == Algorithm::ring;
        return std::make_shared<Request>(request->call(), [&call, &seen, output, ring](Transport& net) {
          if (ring) return allreduce_ring(net, call.dtype, call.reduction, seen.memory, output, *call.tuning);
          return allreduce_recursive_doubling(net, call.dtype, call.reduction, seen.memory, output, *call.tuning);
        });
      }
      case Operation::allgather: {
        const std::size_t mine = blocks[rank].size();
        const std::size_t own = seen.in_place ? blocks[rank].begin : 0;
        seen.memory.assign(seen.in_place ? blocks.count() : mine, kPoison);
        for (std::size_t i = 0; i < mine; ++i) seen.memory[own + i] = share.byte(i);
        if (!seen.in_place) seen.output.assign(blocks.count(), kPoison);
        const Bytes all = seen.in_place ? seen.memory : seen.output;
        return make_all_gather(call.dtype, ConstBytes(seen.memory).subspan(own, mine), all, blocks);
      }
      case Operation::gather:
        fill(seen, share, blocks[rank].size(), rank == call.root ? blocks.count() : 0);
        return make_gather(call.dtype, seen.memory, seen.output, blocks, call.root);
      case Operation::scatter:
        fill(seen, share, rank == call.root ? blocks.count() : 0, blocks[rank].size());
        return make_scatter(call.dtype, seen.memory, seen.output, blocks, call.root);
      case Operation::all_to_all:
        if (call.uneven) {
          const Partition received = call.blocks_received(size, rank);
          fill(seen, share, blocks.count(), received.count());
          return make_all_to_all_v(call.dtype, seen.memory, seen.output, blocks, received);
        }
        fill(seen, share, blocks.count(), blocks.count());
        return make_all_to_all(size, call.dtype, seen.memory, seen.output);
      case Operation::broadcast:
        for (std::size_t i = 0; i < bytes; ++i) seen.memory[i] = rank == call.root ? share.byte(i) : kPoison;
        return make_broadcast(size, call.dtype, seen.memory, call.root);
      default: return make_barrier();
    }
  }

  static void fill(SeenCall& seen, const Contribution& share, std::size_t input_bytes, std::size_t output_bytes) {
    seen.memory.resize(input_bytes);
    for (std::size_t i = 0; i < input_bytes; ++i) seen.memory[i] = share.byte(i);
    seen.output.assign(output_bytes, kPoison);
  }

  // Costs at which sums of these lengths are doubled to the end, given up at once or later, for slices of all ranks or two
  // levels, or made dense. They follow from what ranks compare: ranks that agree have the same. What earlier sums had in
  // common may differ.
  std::shared_ptr<SparseChoice> choice_of(const PlannedCall& call, Caller& caller) const {
    auto& choice = caller.choices[{call.count, static_cast<std::uint64_t>(call.reduction), call.nodes.empty()}];
    if (choice) return choice;
    Chance chance(mix(call.count) + static_cast<std::uint64_t>(call.reduction));
    const double byte_s = chance.magnitude(1e-5, 10.0);
    const double work_s = chance.happens(0.5) ? 0.0 : byte_s * chance.magnitude(0.01, 100.0);
    const AllreduceTable table = call.nodes.empty()
                                     ? AllreduceTable(program_.size)
                                     : AllreduceTable(program_.size, {{0, Algorithm::two_level}}).on_two_levels(true);
    double alpha_s = 1.0;
    std::optional<NodeCosts> node_costs;
    if (!call.nodes.empty() && chance.happens(0.7)) {
      alpha_s = chance.magnitude(1e-4, 1.0);  // next to nothing, and ranks may stay on one level
      node_costs = NodeCosts{.inside = {.alpha_s = alpha_s * chance.magnitude(0.1, 10.0),
                                        .beta_s_per_byte = byte_s * chance.magnitude(0.1, 10.0),
                                        .gamma_s_per_byte = work_s}};
    }
    Chance own(call.seed);
    return choice = std::make_shared<SparseChoice>(
        table, NetworkCosts{.alpha_s = alpha_s, .beta_s_per_byte = byte_s, .gamma_s_per_byte = work_s}, true,
        Overlaps{.ranks = own.happens(0.5) ? 0.0 : 1.0}, node_costs);
  }

  // Ranks know of their own node whether it shares memory.
  static std::shared_ptr<const Nodes> nodes_of(const PlannedCall& call, Rank rank) {
    if (call.nodes.empty()) return nullptr;
    return std::make_shared<const Nodes>(std::span(call.nodes), mix(call.seed + call.nodes[rank]) % 2 == 0);
  }

  RequestPtr make_sparse(const PlannedCall& call, const Contribution& share, SeenCall& seen, Rank rank,
                         std::size_t index) {
    switch (call.dtype) {
      case DType::f64: return make_sparse_of<double>(call, share, seen, rank, index);
      case DType::bf16: return make_sparse_of<bf16>(call, share, seen, rank, index);
      case DType::f16: return make_sparse_of<f16>(call, share, seen, rank, index);
      case DType::i32:
      case DType::u32: return make_sparse_of<std::int32_t>(call, share, seen, rank, index);
      case DType::i64:
      case DType::u64: return make_sparse_of<std::int64_t>(call, share, seen, rank, index);
      default: return make_sparse_of<float>(call, share, seen, rank, index);
    }
  }

  // `random`: whether a sum gets entries that its caller keeps, as Python's does, or a copy, and marks of them.
  template <class V>
  SparseVector<V> vector_of(const PlannedCall& call, const Contribution& share, const SparseReduction& how,
                            std::uint64_t random) {
    OwnEntries<V> own(call, share);
    const bool can_be_dense = call.operation != Operation::allreduce_topk;
    if (share.dense() && can_be_dense) return SparseVector<V>::dense(own.values);
    if (call.operation != Operation::sparse_allreduce || random % 2 == 0) {
      return SparseVector<V>::sparse(call.count, own.indices, own.values);
    }
    const auto kept = std::make_shared<OwnEntries<V>>(std::move(own));
    lent_.push_back(kept);
    if (random / 2 % 2 == 0) {
      kept->marks.resize(kernels::mark_words(call.count));
      TELEGRAD_CHECK(kernels::mark(kept->indices, 0, call.count, kept->marks));
    }
    return addend_of<V>(call.count, kept->indices, kept->values, how, kept->marks);
  }

  // Of ranks that have entries about half call as streams do; null: this one does not.
  template <class V>
  RequestPtr make_staged(const PlannedCall& call, const Contribution& share, const SparseReduction& how, Rank rank,
                         ReadResult& read) {
    const bool gathers = call.operation == Operation::sparse_allgather;
    if ((!gathers && call.operation != Operation::sparse_reduce_scatter) || mix(~call.seed + rank) % 2 == 0) return nullptr;
    for (Rank other = 0; other < program_.size; ++other) {  // who stages may be given entries only
      if (Contribution(call, other, program_.size).dense()) return nullptr;
    }
    const Range own = gathers ? Range{0, call.count} : call.partition(program_.size)[rank];
    auto staged = std::make_shared<StagedCall<V>>(OwnEntries<V>(call, share), gathers ? program_.size : 1, own.size());
    lent_.push_back(staged);
    read = reader<V>(staged, own.begin, call.count);
    const StagedEntries<V> mine = staged->mine(call.count);
    if (gathers) return make_all_gather_staged<V>(mine, staged->taken(), how);
    return make_reduce_scatter_staged<V>(mine, call.partition(program_.size), staged->taken(), how);
  }

  template <class V>
  RequestPtr make_sparse_of(const PlannedCall& call, const Contribution& share, SeenCall& seen, Rank rank,
                            std::size_t index) {
    Caller& caller = ranks_[rank];
    ReadResult& read = caller.readers[index];
    const SparseReduction how{.reduction = call.reduction,
                              .switch_factor = call.switch_factor,
                              .algorithm = call.algorithm,
                              .wire = {.indices = call.indices,
                                       .values = call.wire_values(),
                                       .packs_values = call.indices == IndexFormat::packed},
                              .slices = call.slices,
                              .choice = choice_of(call, caller),
                              .nodes = nodes_of(call, rank),
                              .is_unsigned = is_unsigned(call.dtype)};
    if (RequestPtr staged = make_staged<V>(call, share, how, rank, read)) return staged;
    SparseVector<V> mine = vector_of<V>(call, share, how, mix(call.seed + rank));
    if constexpr (!std::is_integral_v<V>) {
      if (call.operation == Operation::allreduce_topk) {
        if (call.keeps_lost()) seen.lost.resize(call.count);
        TopkSum<V, OkTopkState> kept =
            make_all_reduce_topk(std::move(mine), program_.topk, caller.topk, call.reduction, how.wire, seen.lost);
        read = reader<V>(std::move(kept.result), caller.topk);
        return kept.request;
      }
    }
    if (call.operation == Operation::sparse_allgather) {
      GatheredVectors<V> gathered = make_all_gather(std::move(mine), how);
      read = reader<V>(std::move(gathered.result));
      return gathered.request;
    }
    if (call.operation == Operation::sparse_reduce_scatter) {
      SparseSum<V> slice = make_reduce_scatter(std::move(mine), call.partition(program_.size), how);
      read = reader<V>(std::move(slice.result));
      return slice.request;
    }
    if (share.in_place()) {
      seen.output.assign(call.bytes(), kPoison);
      const std::span<V> output(reinterpret_cast<V*>(seen.output.data()), call.count);
      return make_all_reduce_into(std::move(mine), output, how);
    }
    SparseSum<V> sum = make_all_reduce(std::move(mine), how);
    read = reader<V>(std::move(sum.result));
    return sum.request;
  }

  void collect() {
    seen_.end_s = simulation_.now_s();
    seen_.events = simulation_.network().events();
    seen_.trace_hash = simulation_.network().trace_hash();
    seen_.trace_text = simulation_.network().trace_text();
    for (Rank rank = 0; rank < program_.size; ++rank) {
      SeenRank& seen = seen_.ranks[rank];
      seen.died = simulation_.died(rank);
      seen.frozen = simulation_.frozen(rank);
      seen.verdict = simulation_.session(rank).failure();
      seen.failing = simulation_.session(rank).failing();
      for (std::size_t i = 0; i < seen.calls.size(); ++i) {
        SeenCall& call = seen.calls[i];
        const ReadResult& read = ranks_[rank].readers[i];
        if (call.succeeded() && read && !call.topk) read(call);
      }
    }
  }

  const Program& program_;
  Seen seen_;  // before the simulation, which writes into it
  std::vector<std::shared_ptr<const void>> lent_;  // which it reads
  Simulation simulation_;
  std::vector<Caller> ranks_;
};

}  // namespace

Seen play(const Program& program, bool keep_trace) { return Play(program).run(keep_trace); }

}  // namespace telegrad::explorer
