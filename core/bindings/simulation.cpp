#include "simulation/measure.hpp"
#include "simulation/simulation.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <mutex>

#include "bindings/moves.hpp"
#include "bindings/point_to_point.hpp"
#include "bindings/reductions.hpp"

namespace telegrad::bindings {
namespace {

// A simulation that several threads may use. It runs when somebody waits for one of its operations.
struct SimulatedRanks {
  SimulatedRanks(Rank size, const SimulationOptions& options) : costs(costs_of(options.costs)), simulation(size, options) {}
  const NetworkCosts costs;
  std::mutex mutex;
  Simulation simulation;
};
using SimulatedRanksPtr = std::shared_ptr<SimulatedRanks>;

class SimulatedCommunicator {
 public:
  SimulatedCommunicator(SimulatedRanksPtr ranks, Rank rank)
      : ranks_(std::move(ranks)),
        rank_(rank),
        allreduce_table_(ranks_->simulation.size()),
        sparse_choice_(std::make_shared<SparseChoice>(allreduce_table_, ranks_->costs)) {}

  Rank rank() const { return rank_; }
  Rank size() const { return ranks_->simulation.size(); }
  const AllreduceTable& allreduce_table() const { return allreduce_table_; }
  const std::shared_ptr<SparseChoice>& sparse_choice() const { return sparse_choice_; }
  void use(AllreduceTable table, std::optional<NetworkCosts> costs, std::optional<NodeCosts> node_costs) {
    allreduce_table_ = table.on_two_levels(nodes_ && nodes_->two_level());
    sparse_choice_ = std::make_shared<SparseChoice>(allreduce_table_, costs.value_or(ranks_->costs), true, Overlaps{},
                                                    node_costs);
  }
  const std::shared_ptr<const Nodes>& nodes() const { return nodes_; }
  void use_nodes(std::span<const std::uint32_t> labels) {
    nodes_ = std::make_shared<const Nodes>(labels);
    use(allreduce_table_, sparse_choice_->costs(), sparse_choice_->node_costs());
  }

  void submit(const RequestPtr& request, bool) {
    const std::scoped_lock lock(ranks_->mutex);
    ranks_->simulation.begin(rank_, request);
  }
  bool wait(const Request& request, double) {
    const std::scoped_lock lock(ranks_->mutex);
    if (request.done()) return true;
    const Outcome outcome = ranks_->simulation.run();
    if (request.done()) return true;
    throw TransportError({.kind = FailureKind::transport,
                          .rank = rank_,
                          .operation = describe(request.call()),
                          .reason = "nothing is left to happen in the simulation; begin each operation on all ranks "
                                    "(async_op=True) before waiting for one. Unfinished:\n" +
                                    outcome.unfinished});
  }
  void abort(const std::string& reason) {
    const std::scoped_lock lock(ranks_->mutex);
    ranks_->simulation.session(rank_).give_up(reason);
  }
  std::string report() {
    const std::scoped_lock lock(ranks_->mutex);
    Simulation& simulation = ranks_->simulation;
    return to_json(simulation.session(rank_).report(simulation.now_s()), {.why = "asked", .driver = "sim"});
  }
  nb::dict counters() {
    const std::scoped_lock lock(ranks_->mutex);
    const Session& session = ranks_->simulation.session(rank_);
    return as_dict(session.counters(), session.running(), 0.0);  // its callers wait no time of their own
  }

