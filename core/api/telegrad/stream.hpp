#pragma once
// SparseStream: a vector held as sorted entries or, where those would take more bytes, densely (SparCML §5.1).

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "base/types.hpp"

namespace telegrad::api {

/// What a stream can hold.
template <class V>
concept StreamValue =
    std::same_as<V, float> || std::same_as<V, double> || std::same_as<V, bf16> || std::same_as<V, f16>;

namespace detail {
template <class V>
struct Held;  // the library's own stream
}

/// `n` elements of V (float, double, bf16 or f16), of which some are there as entries; the others are the neutral
/// element of the reduction that the stream is for, zero in sums. It does not change, so copies share their memory.
template <StreamValue V>
class SparseStream {
 public:
  /// Copies. `indices`: strictly increasing and below n, which is at most 2^32 - 1; as many values. Throws
  /// std::invalid_argument.
  SparseStream(std::uint64_t n, std::span<const std::uint32_t> indices, std::span<const V> values);
  SparseStream(std::uint64_t n, std::initializer_list<std::uint32_t> indices, std::initializer_list<V> values);
  /// Of all elements. Copies.
  static SparseStream dense(std::span<const V> values);
  SparseStream(const SparseStream&) = default;
  SparseStream& operator=(const SparseStream&) = default;
  /// What is left behind can be assigned to and destroyed; whatever else throws std::invalid_argument.
  SparseStream(SparseStream&&) noexcept = default;
  SparseStream& operator=(SparseStream&&) noexcept = default;
  ~SparseStream() = default;
  /// For the library's own use.
  explicit SparseStream(std::shared_ptr<detail::Held<V>> held);

  std::uint64_t n() const;
  /// Whether values() are all elements, and indices() empty.
  bool is_dense() const;
  /// Entries held: n() where dense.
  std::size_t nnz() const;
  std::span<const std::uint32_t> indices() const;
  std::span<const V> values() const;
  /// Writes all n elements; throws std::invalid_argument unless `out` has as many. `reduction`: whose neutral element
  /// stands where there is no entry.
  void write_dense(std::span<V> out, Reduction reduction = Reduction::sum) const;

  /// For the library's own use.
  const std::shared_ptr<detail::Held<V>>& held() const;

 private:
  std::shared_ptr<detail::Held<V>> held_;  // null: moved from
};

extern template class SparseStream<float>;
extern template class SparseStream<double>;
extern template class SparseStream<bf16>;
extern template class SparseStream<f16>;

}  // namespace telegrad::api
