// What the tests of kernels and vectors feed them: awkward sizes and starts, awkward numbers, and memory whose
// surroundings are poisoned, so that a kernel that reads or writes outside shows it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "base/types.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/entries.hpp"

namespace samples {

using telegrad::bf16;
using telegrad::Reduction;

inline constexpr Reduction kReductions[] = {Reduction::sum, Reduction::avg, Reduction::prod,
                                            Reduction::min, Reduction::max, Reduction::max_abs};

inline constexpr std::size_t kSizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 4099};

/// Every level this CPU has, one after the other.
template <class Body>
void at_every_level(Body body) {
  using telegrad::kernels::SimdLevel;
  for (const SimdLevel level : telegrad::kernels::kSimdLevels) {
    if (level > telegrad::kernels::best_simd_level()) continue;
    const telegrad::kernels::ScopedSimdLevel forced(level);
    body();
  }
}

/// `size` elements with poison (NaN in every float) before and after, starting `shift` bytes off a cache line.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t size, std::size_t shift = 0)
      : memory_(kGuard + 64 + shift + size * sizeof(T) + kGuard, kPoison), size_(size) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + kGuard);
    begin_ = kGuard + (64 - address % 64) % 64 + shift;
  }
  Guarded(const std::vector<T>& values, std::size_t shift = 0) : Guarded(values.size(), shift) {
    if (!values.empty()) std::memcpy(memory_.data() + begin_, values.data(), values.size() * sizeof(T));
  }

  telegrad::Bytes bytes() { return {memory_.data() + begin_, size_ * sizeof(T)}; }
  /// For shifts that are multiples of sizeof(T).
  std::span<T> span() { return {reinterpret_cast<T*>(memory_.data() + begin_), size_}; }
  std::vector<T> copy() {
    std::vector<T> values(size_);
    if (size_ != 0) std::memcpy(values.data(), memory_.data() + begin_, size_ * sizeof(T));
    return values;
  }
  /// Nothing outside has been written, nor anything from element `first` on.
  bool intact(std::size_t first = ~std::size_t{0}) const {
    const std::size_t end = begin_ + (first < size_ ? first : size_) * sizeof(T);
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if ((i < begin_ || i >= end) && memory_[i] != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr std::byte kPoison{0xff};

  std::vector<std::byte> memory_;
  std::size_t size_;
  std::size_t begin_ = 0;
};

template <class V>
auto bits(const std::vector<V>& values) {
  using Word = std::conditional_t<sizeof(V) == 8, std::uint64_t, std::uint32_t>;
  std::vector<Word> out;
  for (const V& value : values) {
    Word word = 0;
    std::memcpy(&word, &value, sizeof value);
    out.push_back(word);
  }
  return out;
}

/// Zeros of both signs, denormals, the largest number, one, infinities, and at the end NaNs, two of them with payloads.
template <class V>
std::vector<V> special_values() {
  using Format = telegrad::kernels::Format<V>;
  using Bits = typename Format::Bits;
  constexpr std::int64_t kSign = std::numeric_limits<Bits>::min();
  constexpr std::int64_t kInfinity = Format::kInfinity;
  constexpr std::int64_t kSmallestNormal = kInfinity & -kInfinity;
  const auto of_bits = [](std::int64_t word) { return std::bit_cast<V>(static_cast<Bits>(word)); };
  std::vector<V> values;
  for (const std::int64_t word : {std::int64_t{0}, std::int64_t{1}, kSmallestNormal - 1, kSmallestNormal, kInfinity - 1,
                                  kInfinity}) {
    values.push_back(of_bits(word));
    values.push_back(of_bits(word | kSign));
  }
  values.push_back(V(1.0F));
  values.push_back(V(-1.0F));
  values.push_back(of_bits(Format::kNan));
  values.push_back(of_bits(Format::kNan | kSign | 0x23));
  values.push_back(of_bits(kInfinity + 1));
  return values;
}
template <std::integral V>
std::vector<V> special_values() {
  return {0, 1, static_cast<V>(-1), std::numeric_limits<V>::min(), std::numeric_limits<V>::max(), 0, 0, 0};
}

/// Mostly ordinary numbers, and some special ones.
template <class V>
std::vector<V> awkward_values(std::mt19937& random, std::size_t size, bool with_nan = true) {
  constexpr std::size_t kNans = 3;
  const std::vector<V> special = special_values<V>();
  std::normal_distribution<float> ordinary;
  std::vector<V> values(size);
  for (V& value : values) {
    if (random() % 4 == 0) {
      value = special[random() % (special.size() - (with_nan ? 0 : kNans))];
    } else if constexpr (std::is_integral_v<V>) {
      value = static_cast<V>(std::uint64_t{random()} << 32 | random());
    } else if constexpr (sizeof(V) == 8) {
      value = std::normal_distribution<V>()(random);
    } else {
      value = V(ordinary(random));
    }
  }
  return values;
}

/// Small integers: their sums are exact, in any order.
template <class V>
std::vector<V> integers(std::mt19937& random, std::size_t size, int most = 4) {
  std::uniform_int_distribution<int> number(-most, most);
  std::vector<V> values(size);
  for (V& value : values) value = V(static_cast<float>(number(random)));
  return values;
}

/// Two values reduced, without the kernels.
inline float combined(float a, float b, Reduction reduction) {
  switch (reduction) {
    case Reduction::prod: return a * b;
    case Reduction::min: return std::min(a, b);
    case Reduction::max: return std::max(a, b);
    case Reduction::max_abs: return std::abs(a) == std::abs(b) ? std::max(a, b) : std::abs(a) < std::abs(b) ? b : a;
    default: return a + b;
  }
}

/// Each index of [begin, end) with probability `density`.
inline std::vector<std::uint32_t> random_indices(std::mt19937& random, std::uint64_t begin, std::uint64_t end,
                                                 double density) {
  std::vector<std::uint32_t> indices;
  if (density <= 0.0) return indices;
  std::geometric_distribution<std::uint64_t> gap(density < 1.0 ? density : 0.999999);
  for (std::uint64_t i = begin + gap(random); i < end; i += 1 + gap(random)) {
    indices.push_back(static_cast<std::uint32_t>(i));
  }
  return indices;
}

template <class V>
struct Run {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;

  telegrad::kernels::Entries<V> entries() const { return {indices, values}; }
};

}  // namespace samples
