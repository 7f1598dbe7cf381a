#pragma once
// Random numbers that depend on nothing but their seed: the same on every machine, compiler and run.
// SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

#include <cstdint>

namespace telegrad {

/// A bijection that makes every bit of the result depend on every bit of `word`.
constexpr std::uint64_t mix(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9U;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebU;
  return word ^ (word >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15U); }
  /// Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// Uniform in [0, bound), bound > 0; the bias is below bound / 2^64.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

}  // namespace telegrad
