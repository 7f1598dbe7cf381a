#include "simulation/measure.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "codec/counted.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "simulation/measured_ranks.hpp"
#include "simulation/simulation.hpp"
#include "simulation/workload.hpp"

namespace telegrad {
namespace {

// Of a reduce_scatter.
Partition blocks_of(const Workload& workload) { return {workload.bytes / sizeof(float), workload.ranks}; }

// Of the whole vector, where an operation is asked for by the length of one of its P blocks.
std::uint64_t all_bytes(const Workload& workload) { return workload.bytes * workload.ranks; }

std::uint64_t input_bytes(const Workload& workload, Rank rank) {
  switch (workload.operation) {
    case Operation::scatter: return rank == workload.root ? all_bytes(workload) : 0;
    case Operation::all_to_all: return all_bytes(workload);
    default: return workload.bytes;
  }
}

std::uint64_t output_bytes(const Workload& workload, Rank rank) {
  switch (workload.operation) {
    case Operation::gather: return rank == workload.root ? all_bytes(workload) : 0;
    case Operation::allgather:
    case Operation::all_to_all: return all_bytes(workload);
    case Operation::reduce_scatter: return blocks_of(workload)[rank].size() * sizeof(float);
    default: return workload.bytes;
  }
}

// For many ranks they are only found where somebody asks.
std::shared_ptr<const Nodes> levels_of(const Workload& workload) {
  const bool asks = workload.algorithm == Algorithm::two_level || workload.algorithm == Algorithm::automatic;
  return asks ? nodes_of(workload) : nullptr;
}

NetworkCosts costs_inside(const SimCosts& costs) {
  return {.alpha_s = costs.node_alpha_s,
          .beta_s_per_byte = costs.node_beta_s_per_byte,
          .gamma_s_per_byte = costs.gamma_s_per_byte};
}

// As a communicator chooses that is calibrated on this network. Counted entries cannot be marked, and payloads are to go as
// they do.
std::shared_ptr<SparseChoice> choice_of(const Workload& workload, const Nodes* nodes) {
  NetworkCosts costs = costs_of(workload.costs);
  if (nodes == nullptr || !nodes->two_level()) {
    if (workload.costs.ranks_per_node >= workload.ranks) costs = costs_inside(workload.costs);
    return std::make_shared<SparseChoice>(AllreduceTable(workload.ranks), costs, false);
  }
  const NodeCosts node_costs{.inside = costs_inside(workload.costs), .beta_alone_s_per_byte = costs.beta_s_per_byte,
                             .share_memory = false};
  costs.beta_s_per_byte *= workload.costs.oversubscription;  // while all ranks of a node send
  costs.beta_exchange_s_per_byte *= workload.costs.oversubscription;
  return std::make_shared<SparseChoice>(AllreduceTable(workload.ranks).on_two_levels(true), costs, false, Overlaps{},
                                        node_costs);
}

RequestPtr dense_request(const Workload& workload, ConstBytes input, Bytes output) {
  const Partition blocks(all_bytes(workload), workload.ranks);
  switch (workload.operation) {
    case Operation::allreduce:
      return make_all_reduce(workload.ranks, {.input = input,
                                              .output = output,
                                              .algorithm = workload.algorithm,
                                              .nodes = levels_of(workload)});
    case Operation::allgather: return make_all_gather(DType::f32, input, output, blocks);
    case Operation::gather: return make_gather(DType::f32, input, output, blocks, workload.root);
    case Operation::scatter: return make_scatter(DType::f32, input, output, blocks, workload.root);
    case Operation::all_to_all: return make_all_to_all(workload.ranks, DType::f32, input, output);
    case Operation::broadcast: return make_broadcast(workload.ranks, DType::f32, output, workload.root);
    case Operation::reduce: return make_reduce(workload.ranks, {.input = input, .output = output}, workload.root);
    case Operation::reduce_scatter: return make_reduce_scatter({.input = input, .output = output}, blocks_of(workload));
    default: return make_barrier();
  }
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(std::as_bytes(a), std::as_bytes(b));
}

// All ranks share the heads of an input and an output that nobody reads or writes. What they claim overlaps; but blocks are
// floats, and the output lies at an odd address: so no block of it begins where one of the input does, which would look
// as if it were in place.
class DenseSizes final : public MeasuredRanks {
 public:
  explicit DenseSizes(const Workload& workload) : workload_(workload) {}

  RequestPtr request(Rank rank) override {
    return dense_request(workload_, {input_.data(), input_bytes(workload_, rank)},
                         {output_.data() + 1, output_bytes(workload_, rank)});
  }

 private:
  const Workload& workload_;
  alignas(float) std::array<std::byte, Buffer::kHeadBytes> input_{};
  alignas(float) std::array<std::byte, 1 + Buffer::kHeadBytes> output_{};
};

class DenseValues final : public MeasuredRanks {
 public:
  explicit DenseValues(const Workload& workload) : workload_(workload), outputs_(workload.ranks) {
    for (Rank rank = 0; rank < workload.ranks; ++rank) inputs_.push_back(values_of(rank));
  }

