#pragma once
// An operation as Python sees it: the object that it waits for, for every class that runs Requests (an engine's
// Communicator, a simulated one).

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/binding.hpp"
#include "bindings/unlocked.hpp"
#include "collectives/sparse/auto.hpp"
#include "kernels/marks.hpp"
#include "progress/completion_queue.hpp"
#include "progress/engine.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"

namespace nanobind::detail {

template <>
struct dtype_traits<telegrad::f16> {
  static constexpr dlpack::dtype value{static_cast<std::uint8_t>(dlpack::dtype_code::Float), 16, 1};
  static constexpr auto name = const_name("float16");
};

}  // namespace nanobind::detail

namespace telegrad::bindings {

// How long a wait may go without a look at Python's signals.
inline constexpr double kSignalSlice_s = 0.1;

// Calls `attempt(deadline)` without the interpreter's lock until it is true or the time is over.
template <class Attempt>
bool with_signals(double deadline_s, Attempt attempt) {
  while (true) {
    bool over = false;
    {
      const Unlocked unlocked;
      over = attempt(std::min(deadline_s, Engine::now_s() + kSignalSlice_s));
    }
    if (over) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Engine::now_s() >= deadline_s) return false;
  }
}

template <class V>
nb::object owned_array(Array<V> array) {
  const std::size_t size = array.size();
  auto* const kept = new Array<V>(std::move(array));
  const nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<Array<V>*>(pointer); });
  using Element = std::conditional_t<std::is_same_v<V, bf16>, std::uint16_t, V>;
  return nb::cast(nb::ndarray<nb::numpy, Element, nb::ndim<1>>(kept->data(), {size}, owner));
}

// (indices or None when dense, values); bf16 values as their 16 bits.
template <class V>
nb::object vector_as_arrays(SparseVector<V> vector) {
  if (vector.is_dense()) return nb::make_tuple(nb::none(), owned_array(vector.take_values()));
  nb::object indices = owned_array(vector.take_indices());
  return nb::make_tuple(std::move(indices), owned_array(vector.take_values()));
}

// Calls body(V{}) for the type of a vector's values; on_float_type() where that cannot be of integers.
template <class Body>
auto on_float_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f32: return body(float{});
    case DType::f64: return body(double{});
    case DType::bf16: return body(bf16{});
    case DType::f16: return body(f16{});
    default: throw nb::value_error("the values of these sparse vectors are f32, f64, bf16 or f16");
  }
}
// Unsigned integers as signed ones: `how.is_unsigned` says which, and Python views the result as what it is.
template <class Body>
auto on_entry_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::i32:
    case DType::u32: return body(std::int32_t{});
    case DType::i64:
    case DType::u64: return body(std::int64_t{});
    default: return on_float_type(dtype, body);
  }
}

// Dense, of `n` values, where there are no indices: those are read where they lie, and Python keeps them until the
// request is done. Entries are copied: once checked, their indices must not change.
template <class V>
SparseVector<V> vector_of(std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uint64_t n) {
  const std::span<const V> held = memory<const V>(values, nnz);
  if (indices == 0 && nnz == n) return SparseVector<V>::borrow_dense(held);
  return SparseVector<V>::sparse(n, memory<const std::uint32_t>(indices, nnz), held);
}

// For a sum, which may hold it densely, or read its entries where they lie and check them as it does: Python keeps them too.
// `marks`: of the indices, or 0.
template <class V>
SparseVector<V> addend_at(std::uintptr_t indices, std::uintptr_t values, std::size_t nnz, std::uintptr_t marks,
                          std::uint64_t n, const SparseReduction& how) {
  if (indices == 0) return vector_of<V>(indices, values, nnz, n);
  const auto held = memory<const std::uint64_t>(marks, marks == 0 ? 0 : kernels::mark_words(n));
  return addend_of<V>(n, memory<const std::uint32_t>(indices, nnz), memory<const V>(values, nnz), how, held);
}

class StartedCall {
 public:
  /// True once the request is done; false at the deadline (Engine::now_s()) or earlier.
  using Wait = std::function<bool(const Request&, double deadline_s)>;

  StartedCall(Wait wait, RequestPtr request) : wait_(std::move(wait)), request_(std::move(request)) {}
  /// Two that are one to the caller: over when both are.
  StartedCall(Wait wait, RequestPtr request, RequestPtr other)
      : wait_(std::move(wait)), request_(std::move(request)), other_(std::move(other)) {}
  template <class V>
  StartedCall(Wait wait, SparseSum<V> sum) : StartedCall(std::move(wait), std::move(sum.request)) {
    take_result_ = [result = std::move(sum.result)] { return vector_as_arrays(std::move(**result)); };
  }
  template <class V>
  StartedCall(Wait wait, GatheredVectors<V> gathered) : StartedCall(std::move(wait), std::move(gathered.request)) {
    take_result_ = [result = std::move(gathered.result)] {
      nb::list vectors;
      for (SparseVector<V>& vector : **result) vectors.append(vector_as_arrays(std::move(vector)));
      return nb::object(std::move(vectors));
    };
  }
  template <class V, class State>
  StartedCall(Wait wait, TopkSum<V, State> sum) : StartedCall(std::move(wait), std::move(sum.request)) {
    take_result_ = [result = std::move(sum.result)] {
      const auto& [traffic, bytes, local_most, selected, overflow, cut, exact, balanced] = (**result).report;
      nb::object report =
          nb::make_tuple(2 * traffic.entries_sent, 2 * traffic.entries_received, traffic.control_bytes_sent / 4,
                         traffic.control_bytes_received / 4, bytes.sent, bytes.received, local_most, selected, overflow, cut,
                         exact, balanced);
      nb::object largest = vector_as_arrays(std::move((**result).sum));
      nb::object left = vector_as_arrays(std::move((**result).left));
      return nb::object(nb::make_tuple(std::move(largest), std::move(left), std::move(report)));
    };
  }

