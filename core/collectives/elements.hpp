#pragma once
// The arithmetic of dense collectives on vectors whose element type is known at run time, in slices between which the
// network has its turn.

#include "base/types.hpp"
#include "collectives/blocks.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// The bytes of `range`'s elements.
template <class Span>
Span elements(Span whole, DType dtype, Range range) {
  return whole.subspan(range.begin * size_of(dtype), range.size() * size_of(dtype));
}

/// into = from; nothing to do where both are the same memory.
Task<void> copy(Transport& net, ConstBytes from, Bytes into);
/// accumulator = accumulator ∘ addend.
Task<void> reduce(Transport& net, DType dtype, Reduction reduction, Bytes accumulator, ConstBytes addend);
/// out = a ∘ b, the same bits as b ∘ a; `out` may be `a` or `b`. An average is summed like a sum.
Task<void> reduce_to(Transport& net, DType dtype, Reduction reduction, ConstBytes a, ConstBytes b, Bytes out);
/// f16 or bf16 as f32, and back, to nearest even.
Task<void> widen(Transport& net, DType dtype, ConstBytes from, Bytes into);
Task<void> narrow(Transport& net, DType dtype, ConstBytes from, Bytes into);
/// What is left to do once all ranks' elements are reduced: an average is divided by the number of ranks.
Task<void> finish_reduction(Transport& net, DType dtype, Reduction reduction, Bytes values);

}  // namespace telegrad
