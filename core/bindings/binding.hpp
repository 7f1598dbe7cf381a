#pragma once
// What the files of the Python module share. Bindings translate; they decide nothing.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>

#include "base/types.hpp"

namespace telegrad::bindings {

namespace nb = nanobind;

// Python hands memory over as integers: it has checked dtype, layout and length, and keeps the owner alive.
template <class T>
std::span<T> memory(std::uintptr_t address, std::size_t count) {
  return {reinterpret_cast<T*>(address), count};
}

void bind_communicator(nb::module_& module);
void bind_device_fast_path(nb::module_& module);
void bind_explorer(nb::module_& module);
void bind_kernels(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_measure(nb::module_& module);
void bind_selection(nb::module_& module);
void bind_fast_path(nb::module_& module);
void bind_simulation(nb::module_& module);
void bind_sparse_reduction(nb::module_& module);
void bind_tensors(nb::module_& module);
void bind_topk_state(nb::module_& module);
void bind_work(nb::module_& module);

}  // namespace telegrad::bindings
