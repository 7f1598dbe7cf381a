#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings/binding.hpp"
#include "bindings/tensors.hpp"
#include "bindings/unlocked.hpp"
#include "kernels/buckets.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/normal.hpp"
#include "kernels/random_subset.hpp"
#include "kernels/ranked.hpp"
#include "kernels/reused.hpp"
#include "kernels/select.hpp"

namespace telegrad::bindings {
namespace {

using kernels::Side;

// Where Python's arrays lie. A gradient at 0 is none: nothing is added.
struct Arrays {
  std::span<float> residual;
  std::span<const float> gradient;

  Arrays(std::uintptr_t residual_at, std::uintptr_t gradient_at, std::size_t n)
      : residual(memory<float>(residual_at, n)), gradient(memory<const float>(gradient_at, gradient_at == 0 ? 0 : n)) {}
};

kernels::EntriesOut<float> entries(std::uintptr_t indices, std::uintptr_t values, std::size_t capacity) {
  return {memory<std::uint32_t>(indices, capacity), memory<float>(values, capacity)};
}

Side side_of(int sign) { return sign == 0 ? Side::both : sign > 0 ? Side::positive : Side::negative; }

// One of an array's kind and length, or none; None stands for an array that is not there.
template <class V>
std::optional<std::span<V>> array_of(nb::handle owner, bool writable, std::size_t size, bool may_be_none = false) {
  if (may_be_none && owner.is_none()) return std::span<V>{};
  const auto buffer = buffer_of(owner, writable);
  constexpr DType dtype = std::is_same_v<std::remove_const_t<V>, float> ? DType::f32 : DType::u32;
  if (!buffer || buffer->dtype != dtype || buffer->elements < size) return std::nullopt;
  return memory<V>(buffer->pointer, buffer->elements);
}

// (sound, exact, count, threshold, largest, added), or None where an array is not as it must be: the caller finds out
// which.
nb::object accumulate_reused(nb::handle residual, nb::handle before, nb::handle gradient, nb::handle velocity,
                             nb::handle velocity_before, float factor, bool nesterov, bool masks, std::size_t k,
                             std::size_t least, float threshold, bool is_due, nb::handle indices, nb::handle values,
                             std::uint32_t index_offset, float limit) {
  const auto own = array_of<float>(residual, true, 1);
  if (!own) return nb::none();
  const std::size_t size = own->size(), most = std::min(2 * k, size);
  const auto was = array_of<const float>(before, false, size, true);
  const auto given = array_of<const float>(gradient, false, size);
  const auto moved = array_of<float>(velocity, true, size, true);
  const auto moved_from = array_of<const float>(velocity_before, false, size, true);
  const auto to = array_of<std::uint32_t>(indices, true, most);
  const auto of = array_of<float>(values, true, most);
  if (!was || !given || !moved || !moved_from || !to || !of || k < 1 || k > size) return nb::none();
  for (const std::size_t length : {was->size(), given->size(), moved->size(), moved_from->size()}) {
    if (length != 0 && length != size) return nb::none();
  }
  kernels::Reused found;
  {
    const Unlocked unlocked;
    found = kernels::accumulate_reused(
        *own, *was, *given,
        {.velocity = *moved, .before = *moved_from, .factor = factor, .nesterov = nesterov, .masks = masks},
        {.k = k, .least = least, .threshold = threshold, .is_due = is_due}, index_offset,
        {to->first(most), of->first(most)}, limit);
  }
  return nb::make_tuple(found.is_sound, found.is_exact, found.count, found.threshold, found.largest, found.added);
}

std::tuple<std::size_t, float, float> as_tuple(const kernels::Chosen& chosen) {
  return {chosen.count, chosen.threshold, chosen.largest};
}

}  // namespace

void bind_selection(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def(
      "accumulate_select",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n, float threshold, int sign,
         std::uintptr_t indices, std::uintptr_t values, std::size_t capacity, std::uint32_t index_offset) {
        const Arrays in(residual, gradient, n);
        const Side side = side_of(sign);
        return kernels::accumulate_select(in.residual, in.gradient, kernels::key_of_threshold(threshold, side), side,
                                          index_offset, entries(indices, values, capacity));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), nb::arg("threshold"), nb::arg("sign"),
      nb::arg("indices"), nb::arg("values"), nb::arg("capacity"), nb::arg("index_offset"), unlocked);
  module.def("accumulate_reused", &accumulate_reused, nb::arg("residual"), nb::arg("before").none(),
             nb::arg("gradient"), nb::arg("velocity").none(), nb::arg("velocity_before").none(), nb::arg("factor"),
             nb::arg("nesterov"), nb::arg("masks"), nb::arg("k"), nb::arg("least"), nb::arg("threshold"),
             nb::arg("is_due"), nb::arg("indices"), nb::arg("values"), nb::arg("index_offset"), nb::arg("limit"));
  module.def(
      "accumulate_topk",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n, std::size_t k, int sign,
         std::uintptr_t indices, std::uintptr_t values, std::uint32_t index_offset) {
        const Arrays in(residual, gradient, n);
        return as_tuple(kernels::accumulate_topk(in.residual, in.gradient, k, side_of(sign), index_offset,
                                                 entries(indices, values, k)));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), nb::arg("k"), nb::arg("sign"), nb::arg("indices"),
      nb::arg("values"), nb::arg("index_offset"), unlocked);
  module.def(
      "accumulate_trimmed",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n, std::size_t k, double step, int sign,
         std::uintptr_t indices, std::uintptr_t values, std::uint32_t index_offset) {
        const Arrays in(residual, gradient, n);
        return as_tuple(kernels::accumulate_trimmed(in.residual, in.gradient, k, step, side_of(sign), index_offset,
                                                    entries(indices, values, k)));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), nb::arg("k"), nb::arg("step"), nb::arg("sign"),
      nb::arg("indices"), nb::arg("values"), nb::arg("index_offset"), unlocked);
  module.def(
      "accumulate_search",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n, std::size_t k, double tolerance, int sign,
         std::uintptr_t indices, std::uintptr_t values, std::uint32_t index_offset) {
        const Arrays in(residual, gradient, n);
        return as_tuple(kernels::accumulate_search(in.residual, in.gradient, k, tolerance, side_of(sign), index_offset,
                                                   entries(indices, values, std::min(2 * k, n))));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), nb::arg("k"), nb::arg("tolerance"), nb::arg("sign"),
      nb::arg("indices"), nb::arg("values"), nb::arg("index_offset"), unlocked);
  module.def(
      "accumulate_buckets",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n, std::size_t bucket, std::size_t per_bucket,
         std::size_t of_last, std::uintptr_t indices, std::uintptr_t values, std::uint32_t index_offset) {
        const Arrays in(residual, gradient, n);
        const std::size_t count = n / bucket * per_bucket + of_last;
        return as_tuple(kernels::accumulate_buckets(in.residual, in.gradient, bucket, per_bucket, of_last, index_offset,
                                                    entries(indices, values, count)));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), nb::arg("bucket"), nb::arg("per_bucket"),
      nb::arg("of_last"), nb::arg("indices"), nb::arg("values"), nb::arg("index_offset"), unlocked);
  module.def(
      "accumulate_random",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n, std::size_t k, std::uint64_t seed,
         std::uint32_t call, std::uint32_t rank, std::uint32_t vector, std::uintptr_t indices, std::uintptr_t values,
         std::uint32_t index_offset) {
        const Arrays in(residual, gradient, n);
        return as_tuple(kernels::accumulate_random(in.residual, in.gradient, {seed, call, rank, vector}, index_offset,
                                                   entries(indices, values, k)));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), nb::arg("k"), nb::arg("seed"), nb::arg("call"),
      nb::arg("rank"), nb::arg("stream"), nb::arg("indices"), nb::arg("values"), nb::arg("index_offset"), unlocked);
  module.def(
      "accumulate_normal",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n) {
        const Arrays in(residual, gradient, n);
        const kernels::Normal found = kernels::accumulate_normal(in.residual, in.gradient);
        return std::pair(found.mean, found.deviation);
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), unlocked);
  module.def("best_simd_level", [] { return static_cast<int>(kernels::best_simd_level()); });
  module.def(
      "force_simd_level", [](int level) { kernels::force_simd_level(static_cast<kernels::SimdLevel>(level)); },
      nb::arg("level"));
}

}  // namespace telegrad::bindings
