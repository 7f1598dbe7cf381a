#include "telegrad/stream.hpp"

#include <stdexcept>
#include <utility>

#include "api/joined.hpp"
#include "codec/sparse_vector.hpp"

namespace telegrad::api {

template <StreamValue V>
SparseStream<V>::SparseStream(std::uint64_t n, std::span<const std::uint32_t> indices, std::span<const V> values)
    : held_(std::make_shared<detail::Held<V>>(telegrad::SparseStream<V>::sparse(n, indices, values))) {}

template <StreamValue V>
SparseStream<V>::SparseStream(std::uint64_t n, std::initializer_list<std::uint32_t> indices,
                              std::initializer_list<V> values)
    : SparseStream(n, std::span(indices.begin(), indices.size()), std::span(values.begin(), values.size())) {}

template <StreamValue V>
SparseStream<V>::SparseStream(std::shared_ptr<detail::Held<V>> held) : held_(std::move(held)) {}

template <StreamValue V>
const std::shared_ptr<detail::Held<V>>& SparseStream<V>::held() const {
  if (!held_) throw std::invalid_argument("this stream was moved from: use the one that it was moved to");
  return held_;
}

template <StreamValue V>
SparseStream<V> SparseStream<V>::dense(std::span<const V> values) {
  return SparseStream(std::make_shared<detail::Held<V>>(telegrad::SparseStream<V>::dense(values)));
}

template <StreamValue V>
std::uint64_t SparseStream<V>::n() const {
  return held()->stream.dimension();
}

template <StreamValue V>
bool SparseStream<V>::is_dense() const {
  return held()->stream.is_dense();
}

template <StreamValue V>
std::size_t SparseStream<V>::nnz() const {
  return held()->stream.nnz();
}

template <StreamValue V>
std::span<const std::uint32_t> SparseStream<V>::indices() const {
  return held()->stream.indices();
}

template <StreamValue V>
std::span<const V> SparseStream<V>::values() const {
  return held()->stream.values();
}

template <StreamValue V>
void SparseStream<V>::write_dense(std::span<V> out, Reduction reduction) const {
  held()->stream.write_dense(out, reduction);
}

template class SparseStream<float>;
template class SparseStream<double>;
template class SparseStream<bf16>;
template class SparseStream<f16>;

}  // namespace telegrad::api
