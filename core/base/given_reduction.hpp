#pragma once
// A reduction that is the caller's own: see collectives/dense/reduce_in_order.hpp for the order in which it is evaluated.

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace telegrad {

struct GivenReduction {
  /// into[i] = into[i] ∘ from[i], of so many elements, on the library's thread. The two do not overlap.
  std::function<void(std::byte* into, const std::byte* from, std::size_t count)> combine;
  std::size_t element = 1;  // bytes
  std::uint64_t digest = 1;  // of what all ranks must agree on
};

/// FNV-1a of the name and the length of an element; never 0.
inline std::uint64_t digest_of_reduction(std::string_view name, std::size_t element) {
  std::uint64_t digest = 0xcbf29ce484222325 ^ element;
  for (const char one : name) digest = (digest ^ static_cast<unsigned char>(one)) * 0x100000001b3;
  return digest == 0 ? 1 : digest;
}

namespace api {

/// An associative operation on elements of any trivially copyable type, which need not be commutative: results are
/// x0 ∘ x1 ∘ … from left to right, by rank, on all ranks alike.
///
///   const CustomReduction<float> hypotenuse("hypot", 0.0F, [](float a, float b) { return std::hypot(a, b); });
///   comm.all_reduce(x, hypotenuse).wait();
///
/// `combine` runs on the library's thread; an exception of it ends the communicator on all ranks.
template <class T>
  requires std::is_trivially_copyable_v<T>
class CustomReduction {
 public:
  /// `name`: the same on all ranks, or they call different things. Throws std::invalid_argument unless `neutral` combined
  /// with itself is `neutral`.
  template <std::invocable<const T&, const T&> F>
  CustomReduction(std::string_view name, const T& neutral, F combine) {
    const T same = combine(neutral, neutral);
    if (std::memcmp(&same, &neutral, sizeof(T)) != 0) {
      throw std::invalid_argument("neutral of reduction " + std::string(name) +
                                  " is not: combined with itself it gives something else");
    }
    given_ = std::make_shared<const GivenReduction>(GivenReduction{
        .combine =
            [combine = std::move(combine)](std::byte* into, const std::byte* from, std::size_t count) {
              for (std::size_t i = 0; i < count; ++i, into += sizeof(T), from += sizeof(T)) {
                T left, right;
                std::memcpy(&left, into, sizeof(T));
                std::memcpy(&right, from, sizeof(T));
                left = combine(left, right);
                std::memcpy(into, &left, sizeof(T));
              }
            },
        .element = sizeof(T),
        .digest = digest_of_reduction(name, sizeof(T))});
  }
  const std::shared_ptr<const GivenReduction>& given() const { return given_; }

 private:
  std::shared_ptr<const GivenReduction> given_;
};

}  // namespace api
}  // namespace telegrad
