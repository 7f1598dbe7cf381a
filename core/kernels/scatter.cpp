#include "kernels/scatter.hpp"

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "kernels/arithmetic.hpp"

namespace telegrad::kernels {
namespace {

// Far enough to hide a miss, near enough to stay in the first-level cache.
constexpr std::size_t kAhead = 24;

template <class V>
void check_ends(std::span<V> dense, const Entries<V>& entries, std::uint64_t base) {
  TELEGRAD_CHECK(entries.indices.size() == entries.values.size());
  if (entries.empty()) return;
  TELEGRAD_CHECK(entries.indices.front() >= base && entries.indices.back() - base < dense.size());
}

template <class V, class Store>
void scatter(std::span<V> dense, const Entries<V>& entries, std::uint64_t base, Store store) {
  check_ends(dense, entries, base);
  V* const out = dense.data();
  const std::uint32_t* const indices = entries.indices.data();
  const V* const values = entries.values.data();
  const std::size_t size = entries.size();
  std::size_t i = 0;
  for (; i + kAhead < size; ++i) {
    __builtin_prefetch(out + (indices[i + kAhead] - base), 1);
    store(out[indices[i] - base], values[i]);
  }
  for (; i < size; ++i) store(out[indices[i] - base], values[i]);
}

}  // namespace

void fill_zero(Bytes bytes) {
  if (!bytes.empty()) std::memset(bytes.data(), 0, bytes.size());
}

template <class V>
void scatter_add(std::span<V> dense, Entries<V> entries, std::uint64_t base) {
  scatter(dense, entries, base, [](V& at, V value) { at = plus(at, value); });
}

template <class V>
void scatter_set(std::span<V> dense, Entries<V> entries, std::uint64_t base) {
  scatter(dense, entries, base, [](V& at, V value) { at = value; });
}

template <class V>
void expand(std::span<V> dense, Entries<V> entries, float factor, std::uint64_t base) {
  fill_zero(std::as_writable_bytes(dense));
  scatter(dense, entries, base, [factor](V& at, V value) { at = times(value, factor); });
}

namespace reference {

template <class V>
void scatter_add(std::span<V> dense, Entries<V> entries, std::uint64_t base) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    V& at = dense[entries.indices[i] - base];
    at = plus(at, entries.values[i]);
  }
}

template <class V>
void scatter_set(std::span<V> dense, Entries<V> entries, std::uint64_t base) {
  for (std::size_t i = 0; i < entries.size(); ++i) dense[entries.indices[i] - base] = entries.values[i];
}

template <class V>
void expand(std::span<V> dense, Entries<V> entries, float factor, std::uint64_t base) {
  std::fill(dense.begin(), dense.end(), V{});
  for (std::size_t i = 0; i < entries.size(); ++i) {
    dense[entries.indices[i] - base] = times(entries.values[i], factor);
  }
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                              \
  template void scatter_add(std::span<V>, Entries<V>, std::uint64_t);        \
  template void scatter_set(std::span<V>, Entries<V>, std::uint64_t);        \
  template void expand(std::span<V>, Entries<V>, float, std::uint64_t);      \
  template void reference::scatter_add(std::span<V>, Entries<V>, std::uint64_t); \
  template void reference::scatter_set(std::span<V>, Entries<V>, std::uint64_t); \
  template void reference::expand(std::span<V>, Entries<V>, float, std::uint64_t);
TELEGRAD_INSTANTIATE(float)
TELEGRAD_INSTANTIATE(bf16)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
