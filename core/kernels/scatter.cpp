#include "kernels/scatter.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "base/check.hpp"
#include "kernels/operations.hpp"

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

template <class V>
void fill(std::span<V> dense, V value) {
  using Bits = std::array<std::byte, sizeof(V)>;
  if (!dense.empty() && std::bit_cast<Bits>(value) == Bits{}) {  // memset does not read the lines that it overwrites
    std::memset(static_cast<void*>(dense.data()), 0, dense.size_bytes());
  } else {
    std::fill(dense.begin(), dense.end(), value);
  }
}

template <class V>
void scatter_reduce(Reduction reduction, std::span<V> dense, Entries<V> entries, std::uint64_t base) {
  on_operation(reduction, [&]<class Combine>(Combine) {
    scatter(dense, entries, base, [](V& at, V value) { at = Combine::of(at, value); });
  });
}

template <class V>
void expand(std::span<V> dense, Entries<V> entries, V absent, double factor, std::uint64_t base) {
  fill(dense, absent);
  const auto rounded = static_cast<Factor<V>>(factor);
  scatter(dense, entries, base, [rounded](V& at, V value) { at = times(value, rounded); });
}

namespace reference {

template <class V>
void scatter_reduce(Reduction reduction, std::span<V> dense, Entries<V> entries, std::uint64_t base) {
  on_operation(reduction, [&]<class Combine>(Combine) {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      V& at = dense[entries.indices[i] - base];
      at = Combine::of(at, entries.values[i]);
    }
  });
}

template <class V>
void expand(std::span<V> dense, Entries<V> entries, V absent, double factor, std::uint64_t base) {
  for (V& value : dense) value = absent;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    dense[entries.indices[i] - base] = times(entries.values[i], static_cast<Factor<V>>(factor));
  }
}

}  // namespace reference

#define TELEGRAD_INSTANTIATE(V)                                                            \
  template void fill(std::span<V>, V);                                                     \
  template void scatter_reduce(Reduction, std::span<V>, Entries<V>, std::uint64_t);        \
  template void expand(std::span<V>, Entries<V>, V, double, std::uint64_t);                \
  template void reference::scatter_reduce(Reduction, std::span<V>, Entries<V>, std::uint64_t); \
  template void reference::expand(std::span<V>, Entries<V>, V, double, std::uint64_t);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad::kernels
