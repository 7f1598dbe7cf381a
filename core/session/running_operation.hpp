#pragma once
// One operation of a Session while it runs: the Transport that its collective sees, and the matching of its messages.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "session/message_table.hpp"
#include "session/session.hpp"

namespace telegrad {

class Session::RunningOperation final : public Transport {
 public:
  RunningOperation(Session& session, std::uint32_t sequence, RequestPtr request, double now_s)
      : session_(session),
        request_(std::move(request)),
        call_(request_->call()),
        sequence_(sequence),
        called_s_(now_s),
        deadline_s_(now_s + session.options_.timeout_s),
        tell_gap_s_(is_message() ? std::numeric_limits<double>::infinity() : session.options_.probe_s),
        tell_at_s_(now_s + tell_gap_s_),
        stall_at_s_(now_s + session.stall_s_) {}

  Rank rank() const override { return session_.rank(); }
  Rank size() const override { return session_.size(); }
  bool shares_memory() const override { return session_.driver_.shares_memory(); }
  ReadyQueue& ready() override { return session_.ready_; }
  MovedBytes moved() const override { return moved_; }
  std::uint64_t take_turn() override { return session_.driver_.take_turn(); }

  const Call& call() const { return call_; }
  /// Of a message between two ranks: how many operations had begun before it.
  std::uint32_t sequence() const { return sequence_; }
  bool is_message() const { return is_point_to_point(call_); }
  bool frozen() const { return is_message() ? session_.all_frozen_ : session_.frozen(sequence_); }
  double called_s() const { return called_s_; }
  double deadline_s() const { return deadline_s_; }
  /// When something is to be done because time has passed.
  double next_look_s() const { return std::min({deadline_s_, tell_at_s_, stall_at_s_}); }
  Request& request() const { return *request_; }
  bool is_shut() const { return is_shut_; }
  /// While its gate is shut its time does not run.
  void shut() {
    is_shut_ = true;
    deadline_s_ = tell_at_s_ = stall_at_s_ = std::numeric_limits<double>::infinity();
  }
  void open(double now_s) {
    is_shut_ = false;
    deadline_s_ = now_s + session_.options_.timeout_s;
    tell_at_s_ = now_s + tell_gap_s_;
    stall_at_s_ = now_s + session_.stall_s_;
  }
  double stall_at_s() const { return stall_at_s_; }
  bool stall_told() const { return stall_told_; }
  /// Its stall has been told, if `told`, or is not to be looked at before the next stall_s.
  void note_stall(bool told, double now_s) {
    stall_told_ = told;
    stall_at_s_ = told ? std::numeric_limits<double>::infinity() : now_s + session_.options_.stall_s;
  }

  void start(Task<void> task) {
    task_ = std::move(task);
    task_.start();
  }
  Task<void>& task() { return task_; }

  /// A message of this operation, its call already compared.
  void deliver(const Arrival& arrival);
  /// Gives back what has come and will not be taken.
  void discard_unexpected();
  /// The ranks that it wants messages from, ascending.
  std::vector<Rank> waits_for() const;
  /// Whom it has sent something last: of interest where it waits for no message.
  std::vector<Rank> sends_to() const;
  std::string sends_to_text() const;
  /// Two ranks may wait for each other in different calls without ever exchanging a message: so who waits says what for,
  /// again and again in growing intervals.
  void tell_call_if_stuck(double now_s);

 protected:
  void start_send(Rank to, Step step, ConstBytes bytes, Pending& pending) override;
  void start_receive(Rank from, Step step, Bytes into, Pending& pending) override;
  void start_receive_any(Rank from, Step step, std::size_t most_bytes, Buffer& into, Pending& pending) override;
  void start_compute(std::size_t bytes, Pending& pending) override;
  void start_fail(Rank culprit, std::string reason) override;
  void start_reduce(std::uint64_t turn, DType dtype, Reduction reduction, Buffer& values, Pending& pending) override;
  bool runs_work() const override { return !SizeOnly::active(); }

 private:
  struct Posted {
    Bytes into;
    Buffer* any = nullptr;  // set: any length up to most_bytes
    std::size_t most_bytes = 0;
    Pending* pending = nullptr;
  };
  void post(Rank from, Step step, Posted posted);
  void take(const Arrival& arrival, const Posted& posted);
  std::string reason_of_length(const Envelope& envelope, const Posted& posted) const;

  Session& session_;
  RequestPtr request_;
  Call call_;  // the request's, nearer: every message is compared with it
  std::uint32_t sequence_;
  double called_s_;
  double deadline_s_;
  double tell_gap_s_;
  double tell_at_s_;
  double stall_at_s_;
  bool stall_told_ = false;
  bool is_shut_ = false;
  Rank last_sent_to_ = kNoRank;
  bool network_reduces_ = false;  // since it has sent something last
  MovedBytes moved_;
  Task<void> task_;
  MessageTable<Posted> posted_;
  MessageTable<Arrival> unexpected_;
};

}  // namespace telegrad
