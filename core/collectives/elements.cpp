#include "collectives/elements.hpp"

#include <cstring>
#include <span>

#include "base/check.hpp"
#include "kernels/narrow.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scale.hpp"

namespace telegrad {
namespace {

std::span<float> as_floats(Bytes bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}
std::span<const float> as_floats(ConstBytes bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

}  // namespace

Task<void> copy(Transport& net, ConstBytes from, Bytes into) {
  TELEGRAD_CHECK(from.size() == into.size());
  const std::size_t count = from.data() == into.data() ? 0 : from.size();
  return compute_slices(net, count, 1, [from, into](std::size_t begin, std::size_t end) {
    std::memcpy(into.data() + begin, from.data() + begin, end - begin);
  });
}

Task<void> reduce(Transport& net, DType dtype, Reduction reduction, Bytes accumulator, ConstBytes addend) {
  return reduce_to(net, dtype, reduction, accumulator, addend, accumulator);
}

Task<void> reduce_to(Transport& net, DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size());
  const std::size_t element = size_of(dtype);
  return compute_slices(net, out.size() / element, element, [=](std::size_t begin, std::size_t end) {
    const Range slice{begin, end};
    kernels::reduce_to(dtype, reduction, elements(a, dtype, slice), elements(b, dtype, slice),
                       elements(out, dtype, slice));
  });
}

Task<void> widen(Transport& net, DType dtype, ConstBytes from, Bytes into) {
  TELEGRAD_CHECK(into.size() == 2 * from.size());
  return compute_slices(net, from.size() / size_of(dtype), sizeof(float), [=](std::size_t begin, std::size_t end) {
    kernels::widen(dtype, elements(from, dtype, Range{begin, end}), as_floats(into).subspan(begin, end - begin));
  });
}

Task<void> narrow(Transport& net, DType dtype, ConstBytes from, Bytes into) {
  TELEGRAD_CHECK(from.size() == 2 * into.size());
  return compute_slices(net, into.size() / size_of(dtype), sizeof(float), [=](std::size_t begin, std::size_t end) {
    kernels::narrow(dtype, as_floats(from).subspan(begin, end - begin), elements(into, dtype, Range{begin, end}));
  });
}

Task<void> finish_reduction(Transport& net, DType dtype, Reduction reduction, Bytes values) {
  if (reduction != Reduction::avg) co_return;
  const double factor = 1.0 / static_cast<double>(net.size());
  const std::size_t element = size_of(dtype);
  co_await compute_slices(net, values.size() / element, element, [=](std::size_t begin, std::size_t end) {
    kernels::scale(dtype, elements(values, dtype, Range{begin, end}), factor);
  });
}

}  // namespace telegrad
