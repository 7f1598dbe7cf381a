#pragma once
// Communicator: what a program holds. It joins the peers, hands operations to the engine and leaves in good order.
// Arguments have been checked by whoever offers this to users.

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/types.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/support/nodes.hpp"
#include "progress/engine.hpp"
#include "progress/trace.hpp"
#include "session/request.hpp"

namespace telegrad {

struct CommunicatorOptions {
  SessionOptions session{};
  std::string report_folder{};  // for reports of operations that hang; empty: none are written
};

class Communicator {
 public:
  Communicator(std::shared_ptr<Engine> engine, std::unique_ptr<Driver> driver, CommunicatorOptions options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Rank rank() const { return rank_; }
  Rank size() const { return size_; }
  const char* driver_name() const { return driver_name_; }
  /// See Transport::shares_memory().
  bool shares_memory() const { return shares_memory_; }

  /// See Driver::warning().
  const std::string& warning() const { return warning_; }

  /// What chooses where a call names no algorithm; at first the built-in table.
  const AllreduceTable& allreduce_table() const { return allreduce_table_; }
  /// The same for sums of sparse vectors: give it to each of them.
  const std::shared_ptr<SparseChoice>& sparse_choice() const { return sparse_choice_; }
  /// All ranks do so between the same operations, with the same table for their number, and the same costs of the
  /// network and of nodes, if they were measured; nobody submits meanwhile.
  void use(AllreduceTable table, std::optional<NetworkCosts> costs = {}, std::optional<NodeCosts> node_costs = {}) {
    allreduce_table_ = table.on_two_levels(nodes_ && nodes_->two_level()).with_network_sums(network_sums_);
    sparse_choice_ = std::make_shared<SparseChoice>(allreduce_table_, costs, true, Overlaps{}, node_costs);
  }
  /// Null: nothing is known of them.
  const std::shared_ptr<const Nodes>& nodes() const { return nodes_; }
  /// By the labels of all ranks; whoever has the same is in the same node. All ranks do so between the same operations,
  /// with the same labels; nobody submits meanwhile. CHECKs that there is one for each rank.
  void use_nodes(std::span<const std::uint32_t> labels);

  /// Greets the peers; every Communicator of the process does so before any waits in await_join().
  void join();
  /// True once all peers have greeted; false at `deadline_s` or after a signal. Throws TransportError.
  bool await_join(double deadline_s);
  /// Throws TransportError naming the ranks that did not answer within `timeout_s`.
  [[noreturn]] void give_up_join(double timeout_s);

  /// Begins an operation (session/reductions.hpp, moves.hpp, messages.hpp); all ranks begin the same ones in the same
  /// order, but for messages. `caller_waits`: the caller calls wait() at once, so the engine's thread need not wake up.
  RequestPtr submit(RequestPtr request, bool caller_waits);

  /// True if done by `deadline_s` (Engine::now_s()); false then, or after a signal.
  bool wait(const Request& request, double deadline_s);

  /// See Session::hint_at_stalls().
  void hint_at_stalls(std::string at_once, std::string later);

  /// Ends all operations on all ranks with an error that says `reason`.
  void abort(const std::string& reason);
  /// Says goodbye: operations that still run fail, and none begin any more. Who closes several communicators says so on all
  /// of them before it waits for peers on one. Idempotent.
  void part();
  /// Parts; waits, a few seconds after that at most, for the peers to close too; then lets go of everything. Idempotent.
  /// Does nothing in a forked child, whose parent has the network.
  void close();
  /// In a process that was forked from the one that made this: then nothing may be called but close().
  bool forked() const { return engine_->forked(); }
  struct Counters : Session::Counters {
    std::uint64_t in_flight = 0;  // operations that have begun and are not over
    double waiting_s = 0.0;       // in wait(), of all threads together
    std::uint64_t refused = 0;    // see Driver::refused()
  };
  Counters counters();
  /// From now on the last `most` operations and waits are recorded. Once, before the first operation.
  void start_trace(std::size_t most) { trace_ = std::make_unique<Trace>(most); }
  /// Also after close(); empty without start_trace().
  Trace::Records traced() const { return trace_ ? trace_->records() : Trace::Records{}; }
  std::uint32_t epoch() const { return epoch_; }
  /// What this rank knows of its operations and peers, as JSON (session/report.hpp).
  std::string report();

 private:
  // With the baton held.
  std::string report_now(const char* why) const;
  std::string write_report(const char* why) const;
  void write_report_aside(const char* why, std::string told = {}) const;
  void tell_stall(const std::string& line) const;
  std::string report_name() const;

  std::shared_ptr<Engine> engine_;
  Participant participant_;
  Rank rank_;
  Rank size_;
  const char* driver_name_;
  bool shares_memory_;
  bool network_sums_;
  std::string warning_;
  AllreduceTable allreduce_table_;
  std::shared_ptr<SparseChoice> sparse_choice_;
  std::shared_ptr<const Nodes> nodes_;
  std::uint32_t epoch_;
  std::string report_folder_;
  std::shared_ptr<const Group> group_;  // null: not split from another
  std::atomic<int> submitting_ = 0;     // threads that are within submit()
  std::mutex parting_;
  std::atomic<bool> closing_ = false;  // nothing is begun any more
  bool peers_need_us_ = false;         // after part()
  double leaves_s_ = 0.0;              // no later, if they do
  std::atomic<bool> left_ = false;
  std::atomic<bool> closed_ = false;
  Counters last_counters_;
  std::atomic<double> waiting_s_ = 0.0;
  std::unique_ptr<Trace> trace_;  // null: nothing is recorded
};

}  // namespace telegrad
