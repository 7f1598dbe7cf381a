#include <algorithm>
#include <limits>

#include "collectives/dense/choice.hpp"
#include "collectives/sparse/cost.hpp"
#include "collectives/sparse/messages.hpp"

#include "bindings/binding.hpp"

namespace telegrad::bindings {

void bind_sparse_reduction(nb::module_& module) {
  nb::enum_<IndexFormat>(module, "IndexFormat")
      .value("none", IndexFormat::none)
      .value("raw32", IndexFormat::raw32)
      .value("packed", IndexFormat::packed);
  nb::class_<NetworkCosts>(module, "NetworkCosts")
      .def(
          "__init__",
          [](NetworkCosts* self, double alpha_s, double beta_s_per_byte, double beta_exchange_s_per_byte,
             double gamma_s_per_byte) {
            new (self) NetworkCosts{.alpha_s = alpha_s,
                                    .beta_s_per_byte = beta_s_per_byte,
                                    .beta_exchange_s_per_byte = beta_exchange_s_per_byte,
                                    .gamma_s_per_byte = gamma_s_per_byte};
          },
          nb::arg("alpha_s"), nb::arg("beta_s_per_byte"), nb::arg("beta_exchange_s_per_byte"),
          nb::arg("gamma_s_per_byte"));
  // Seconds, by algorithm, that a sum of so many entries per rank takes; by the fastest dense one, where that is made.
  module.def(
      "sparse_sum_costs",
      [](Rank ranks, std::uint64_t n, double entries, double overlap, DType dtype, IndexFormat indices,
         bool packs_values, const NetworkCosts& network) {
        const SparseSumShape shape{
            .ranks = ranks, .dimension = n, .dtype = dtype, .indices = indices, .packs_values = packs_values};
        const SparseCosts costs(shape, network);
        const SumGrowth growth(n, entries, overlap);
        nb::dict seconds;
        seconds["recursive_doubling"] = costs.doubling_s(growth.of_sums(ranks / costs.members()), 0);
        seconds["split_allgather"] = costs.split_s(entries, growth.entries(ranks));
        seconds["split_dense_allgather"] = costs.split_dense_s(entries);
        double dense_s = std::numeric_limits<double>::infinity();
        for (const Algorithm one : kAllreduceAlgorithms) dense_s = std::min(dense_s, costs.dense_s(one));
        seconds["dense"] = costs.made_dense_s() + dense_s;
        return seconds;
      },
      nb::arg("ranks"), nb::arg("n"), nb::arg("entries"), nb::arg("overlap"), nb::arg("dtype"), nb::arg("indices"),
      nb::arg("packs_values"), nb::arg("network"));
  nb::class_<SparseReduction>(module, "SparseReduction")
      .def(
          "__init__",
          [](SparseReduction* self, Reduction reduction, Algorithm algorithm, double switch_factor, IndexFormat indices,
             ValueEncoding values, std::uint64_t seed, std::uint32_t call, std::uintptr_t residual,
             std::size_t elements, bool balanced, bool packs_values, bool rounds_shares) {
            new (self) SparseReduction{
                .reduction = reduction,
                .switch_factor = switch_factor,
                .algorithm = algorithm,
                .wire = {.indices = indices,
                         .values = values,
                         .key = {.seed = seed, .call = call},
                         .packs_values = packs_values},
                .rounds_shares = rounds_shares,
                .residual = residual == 0 ? std::span<float>() : memory<float>(residual, elements),
                .slices = balanced ? Slices::balanced : Slices::equal};
          },
          nb::arg("reduction"), nb::arg("algorithm"), nb::arg("switch_factor"), nb::arg("indices") = IndexFormat::none,
          nb::arg("values") = ValueEncoding::native, nb::arg("seed") = 0, nb::arg("call") = 0, nb::arg("residual") = 0,
          nb::arg("elements") = 0, nb::arg("balanced") = false, nb::arg("packs_values") = false,
          nb::arg("rounds_shares") = true);
}

}  // namespace telegrad::bindings
