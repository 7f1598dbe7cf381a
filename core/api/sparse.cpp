// The operations of a Communicator on sparse vectors.

#include <atomic>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

#include "api/begin.hpp"
#include "collectives/sparse/auto.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"

namespace telegrad::api {
namespace {

using detail::begun;
using detail::Held;
using detail::Joined;

WireFormat wire_of(const SparseOptions& options, Joined& joined) {
  WireFormat wire{.values = options.values, .key = {.seed = options.seed}};
  const bool packs = options.wire == Wire::packed ||
                     (options.wire == Wire::automatic && !joined.core->shares_memory() &&
                      std::string_view(joined.core->driver_name()) != "local");
  if (packs) wire.indices = IndexFormat::packed;
  if (options.wire == Wire::raw) wire.indices = IndexFormat::raw32;
  wire.packs_values = packs;
  if (options.values != ValueEncoding::native) wire.key.call = joined.encoded_calls++;
  return wire;
}

template <SparseValue V>
SparseReduction reduction_of(const SparseVector<V>& vector, Reduction reduction, const SparseOptions& options,
                             Joined& joined) {
  const Algorithm algorithm = detail::algorithm_named(options.algorithm, detail::kSparseAlgorithms);
  detail::check_reduction(reduction);
  if (!has_reduction(detail::dtype<V>(), reduction) || reduction > Reduction::max_abs) {
    throw std::invalid_argument(std::string("reduction=") + name_of(reduction) + " is not for sparse vectors of " +
                                name_of(detail::dtype<V>()) + ": use sum, …");
  }
  if (options.values > kLastValueEncoding) {
    throw std::invalid_argument("values=" + std::to_string(static_cast<int>(options.values)) +
                                " is no ValueEncoding: use one of its names");
  }
  if (options.wire > Wire::packed) {
    throw std::invalid_argument("wire=" + std::to_string(static_cast<int>(options.wire)) +
                                " is no Wire: use one of its names");
  }
  if (!(options.switch_factor >= 0)) {
    throw std::invalid_argument("switch_factor=" + std::to_string(options.switch_factor) + " must be 0 or more");
  }
  if (options.balanced && algorithm == Algorithm::recursive_doubling) {
    throw std::invalid_argument("balanced slices are not for algorithm=recursive_doubling, which has none");
  }
  if (options.values != ValueEncoding::native) {
    const std::string given = std::string("values=") + name_of(options.values);
    if (!std::is_same_v<V, float>) throw std::invalid_argument(given + " is for vectors of float: leave it out");
    if (reduction != Reduction::sum && reduction != Reduction::avg) {
      throw std::invalid_argument(given + " rounds, which is for sums and averages only: leave it out");
    }
    if (algorithm == Algorithm::recursive_doubling) {
      throw std::invalid_argument(given + " rounds, which algorithm=recursive_doubling cannot: use another");
    }
  }
  if (!options.error.empty() && options.error.size() != vector.n()) {
    throw std::invalid_argument("error has " + std::to_string(options.error.size()) + " elements but the sparse vector n=" +
                                std::to_string(vector.n()) + ": give it as many");
  }
  return {.reduction = reduction,
          .switch_factor = options.switch_factor,
          .algorithm = algorithm,
          .wire = wire_of(options, joined),
          .residual = options.error,
          .slices = options.balanced ? Slices::balanced : Slices::equal,
          .is_unsigned = std::unsigned_integral<V>};
}

// The library's own vector; without a copy where the caller has given away the last of its own.
template <SparseValue V>
using Library = telegrad::SparseVector<typename detail::Signed<V>::Value>;

template <SparseValue V>
Library<V> given(const SparseVector<V>& vector) {
  if (vector.held().use_count() != 1) return vector.held()->vector.clone();
  std::atomic_thread_fence(std::memory_order_acquire);  // another thread's copy may have been read until just now
  return std::move(vector.held()->vector);
}

// For a sum: where that may be made densely, also what takes less memory so.
template <SparseValue V>
Library<V> addend(const SparseVector<V>& vector, const SparseReduction& how) {
  Library<V> mine = given(vector);
  if (begins_densely<typename detail::Signed<V>::Value>(mine.dimension(), mine.nnz(), how)) mine.to_dense(how.reduction);
  return mine;
}

// What `convert` makes of `result`, once.
template <class T, class Found, class Convert>
std::function<T()> once(std::shared_ptr<std::optional<Found>> result, Convert convert) {
  struct Made {
    std::once_flag flag;
    std::optional<T> value;
  };
  return [made = std::make_shared<Made>(), result = std::move(result), convert] {
    std::call_once(made->flag, [&] { made->value.emplace(convert(std::move(**result))); });
    return *made->value;
  };
}

template <SparseValue V>
SparseVector<V> wrapped(Library<V> vector) {
  return SparseVector<V>(std::make_shared<Held<V>>(std::move(vector)));
}

}  // namespace

template <SparseValue V>
Result<SparseVector<V>> Communicator::all_reduce(SparseVector<V> vector, Reduction reduction,
                                                 const SparseOptions& options) {
  SparseReduction how = reduction_of(vector, reduction, options, *state());
  how.choice = state()->core->sparse_choice();
  auto sum = make_all_reduce(addend(vector, how), how);
  return {begun(state(), sum.request), once<SparseVector<V>>(sum.result, wrapped<V>)};
}

template <SparseValue V>
Work Communicator::all_reduce_into(SparseVector<V> vector, std::type_identity_t<std::span<V>> out, Reduction reduction,
                                   const SparseOptions& options) {
  if (out.size() != vector.n()) {
    throw std::invalid_argument("out has " + std::to_string(out.size()) + " elements but the sparse vector n=" +
                                std::to_string(vector.n()) + ": give it as many");
  }
  SparseReduction how = reduction_of(vector, reduction, options, *state());
  if (detail::overlap(std::as_bytes(out), std::as_bytes(options.error))) {
    throw std::invalid_argument("error shares memory with out: give each memory of its own");
  }
  how.choice = state()->core->sparse_choice();
  return Work(begun(state(), make_all_reduce_into(addend(vector, how), detail::as_held(out), how)));
}

template <SparseValue V>
Result<SparseVector<V>> Communicator::reduce_scatter(SparseVector<V> vector, Reduction reduction, Counts counts,
                                                     const SparseOptions& options) {
  if (options.algorithm != "auto" || options.balanced) {
    throw std::invalid_argument("algorithm and balanced are not for reduce_scatter, which has one way: leave them out");
  }
  detail::check_counts("counts", counts, size());
  Partition slices = counts.empty() ? Partition(vector.n(), size()) : Partition(counts);
  if (slices.count() != vector.n()) {
    throw std::invalid_argument("counts add up to " + std::to_string(slices.count()) + " but the sparse vector has n=" +
                                std::to_string(vector.n()) + ": give each element to one rank");
  }
  const SparseReduction how = reduction_of(vector, reduction, options, *state());
  auto sum = make_reduce_scatter(given(vector), std::move(slices), how);
  return {begun(state(), sum.request), once<SparseVector<V>>(sum.result, wrapped<V>)};
}

template <SparseValue V>
Result<std::vector<SparseVector<V>>> Communicator::all_gather(SparseVector<V> vector, const SparseOptions& options) {
  if (options.algorithm != "auto" || options.balanced || options.switch_factor != 1.0) {
    throw std::invalid_argument(
        "algorithm, balanced and switch_factor are not for all_gather, which adds nothing: leave them out");
  }
  const SparseReduction how = reduction_of(vector, Reduction::sum, options, *state());
  auto gathered = make_all_gather(given(vector), how);
  const auto wrap_all = [](std::vector<Library<V>> found) {
    std::vector<SparseVector<V>> all;
    for (Library<V>& one : found) all.push_back(wrapped<V>(std::move(one)));
    return all;
  };
  return {begun(state(), gathered.request), once<std::vector<SparseVector<V>>>(gathered.result, wrap_all)};
}

#define TELEGRAD_SPARSE_OF(V)                                                                                     \
  template Result<SparseVector<V>> Communicator::all_reduce(SparseVector<V>, Reduction, const SparseOptions&);     \
  template Work Communicator::all_reduce_into(SparseVector<V>, std::type_identity_t<std::span<V>>, Reduction,      \
                                              const SparseOptions&);                                               \
  template Result<SparseVector<V>> Communicator::reduce_scatter(SparseVector<V>, Reduction, Counts,                \
                                                                const SparseOptions&);                             \
  template Result<std::vector<SparseVector<V>>> Communicator::all_gather(SparseVector<V>, const SparseOptions&);
TELEGRAD_SPARSE_OF(float)
TELEGRAD_SPARSE_OF(double)
TELEGRAD_SPARSE_OF(bf16)
TELEGRAD_SPARSE_OF(f16)
TELEGRAD_SPARSE_OF(std::int32_t)
TELEGRAD_SPARSE_OF(std::int64_t)
TELEGRAD_SPARSE_OF(std::uint32_t)
TELEGRAD_SPARSE_OF(std::uint64_t)
#undef TELEGRAD_SPARSE_OF

}  // namespace telegrad::api
