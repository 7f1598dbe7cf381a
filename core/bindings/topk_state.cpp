#include "bindings/topk_state.hpp"

namespace telegrad::bindings {

void bind_topk_state(nb::module_& module) {
  nb::class_<TopkState>(module, "TopkState")
      .def(
          "__init__",
          [](TopkState* self, std::uint64_t k, std::uint64_t boundaries_every, std::uint64_t threshold_every,
             double balance_factor, bool as_published) {
            new (self) TopkState({.k = k,
                                  .boundaries_every = boundaries_every,
                                  .threshold_every = threshold_every,
                                  .balance_factor = balance_factor,
                                  .as_published = as_published},
                                 {});
          },
          nb::arg("k"), nb::arg("boundaries_every"), nb::arg("threshold_every"), nb::arg("balance_factor"),
          nb::arg("as_published"))
      .def_prop_ro("in_use", &TopkState::in_use)
      .def("get",
           [](TopkState& self) {
             const OkTopkState& state = self.state();
             return nb::make_tuple(state.calls, state.threshold, state.lengths);
           })
      .def(
          "set",
          [](TopkState& self, std::uint64_t calls, double threshold, std::vector<std::uint64_t> lengths) {
            self.load({.calls = calls, .threshold = threshold, .lengths = std::move(lengths)});
          },
          nb::arg("calls"), nb::arg("threshold"), nb::arg("lengths"));
}

}  // namespace telegrad::bindings
