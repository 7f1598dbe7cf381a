#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "base/random.hpp"
#include "collectives/topk/threshold.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "simulation/measured_ranks.hpp"
#include "simulation/workload.hpp"

namespace telegrad {
namespace {

using Vector = SparseVector<float>;
using Value = float (*)(const Workload&, Rank, std::uint64_t);

Vector vector_of(const Workload& workload, Rank rank, Value value) {
  const std::vector<std::uint32_t> indices = indices_of(workload, rank);
  std::vector<float> values;
  for (const std::uint32_t index : indices) values.push_back(value(workload, rank, index));
  return Vector::sparse(workload.bytes / sizeof(float), indices, values);
}

bool same_entries(std::span<const std::uint32_t> indices, std::span<const float> values, const Vector& other) {
  return !other.is_dense() && std::ranges::equal(indices, other.indices()) &&
         std::ranges::equal(std::as_bytes(values), std::as_bytes(other.values()));
}

// The sum of entries that are there, in the order of ranks.
struct Sum {
  std::vector<float> values;
  std::vector<bool> there;

  Sum(const std::vector<Vector>& inputs, std::size_t elements) : values(elements), there(elements) {
    for (const Vector& input : inputs) {
      for (std::size_t i = 0; i < input.nnz(); ++i) {
        const std::uint32_t at = input.indices()[i];
        values[at] = there[at] ? values[at] + input.values()[i] : input.values()[i];
        there[at] = true;
      }
    }
  }

  // The entries in a range whose magnitudes have at least this key.
  Vector part(Range range, std::uint64_t key) const {
    std::vector<std::uint32_t> indices;
    std::vector<float> kept;
    for (std::size_t at = range.begin; at < range.end; ++at) {
      if (!there[at] || magnitude_key(values[at]) < key) continue;
      indices.push_back(static_cast<std::uint32_t>(at));
      kept.push_back(values[at]);
    }
    return Vector::sparse(values.size(), indices, kept);
  }
};

class Gathering final : public MeasuredRanks {
 public:
  explicit Gathering(const Workload& workload) : workload_(workload) {
    for (Rank rank = 0; rank < workload.ranks; ++rank) inputs_.push_back(vector_of(workload, rank, value_of));
  }
  RequestPtr request(Rank rank) override {
    results_.push_back(make_all_gather(vector_of(workload_, rank, value_of), SparseReduction{.wire = workload_.wire}));
    return results_.back().request;
  }
  std::uint64_t result_nnz() const override { return workload_.nnz * workload_.ranks; }
  std::optional<Rank> wrong() const override {
    for (Rank rank = 0; rank < workload_.ranks; ++rank) {
      const std::vector<Vector>& vectors = **results_[rank].result;
      for (Rank source = 0; source < workload_.ranks; ++source) {
        if (!same_entries(inputs_[source].indices(), inputs_[source].values(), vectors[source])) return rank;
      }
    }
    return std::nullopt;
  }

 private:
  const Workload& workload_;
  std::vector<Vector> inputs_;
  std::vector<GatheredVectors<float>> results_;
};

class Scattering final : public MeasuredRanks {
 public:
  explicit Scattering(const Workload& workload)
      : workload_(workload), slices_(workload.bytes / sizeof(float), workload.ranks) {
    for (Rank rank = 0; rank < workload.ranks; ++rank) inputs_.push_back(vector_of(workload, rank, value_of));
  }
  RequestPtr request(Rank rank) override {
    // Nothing goes dense: a zero stays an entry.
    const SparseReduction how{.switch_factor = std::numeric_limits<double>::infinity(), .wire = workload_.wire};
    results_.push_back(make_reduce_scatter(vector_of(workload_, rank, value_of), slices_, how));
    return results_.back().request;
  }
  std::uint64_t result_nnz() const override { return (*results_[0].result)->nnz(); }
  std::optional<Rank> wrong() const override {
    const Sum sum(inputs_, slices_.count());
    for (Rank rank = 0; rank < workload_.ranks; ++rank) {
      const Vector slice = sum.part(slices_[rank], 0);
      if (!same_entries(slice.indices(), slice.values(), **results_[rank].result)) return rank;
    }
    return std::nullopt;
  }

 private:
  const Workload& workload_;
  const Partition slices_;
  std::vector<Vector> inputs_;
  std::vector<SparseSum<float>> results_;
};

// Of many magnitudes, the large ones rare: small integers would tie at every threshold.
float gradient_of(const Workload& workload, Rank rank, std::uint64_t i) {
  const std::uint64_t word = mix(mix(workload.seed + 1) + (std::uint64_t{rank} << 40) + i);
  const float part = (static_cast<float>(word >> 40) + 1.0F) * 0x1p-24F;
  return (word & 1 ? -1.0F : 1.0F) / (part * part + 0x1p-10F);
}

// Every call has entries of its own, and begins with what the last one has left.
class Keeping final : public MeasuredRanks {
 public:
  explicit Keeping(const Workload& workload) : workload_(workload), calls_(workload.ranks) {
    settings_.k = workload.keep > 0 ? workload.keep : std::max<std::uint64_t>(1, workload.nnz);
  }
  RequestPtr request(Rank rank) override {
    std::vector<TopkSum<float, OkTopkState>>& calls = calls_[rank];
    const OkTopkState state = calls.empty() ? OkTopkState{} : (*calls.back().result)->state;
    calls.push_back(make_all_reduce_topk(input(rank, calls.size()), settings_, state, Reduction::sum, workload_.wire));
    return calls.back().request;
  }
  std::uint64_t result_nnz() const override { return (*calls_[0].back().result)->sum.nnz(); }
  std::vector<SparseTraffic> traffic() const override {
    std::vector<SparseTraffic> all;
    for (const auto& calls : calls_) all.push_back((*calls.back().result)->report.traffic);
    return all;
  }
  std::optional<Rank> wrong() const override {
    for (std::size_t call = 0; call < workload_.calls; ++call) {
      std::vector<Vector> inputs;
      for (Rank rank = 0; rank < workload_.ranks; ++rank) inputs.push_back(input(rank, call));
      const OkTopkSum<float>& first = **calls_[0][call].result;
      const bool rounds = workload_.wire.values != ValueEncoding::native;
      if (rounds && !is_right_but_for_rounding(inputs, first)) return 0;
      const Vector kept = rounds ? Vector::sparse(first.sum.dimension(), first.sum.indices(), first.sum.values())
                                 : expected(inputs, first);
      for (Rank rank = 0; rank < workload_.ranks; ++rank) {
        const OkTopkSum<float>& result = **calls_[rank][call].result;
        if (!same_entries(kept.indices(), kept.values(), result.sum)) return rank;
        if (!is_rest(inputs[rank], kept, result.left)) return rank;
        const std::uint64_t most = std::max(result.report.local_most, result.report.selected);
        if (result.report.words_most() > oktopk_words_most(most, workload_.ranks)) return rank;
      }
    }
    return std::nullopt;
  }

