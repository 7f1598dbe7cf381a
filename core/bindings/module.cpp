#include "base/types.hpp"
#include "bindings/binding.hpp"
#include "bindings/errors.hpp"
#include "bindings/names.hpp"
#include "transport/envelope.hpp"

namespace telegrad::bindings {

NB_MODULE(_core, module) {
  module.doc() = "telegrad's core: collectives, kernels and the simulator. Use the telegrad package instead.";

  // A forked child keeps for ever what belongs to its parent's threads; that is no leak to report.
  nb::set_leak_warnings(false);

  translate_transport_errors();

  nb::enum_<DType> dtype(module, "DType");
  for (auto value = static_cast<std::uint8_t>(DType::f32); value <= static_cast<std::uint8_t>(DType::c128); ++value) {
    dtype.value(name_of(static_cast<DType>(value)), static_cast<DType>(value));
  }
  nb::enum_<Reduction> reduction(module, "Reduction");
  for (const Reduction value : kReductions) reduction.value(name_of(value), value);
  module.def("has_reduction", &has_reduction, nb::arg("dtype"), nb::arg("reduction"));
  nb::enum_<ValueEncoding> encoding(module, "ValueEncoding");
  for (auto value = static_cast<std::uint8_t>(ValueEncoding::native);
       value <= static_cast<std::uint8_t>(kLastValueEncoding); ++value) {
    encoding.value(name_of(static_cast<ValueEncoding>(value)), static_cast<ValueEncoding>(value));
  }
  nb::enum_<Algorithm>(module, "Algorithm")
      .value("auto", Algorithm::automatic)
      .value("ring", Algorithm::ring)
      .value("recursive_doubling", Algorithm::recursive_doubling)
      .value("split_allgather", Algorithm::split_allgather)
      .value("split_dense_allgather", Algorithm::split_dense_allgather)
      .value("rabenseifner", Algorithm::rabenseifner)
      .value("two_level", Algorithm::two_level)
      .value("mpi", Algorithm::mpi);

  bind_sparse_reduction(module);
  bind_communicator(module);
  bind_device_fast_path(module);
  bind_kernels(module);
  bind_linear(module);
  bind_explorer(module);
  bind_measure(module);
  bind_selection(module);
  bind_fast_path(module);
  bind_simulation(module);
  bind_tensors(module);
  bind_topk_state(module);
  bind_work(module);
}

}  // namespace telegrad::bindings
