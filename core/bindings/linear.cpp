#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/binding.hpp"
#include "bindings/unlocked.hpp"
#include "linear/columns.hpp"
#include "linear/descent.hpp"
#include "linear/dual_descent.hpp"
#include "linear/gradient.hpp"
#include "linear/libsvm.hpp"
#include "linear/newton.hpp"
#include "linear/numbering.hpp"
#include "linear/rank_gradient.hpp"

namespace telegrad::bindings {
namespace {

using namespace linear;

std::string_view text_at(std::uintptr_t address, std::size_t size) {
  return {reinterpret_cast<const char*>(address), size};
}

nb::list damaged_of(const ParsedRows& found) {
  nb::list lines;
  for (const DamagedLine& one : found.first_damaged) {
    lines.append(nb::make_tuple(one.line, one.damage, nb::bytes(one.token.data(), one.token.size())));
  }
  return lines;
}

// Sums by Python's function, in the thread that has called step().
Newton::Reduce reduce_by(nb::callable act) {
  return [act = std::move(act)](std::span<double> numbers, std::size_t of_feature, Newton::Over over) {
    const nb::gil_scoped_acquire locked;
    act(reinterpret_cast<std::uintptr_t>(numbers.data()), numbers.size(), of_feature, over == Newton::Over::largest);
  };
}

}  // namespace

void bind_linear(nb::module_& module) {
  const nb::call_guard<Unlocked> unlocked;
  nb::enum_<Damage>(module, "Damage")
      .value("bad_label", Damage::bad_label)
      .value("bad_index", Damage::bad_index)
      .value("bad_value", Damage::bad_value)
      .value("not_finite", Damage::not_finite)
      .value("below_base", Damage::below_base)
      .value("not_rising", Damage::not_rising)
      .value("beyond_32_bits", Damage::beyond_32_bits)
      .value("beyond_features", Damage::beyond_features)
      .value("query_id", Damage::query_id)
      .value("bad_weight", Damage::bad_weight);
  nb::class_<ParsedRows>(module, "ParsedRows")
      .def_ro("rows", &ParsedRows::rows)
      .def_ro("entries", &ParsedRows::entries)
      .def_ro("lines", &ParsedRows::lines)
      .def_ro("features", &ParsedRows::features)
      .def_ro("damaged", &ParsedRows::damaged)
      .def_ro("weighted", &ParsedRows::weighted)
      .def_ro("complete", &ParsedRows::complete)
      .def_prop_ro("first_damaged", &damaged_of);
  module.def(
      "whole_lines",
      [](std::uintptr_t text, std::size_t size, std::size_t begin, std::size_t end) {
        const TextRange range = whole_lines(text_at(text, size), begin, end);
        return std::tuple(range.begin, range.end);
      },
      nb::arg("text"), nb::arg("size"), nb::arg("begin"), nb::arg("end"), unlocked);
  module.def(
      "libsvm_bounds",
      [](std::uintptr_t text, std::size_t size) {
        const RowBounds bounds = bounds_of(text_at(text, size));
        return std::tuple(bounds.rows, bounds.entries);
      },
      nb::arg("text"), nb::arg("size"), unlocked);
  // Arrays that Python keeps alive, by their addresses, and how long they are.
  nb::class_<RowsOut>(module, "RowsOut")
      .def(
          "__init__",
          [](RowsOut* self, std::uintptr_t offsets, std::uintptr_t indices, std::uintptr_t values,
             std::uintptr_t labels, std::uintptr_t starts, std::uintptr_t weights, std::size_t rows,
             std::size_t entries) {
            new (self) RowsOut{memory<std::uint64_t>(offsets, rows + 1), memory<std::uint32_t>(indices, entries),
                               memory<float>(values, entries), memory<float>(labels, rows),
                               memory<std::uint64_t>(starts, rows), memory<float>(weights, rows)};
          },
          nb::arg("offsets"), nb::arg("indices"), nb::arg("values"), nb::arg("labels"), nb::arg("starts"),
          nb::arg("weights"), nb::arg("rows"), nb::arg("entries"));
  nb::class_<RowsView>(module, "RowsView")
      .def(
          "__init__",
          [](RowsView* self, std::uintptr_t offsets, std::uintptr_t indices, std::uintptr_t values, std::size_t rows,
             std::size_t entries) {
            new (self) RowsView{memory<const std::uint64_t>(offsets, rows + 1),
                                memory<const std::uint32_t>(indices, entries), memory<const float>(values, entries)};
          },
          nb::arg("offsets"), nb::arg("indices"), nb::arg("values"), nb::arg("rows"), nb::arg("entries"));
  nb::class_<ModelView>(module, "ModelView")
      .def(
          "__init__",
          [](ModelView* self, std::uintptr_t weights, std::size_t features, double scale, double bias) {
            new (self) ModelView{memory<const float>(weights, features), scale, bias};
          },
          nb::arg("weights"), nb::arg("features"), nb::arg("scale"), nb::arg("bias"));
  module.def(
      "parse_libsvm",
      [](std::uintptr_t text, std::size_t size, std::uint32_t index_base, std::uint64_t features, bool strict,
         const RowsOut& out) {
        return parse_libsvm(text_at(text, size), {.index_base = index_base, .features = features, .strict = strict},
                            out);
      },
      nb::arg("text"), nb::arg("size"), nb::arg("index_base"), nb::arg("features"), nb::arg("strict"), nb::arg("out"),
      unlocked);

  nb::enum_<Loss>(module, "Loss")
      .value("logistic", Loss::logistic)
      .value("hinge", Loss::hinge)
      .value("squared_hinge", Loss::squared_hinge)
      .value("squared_error", Loss::squared_error);
  module.def(
      "score_rows",
      [](const RowsView& rows, std::size_t first, const ModelView& model, std::uintptr_t scores, std::size_t count) {
        score_rows(rows, first, model, memory<float>(scores, count));
      },
      nb::arg("rows"), nb::arg("first"), nb::arg("model"), nb::arg("scores"), nb::arg("count"), unlocked);
  nb::class_<Numbering>(module, "Numbering")
      .def(
          "__init__",
          [](Numbering* self, std::uintptr_t indices, std::size_t count, std::size_t features) {
            new (self) Numbering(memory<const std::uint32_t>(indices, count), features);
          },
          nb::arg("indices"), nb::arg("count"), nb::arg("features"), unlocked)
      .def_prop_ro("size", &Numbering::size)
      .def(
          "write_features",
          [](const Numbering& numbering, std::uintptr_t out) {
            numbering.write_features(memory<std::uint32_t>(out, numbering.size()));
          },
          nb::arg("out"), unlocked)
      .def(
          "renumber",
          [](const Numbering& numbering, std::uintptr_t indices, std::uintptr_t out, std::size_t count) {
            numbering.renumber(memory<const std::uint32_t>(indices, count), memory<std::uint32_t>(out, count));
          },
          nb::arg("indices"), nb::arg("out"), nb::arg("count"), unlocked);
  nb::class_<Team>(module, "Team")
      .def(nb::init<std::size_t>(), nb::arg("threads"), unlocked)
      .def_prop_ro("size", &Team::size);
  nb::class_<BatchGradient>(module, "BatchGradient")
      .def(nb::init<std::size_t, Team&>(), nb::arg("features"), nb::arg("team"), nb::keep_alive<1, 3>());
  nb::enum_<Rule>(module, "Rule").value("sgd", Rule::sgd).value("adagrad", Rule::adagrad);
  nb::class_<Descent>(module, "Descent")
      .def(
          "__init__",
          [](Descent* self, std::size_t features, Rule rule, double l1, double l2, bool with_bias, Team& team,
             const Numbering* numbering) {
            new (self) Descent(features, rule, {.l1 = l1, .l2 = l2}, with_bias, team, numbering);
          },
          nb::arg("features"), nb::arg("rule"), nb::arg("l1"), nb::arg("l2"), nb::arg("with_bias"), nb::arg("team"),
          nb::arg("numbering").none(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>())
      .def(
          "step",
          [](Descent& descent, std::uintptr_t indices, std::uintptr_t sums, std::size_t count, double slope,
             double rate, double rows) {
            descent.step(memory<const std::uint32_t>(indices, indices == 0 ? 0 : count),
                         memory<const float>(sums, count), slope, rate, rows);
          },
          nb::arg("indices"), nb::arg("sums"), nb::arg("count"), nb::arg("slope"), nb::arg("rate"), nb::arg("rows"),
          unlocked)
      .def(
          "step_alone",
          [](Descent& descent, BatchGradient& gradient, const RowsView& rows, std::uintptr_t targets,
             std::uintptr_t chosen, std::size_t count, Loss loss, double rate) {
            const Descent::Alone done =
                descent.step_alone(gradient, rows, memory<const float>(targets, rows.offsets.size() - 1),
                                   memory<const std::uint64_t>(chosen, count), loss, rate);
            return std::tuple(done.loss, done.entries);
          },
          nb::arg("gradient"), nb::arg("rows"), nb::arg("targets"), nb::arg("chosen"), nb::arg("count"),
          nb::arg("loss"), nb::arg("rate"), unlocked)
      .def(
          "write_weights",
          [](const Descent& descent, std::uintptr_t out, std::size_t count) {
            descent.write_weights(memory<float>(out, count));
          },
          nb::arg("out"), nb::arg("count"), unlocked)
      .def("settle", &Descent::settle, unlocked)
      .def(
          "write_squares",
          [](const Descent& descent, std::uintptr_t out, std::size_t count) {
            descent.write_squares(memory<float>(out, count));
          },
          nb::arg("out"), nb::arg("count"), unlocked)
      .def(
          "restore",
          [](Descent& descent, std::uintptr_t weights, std::uintptr_t squares, std::size_t count, double bias,
             double bias_squares) {
            descent.restore(memory<const float>(weights, count),
                            memory<const float>(squares, squares == 0 ? 0 : count), bias, bias_squares);
          },
          nb::arg("weights"), nb::arg("squares"), nb::arg("count"), nb::arg("bias"), nb::arg("bias_squares"), unlocked)
      .def_prop_ro("bias", &Descent::bias)
      .def_prop_ro("bias_squares", &Descent::bias_squares);
  nb::class_<RankGradient>(module, "RankGradient")
      .def(nb::init<const Descent&, const Numbering*, Team&>(), nb::arg("descent"), nb::arg("numbering").none(),
           nb::arg("team"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), unlocked)
      .def(
          "find",
          [](RankGradient& gradient, const RowsView& rows, std::uintptr_t targets, std::uintptr_t chosen,
             std::size_t count, Loss loss) {
            return gradient.find(rows, memory<const float>(targets, rows.offsets.size() - 1),
                                 memory<const std::uint64_t>(chosen, count), loss);
          },
          nb::arg("rows"), nb::arg("targets"), nb::arg("chosen"), nb::arg("count"), nb::arg("loss"), unlocked)
      .def(
          "take",
          [](RankGradient& gradient, std::uintptr_t indices, std::uintptr_t values, std::size_t count) {
            gradient.take(memory<std::uint32_t>(indices, count), memory<float>(values, count));
          },
          nb::arg("indices"), nb::arg("values"), nb::arg("count"), unlocked);
  nb::class_<Columns>(module, "Columns")
      .def(
          "__init__",
          [](Columns* self, const RowsView& rows, std::uintptr_t chosen, std::size_t count, std::size_t features,
             Team& team) { new (self) Columns(rows, memory<const std::uint64_t>(chosen, count), features, team); },
          nb::arg("rows"), nb::arg("chosen"), nb::arg("count"), nb::arg("features"), nb::arg("team"),
          nb::keep_alive<1, 6>(), unlocked)
      .def(
          "write_offsets",
          [](const Columns& columns, std::uintptr_t out) {
            std::ranges::copy(columns.offsets(), reinterpret_cast<std::uint64_t*>(out));
          },
          nb::arg("out"), unlocked)
      .def(
          "derivatives",
          [](Columns& columns, std::uintptr_t block, std::size_t count, std::uintptr_t scores, std::uintptr_t targets,
             std::size_t rows, double bias, Loss loss, std::uintptr_t slopes, std::uintptr_t curvatures) {
            columns.derivatives(memory<const std::uint32_t>(block, count), memory<const double>(scores, rows),
                                memory<const float>(targets, rows), bias, loss, memory<double>(slopes, count),
                                memory<double>(curvatures, count));
          },
          nb::arg("block"), nb::arg("count"), nb::arg("scores"), nb::arg("targets"), nb::arg("rows"), nb::arg("bias"),
          nb::arg("loss"), nb::arg("slopes"), nb::arg("curvatures"), unlocked)
      .def(
          "move",
          [](Columns& columns, std::uintptr_t block, std::uintptr_t changes, std::size_t count, std::uintptr_t scores,
             std::size_t rows) {
            columns.move(memory<const std::uint32_t>(block, count), memory<const float>(changes, count),
                         memory<double>(scores, rows));
          },
          nb::arg("block"), nb::arg("changes"), nb::arg("count"), nb::arg("scores"), nb::arg("rows"), unlocked);
  nb::class_<Newton::Step>(module, "NewtonStep")
      .def_ro("loss", &Newton::Step::loss)
      .def_ro("objective", &Newton::Step::objective)
      .def_ro("gap", &Newton::Step::gap)
      .def_ro("sums", &Newton::Step::sums)
      .def_ro("iterations", &Newton::Step::iterations)
      .def_ro("converged", &Newton::Step::converged)
      .def_ro("stuck", &Newton::Step::stuck);
  nb::class_<Newton>(module, "Newton")
      .def(
          "__init__",
          [](Newton* self, const RowsView& rows, std::uintptr_t chosen, std::size_t count, std::uintptr_t targets,
             std::uintptr_t row_weights, std::size_t total_rows, std::size_t features, std::size_t classes, Loss loss,
             double l2, double l1, bool with_bias, double tolerance, bool descends, std::uint64_t seed, std::size_t total_features,
             std::uintptr_t counted, std::size_t rank, std::size_t ranks, Team& team, nb::callable reduce) {
            const std::size_t all = rows.offsets.size() - 1;
            const Newton::Problem problem{.rows = rows,
                                          .chosen = memory<const std::uint64_t>(chosen, count),
                                          .targets = memory<const float>(targets, all),
                                          .row_weights = memory<const float>(row_weights, row_weights == 0 ? 0 : all),
                                          .total_rows = total_rows,
                                          .features = features,
                                          .total_features = total_features,
                                          .split = counted != 0,
                                          .counted = memory<const std::uint8_t>(counted, counted == 0 ? 0 : features),
                                          .rank = rank,
                                          .ranks = ranks,
                                          .classes = classes,
                                          .loss = loss,
                                          .l2 = l2,
                                          .l1 = l1,
                                          .with_bias = with_bias,
                                          .tolerance = tolerance,
                                          .descends = descends,
                                          .seed = seed};
            new (self) Newton(problem, team, reduce_by(std::move(reduce)));
          },
          nb::arg("rows"), nb::arg("chosen"), nb::arg("count"), nb::arg("targets"), nb::arg("row_weights"),
          nb::arg("total_rows"), nb::arg("features"), nb::arg("classes"), nb::arg("loss"), nb::arg("l2"),
          nb::arg("l1"), nb::arg("with_bias"), nb::arg("tolerance"), nb::arg("descends"), nb::arg("seed"),
          nb::arg("total_features"), nb::arg("counted"), nb::arg("rank"), nb::arg("ranks"), nb::arg("team"),
          nb::arg("reduce"), nb::keep_alive<1, 21>())
      .def("step", &Newton::step, nb::arg("last") = false, unlocked)
      .def(
          "write_weights",
          [](const Newton& newton, std::uintptr_t out, std::size_t count) {
            newton.write_weights(memory<float>(out, count));
          },
          nb::arg("out"), nb::arg("count"))
      .def_prop_ro("bias", &Newton::bias)
      .def_prop_ro("objective", &Newton::objective)
      .def(
          "write_biases",
          [](const Newton& newton, std::uintptr_t out, std::size_t count) {
            newton.write_biases(memory<double>(out, count));
          },
          nb::arg("out"), nb::arg("count"))
      .def_prop_ro("dual_count", [](const Newton& newton) { return newton.duals().size(); })
      .def(
          "write_duals",
          [](const Newton& newton, std::uintptr_t out) {
            std::ranges::copy(newton.duals(), reinterpret_cast<double*>(out));
          },
          nb::arg("out"))
      .def(
          "write_margins",
          [](const Newton& newton, std::uintptr_t duals, std::uintptr_t lacking, std::size_t rows) {
            newton.write_margins(memory<double>(duals, rows), memory<double>(lacking, rows));
          },
          nb::arg("duals"), nb::arg("lacking"), nb::arg("rows"))
      .def(
          "fix",
          [](Newton& newton, std::uintptr_t moves, std::uintptr_t duals, std::uintptr_t scores, std::size_t rows) {
            return newton.fix(memory<const std::uint8_t>(moves, rows), memory<const double>(duals, rows),
                              memory<double>(scores, rows));
          },
          nb::arg("moves"), nb::arg("duals"), nb::arg("scores"), nb::arg("rows"), unlocked)
      .def(
          "take",
          [](Newton& newton, std::uintptr_t duals, std::size_t rows) {
            return newton.take(memory<const double>(duals, rows));
          },
          nb::arg("duals"), nb::arg("rows"), unlocked)
      .def_prop_ro("taken", &Newton::taken)
      .def_prop_ro("present_bias", &Newton::present_bias)
      .def("settle", &Newton::settle, nb::arg("ends"))
      .def(
          "restore",
          [](Newton& newton, std::uintptr_t weights, std::size_t count, double bias, std::uintptr_t duals,
             std::size_t dual_count) {
            newton.restore(memory<const float>(weights, count), bias, memory<const double>(duals, dual_count));
          },
          nb::arg("weights"), nb::arg("count"), nb::arg("bias"), nb::arg("duals"), nb::arg("dual_count"));
  // Steps of the dual descent on few rows, the others fixed, from `duals`, which are replaced. Returns the bias.
  module.def(
      "descend_duals",
      [](const RowsView& rows, std::uintptr_t targets, std::uintptr_t row_weights, std::uintptr_t scores,
         std::uintptr_t duals, std::size_t features, double l2, bool with_bias, double tolerance, std::uint64_t seed,
         std::size_t steps, double bias, double imbalance, double objective, double total_weight,
         const nb::callable& look) {
        const std::size_t count = rows.offsets.size() - 1;
        std::vector<std::uint64_t> chosen(count);
        std::iota(chosen.begin(), chosen.end(), std::uint64_t{0});
        const std::span<double> moved = memory<double>(duals, count);
        DualDescent descent({.rows = rows, .chosen = chosen, .targets = memory<const float>(targets, count),
                             .row_weights = memory<const float>(row_weights, count), .total_rows = count,
                             .features = features, .loss = Loss::hinge, .l2 = l2, .with_bias = with_bias,
                             .tolerance = tolerance, .seed = seed},
                            {.scores = memory<const double>(scores, count), .imbalance = imbalance,
                             .objective = objective, .total_weight = total_weight});
        descent.restore(moved, bias);
        const auto interrupted = [&look] {
          const nb::gil_scoped_acquire locked;
          look();
        };
        for (DualDescent::Step last; steps-- > 0 && !last.converged && !last.slow;) last = descent.step(interrupted);
        descent.write_balanced(moved);
        return descent.weights().back();
      },
      nb::arg("rows"), nb::arg("targets"), nb::arg("row_weights"), nb::arg("scores"), nb::arg("duals"),
      nb::arg("features"), nb::arg("l2"), nb::arg("with_bias"), nb::arg("tolerance"), nb::arg("seed"),
      nb::arg("steps"), nb::arg("bias"), nb::arg("imbalance"), nb::arg("objective"), nb::arg("total_weight"),
      nb::arg("look"), unlocked);
  module.def(
      "sum_losses",
      [](std::uintptr_t scores, std::uintptr_t targets, std::size_t rows, double bias, Loss loss) {
        const LossSums sums =
            sum_losses(memory<const double>(scores, rows), memory<const float>(targets, rows), bias, loss);
        return std::tuple(sums.loss, sums.slope);
      },
      nb::arg("scores"), nb::arg("targets"), nb::arg("rows"), nb::arg("bias"), nb::arg("loss"), unlocked);
}

}  // namespace telegrad::bindings
