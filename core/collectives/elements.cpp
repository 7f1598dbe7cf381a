#include "collectives/elements.hpp"

#include <cstring>

#include "base/check.hpp"
#include "kernels/reduce.hpp"

namespace telegrad {

Task<void> copy(Transport& net, ConstBytes from, Bytes into) {
  TELEGRAD_CHECK(from.size() == into.size());
  const std::size_t count = from.data() == into.data() ? 0 : from.size();
  return compute_slices(net, count, 1, [from, into](std::size_t begin, std::size_t end) {
    std::memcpy(into.data() + begin, from.data() + begin, end - begin);
  });
}

Task<void> add(Transport& net, DType dtype, Bytes accumulator, ConstBytes addend) {
  return add_to(net, dtype, accumulator, addend, accumulator);
}

Task<void> add_to(Transport& net, DType dtype, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size());
  const std::size_t element = size_of(dtype);
  return compute_slices(net, out.size() / element, element, [=](std::size_t begin, std::size_t end) {
    const Range slice{begin, end};
    kernels::add_to(dtype, elements(a, dtype, slice), elements(b, dtype, slice), elements(out, dtype, slice));
  });
}

Task<void> scale(Transport& net, DType dtype, Bytes values, float factor) {
  const std::size_t element = size_of(dtype);
  return compute_slices(net, values.size() / element, element, [=](std::size_t begin, std::size_t end) {
    kernels::scale(dtype, elements(values, dtype, Range{begin, end}), factor);
  });
}

}  // namespace telegrad
