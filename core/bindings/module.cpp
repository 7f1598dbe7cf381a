#include <nanobind/stl/string.h>

#include "base/types.hpp"
#include "bindings/binding.hpp"
#include "session/report.hpp"
#include "transport/envelope.hpp"
#include "transport/failure.hpp"

namespace telegrad::bindings {
namespace {

nb::object rank_or_none(Rank rank) { return rank == kNoRank ? nb::none() : nb::cast(rank); }

nb::object text_or_none(const std::string& text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.c_str()));
}

void raise_transport_error(const Failure& failure) {
  try {
    const nb::object type = nb::module_::import_("telegrad.errors").attr(error_name(failure.kind));
    const nb::object error =
        type(failure.message(), nb::arg("rank") = rank_or_none(failure.rank),
             nb::arg("peer") = rank_or_none(failure.peer),
             nb::arg("host") = text_or_none(failure.host), nb::arg("operation") = failure.operation.c_str(),
             nb::arg("tag") = failure.tag.value_or(failure.sequence),
             nb::arg("group") = failure.group ? text_or_none(failure.group->name) : nb::none(),
             nb::arg("parent_rank") = rank_or_none(failure.in_parent(failure.rank)),
             nb::arg("parent_peer") = rank_or_none(failure.in_parent(failure.peer)));
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (nb::python_error& error) {
    error.restore();
  }
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "telegrad's core: collectives, kernels and the simulator. Use the telegrad package instead.";

  // A forked child keeps for ever what belongs to its parent's threads; that is no leak to report.
  nb::set_leak_warnings(false);

  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const TransportError& error) {
      raise_transport_error(error.failure());
    }
  });

  nb::enum_<DType> dtype(module, "DType");
  for (auto value = static_cast<std::uint8_t>(DType::f32); value <= static_cast<std::uint8_t>(DType::c128); ++value) {
    dtype.value(name_of(static_cast<DType>(value)), static_cast<DType>(value));
  }
  nb::enum_<Reduction> reduction(module, "Reduction");
  for (const Reduction value : {Reduction::sum, Reduction::avg, Reduction::prod, Reduction::min, Reduction::max,
                                Reduction::max_abs}) {
    reduction.value(name_of(value), value);
  }
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
      .value("two_level", Algorithm::two_level);

  bind_sparse_reduction(module);
  bind_communicator(module);
  bind_kernels(module);
  bind_linear(module);
  bind_explorer(module);
  bind_measure(module);
  bind_selection(module);
  bind_simulation(module);
  bind_tensors(module);
  bind_topk_state(module);
}

}  // namespace telegrad::bindings