  RequestPtr request(Rank rank) override {
    outputs_[rank].resize(output_bytes(workload_, rank) / sizeof(float));
    if (workload_.operation == Operation::broadcast && rank == workload_.root) outputs_[rank] = inputs_[rank];
    return dense_request(workload_, std::as_bytes(std::span(inputs_[rank])),
                         std::as_writable_bytes(std::span(outputs_[rank])));
  }

  std::optional<Rank> wrong() const override {
    const std::vector<float> same_for_all = expected_output();
    for (Rank rank = 0; rank < workload_.ranks; ++rank) {
      const bool own = workload_.operation == Operation::scatter || workload_.operation == Operation::all_to_all;
      if (workload_.operation == Operation::gather && rank != workload_.root) continue;
      const std::vector<float> of_rank = own ? blocks_for(rank) : std::vector<float>{};
      std::span<const float> wanted = own ? of_rank : same_for_all;
      if (workload_.operation == Operation::reduce_scatter) {
        const Range block = blocks_of(workload_)[rank];
        wanted = wanted.subspan(block.begin, block.size());
      }
      if (workload_.operation == Operation::reduce && rank != workload_.root) wanted = untouched_;
      if (!same_bits(std::span(outputs_[rank]), wanted)) return rank;
    }
    return std::nullopt;
  }

 private:
  std::vector<float> values_of(Rank rank) const {
    std::vector<float> values(input_bytes(workload_, rank) / sizeof(float));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(workload_, rank, i);
    return values;
  }

  // What the others (only the root, of a scatter) have for this rank.
  std::vector<float> blocks_for(Rank rank) const {
    const auto count = static_cast<std::ptrdiff_t>(workload_.bytes / sizeof(float));
    std::vector<float> blocks;
    for (const auto& input : inputs_) {
      if (input.empty()) continue;
      blocks.insert(blocks.end(), input.begin() + rank * count, input.begin() + (rank + 1) * count);
    }
    return blocks;
  }

  std::vector<float> expected_output() const {
    if (workload_.operation == Operation::broadcast) return inputs_[workload_.root];
    if (workload_.operation == Operation::barrier) return outputs_[0];
    const bool gathers = workload_.operation == Operation::allgather || workload_.operation == Operation::gather;
    const bool reduces = workload_.operation == Operation::allreduce || workload_.operation == Operation::reduce ||
                         workload_.operation == Operation::reduce_scatter;
    std::vector<float> expected;
    for (const auto& input : inputs_) {
      if (gathers || (reduces && expected.empty())) {
        expected.insert(expected.end(), input.begin(), input.end());
      } else if (reduces) {
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += input[i];
      }
    }
    return expected;
  }

  const Workload& workload_;
  std::vector<std::vector<float>> inputs_;
  std::vector<std::vector<float>> outputs_;
  const std::vector<float> untouched_ = std::vector<float>(workload_.bytes / sizeof(float));
};

// Of one rank: its calls learn from each other.
SparseReduction sparse_reduction(const Workload& workload, const std::shared_ptr<const Nodes>& nodes) {
  return {.switch_factor = workload.switch_factor,
          .algorithm = workload.algorithm,
          .wire = workload.wire,
          .choice = choice_of(workload, nodes.get()),
          .nodes = nodes};
}

std::vector<SparseReduction> sparse_reductions(const Workload& workload) {
  std::vector<SparseReduction> reductions;
  const auto nodes = levels_of(workload);
  for (Rank rank = 0; rank < workload.ranks; ++rank) reductions.push_back(sparse_reduction(workload, nodes));
  return reductions;
}

class SparseSizes final : public MeasuredRanks {
 public:
  explicit SparseSizes(const Workload& workload) : workload_(workload), reductions_(sparse_reductions(workload)) {}

  RequestPtr request(Rank rank) override {
    const std::uint64_t common = common_entries(workload_);
    auto vector = SparseVector<CountedF32>::sparse(
        workload_.bytes / sizeof(float),
        {.common = common, .own = workload_.nnz - common, .seed = mix(mix(workload_.seed) + rank + 1) | 1});
    sums_.push_back(make_all_reduce(std::move(vector), reductions_[rank]));
    return sums_.back().request;
  }
  std::uint64_t result_nnz() const override { return (*sums_[0].result)->nnz(); }

 private:
  const Workload& workload_;
  const std::vector<SparseReduction> reductions_;
  std::vector<SparseSum<CountedF32>> sums_;
};

class SparseValues final : public MeasuredRanks {
 public:
  explicit SparseValues(const Workload& workload)
      : workload_(workload), nodes_(levels_of(workload)), expected_(workload.bytes / sizeof(float)) {}

  RequestPtr request(Rank rank) override {
    const std::vector<std::uint32_t> indices = indices_of(workload_, rank);
    std::vector<float> values;
    for (const std::uint32_t index : indices) {
      values.push_back(value_of(workload_, rank, index));
      expected_[index] += values.back();
    }
    auto vector = SparseVector<float>::sparse(expected_.size(), indices, values);
    sums_.push_back(make_all_reduce(std::move(vector), sparse_reduction(workload_, nodes_)));
    return sums_.back().request;
  }
  std::uint64_t result_nnz() const override { return (*sums_[0].result)->nnz(); }

