#include "telegrad/stream.hpp"

#include <utility>

#include "sparse/stream.hpp"
#include "telegrad/joined.hpp"

namespace telegrad::api {

template <class V>
SparseStream<V>::SparseStream(std::uint64_t n, std::span<const std::uint32_t> indices, std::span<const V> values)
    : held_(std::make_shared<detail::Held<V>>(telegrad::SparseStream<V>::sparse(n, indices, values))) {}

template <class V>
SparseStream<V>::SparseStream(std::uint64_t n, std::initializer_list<std::uint32_t> indices,
                              std::initializer_list<V> values)
    : SparseStream(n, std::span(indices.begin(), indices.size()), std::span(values.begin(), values.size())) {}

template <class V>
SparseStream<V>::SparseStream(std::shared_ptr<detail::Held<V>> held) : held_(std::move(held)) {}

template <class V>
SparseStream<V> SparseStream<V>::dense(std::span<const V> values) {
  return SparseStream(std::make_shared<detail::Held<V>>(telegrad::SparseStream<V>::dense(values)));
}

template <class V>
std::uint64_t SparseStream<V>::n() const {
  return held_->stream.dimension();
}

template <class V>
bool SparseStream<V>::is_dense() const {
  return held_->stream.is_dense();
}

template <class V>
std::size_t SparseStream<V>::nnz() const {
  return held_->stream.nnz();
}

template <class V>
std::span<const std::uint32_t> SparseStream<V>::indices() const {
  return held_->stream.indices();
}

template <class V>
std::span<const V> SparseStream<V>::values() const {
  return held_->stream.values();
}

template <class V>
void SparseStream<V>::write_dense(std::span<V> out, Reduction reduction) const {
  held_->stream.write_dense(out, reduction);
}

template class SparseStream<float>;
template class SparseStream<double>;
template class SparseStream<bf16>;
template class SparseStream<f16>;

}  // namespace telegrad::api
