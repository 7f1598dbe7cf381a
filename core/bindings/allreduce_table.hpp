#pragma once
// What chooses the algorithms of sums, as Python gives it to a communicator: the table of dense ones, and the network's
// costs for sparse ones.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/binding.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/sparse/choice.hpp"

namespace telegrad::bindings {

/// `Self` has size(), allreduce_table(), use(table, costs, node_costs) and use_nodes(labels).
template <class Self>
void bind_allreduce_table(nb::class_<Self>& type) {
  type.def(
          "use_allreduce_table",
          [](Self& self, const std::vector<std::pair<std::size_t, Algorithm>>& choices,
             const std::optional<NetworkCosts>& costs, const std::optional<NetworkCosts>& inside,
             std::optional<double> beta_alone_s_per_byte) {
            std::vector<AllreduceChoice> rows;
            for (const auto& [from_bytes, algorithm] : choices) rows.push_back({from_bytes, algorithm});
            try {
              std::optional<NodeCosts> node_costs;
              if (inside) node_costs = NodeCosts{.inside = *inside, .beta_alone_s_per_byte = beta_alone_s_per_byte};
              self.use(choices.empty() ? AllreduceTable(self.size()) : AllreduceTable(self.size(), std::move(rows)), costs,
                       node_costs);
            } catch (const std::invalid_argument& error) {
              throw nb::value_error(error.what());
            }
          },
          nb::arg("choices"), nb::arg("costs").none() = nb::none(), nb::arg("inside").none() = nb::none(),
          nb::arg("beta_alone_s_per_byte").none() = nb::none())
      .def(
          "use_nodes",
          [](Self& self, const std::vector<std::uint32_t>& labels) {
            if (labels.size() != self.size()) {
              throw nb::value_error(("there are " + std::to_string(labels.size()) + " labels for " +
                                     std::to_string(self.size()) + " ranks: give one for each")
                                        .c_str());
            }
            self.use_nodes(labels);
          },
          nb::arg("labels"))
      .def(
          "choose_allreduce", [](const Self& self, std::size_t bytes) { return self.allreduce_table().choose(bytes); },
          nb::arg("bytes"));
}

}  // namespace telegrad::bindings
