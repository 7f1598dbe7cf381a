#include "collectives/sparse_messages.hpp"

#include "bindings/binding.hpp"

namespace telegrad::bindings {

void bind_sparse_reduction(nb::module_& module) {
  nb::enum_<IndexFormat>(module, "IndexFormat")
      .value("none", IndexFormat::none)
      .value("raw32", IndexFormat::raw32)
      .value("packed", IndexFormat::packed);
  nb::class_<SparseReduction>(module, "SparseReduction")
      .def(
          "__init__",
          [](SparseReduction* self, Reduction reduction, Algorithm algorithm, double switch_factor, IndexFormat indices,
             ValueEncoding values, std::uint64_t seed, std::uint32_t call, std::uintptr_t residual,
             std::size_t elements, bool balanced) {
            new (self) SparseReduction{
                .reduction = reduction,
                .switch_factor = switch_factor,
                .algorithm = algorithm,
                .wire = {.indices = indices, .values = values, .key = {.seed = seed, .call = call}},
                .residual = residual == 0 ? std::span<float>() : memory<float>(residual, elements),
                .slices = balanced ? Slices::balanced : Slices::equal};
          },
          nb::arg("reduction"), nb::arg("algorithm"), nb::arg("switch_factor"), nb::arg("indices") = IndexFormat::none,
          nb::arg("values") = ValueEncoding::native, nb::arg("seed") = 0, nb::arg("call") = 0, nb::arg("residual") = 0,
          nb::arg("elements") = 0, nb::arg("balanced") = false);
}

}  // namespace telegrad::bindings
