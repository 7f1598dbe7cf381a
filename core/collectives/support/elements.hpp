#pragma once
// The arithmetic of dense collectives on vectors whose element type is known at run time, in slices between which the
// network has its turn.

#include <bit>

#include "base/types.hpp"
#include "collectives/support/blocks.hpp"
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

/// What some ranks' elements have been reduced to. On its way to an average a sum of f16, which may leave the type's range,
/// is kept halved, `halvings` times: at least once for each doubling of the number of ranks. Exact but for what gets below
/// 2^-14. With any other type or reduction the number says nothing.
struct Partial {
  ConstBytes values;
  Rank halvings = 0;
};
/// How often a sum of so many ranks is halved.
inline Rank halvings_of(Rank ranks) { return static_cast<Rank>(std::bit_width(ranks - 1)); }
/// out = a ∘ b, halved `halvings` times (no fewer than `a` and `b`); `out` may be a's or b's memory.
Task<void> reduce_partial(Transport& net, DType dtype, Reduction reduction, Partial a, Partial b, Bytes out, Rank halvings);
/// into = a that has met no other, halved `halvings` times; `into` may be its memory.
Task<void> keep_partial(Transport& net, DType dtype, Reduction reduction, Partial a, Bytes into, Rank halvings);
/// The last step, all ranks' elements being in `a` or `b`: out = a ∘ b, an average divided by the number of ranks. An
/// average of 16-bit floats is rounded once here, and finite where all elements are. `out` may be a's or b's memory.
Task<void> reduce_last(Transport& net, DType dtype, Reduction reduction, Partial a, Partial b, Bytes out);

/// values *= factor.
Task<void> scale(Transport& net, DType dtype, Bytes values, double factor);
/// f16 or bf16 as f32, in which nothing is halved, and back, to nearest even; the latter overwrites `from`.
Task<void> widen(Transport& net, DType dtype, Reduction reduction, Partial from, Bytes into);
Task<void> narrow(Transport& net, DType dtype, Reduction reduction, Bytes from, Bytes into, Rank halvings);
/// What is left of an average once all ranks' elements are summed: it is divided by the number of ranks.
Task<void> finish_reduction(Transport& net, DType dtype, Reduction reduction, Bytes values);

}  // namespace telegrad
