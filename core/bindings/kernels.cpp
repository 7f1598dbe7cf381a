#include "bindings/binding.hpp"
#include "bindings/operation.hpp"
#include "bindings/unlocked.hpp"
#include "codec/pack_indices.hpp"
#include "kernels/marks.hpp"
#include "kernels/merge.hpp"
#include "kernels/narrow.hpp"
#include "kernels/quantise.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scan.hpp"
#include "kernels/scatter.hpp"

namespace telegrad::bindings {
namespace {

// No memory where there is no address: what is optional.
std::span<float> optional_memory(std::uintptr_t address, std::size_t count) {
  return memory<float>(address, address == 0 ? 0 : count);
}

void bind_scatter(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def(
      "scatter",
      [](bool adds, std::uintptr_t dense, std::size_t n, DType dtype, std::uintptr_t indices, std::uintptr_t values,
         std::size_t count, std::uint64_t base) {
        on_entry_type(dtype, [&]<class V>(V) {
          const kernels::Entries<V> entries{memory<const std::uint32_t>(indices, count), memory<const V>(values, count)};
          if (adds) return kernels::scatter_reduce<V>(Reduction::sum, memory<V>(dense, n), entries, base);
          kernels::scatter_set<V>(memory<V>(dense, n), entries, base);
        });
      },
      nb::arg("adds"), nb::arg("dense"), nb::arg("n"), nb::arg("dtype"), nb::arg("indices"), nb::arg("values"),
      nb::arg("count"), nb::arg("base"), unlocked);
}

void bind_encodings(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def(
      "quantise",
      [](unsigned bits, std::size_t bucket, bool stochastic, std::uint64_t seed, std::uint32_t call, std::uint32_t rank,
         std::uint64_t first, std::uintptr_t values, std::size_t n, std::uintptr_t out, std::uintptr_t error) {
        const kernels::Quantisation how{bits, bucket, stochastic};
        kernels::quantise(how, {.seed = seed, .call = call, .rank = rank}, first, memory<const float>(values, n),
                          memory<std::byte>(out, how.encoded_bytes(n)), optional_memory(error, n));
      },
      nb::arg("bits"), nb::arg("bucket"), nb::arg("stochastic"), nb::arg("seed"), nb::arg("call"), nb::arg("rank"),
      nb::arg("first"), nb::arg("values"), nb::arg("n"), nb::arg("out"), nb::arg("error"), unlocked);
  module.def(
      "dequantise",
      [](unsigned bits, std::size_t bucket, bool stochastic, std::uintptr_t encoded, std::size_t bytes,
         std::uintptr_t values, std::size_t n) {
        return kernels::dequantise({bits, bucket, stochastic}, memory<const std::byte>(encoded, bytes),
                                   memory<float>(values, n));
      },
      nb::arg("bits"), nb::arg("bucket"), nb::arg("stochastic"), nb::arg("encoded"), nb::arg("bytes"), nb::arg("values"),
      nb::arg("n"), unlocked);
  module.def(
      "narrow",
      [](DType dtype, std::uintptr_t values, std::size_t n, std::uintptr_t out, std::uintptr_t error) {
        kernels::narrow(dtype, memory<const float>(values, n), memory<std::byte>(out, n * size_of(dtype)),
                        optional_memory(error, n));
      },
      nb::arg("dtype"), nb::arg("values"), nb::arg("n"), nb::arg("out"), nb::arg("error"), unlocked);
  module.def(
      "widen",
      [](DType dtype, std::uintptr_t encoded, std::size_t n, std::uintptr_t values) {
        kernels::widen(dtype, memory<const std::byte>(encoded, n * size_of(dtype)), memory<float>(values, n));
      },
      nb::arg("dtype"), nb::arg("encoded"), nb::arg("n"), nb::arg("values"), unlocked);
  module.def(
      "mean_of_one_sign",
      [](std::uintptr_t values, std::size_t n, std::uintptr_t out, std::uintptr_t error) {
        return kernels::mean_of_one_sign(memory<const float>(values, n), memory<std::byte>(out, kernels::kMeanBytes),
                                         optional_memory(error, n));
      },
      nb::arg("values"), nb::arg("n"), nb::arg("out"), nb::arg("error"), unlocked);
  module.def(
      "fill_mean",
      [](std::uintptr_t encoded, std::size_t bytes, std::uintptr_t values, std::size_t n) {
        return kernels::fill_mean(memory<const std::byte>(encoded, bytes), memory<float>(values, n));
      },
      nb::arg("encoded"), nb::arg("bytes"), nb::arg("values"), nb::arg("n"), unlocked);
}

void bind_packing(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def(
      "pack_indices",
      [](std::uintptr_t indices, std::size_t n, std::uintptr_t out, std::size_t capacity) {
        const auto all = memory<const std::uint32_t>(indices, n);
        const kernels::IndexPlan plan = kernels::plan_indices(all);
        kernels::pack_indices(plan, all, memory<std::byte>(out, capacity));
        return plan.bytes;
      },
      nb::arg("indices"), nb::arg("n"), nb::arg("out"), nb::arg("capacity"), unlocked);
  module.def(
      "unpack_indices",
      [](std::uintptr_t packed, std::size_t bytes, std::uintptr_t indices, std::size_t n) {
        return kernels::unpack_indices(memory<const std::byte>(packed, bytes), memory<std::uint32_t>(indices, n));
      },
      nb::arg("packed"), nb::arg("bytes"), nb::arg("indices"), nb::arg("n"), unlocked);
}

}  // namespace

void bind_kernels(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def(
      "accumulate",
      [](std::uintptr_t residual, std::uintptr_t gradient, std::size_t n) {
        kernels::add(DType::f32, memory<std::byte>(residual, n * sizeof(float)),
                     memory<const std::byte>(gradient, n * sizeof(float)));
      },
      nb::arg("residual"), nb::arg("gradient"), nb::arg("n"), unlocked);
  module.def(
      "compact",
      [](std::uintptr_t dense, std::size_t n, DType dtype, double absent, std::uintptr_t indices, std::uintptr_t values,
         std::size_t capacity) {
        return on_entry_type(dtype, [&]<class V>(V) {
          const kernels::EntriesOut<V> out{memory<std::uint32_t>(indices, capacity), memory<V>(values, capacity)};
          return kernels::compact<V>(memory<const V>(dense, n), V(static_cast<float>(absent)), 0, out);
        });
      },
      nb::arg("dense"), nb::arg("n"), nb::arg("dtype"), nb::arg("absent"), nb::arg("indices"), nb::arg("values"),
      nb::arg("capacity"), unlocked);
  module.def(
      "count_nonfinite",
      [](std::uintptr_t x, std::size_t n, DType dtype) {
        return kernels::count_nonfinite(dtype, memory<const std::byte>(x, n * size_of(dtype)));
      },
      nb::arg("x"), nb::arg("n"), nb::arg("dtype"), unlocked);
  module.def(
      "mark",
      [](std::uintptr_t indices, std::size_t count, std::size_t n, std::uintptr_t marks) {
        return kernels::mark(memory<const std::uint32_t>(indices, count), 0, n,
                             memory<std::uint64_t>(marks, kernels::mark_words(n)));
      },
      nb::arg("indices"), nb::arg("count"), nb::arg("n"), nb::arg("marks"), unlocked);
  bind_scatter(module);
  bind_encodings(module);
  bind_packing(module);
}

}  // namespace telegrad::bindings
