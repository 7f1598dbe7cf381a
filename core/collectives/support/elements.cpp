#include "collectives/support/elements.hpp"

#include <cmath>
#include <span>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "kernels/average.hpp"
#include "kernels/narrow.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scale.hpp"

namespace telegrad {
namespace {

std::span<float> as_floats(Bytes bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

bool is_halved(DType dtype, Reduction reduction) { return dtype == DType::f16 && reduction == Reduction::avg; }

// 2^exponent.
float power_of_two(int exponent) { return std::ldexp(1.0F, exponent); }
int less(Rank halvings, Rank by) { return static_cast<int>(halvings) - static_cast<int>(by); }

Task<void> add_scaled(Transport& net, DType dtype, ConstBytes a, float factor_a, ConstBytes b, float factor_b, float factor,
                      Bytes out) {
  TELEGRAD_CHECK(a.size() == b.size() && a.size() == out.size());
  const std::size_t element = size_of(dtype);
  return compute_slices(net, out.size() / element, element, [=](std::size_t begin, std::size_t end) {
    const Range slice{begin, end};
    kernels::add_scaled(dtype, {elements(a, dtype, slice), factor_a}, {elements(b, dtype, slice), factor_b}, factor,
                        elements(out, dtype, slice));
  });
}

double share_of_each(const Transport& net) { return 1.0 / static_cast<double>(net.size()); }

Task<void> sum_and_divide(Transport& net, DType dtype, ConstBytes a, ConstBytes b, Bytes out) {
  co_await reduce_to(net, dtype, Reduction::sum, a, b, out);
  co_await scale(net, dtype, out, share_of_each(net));
}

Task<void> copy_halved(Transport& net, DType dtype, ConstBytes from, Bytes into, double factor) {
  co_await copy(net, from, into);
  co_await scale(net, dtype, into, factor);
}

}  // namespace

Task<void> copy(Transport& net, ConstBytes from, Bytes into) {
  TELEGRAD_CHECK(from.size() == into.size());
  const std::size_t count = from.data() == into.data() ? 0 : from.size();
  return compute_slices(net, count, 1, [from, into](std::size_t begin, std::size_t end) {
    copy_bytes(into.data() + begin, from.data() + begin, end - begin);
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

Task<void> reduce_partial(Transport& net, DType dtype, Reduction reduction, Partial a, Partial b, Bytes out,
                          Rank halvings) {
  if (!is_halved(dtype, reduction)) return reduce_to(net, dtype, reduction, a.values, b.values, out);
  return add_scaled(net, dtype, a.values, power_of_two(less(a.halvings, halvings)), b.values,
                    power_of_two(less(b.halvings, halvings)), 1.0F, out);
}

Task<void> keep_partial(Transport& net, DType dtype, Reduction reduction, Partial a, Bytes into, Rank halvings) {
  if (!is_halved(dtype, reduction) || a.halvings == halvings) return copy(net, a.values, into);
  return copy_halved(net, dtype, a.values, into, power_of_two(less(a.halvings, halvings)));
}

Task<void> reduce_last(Transport& net, DType dtype, Reduction reduction, Partial a, Partial b, Bytes out) {
  if (reduction != Reduction::avg) return reduce_to(net, dtype, reduction, a.values, b.values, out);
  const auto share = static_cast<float>(share_of_each(net));
  switch (dtype) {
    case DType::bf16: return add_scaled(net, dtype, a.values, 1.0F, b.values, 1.0F, share, out);
    case DType::f16:
      return add_scaled(net, dtype, a.values, power_of_two(static_cast<int>(a.halvings)), b.values,
                        power_of_two(static_cast<int>(b.halvings)), share, out);
    default: return sum_and_divide(net, dtype, a.values, b.values, out);
  }
}

Task<void> scale(Transport& net, DType dtype, Bytes values, double factor) {
  const std::size_t element = size_of(dtype);
  return compute_slices(net, values.size() / element, element, [=](std::size_t begin, std::size_t end) {
    kernels::scale(dtype, elements(values, dtype, Range{begin, end}), factor);
  });
}

Task<void> widen(Transport& net, DType dtype, Reduction reduction, Partial from, Bytes into) {
  TELEGRAD_CHECK(into.size() == 2 * from.values.size());
  const Rank halvings = is_halved(dtype, reduction) ? from.halvings : 0;
  return compute_slices(net, into.size() / sizeof(float), sizeof(float), [=](std::size_t begin, std::size_t end) {
    const Range slice{begin, end};
    const Bytes wide = elements(into, DType::f32, slice);
    kernels::widen(dtype, elements(from.values, dtype, slice), as_floats(wide));
    if (halvings > 0) kernels::scale(DType::f32, wide, std::ldexp(1.0, static_cast<int>(halvings)));
  });
}

Task<void> narrow(Transport& net, DType dtype, Reduction reduction, Bytes from, Bytes into, Rank halvings) {
  TELEGRAD_CHECK(from.size() == 2 * into.size());
  if (!is_halved(dtype, reduction)) halvings = 0;
  return compute_slices(net, from.size() / sizeof(float), sizeof(float), [=](std::size_t begin, std::size_t end) {
    const Range slice{begin, end};
    const Bytes wide = elements(from, DType::f32, slice);
    if (halvings > 0) kernels::scale(DType::f32, wide, std::ldexp(1.0, -static_cast<int>(halvings)));
    kernels::narrow(dtype, as_floats(wide), elements(into, dtype, slice));
  });
}

Task<void> finish_reduction(Transport& net, DType dtype, Reduction reduction, Bytes values) {
  if (reduction == Reduction::avg) co_await scale(net, dtype, values, share_of_each(net));
}

}  // namespace telegrad
