#pragma once
// Drawing what ranks call.

#include <vector>

#include "simulation/explorer/drawing.hpp"
#include "simulation/explorer/program.hpp"

namespace telegrad::explorer {

/// Large ones have vectors beyond all at which the library begins to cut them: bulk messages, slices of work, blocks of
/// indices.
enum class Extent : std::uint8_t { usual, large };
/// One call of `operation` by `size` ranks.
PlannedCall draw_call(Chance& chance, Operation operation, Rank size, Extent extent = Extent::usual);
/// The calls of a program in which everybody calls alike; `at`: the one at which `trouble` strikes, and suits it.
std::vector<PlannedCall> draw_calls(Chance& chance, Trouble trouble, Rank size, std::size_t& at);
/// All but the call at `at`, and a barrier at the end, become sums of which `k` entries are kept, of vectors of one length;
/// and some more are called before these.
void train(std::vector<PlannedCall>& calls, Trouble trouble, Rank size, std::size_t& at, std::uint64_t k);
/// What an odd rank calls instead of `calls`; `turn` counts the odd ranks.
std::vector<PlannedCall> odd_calls(Chance& chance, Trouble trouble, Rank size, std::vector<PlannedCall> calls,
                                   std::size_t at, std::size_t turn);

/// Pessimistic, for one rank of `size`.
struct Effort {
  double messages = 0.0;
  double bytes = 0.0;
};
Effort effort_of(const PlannedCall& call, Rank size);

}  // namespace telegrad::explorer