  std::optional<Rank> wrong() const override {
    std::vector<float> dense(expected_.size());
    const SparseVector<float>& first = **sums_[0].result;
    first.write_dense(dense);
    const double off_most = rounding_most(workload_);
    for (std::size_t i = 0; i < dense.size(); ++i) {
      if (!(std::abs(static_cast<double>(dense[i]) - expected_[i]) <= off_most)) return 0;
    }
    for (Rank rank = 1; rank < workload_.ranks; ++rank) {
      if (!same_vector(**sums_[rank].result, first)) return rank;
    }
    return std::nullopt;
  }

 private:
  static bool same_vector(const SparseVector<float>& a, const SparseVector<float>& b) {
    return a.is_dense() == b.is_dense() && std::ranges::equal(a.indices(), b.indices()) &&
           same_bits(a.values(), b.values());
  }

  const Workload& workload_;
  const std::shared_ptr<const Nodes> nodes_;
  std::vector<float> expected_;
  std::vector<SparseSum<float>> sums_;
};

std::unique_ptr<MeasuredRanks> ranks_of(const Workload& workload) {
  if (measures_vectors(workload.operation)) return measured_vectors(workload);
  const bool sparse = workload.operation == Operation::sparse_allreduce;
  if (sparse && workload.payloads) return std::make_unique<SparseValues>(workload);
  if (sparse) return std::make_unique<SparseSizes>(workload);
  if (workload.payloads) return std::make_unique<DenseValues>(workload);
  return std::make_unique<DenseSizes>(workload);
}

Measurement measurement_of(const Workload& workload, Simulation& simulation) {
  Measurement found;
  const SimNetwork& network = simulation.network();
  for (Rank rank = 0; rank < workload.ranks; ++rank) {
    const SimCounts& counts = network.counts(rank);
    found.finish_by_rank_s.push_back(simulation.finish_s(rank));
    found.finish_s = std::max(found.finish_s, simulation.finish_s(rank));
    found.messages_sent.push_back(counts.messages_sent);
    found.messages_received.push_back(counts.messages_received);
    found.bytes_sent.push_back(counts.bytes_sent);
    found.bytes_received.push_back(counts.bytes_received);
  }
  found.events = network.events();
  if (workload.links) found.links = network.links();
  if (workload.timeline) found.timeline = network.timeline();
  return found;
}

}  // namespace

NetworkCosts costs_of(const SimCosts& costs) {
  return {.alpha_s = costs.alpha_s,
          .beta_s_per_byte = costs.beta_s_per_byte,
          .beta_exchange_s_per_byte = costs.beta_exchange_s_per_byte,
          .gamma_s_per_byte = costs.gamma_s_per_byte};
}

Measurement measure(const Workload& workload) {
  validate(workload);
  const std::unique_ptr<MeasuredRanks> ranks = ranks_of(workload);  // outlives the sessions, which may hold its memory
  Simulation simulation(workload.ranks,
                        {.costs = workload.costs, .seed = workload.seed, .size_only = !workload.payloads});
  if (workload.links) simulation.network().keep_links();
  if (workload.timeline) simulation.network().keep_timeline();
  std::vector<RequestPtr> requests;
  // Calls that follow each other with a state are made one by one.
  const std::function<void(Rank, std::uint32_t)> call = [&](Rank rank, std::uint32_t left) {
    const RequestPtr request = ranks->request(rank);
    requests.push_back(request);
    if (left > 1) {
      request->when_done([&call, rank, left, last = request.get()] {
        if (!last->failure()) call(rank, left - 1);
      });
    }
    simulation.begin(rank, request, simulation.now_s());
  };
  for (Rank rank = 0; rank < workload.ranks; ++rank) {
    if (workload.operation == Operation::allreduce_topk) {
      call(rank, workload.calls);
      continue;
    }
    requests.push_back(ranks->request(rank));
    simulation.begin(rank, requests.back());
    for (std::uint32_t call = 1; call < workload.calls; ++call) {
      requests.push_back(ranks->request(rank));
      simulation.begin_when_idle(rank, requests.back());
    }
  }
  const Outcome outcome = simulation.run();
  if (outcome.deadlock) {
    throw std::runtime_error("the ranks wait for each other for ever; please report this as a bug. Unfinished:\n" +
                             outcome.unfinished);
  }
  for (const RequestPtr& request : requests) {
    if (request->failure()) throw std::runtime_error("a rank failed: " + request->failure()->message());
  }
  if (workload.payloads) {
    if (const auto rank = ranks->wrong()) {
      throw std::runtime_error("rank " + std::to_string(*rank) + " has a wrong result of " +
                               describe(requests[*rank]->call()) + "; please report this as a bug");
    }
  }
  Measurement found = measurement_of(workload, simulation);
  found.result_nnz = ranks->result_nnz();
  for (const SparseTraffic& traffic : ranks->traffic()) {
    found.words_sent.push_back(2 * traffic.entries_sent);
    found.words_received.push_back(2 * traffic.entries_received);
  }
  return found;
}

}  // namespace telegrad
