#pragma once
// From a caller's array to an address.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/types.hpp"
#include "bindings/binding.hpp"

namespace telegrad::bindings {

/// Contiguous host memory. Whoever uses `pointer` keeps its owner alive.
struct HostBuffer {
  std::uintptr_t pointer;
  std::size_t elements;
  std::size_t nbytes;
  DType dtype;
};

bool is_array(nb::handle x);  // a numpy.ndarray itself, no subclass

/// None for what cannot be used as it is: the caller finds out why, and says so.
std::optional<HostBuffer> buffer_of(nb::handle owner, bool writable);

}  // namespace telegrad::bindings
