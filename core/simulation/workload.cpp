#include "simulation/workload.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "base/random.hpp"
#include "codec/sparse_vector.hpp"
#include "simulation/measured_ranks.hpp"

namespace telegrad {
namespace {

struct CostName {
  std::string_view name;
  double SimCosts::*field;
};
constexpr CostName kCosts[] = {
    {"alpha_s", &SimCosts::alpha_s},
    {"beta_s_per_byte", &SimCosts::beta_s_per_byte},
    {"beta_exchange_s_per_byte", &SimCosts::beta_exchange_s_per_byte},
    {"gamma_s_per_byte", &SimCosts::gamma_s_per_byte},
    {"jitter", &SimCosts::jitter},
    {"compute_noise", &SimCosts::compute_noise},
    {"start_noise_s", &SimCosts::start_noise_s},
    {"node_alpha_s", &SimCosts::node_alpha_s},
    {"node_beta_s_per_byte", &SimCosts::node_beta_s_per_byte},
    {"oversubscription", &SimCosts::oversubscription},
};
// A rank's values lie between -kLargest and kLargest.
constexpr std::uint64_t kLargest = 7;
constexpr std::uint64_t kValues = 2 * kLargest + 1;

constexpr std::string_view kRanksPerNode = "ranks_per_node";

struct OperationName {
  std::string_view name;
  Operation operation;
};
constexpr OperationName kOperations[] = {
    {"allreduce", Operation::allreduce}, {"sparse_allreduce", Operation::sparse_allreduce},
    {"allgather", Operation::allgather}, {"broadcast", Operation::broadcast},
    {"barrier", Operation::barrier},     {"reduce", Operation::reduce},
    {"gather", Operation::gather},       {"reduce_scatter", Operation::reduce_scatter},
    {"scatter", Operation::scatter},     {"all_to_all", Operation::all_to_all},
    {"sparse_allgather", Operation::sparse_allgather},
    {"sparse_reduce_scatter", Operation::sparse_reduce_scatter},
    {"allreduce_topk", Operation::allreduce_topk},
};
constexpr Algorithm kAlgorithms[] = {Algorithm::ring,
                                     Algorithm::recursive_doubling,
                                     Algorithm::split_allgather,
                                     Algorithm::split_dense_allgather,
                                     Algorithm::rabenseifner,
                                     Algorithm::two_level};

std::string quoted(std::string_view text) {
  std::string quoted = "'";
  quoted += text;
  return quoted += '\'';
}

void add_name(std::string& names, std::string_view name) {
  if (!names.empty()) names += ", ";
  names += quoted(name);
}

std::string text(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", value);
  return digits;
}

void require(bool holds, std::string_view argument, const std::string& value, const std::string& remedy) {
  if (!holds) throw std::invalid_argument(std::string(argument) + " is " + value + ": " + remedy);
}

void validate_two_level(const Workload& workload) {
  require(nodes_of(workload)->two_level(), "algorithm", "'two_level'",
          "it needs nodes of some of the ranks, give costs['ranks_per_node'] above 1 and below the number of ranks");
}

void validate_algorithm(const Workload& workload) {
  const auto is = [&](Algorithm algorithm) { return workload.algorithm == algorithm; };
  const std::string named = is(Algorithm::automatic) ? "''" : quoted(name_of(workload.algorithm));
  const bool sums = workload.operation == Operation::allreduce || workload.operation == Operation::sparse_allreduce;
  if (sums && is(Algorithm::two_level)) return validate_two_level(workload);
  if (workload.operation == Operation::allreduce) {
    require(is(Algorithm::ring) || is(Algorithm::recursive_doubling) || is(Algorithm::rabenseifner), "algorithm", named,
            "an allreduce has four, give 'ring', 'recursive_doubling', 'rabenseifner' or 'two_level'");
  } else if (workload.operation == Operation::sparse_allreduce) {
    require(is(Algorithm::automatic) || is(Algorithm::split_allgather) || is(Algorithm::split_dense_allgather) ||
                is(Algorithm::recursive_doubling) || is(Algorithm::ring),
            "algorithm", named,
            "give '', 'split_allgather', 'split_dense_allgather', 'recursive_doubling', 'ring' or 'two_level' for a "
            "sparse_allreduce");
  } else {
    require(is(Algorithm::automatic), "algorithm", named,
            std::string("it follows from ranks and bytes for this operation, ") + name_of(workload.operation) +
                ": give ''");
  }
}

bool has_entries(const Workload& workload) {
  return workload.operation == Operation::sparse_allreduce || measures_vectors(workload.operation);
}

void validate_wire(const Workload& workload) {
  const WireFormat& wire = workload.wire;
  const bool sparse = has_entries(workload);
  const bool rounds = wire.values != ValueEncoding::native;
  require(sparse || (wire.indices == IndexFormat::none && !rounds && !wire.packs_values), "wire",
          std::string(name_of(wire.indices)) + " indices and " + name_of(wire.values) + " values",
          "only sparse operations have formats of entries, give 'none' and 'native'");
  const bool sums = workload.operation == Operation::sparse_allreduce || workload.operation == Operation::allreduce_topk;
  require(!rounds || sums, "values", name_of(wire.values),
          "only sums of whole vectors are measured with values that are rounded, give 'native'");
  require(!rounds || workload.algorithm != Algorithm::recursive_doubling, "values", name_of(wire.values),
          "recursive_doubling takes no values that are rounded, give 'native' or another algorithm");
}

void validate_costs(const SimCosts& costs) {
  for (const CostName& cost : kCosts) {
    const double value = costs.*cost.field;
    require(std::isfinite(value) && value >= 0.0, "costs[" + quoted(cost.name) + "]", text(value),
            "it must be a finite number that is not negative");
  }
  require(costs.oversubscription > 0.0, "costs['oversubscription']", text(costs.oversubscription),
          "it must be positive; 1 is a network that is not oversubscribed");
}

// `count` of the numbers below `bound`, ascending, each set equally likely.
std::vector<std::uint32_t> sample(std::uint64_t bound, std::uint64_t count, Random& random) {
  std::vector<std::uint32_t> chosen;
  chosen.reserve(count);
  if (count * 16 < bound) {  // drawn again where twice
    while (chosen.size() < count) {
      const std::size_t missing = count - chosen.size();
      for (std::size_t i = 0; i < missing; ++i) chosen.push_back(static_cast<std::uint32_t>(random.below(bound)));
      std::sort(chosen.begin(), chosen.end());
      chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    }
    return chosen;
  }
  // Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S.
  for (std::uint64_t i = 0; chosen.size() < count; ++i) {
    if (random.below(bound - i) < count - chosen.size()) chosen.push_back(static_cast<std::uint32_t>(i));
  }
  return chosen;
}

}  // namespace

Operation operation_named(std::string_view name) {
  for (const OperationName& known : kOperations) {
    if (known.name == name) return known.operation;
  }
  std::string names;
  for (const OperationName& known : kOperations) add_name(names, known.name);
  throw std::invalid_argument("operation is " + quoted(name) + ": it must be one of " + names);
}

Algorithm algorithm_named(std::string_view name) {
  if (name.empty()) return Algorithm::automatic;
  std::string names;
  for (const Algorithm algorithm : kAlgorithms) {
    if (name == name_of(algorithm)) return algorithm;
    add_name(names, name_of(algorithm));
  }
  throw std::invalid_argument("algorithm is " + quoted(name) + ": it must be one of " + names + ", or ''");
}

std::shared_ptr<const Nodes> nodes_of(const Workload& workload) {
  const Rank per_node = std::max<Rank>(1, workload.costs.ranks_per_node);
  std::vector<std::uint32_t> labels;
  for (Rank rank = 0; rank < std::max<Rank>(1, workload.ranks); ++rank) labels.push_back(rank / per_node);
  return std::make_shared<const Nodes>(std::span<const std::uint32_t>(labels));
}

void set_cost(SimCosts& costs, std::string_view name, double value) {
  if (name == kRanksPerNode) {
    require(value >= 0.0 && value <= 0xffffffff && value == std::floor(value), "costs['ranks_per_node']", text(value),
            "it must be a whole number that is not negative");
    costs.ranks_per_node = static_cast<Rank>(value);
    return;
  }
  std::string names;
  add_name(names, kRanksPerNode);
  for (const CostName& cost : kCosts) {
    if (cost.name == name) {
      costs.*cost.field = value;
      return;
    }
    add_name(names, cost.name);
  }
  throw std::invalid_argument("costs has " + quoted(name) + ": its names must be of " + names);
}

void validate(const Workload& workload) {
  require(workload.ranks >= 1, "ranks", "0", "give at least 1");
  require(workload.bytes % sizeof(float) == 0, "bytes", std::to_string(workload.bytes),
          "it must be a multiple of 4, as elements are f32");
  validate_algorithm(workload);
  validate_wire(workload);
  const bool sparse = has_entries(workload);
  const std::uint64_t elements = workload.bytes / sizeof(float);
  require(sparse || workload.nnz == 0, "nnz", std::to_string(workload.nnz),
          "only sparse operations have entries, give 0");
  require(workload.operation == Operation::allreduce_topk || workload.keep == 0, "keep", std::to_string(workload.keep),
          "only an allreduce_topk keeps a part of a sum, give 0");
  require(!measures_vectors(workload.operation) || workload.payloads, "payloads", "False",
          "this operation is measured with real entries, give payloads=True");
  if (sparse) {
    require(elements <= kDimensionMost, "bytes", std::to_string(workload.bytes),
            "a sparse vector has at most " + std::to_string(kDimensionMost) + " elements, of 4 bytes each");
    require(workload.nnz <= elements, "nnz", std::to_string(workload.nnz),
            "a vector of " + std::to_string(workload.bytes) + " bytes has at most " + std::to_string(elements) +
                " entries");
  }
  require(workload.overlap >= 0.0 && workload.overlap <= 1.0, "overlap", text(workload.overlap),
          "it is a share of the entries, between 0 and 1");
  require(std::isfinite(workload.switch_factor) && workload.switch_factor >= 0.0, "switch_factor",
          text(workload.switch_factor), "it must not be negative; 1 switches where both forms take the same bytes");
  require(workload.root < workload.ranks, "root", std::to_string(workload.root),
          "it must be a rank, below " + std::to_string(workload.ranks));
  require(workload.calls >= 1, "calls", "0", "give at least 1");
  require(workload.calls == 1 || !workload.payloads || workload.operation == Operation::allreduce_topk, "calls", std::to_string(workload.calls),
          "one call after another goes without payloads only, give payloads=False or calls=1");
  validate_costs(workload.costs);
}

std::uint64_t common_entries(const Workload& workload) {
  return static_cast<std::uint64_t>(std::llround(workload.overlap * static_cast<double>(workload.nnz)));
}

float value_of(const Workload& workload, Rank rank, std::uint64_t i) {
  const std::uint64_t word = mix(mix(workload.seed + 1) + (std::uint64_t{rank} << 40) + i);
  return static_cast<float>(word % kValues) - static_cast<float>(kLargest);
}

double rounding_of(ValueEncoding encoding) {
  switch (encoding) {
    case ValueEncoding::native: return 0.0;
    case ValueEncoding::bf16: return 0x1p-8;
    case ValueEncoding::f16: return 0x1p-11;
    case ValueEncoding::int8: return 1.0 / 127;
    case ValueEncoding::qsgd8: return 1.0 / 127;
    case ValueEncoding::qsgd4: return 1.0 / 7;
    case ValueEncoding::qsgd2:
    case ValueEncoding::mean: return 1.0;
    case ValueEncoding::e3m0: return 0.25;
    case ValueEncoding::codebook2: return 2.0;
  }
  return 0.0;
}

bool has_own_scale(ValueEncoding encoding) {
  return encoding == ValueEncoding::bf16 || encoding == ValueEncoding::f16;
}

double rounding_most(const Workload& workload) {
  // Every message may round what it holds, by this part of the largest of it.
  const double part = rounding_of(workload.wire.values);
  constexpr auto kMost = static_cast<double>(kLargest);
  const double sum = kMost * workload.ranks;
  double off = 0.0;
  if (workload.algorithm == Algorithm::ring) {  // a sum is rounded at every hop
    for (Rank rank = 1; rank < workload.ranks; ++rank) off += part * (kMost * rank + off);
  } else {
    off = part * sum;
  }
  return off + part * (sum + off);
}

std::vector<std::uint32_t> indices_of(const Workload& workload, Rank rank) {
  const std::uint64_t elements = workload.bytes / sizeof(float);
  const std::uint64_t common_count = common_entries(workload);
  Random of_all(workload.seed);
  Random of_rank(mix(workload.seed) + rank + 1);
  const std::vector<std::uint32_t> common = sample(elements, common_count, of_all);
  const std::vector<std::uint32_t> own = sample(elements - common_count, workload.nnz - common_count, of_rank);
  // Own indices are counted among those that are not common.
  std::vector<std::uint32_t> indices;
  indices.reserve(workload.nnz);
  std::size_t passed = 0;
  for (const std::uint32_t place : own) {
    for (; passed < common.size() && common[passed] <= place + passed; ++passed) indices.push_back(common[passed]);
    indices.push_back(static_cast<std::uint32_t>(place + passed));
  }
  indices.insert(indices.end(), common.begin() + static_cast<std::ptrdiff_t>(passed), common.end());
  return indices;
}

}  // namespace telegrad
