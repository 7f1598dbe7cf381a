#pragma once
// Chances, as the drawing of programs needs them.

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/random.hpp"

namespace telegrad::explorer {

class Chance {
 public:
  explicit Chance(std::uint64_t seed) : random_(seed) {}

  bool happens(double probability) { return random_.uniform() < probability; }
  double between(double least, double most) { return least + (most - least) * random_.uniform(); }
  /// Every order of magnitude is equally likely; `least` > 0.
  double magnitude(double least, double most) { return least * std::pow(most / least, random_.uniform()); }
  /// least <= result <= most.
  template <class Integer>
  Integer integer(Integer least, Integer most) {
    return static_cast<Integer>(least + static_cast<Integer>(random_.below(static_cast<std::uint64_t>(most - least) + 1)));
  }
  template <class T, std::size_t N>
  T pick(const std::array<T, N>& from) {
    return from[random_.below(N)];
  }
  std::uint64_t seed() { return random_.next(); }

 private:
  Random random_;
};

}  // namespace telegrad::explorer
