#include "telegrad/sparse_vector.hpp"

#include <stdexcept>
#include <utility>

#include "api/joined.hpp"
#include "codec/sparse_vector.hpp"
#include "collectives/sparse/messages.hpp"

namespace telegrad::api {

template <SparseValue V>
SparseVector<V>::SparseVector(std::uint64_t n, std::span<const std::uint32_t> indices, std::span<const V> values)
    : held_(std::make_shared<detail::Held<V>>(telegrad::SparseVector<typename detail::Signed<V>::Value>::sparse(
          n, indices, detail::as_held(values)))) {}

template <SparseValue V>
SparseVector<V>::SparseVector(std::uint64_t n, std::initializer_list<std::uint32_t> indices,
                              std::initializer_list<V> values)
    : SparseVector(n, std::span(indices.begin(), indices.size()), std::span(values.begin(), values.size())) {}

template <SparseValue V>
SparseVector<V>::SparseVector(std::shared_ptr<detail::Held<V>> held) : held_(std::move(held)) {}

template <SparseValue V>
const std::shared_ptr<detail::Held<V>>& SparseVector<V>::held() const {
  if (!held_) throw std::invalid_argument("this sparse vector was moved from: use the one that it was moved to");
  return held_;
}

template <SparseValue V>
SparseVector<V> SparseVector<V>::dense(std::span<const V> values) {
  using Library = telegrad::SparseVector<typename detail::Signed<V>::Value>;
  return SparseVector(std::make_shared<detail::Held<V>>(Library::dense(detail::as_held(values))));
}

template <SparseValue V>
std::uint64_t SparseVector<V>::n() const {
  return held()->vector.dimension();
}

template <SparseValue V>
bool SparseVector<V>::is_dense() const {
  return held()->vector.is_dense();
}

template <SparseValue V>
std::size_t SparseVector<V>::nnz() const {
  return held()->vector.nnz();
}

template <SparseValue V>
std::span<const std::uint32_t> SparseVector<V>::indices() const {
  return held()->vector.indices();
}

template <SparseValue V>
std::span<const V> SparseVector<V>::values() const {
  const auto values = held()->vector.values();
  return {reinterpret_cast<const V*>(values.data()), values.size()};
}

template <SparseValue V>
void SparseVector<V>::write_dense(std::span<V> out, Reduction reduction) const {
  const auto& vector = held()->vector;
  if constexpr (std::unsigned_integral<V>) {
    if (SparseReduction{.reduction = reduction, .is_unsigned = true}.flips_signs()) {
      auto flipped = vector.clone();
      flip_signs(flipped.own_values());
      flipped.write_dense(detail::as_held(out), reduction);
      return flip_signs(detail::as_held(out));
    }
  }
  vector.write_dense(detail::as_held(out), reduction);
}

template class SparseVector<float>;
template class SparseVector<double>;
template class SparseVector<bf16>;
template class SparseVector<f16>;
template class SparseVector<std::int32_t>;
template class SparseVector<std::int64_t>;
template class SparseVector<std::uint32_t>;
template class SparseVector<std::uint64_t>;

}  // namespace telegrad::api
