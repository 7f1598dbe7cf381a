#pragma once
// A dense sum in place, of an array or a tensor, for calls that are to cost little.

#include "bindings/binding.hpp"
#include "bindings/names.hpp"
#include "bindings/tensors.hpp"
#include "bindings/torch_tensor.hpp"
#include "session/reductions.hpp"

namespace telegrad::bindings {

/// `op`, `algorithm`: names, or null for "sum" and "auto". Null for what cannot be summed as it is: the caller finds out
/// why, and says so. `Self` has allreduce_table() and nodes().
template <class Self>
RequestPtr request_for_array(Self& self, nb::handle x, nb::handle op, nb::handle algorithm) {
  constexpr Reduction kSum = Reduction::sum;
  constexpr Algorithm kAutomatic = Algorithm::automatic;
  const Reduction* const reduction = op.is_valid() ? reduction_names().find(op) : &kSum;
  const Algorithm* const chosen = algorithm.is_valid() ? dense_algorithm_names().find(algorithm) : &kAutomatic;
  if (reduction == nullptr || chosen == nullptr) return nullptr;
  const auto found = is_array(x) ? buffer_of(x, true) : torch_buffer_of(x);
  if (!found || !has_reduction(found->dtype, *reduction)) return nullptr;
  return make_all_reduce(self.allreduce_table(), {.input = memory<const std::byte>(found->pointer, found->nbytes),
                                                  .output = memory<std::byte>(found->pointer, found->nbytes),
                                                  .dtype = found->dtype,
                                                  .reduction = *reduction,
                                                  .algorithm = *chosen,
                                                  .nodes = self.nodes()});
}

}  // namespace telegrad::bindings
