#include "bindings/topk_state.hpp"

#include <nanobind/stl/pair.h>

namespace telegrad::bindings {
namespace {

// What the last call has left.
void bind_past(nb::class_<KeptBoundedTopk>& type) {
  type.def("get",
           [](KeptBoundedTopk& self) {
             const BoundedTopkState& state = self.state();
             return nb::make_tuple(state.calls, state.threshold, state.lengths);
           })
      .def(
          "set",
          [](KeptBoundedTopk& self, std::uint64_t calls, double threshold, std::vector<std::uint64_t> lengths) {
            self.load({.calls = calls, .threshold = threshold, .lengths = std::move(lengths)});
          },
          nb::arg("calls"), nb::arg("threshold"), nb::arg("lengths"));
}

void bind_past(nb::class_<KeptOkTopk>& type) {
  type.def("get",
           [](KeptOkTopk& self) {
             const OkTopkState& state = self.state();
             return nb::make_tuple(state.calls, state.threshold, state.lengths, state.spread, state.squares);
           })
      .def(
          "set",
          [](KeptOkTopk& self, std::uint64_t calls, double threshold, std::vector<std::uint64_t> lengths, bool spread,
             std::vector<double> squares) {
            self.load({.calls = calls,
                       .threshold = threshold,
                       .lengths = std::move(lengths),
                       .spread = spread,
                       .squares = std::move(squares)});
          },
          nb::arg("calls"), nb::arg("threshold"), nb::arg("lengths"), nb::arg("spread") = false,
          nb::arg("squares") = std::vector<double>());
}

}  // namespace

void bind_topk_state(nb::module_& module) {
  nb::class_<KeptOkTopk> oktopk(module, "OkTopkState");
  oktopk.def_static("words_most", &oktopk_words_most, nb::arg("most"), nb::arg("ranks"))
      .def_static(
          "bytes_most",
          [](std::uint64_t most, std::uint64_t k, Rank ranks, std::uint64_t n, bool cut, bool exact, bool balanced) {
            return oktopk_bytes_most<float>(most, k, ranks, n, {.cut = cut, .exact = exact, .balanced = balanced});
          },
          nb::arg("most"), nb::arg("k"), nb::arg("ranks"), nb::arg("n"), nb::arg("cut") = true, nb::arg("exact") = true,
          nb::arg("balanced") = true)
      .def(
          "__init__",
          [](KeptOkTopk* self, std::uint64_t k, std::uint64_t boundaries_every, std::uint64_t threshold_every,
             double balance_factor, bool as_published,
             const std::vector<std::pair<std::uint64_t, std::uint64_t>>& tensors) {
            std::vector<IndexRange> ranges;
            for (const auto& [first, size] : tensors) ranges.push_back({first, first + size});
            new (self) KeptOkTopk({.k = k,
                                   .boundaries_every = boundaries_every,
                                   .threshold_every = threshold_every,
                                   .balance_factor = balance_factor,
                                   .as_published = as_published,
                                   .tensors = std::move(ranges)},
                                  {});
          },
          nb::arg("k"), nb::arg("boundaries_every"), nb::arg("threshold_every"), nb::arg("balance_factor"),
          nb::arg("as_published"), nb::arg("tensors") = std::vector<std::pair<std::uint64_t, std::uint64_t>>())
      .def_prop_ro("in_use", &KeptOkTopk::in_use);
  bind_past(oktopk);
  nb::class_<KeptBoundedTopk> bounded(module, "BoundedTopkState");
  bounded
      .def(
          "__init__",
          [](KeptBoundedTopk* self, std::uint64_t k, double slack, std::uint64_t boundaries_every) {
            new (self) KeptBoundedTopk({.k = k, .slack = slack, .boundaries_every = boundaries_every}, {});
          },
          nb::arg("k"), nb::arg("slack"), nb::arg("boundaries_every"))
      .def_prop_ro("in_use", &KeptBoundedTopk::in_use);
  bind_past(bounded);
  nb::class_<KeptGTopk>(module, "GTopkState")
      .def(
          "__init__", [](KeptGTopk* self, std::uint64_t k) { new (self) KeptGTopk({.k = k}, {}); }, nb::arg("k"))
      .def_prop_ro("in_use", &KeptGTopk::in_use);
}

}  // namespace telegrad::bindings
