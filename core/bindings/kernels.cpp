#include <bit>

#include "bindings/binding.hpp"
#include "bindings/operation.hpp"
#include "bindings/unlocked.hpp"
#include "kernels/arithmetic.hpp"
#include "kernels/low_rank.hpp"
#include "kernels/marks.hpp"
#include "kernels/merge.hpp"
#include "kernels/reduce.hpp"
#include "kernels/scan.hpp"

namespace telegrad::bindings {

void bind_kernels(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def(
      "compact",
      [](std::uintptr_t dense, std::size_t n, DType dtype, std::uint64_t absent_bits, std::uintptr_t indices,
         std::uintptr_t values, std::size_t capacity) {
        return on_entry_type(dtype, [&]<class V>(V) {
          const kernels::EntriesOut<V> out{memory<std::uint32_t>(indices, capacity), memory<V>(values, capacity)};
          using Bits = typename kernels::Format<V>::Bits;
          return kernels::compact<V>(memory<const V>(dense, n), std::bit_cast<V>(static_cast<Bits>(absent_bits)), 0, out);
        });
      },
      nb::arg("dense"), nb::arg("n"), nb::arg("dtype"), nb::arg("absent_bits"), nb::arg("indices"),
      nb::arg("values"), nb::arg("capacity"), unlocked);
  module.def(
      "count_nonfinite",
      [](std::uintptr_t x, std::size_t n, DType dtype) {
        return kernels::count_nonfinite(dtype, memory<const std::byte>(x, n * size_of(dtype)));
      },
      nb::arg("x"), nb::arg("n"), nb::arg("dtype"), unlocked);
  module.def(
      "low_rank_product",
      [](std::uintptr_t left, std::size_t rows, std::uintptr_t right, std::size_t columns, std::size_t rank,
         std::uintptr_t out) {
        kernels::low_rank_product(memory<const float>(left, rows * rank), memory<const float>(right, rank * columns), rank,
                                  memory<float>(out, rows * columns));
      },
      nb::arg("left"), nb::arg("rows"), nb::arg("right"), nb::arg("columns"), nb::arg("rank"), nb::arg("out"), unlocked);
  module.def(
      "add_and_multiply",
      [](std::uintptr_t before, std::uintptr_t added, std::uintptr_t lines, std::size_t rows, std::size_t columns,
         std::size_t rank, std::uintptr_t sum, std::uintptr_t out) {
        return kernels::add_and_multiply(memory<const float>(before, rows * columns),
                                         memory<const float>(added, rows * columns),
                                         memory<const float>(lines, rank * columns), rank,
                                         memory<float>(sum, rows * columns), memory<float>(out, rank * rows));
      },
      nb::arg("before"), nb::arg("added"), nb::arg("lines"), nb::arg("rows"), nb::arg("columns"), nb::arg("rank"),
      nb::arg("sum"), nb::arg("out"), unlocked);
  module.def(
      "multiply_transposed",
      [](std::uintptr_t left, std::uintptr_t matrix, std::size_t rows, std::size_t columns, std::size_t rank,
         std::uintptr_t out) {
        kernels::multiply_transposed(memory<const float>(left, rows * rank), memory<const float>(matrix, rows * columns),
                                     rank, memory<float>(out, rank * columns));
      },
      nb::arg("left"), nb::arg("matrix"), nb::arg("rows"), nb::arg("columns"), nb::arg("rank"), nb::arg("out"), unlocked);
  module.def(
      "subtract_product",
      [](std::uintptr_t left, std::uintptr_t right, std::size_t rows, std::size_t columns, std::size_t rank,
         std::uintptr_t matrix) {
        return kernels::subtract_product(memory<const float>(left, rows * rank),
                                         memory<const float>(right, rank * columns), rank,
                                         memory<float>(matrix, rows * columns));
      },
      nb::arg("left"), nb::arg("right"), nb::arg("rows"), nb::arg("columns"), nb::arg("rank"), nb::arg("matrix"),
      unlocked);
  module.def(
      "orthonormal_basis",
      [](std::uintptr_t columns, std::size_t count, std::size_t rows, std::uintptr_t basis) {
        kernels::orthonormal_basis(memory<const float>(columns, count * rows), rows, memory<float>(basis, count * rows));
      },
      nb::arg("columns"), nb::arg("count"), nb::arg("rows"), nb::arg("basis"), unlocked);
  module.def(
      "squared_lengths",
      [](std::uintptr_t matrix, std::size_t rows, std::size_t columns, std::uintptr_t squares) {
        kernels::squared_lengths(memory<const float>(matrix, rows * columns), memory<double>(squares, columns));
      },
      nb::arg("matrix"), nb::arg("rows"), nb::arg("columns"), nb::arg("squares"), unlocked);
  module.def(
      "mark",
      [](std::uintptr_t indices, std::size_t count, std::size_t n, std::uintptr_t marks) {
        return kernels::mark(memory<const std::uint32_t>(indices, count), 0, n,
                             memory<std::uint64_t>(marks, kernels::mark_words(n)));
      },
      nb::arg("indices"), nb::arg("count"), nb::arg("n"), nb::arg("marks"), unlocked);
}

}  // namespace telegrad::bindings