 private:
  SimulatedRanksPtr ranks_;
  Rank rank_;
  AllreduceTable allreduce_table_;
  std::shared_ptr<SparseChoice> sparse_choice_;
  std::shared_ptr<const Nodes> nodes_;
};

// With `timeout_s` as an engine would drive them, for a caller with a clock of its own: see Simulation::advance().
SimulatedRanksPtr make_ranks(Rank size, double alpha_s, double beta_s_per_byte, double gamma_s_per_byte, double jitter,
                             std::uint64_t seed, std::optional<double> timeout_s,
                             std::optional<double> liveness_timeout_s) {
  const SimulationOptions options{.costs = {.alpha_s = alpha_s,
                                            .beta_s_per_byte = beta_s_per_byte,
                                            .gamma_s_per_byte = gamma_s_per_byte,
                                            .jitter = jitter},
                                  .seed = seed,
                                  .session = {.timeout_s = timeout_s.value_or(SessionOptions{}.timeout_s),
                                              .liveness_timeout_s = liveness_timeout_s,
                                              .count_peers = true},
                                  .clocks = timeout_s.has_value()};
  return std::make_shared<SimulatedRanks>(size, options);
}

}  // namespace

void bind_simulation(nb::module_& module) {
  nb::class_<SimulatedCommunicator> communicator(module, "SimulatedCommunicator");
  communicator.def_prop_ro("rank", &SimulatedCommunicator::rank)
      .def_prop_ro("size", &SimulatedCommunicator::size)
      .def_prop_ro("driver", [](const SimulatedCommunicator&) { return "sim"; })
      .def_prop_ro("shares_memory", [](const SimulatedCommunicator&) { return false; })
      .def("abort", &SimulatedCommunicator::abort, nb::arg("reason"))
      .def("part", [](SimulatedCommunicator&) {})
      .def("close", [](SimulatedCommunicator&) {})
      .def("counters", &SimulatedCommunicator::counters)
      .def("report", &SimulatedCommunicator::report);
  bind_reductions(communicator);
  bind_moves(communicator);
  bind_point_to_point(communicator);

  nb::class_<SimulatedRanks>(module, "Simulation")
      .def_static("make", &make_ranks, nb::arg("size"), nb::arg("alpha_s"), nb::arg("beta_s_per_byte"),
                  nb::arg("gamma_s_per_byte"), nb::arg("jitter"), nb::arg("seed"),
                  nb::arg("timeout_s").none() = nb::none(), nb::arg("liveness_timeout_s").none() = nb::none())
      .def("communicator",
           [](const SimulatedRanksPtr& self, Rank rank) { return std::make_shared<SimulatedCommunicator>(self, rank); },
           nb::arg("rank"))
      .def("now_s", [](SimulatedRanks& self) { return self.simulation.now_s(); })
      .def("next_s", [](SimulatedRanks& self) { return self.simulation.network().next_s(); })
      .def("advance", [](SimulatedRanks& self, double until_s) { return self.simulation.advance(until_s); },
           nb::arg("until_s"))
      .def("kill",
           [](SimulatedRanks& self, Rank rank, double detect_s) {
             self.simulation.network().fail({.kind = SimFaultKind::kill, .rank = rank, .detect_s = detect_s});
           },
           nb::arg("rank"), nb::arg("detect_s"))
      .def("freeze",
           [](SimulatedRanks& self, Rank rank, double duration_s) {
             self.simulation.network().fail({.kind = SimFaultKind::freeze, .rank = rank, .duration_s = duration_s});
           },
           nb::arg("rank"), nb::arg("duration_s"))
      .def("abort",
           [](SimulatedRanks& self, Rank rank, const std::string& reason) {
             self.simulation.act(rank, [reason](Session& session) { session.give_up(reason); });
           },
           nb::arg("rank"), nb::arg("reason"))
      .def("part",
           [](SimulatedRanks& self, Rank rank) {
             self.simulation.act(rank, [](Session& session) {
               if (session.running() != 0) session.give_up("it closed its communicator with operations under way");
               session.part();
             });
           },
           nb::arg("rank"))
      .def("joined", [](SimulatedRanks& self, Rank rank) { return self.simulation.session(rank).joined(); },
           nb::arg("rank"))
      .def("over",
           [](SimulatedRanks& self, Rank rank) {
             const Session& session = self.simulation.session(rank);
             return session.failure() || (session.parted() && !session.failing());
           },
           nb::arg("rank"))
      .def("shut_down", [](SimulatedRanks& self, Rank rank) { self.simulation.shut_down(rank); },
           nb::arg("rank"))
      .def("finish_s", [](SimulatedRanks& self, Rank rank) { return self.simulation.finish_s(rank); }, nb::arg("rank"));
}

}  // namespace telegrad::bindings