  bool done() const { return request_->done() && (!other_ || other_->done()); }

  bool succeeded() const { return done() && !request_->failure() && (!other_ || !other_->failure()); }

  /// Waits a moment: true if it has succeeded then.
  bool succeeds_soon() const {
    if (!done()) {
      const Unlocked unlocked;
      const double deadline_s = Engine::now_s() + kSignalSlice_s;
      if (wait_(*request_, deadline_s) && other_) wait_(*other_, deadline_s);
    }
    return succeeded();
  }

  bool wait(std::optional<double> timeout_s) const {
    const double deadline_s = timeout_s ? Engine::now_s() + *timeout_s : std::numeric_limits<double>::infinity();
    return wait_for(*request_, deadline_s) && (!other_ || wait_for(*other_, deadline_s));
  }

  /// When it began and when it ended; empty unless it has succeeded.
  std::optional<std::pair<double, double>> span_s() const {
    if (!done()) return std::nullopt;
    std::optional<std::pair<double, double>> span;
    for (const RequestPtr& one : {request_, other_}) {
      if (!one) continue;
      if (!one->begun() || !one->ended_s()) return std::nullopt;
      const double begun_s = one->begun()->when_s;
      const double ended_s = *one->ended_s();
      span = span ? std::pair{std::min(span->first, begun_s), std::max(span->second, ended_s)}
                  : std::pair{begun_s, ended_s};
    }
    return span;
  }

  /// Whose message a receive got; empty unless it has succeeded.
  std::optional<Rank> source() const { return done() ? request_->source() : std::nullopt; }

  void watch(CompletionQueue& queue, std::uint64_t token) const {
    if (!other_) {
      queue.watch(*request_, token);
    } else {
      request_->when_done([&queue, token, other = other_] { queue.watch(*other, token); });
    }
  }

  /// Arrays; of all_reduce_topk a tuple of sum, rest and report.
  nb::object sparse_result() {
    if (!take_result_ || !done() || request_->failure()) {
      throw nb::value_error("no sparse result: wait for a sparse operation first, and take its result once");
    }
    return std::exchange(take_result_, nullptr)();
  }

 private:
  bool wait_for(const Request& request, double deadline_s) const {
    const bool over = with_signals(deadline_s, [&](double slice_s) { return wait_(request, slice_s); });
    if (over) request.rethrow();
    return over;
  }

  Wait wait_;  // keeps the communicator
  RequestPtr request_;
  RequestPtr other_;  // may be null
  std::function<nb::object()> take_result_;
};

template <class Self, class Started>
StartedCall operation_of(const std::shared_ptr<Self>& self, Started started) {
  return StartedCall([self](const Request& request, double slice_s) { return self->wait(request, slice_s); },
                   std::move(started));
}

/// Begins `started` (a RequestPtr, or something with one in `.request`) on `self`, which has submit(request, blocking) and
/// wait(request, deadline_s). `gate`: null: it begins at once.
template <class Self, class Started>
StartedCall begin(const std::shared_ptr<Self>& self, Started started, bool blocking, const Gate* gate = nullptr) {
  if constexpr (requires { started.request; }) {
    if (gate != nullptr) started.request->set_gate(*gate);
    self->submit(started.request, blocking);
  } else {
    if (gate != nullptr) started->set_gate(*gate);
    self->submit(started, blocking);
  }
  return operation_of(self, std::move(started));
}

/// Begins `request` for a caller that waits, and waits a moment: true if that was all, which spares Python an object and
/// a call.
template <class Self>
bool is_done(Self& self, const RequestPtr& request) {
  self.submit(request, true);
  {
    const Unlocked unlocked;
    self.wait(*request, Engine::now_s() + kSignalSlice_s);
  }
  return request->done() && !request->failure();
}

/// What Communicator.stats() of Python shows.
inline nb::dict as_dict(const Session::Counters& counters, std::uint64_t in_flight, double waiting_s,
                        std::uint64_t refused = 0) {
  nb::dict result;
  result["operations"] = counters.operations;
  result["in_flight"] = in_flight;
  result["waiting_s"] = waiting_s;
  result["messages_refused"] = refused;
  result["messages_sent"] = counters.messages_sent;
  result["messages_received"] = counters.messages_received;
  result["bytes_sent"] = counters.bytes_sent;
  result["bytes_received"] = counters.bytes_received;
  nb::list sent_to;
  nb::list received_from;
  for (const Session::Traffic& peer : counters.peers) {
    sent_to.append(peer.bytes_sent);
    received_from.append(peer.bytes_received);
  }
  result["bytes_sent_to"] = sent_to;
  result["bytes_received_from"] = received_from;
  return result;
}

}  // namespace telegrad::bindings
