#include "simulation/explorer/exploration.hpp"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bindings/binding.hpp"
#include "bindings/unlocked.hpp"

namespace telegrad::bindings {
namespace {

std::string explore(std::uint64_t first_seed, std::uint64_t seeds, Rank first_ranks, Rank last_ranks,
                    std::string only) {
  return explorer::explore({.first_seed = first_seed,
                            .seeds = seeds,
                            .first_ranks = first_ranks,
                            .last_ranks = last_ranks,
                            .only = std::move(only)});
}

nb::tuple replay(std::uint64_t seed, Rank first_ranks, Rank last_ranks) {
  explorer::Replay replayed;
  {
    const Unlocked unlocked;
    replayed = explorer::replay(seed, first_ranks, last_ranks);
  }
  return nb::make_tuple(replayed.verdict, replayed.trace_hash, replayed.trace);
}

}  // namespace

void bind_explorer(nb::module_& module) {
  module.def("explore", &explore, nb::arg("first_seed"), nb::arg("seeds"), nb::arg("first_ranks"),
             nb::arg("last_ranks"), nb::arg("only") = "", nb::call_guard<Unlocked>());
  module.def("replay", &replay, nb::arg("seed"), nb::arg("first_ranks"), nb::arg("last_ranks"));
}

}  // namespace telegrad::bindings
