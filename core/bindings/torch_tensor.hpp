#pragma once
// torch's tensors without torch's headers: what few calls of their methods tell.

#include <optional>

#include "bindings/tensors.hpp"

namespace telegrad::bindings {

/// Of a torch.Tensor or Parameter that lies in host memory as an array does, of a type that can be reduced. None for
/// everything else: the caller finds out why, and says so.
std::optional<HostBuffer> torch_buffer_of(nb::handle x);

}  // namespace telegrad::bindings
