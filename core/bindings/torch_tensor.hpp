#pragma once
// torch's tensors without torch's headers: what few calls of their methods tell.

#include <optional>

#include "bindings/tensors.hpp"

namespace telegrad::bindings {

/// Of a torch.Tensor or Parameter that lies in host memory as an array does, of a type that can be reduced. None for
/// everything else: the caller finds out why, and says so.
std::optional<HostBuffer> torch_buffer_of(nb::handle x);
/// The same of one whose memory is `device`'s (a torch.device); none, too, where inference mode has made it.
std::optional<HostBuffer> torch_buffer_on(nb::handle device, nb::handle x);

}  // namespace telegrad::bindings
