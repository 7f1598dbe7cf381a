// telegrad._mpi and telegrad._mpi_abi (TELEGRAD_MODULE): drivers over MPI, for telegrad._core. Modules of their own, so that
// no other part needs an MPI library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/driver_capsule.hpp"
#include "bindings/errors.hpp"
#include "drivers/mpi/mpi_driver.hpp"

namespace telegrad::bindings {
namespace {

namespace nb = nanobind;

// Other ranks are waited for without the interpreter's lock; Ctrl-C and the time limit end it.
MpiNetwork::Patience patience_until(double timeout_s) {
  return [until = MpiNetwork::patience(timeout_s)] {
    {
      const nb::gil_scoped_release unlocked;
      until();
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
}

// `address`: of an MPI_Comm, as mpi4py's MPI._addressof() gives it.
std::shared_ptr<MpiNetwork> network_of(std::uintptr_t address, double timeout_s) {
  MPI_Comm comm = MPI_COMM_NULL;
  std::memcpy(&comm, reinterpret_cast<const void*>(address), sizeof comm);
  return MpiNetwork::of(comm, patience_until(timeout_s));
}

nb::list exchange(MpiNetwork& self, const nb::bytes& mine, double timeout_s) {
  const auto* const first = reinterpret_cast<const std::byte*>(mine.c_str());
  nb::list result;
  for (const auto& blob : self.exchange({first, mine.size()}, patience_until(timeout_s))) {
    result.append(nb::bytes(blob.data(), blob.size()));
  }
  return result;
}

nb::capsule make_driver(const std::shared_ptr<MpiNetwork>& network, Rank rank, Rank size) {
  using Held = std::unique_ptr<AddressedDriver>;
  auto held = std::make_unique<Held>(std::make_unique<MpiDriver>(network, rank, size));
  return nb::capsule(held.release(), kDriverCapsule, [](void* pointer) noexcept { delete static_cast<Held*>(pointer); });
}

}  // namespace

NB_MODULE(TELEGRAD_MODULE, module) {
  module.doc() = "telegrad's mpi driver. Use telegrad.Communicator.from_mpi() instead.";
  nb::set_leak_warnings(false);
  translate_transport_errors();

  nb::class_<MpiNetwork>(module, "Network")
      .def_prop_ro("rank", &MpiNetwork::rank)
      .def_prop_ro("size", &MpiNetwork::size)
      .def("exchange", &exchange, nb::arg("mine"), nb::arg("timeout_s"));
  module.def("network_of", &network_of, nb::arg("address"), nb::arg("timeout_s"));
  module.def("make_driver", &make_driver, nb::arg("network"), nb::arg("rank"), nb::arg("size"));
  module.def("library_version", &MpiNetwork::library_version);
  module.def("is_initialized", [] {
    int initialised = 0;
    MPI_Initialized(&initialised);
    return initialised != 0;
  });
  module.attr("handle_bytes") = sizeof(MPI_Comm);
}

}  // namespace telegrad::bindings
