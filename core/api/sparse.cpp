// The operations of a Communicator on sparse streams.

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

template <StreamValue V>
SparseReduction reduction_of(const SparseStream<V>& stream, Reduction reduction, const SparseOptions& options,
                             Joined& joined) {
  const Algorithm algorithm = detail::algorithm_named(options.algorithm, detail::kSparseAlgorithms);
  detail::check_reduction(reduction);
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
    if (!std::is_same_v<V, float>) throw std::invalid_argument(given + " is for streams of float: leave it out");
    if (reduction != Reduction::sum && reduction != Reduction::avg) {
      throw std::invalid_argument(given + " rounds, which is for sums and averages only: leave it out");
    }
    if (algorithm == Algorithm::recursive_doubling) {
      throw std::invalid_argument(given + " rounds, which algorithm=recursive_doubling cannot: use another");
    }
  }
  if (!options.error.empty() && options.error.size() != stream.n()) {
    throw std::invalid_argument("error has " + std::to_string(options.error.size()) + " elements but the stream n=" +
                                std::to_string(stream.n()) + ": give it as many");
  }
  return {.reduction = reduction,
          .switch_factor = options.switch_factor,
          .algorithm = algorithm,
          .wire = wire_of(options, joined),
          .residual = options.error,
          .slices = options.balanced ? Slices::balanced : Slices::equal};
}

// The library's own stream; without a copy where the caller has given away the last of its own.
template <StreamValue V>
telegrad::SparseStream<V> given(const SparseStream<V>& stream) {
  if (stream.held().use_count() != 1) return stream.held()->stream.clone();
  std::atomic_thread_fence(std::memory_order_acquire);  // another thread's copy may have been read until just now
  return std::move(stream.held()->stream);
}

// For a sum: where that may be made densely, also what takes less memory so.
template <StreamValue V>
telegrad::SparseStream<V> addend(const SparseStream<V>& stream, const SparseReduction& how) {
  telegrad::SparseStream<V> mine = given(stream);
  if (begins_densely<V>(mine.dimension(), mine.nnz(), how)) mine.to_dense(how.reduction);
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

template <StreamValue V>
SparseStream<V> wrapped(telegrad::SparseStream<V> stream) {
  return SparseStream<V>(std::make_shared<Held<V>>(std::move(stream)));
}

}  // namespace

template <StreamValue V>
Result<SparseStream<V>> Communicator::all_reduce(SparseStream<V> stream, Reduction reduction,
                                                 const SparseOptions& options) {
  SparseReduction how = reduction_of(stream, reduction, options, *state());
  how.choice = state()->core->sparse_choice();
  auto sum = make_all_reduce(addend(stream, how), how);
  return {begun(state(), sum.request), once<SparseStream<V>>(sum.result, wrapped<V>)};
}

template <StreamValue V>
Work Communicator::all_reduce_into(SparseStream<V> stream, std::type_identity_t<std::span<V>> out, Reduction reduction,
                                   const SparseOptions& options) {
  if (out.size() != stream.n()) {
    throw std::invalid_argument("out has " + std::to_string(out.size()) + " elements but the stream n=" +
                                std::to_string(stream.n()) + ": give it as many");
  }
  SparseReduction how = reduction_of(stream, reduction, options, *state());
  if (detail::overlap(std::as_bytes(out), std::as_bytes(options.error))) {
    throw std::invalid_argument("error shares memory with out: give each memory of its own");
  }
  how.choice = state()->core->sparse_choice();
  return Work(begun(state(), make_all_reduce_into(addend(stream, how), out, how)));
}

template <StreamValue V>
Result<SparseStream<V>> Communicator::reduce_scatter(SparseStream<V> stream, Reduction reduction, Counts counts,
                                                     const SparseOptions& options) {
  if (options.algorithm != "auto" || options.balanced) {
    throw std::invalid_argument("algorithm and balanced are not for reduce_scatter, which has one way: leave them out");
  }
  detail::check_counts("counts", counts, size());
  Partition slices = counts.empty() ? Partition(stream.n(), size()) : Partition(counts);
  if (slices.count() != stream.n()) {
    throw std::invalid_argument("counts add up to " + std::to_string(slices.count()) + " but the stream has n=" +
                                std::to_string(stream.n()) + ": give each element to one rank");
  }
  const SparseReduction how = reduction_of(stream, reduction, options, *state());
  auto sum = make_reduce_scatter(given(stream), std::move(slices), how);
  return {begun(state(), sum.request), once<SparseStream<V>>(sum.result, wrapped<V>)};
}

template <StreamValue V>
Result<std::vector<SparseStream<V>>> Communicator::all_gather(SparseStream<V> stream, const SparseOptions& options) {
  if (options.algorithm != "auto" || options.balanced || options.switch_factor != 1.0) {
    throw std::invalid_argument(
        "algorithm, balanced and switch_factor are not for all_gather, which adds nothing: leave them out");
  }
  const SparseReduction how = reduction_of(stream, Reduction::sum, options, *state());
  auto gathered = make_all_gather(given(stream), how);
  const auto wrap_all = [](std::vector<telegrad::SparseStream<V>> found) {
    std::vector<SparseStream<V>> all;
    for (telegrad::SparseStream<V>& one : found) all.push_back(wrapped(std::move(one)));
    return all;
  };
  return {begun(state(), gathered.request), once<std::vector<SparseStream<V>>>(gathered.result, wrap_all)};
}

#define TELEGRAD_STREAMS_OF(V)                                                                                     \
  template Result<SparseStream<V>> Communicator::all_reduce(SparseStream<V>, Reduction, const SparseOptions&);     \
  template Work Communicator::all_reduce_into(SparseStream<V>, std::type_identity_t<std::span<V>>, Reduction,      \
                                              const SparseOptions&);                                               \
  template Result<SparseStream<V>> Communicator::reduce_scatter(SparseStream<V>, Reduction, Counts,                \
                                                                const SparseOptions&);                             \
  template Result<std::vector<SparseStream<V>>> Communicator::all_gather(SparseStream<V>, const SparseOptions&);
TELEGRAD_STREAMS_OF(float)
TELEGRAD_STREAMS_OF(double)
TELEGRAD_STREAMS_OF(bf16)
TELEGRAD_STREAMS_OF(f16)
#undef TELEGRAD_STREAMS_OF

}  // namespace telegrad::api
