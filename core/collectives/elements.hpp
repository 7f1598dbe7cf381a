#pragma once
// The arithmetic of dense collectives on vectors whose element type is known at run time, in slices between which the
// network has its turn. dtype is f32 or bf16.

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
/// accumulator += addend.
Task<void> add(Transport& net, DType dtype, Bytes accumulator, ConstBytes addend);
/// out = a + b; `out` may be `a` or `b`.
Task<void> add_to(Transport& net, DType dtype, ConstBytes a, ConstBytes b, Bytes out);
/// values *= factor.
Task<void> scale(Transport& net, DType dtype, Bytes values, float factor);

}  // namespace telegrad
