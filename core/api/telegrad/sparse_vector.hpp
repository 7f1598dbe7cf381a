#pragma once
// SparseVector: a vector held as sorted entries or, where those would take more bytes, densely (SparCML §5.1).

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "base/types.hpp"

namespace telegrad::api {

/// What a vector can hold.
template <class V>
concept SparseValue =
    std::same_as<V, float> || std::same_as<V, double> || std::same_as<V, bf16> || std::same_as<V, f16> ||
    std::same_as<V, std::int32_t> || std::same_as<V, std::int64_t> || std::same_as<V, std::uint32_t> ||
    std::same_as<V, std::uint64_t>;

namespace detail {
template <class V>
struct Held;  // the library's own vector
}

/// `n` elements of V (float, double, bf16, f16, or an integer of 32 or 64 bits), of which some are there as entries; the
/// others are the neutral element of the reduction that the vector is for, zero in sums. It does not change, so copies share
/// their memory.
template <SparseValue V>
class SparseVector {
 public:
  /// Copies. `indices`: strictly increasing and below n, which is at most 2^32 - 1; as many values. Throws
  /// std::invalid_argument.
  SparseVector(std::uint64_t n, std::span<const std::uint32_t> indices, std::span<const V> values);
  SparseVector(std::uint64_t n, std::initializer_list<std::uint32_t> indices, std::initializer_list<V> values);
  /// Of all elements. Copies.
  static SparseVector dense(std::span<const V> values);
  SparseVector(const SparseVector&) = default;
  SparseVector& operator=(const SparseVector&) = default;
  /// What is left behind can be assigned to and destroyed; whatever else throws std::invalid_argument.
  SparseVector(SparseVector&&) noexcept = default;
  SparseVector& operator=(SparseVector&&) noexcept = default;
  ~SparseVector() = default;
  /// For the library's own use.
  explicit SparseVector(std::shared_ptr<detail::Held<V>> held);

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

extern template class SparseVector<float>;
extern template class SparseVector<double>;
extern template class SparseVector<bf16>;
extern template class SparseVector<f16>;
extern template class SparseVector<std::int32_t>;
extern template class SparseVector<std::int64_t>;
extern template class SparseVector<std::uint32_t>;
extern template class SparseVector<std::uint64_t>;

}  // namespace telegrad::api