 private:
  Vector input(Rank rank, std::size_t call) const {
    Workload of_call = workload_;
    if (call > 0) of_call.seed = mix(workload_.seed + call);
    return vector_of(of_call, rank, gradient_of);
  }

  // All that reaches the k-th largest; or, where an old threshold was used, the least that was kept.
  Vector expected(const std::vector<Vector>& inputs, const OkTopkSum<float>& found) const {
    const Sum sum(inputs, workload_.bytes / sizeof(float));
    std::vector<std::uint64_t> keys;
    for (std::size_t at = 0; found.report.exact && at < sum.values.size(); ++at) {
      if (sum.there[at]) keys.push_back(magnitude_key(sum.values[at]));
    }
    std::uint64_t least = found.report.exact ? 0 : ~std::uint64_t{0};
    if (keys.size() >= settings_.k) {
      const auto wanted = keys.begin() + static_cast<std::ptrdiff_t>(settings_.k - 1);
      std::ranges::nth_element(keys, wanted, std::greater<>());
      least = *wanted;
    }
    if (!found.report.exact) {
      for (const float value : found.sum.values()) least = std::min(least, magnitude_key(value));
    }
    return sum.part({0, sum.values.size()}, least);
  }

  // Entries are rounded on their way to their owner, and their sum once more; so a sum that is not kept may be larger than
  // one that is, by what rounding does to both.
  bool is_right_but_for_rounding(const std::vector<Vector>& inputs, const OkTopkSum<float>& found) const {
    const Sum sum(inputs, workload_.bytes / sizeof(float));
    double largest = 0.0;
    std::vector<double> magnitudes(sum.values.size());
    for (const Vector& input : inputs) {
      for (std::size_t i = 0; i < input.nnz(); ++i) {
        const double size = std::abs(static_cast<double>(input.values()[i]));
        magnitudes[input.indices()[i]] += size;
        largest = std::max(largest, size);
      }
    }
    const double part = rounding_of(workload_.wire.values) + 0x1p-20;  // of additions
    const auto off_most = [&](std::size_t at) {
      const double given = has_own_scale(workload_.wire.values) ? magnitudes[at] : largest * workload_.ranks;
      return part * given + part * (given + part * given);
    };
    double least_kept = std::numeric_limits<double>::infinity();  // what it may have been before it was rounded
    for (std::size_t i = 0; i < found.sum.nnz(); ++i) {
      const std::uint32_t at = found.sum.indices()[i];
      const double value = found.sum.values()[i];
      if (!sum.there[at] || !(std::abs(value - sum.values[at]) <= off_most(at))) return false;
      least_kept = std::min(least_kept, std::abs(value) + off_most(at));
    }
    const auto held = static_cast<std::uint64_t>(std::ranges::count(sum.there, true));
    if (found.report.exact && found.sum.nnz() < std::min<std::uint64_t>(held, settings_.k)) return false;
    for (std::size_t at = 0; at < sum.values.size(); ++at) {
      if (!sum.there[at] || std::ranges::binary_search(found.sum.indices(), static_cast<std::uint32_t>(at))) continue;
      if (std::abs(static_cast<double>(sum.values[at])) > least_kept + off_most(at)) return false;
    }
    return true;
  }

  static bool is_rest(const Vector& given, const Vector& kept, const Vector& left) {
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
    for (std::size_t i = 0; i < given.nnz(); ++i) {
      if (std::ranges::binary_search(kept.indices(), given.indices()[i])) continue;
      indices.push_back(given.indices()[i]);
      values.push_back(given.values()[i]);
    }
    return same_entries(indices, values, left);
  }

  const Workload& workload_;
  OkTopkSettings settings_;
  std::vector<std::vector<TopkSum<float, OkTopkState>>> calls_;  // by rank
};

}  // namespace

bool measures_vectors(Operation operation) {
  return operation == Operation::sparse_allgather || operation == Operation::sparse_reduce_scatter ||
         operation == Operation::allreduce_topk;
}

std::unique_ptr<MeasuredRanks> measured_vectors(const Workload& workload) {
  if (workload.operation == Operation::sparse_allgather) return std::make_unique<Gathering>(workload);
  if (workload.operation == Operation::sparse_reduce_scatter) return std::make_unique<Scattering>(workload);
  return std::make_unique<Keeping>(workload);
}

}  // namespace telegrad
