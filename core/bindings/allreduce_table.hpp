#pragma once
// The table that chooses the algorithm of a dense sum, as Python gives it to a communicator.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/binding.hpp"
#include "collectives/choice.hpp"

namespace telegrad::bindings {

/// `Self` has size(), allreduce_table() and use(table).
template <class Self>
void bind_allreduce_table(nb::class_<Self>& type) {
  type.def(
          "use_allreduce_table",
          [](Self& self, const std::vector<std::pair<std::size_t, Algorithm>>& choices) {
            std::vector<AllreduceChoice> rows;
            for (const auto& [from_bytes, algorithm] : choices) rows.push_back({from_bytes, algorithm});
            try {
              self.use(choices.empty() ? AllreduceTable(self.size()) : AllreduceTable(self.size(), std::move(rows)));
            } catch (const std::invalid_argument& error) {
              throw nb::value_error(error.what());
            }
          },
          nb::arg("choices"))
      .def(
          "choose_allreduce", [](const Self& self, std::size_t bytes) { return self.allreduce_table().choose(bytes); },
          nb::arg("bytes"));
}

}  // namespace telegrad::bindings
