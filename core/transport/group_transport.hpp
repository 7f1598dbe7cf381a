#pragma once
// Some of an operation's ranks as if they were all: so a collective runs among them as it is. Groups that meet in one
// operation and have two ranks in common must have steps of their own.

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "transport/transport.hpp"

namespace telegrad {

class GroupTransport final : public Transport {
 public:
  /// `ranks`: the parent's, of whom this rank is number `self`. Steps are the parent's from `first_step` on, `steps` of
  /// them at most (CHECKed). `shares_memory`: see Transport::shares_memory(), of these ranks.
  GroupTransport(Transport& parent, std::vector<Rank> ranks, Rank self, bool shares_memory, Step first_step, Step steps)
      : parent_(parent),
        ranks_(std::move(ranks)),
        self_(self),
        shares_memory_(shares_memory),
        first_step_(first_step),
        steps_(steps) {
    TELEGRAD_CHECK(self_ < ranks_.size() && ranks_[self_] == parent_.rank());
  }

  Rank rank() const override { return self_; }
  Rank size() const override { return static_cast<Rank>(ranks_.size()); }
  bool shares_memory() const override { return shares_memory_; }
  ReadyQueue& ready() override { return parent_.ready(); }
  MovedBytes moved() const override { return parent_.moved(); }

 protected:
  void start_send(Rank to, Step step, ConstBytes bytes, Pending& pending) override {
    parent_.start_send(ranks_[to], parents(step), bytes, pending);
  }
  void start_receive(Rank from, Step step, Bytes into, Pending& pending) override {
    parent_.start_receive(ranks_[from], parents(step), into, pending);
  }
  void start_receive_any(Rank from, Step step, std::size_t most_bytes, Buffer& into, Pending& pending) override {
    parent_.start_receive_any(ranks_[from], parents(step), most_bytes, into, pending);
  }
  void start_compute(std::size_t bytes, Pending& pending) override { parent_.start_compute(bytes, pending); }
  // Collectives name the culprit in the reason by its number here.
  void start_fail(Rank culprit, std::string reason) override {
    const Rank known = culprit < ranks_.size() ? ranks_[culprit] : culprit;
    if (known != culprit) reason += " (rank " + std::to_string(culprit) + " of a group is rank " + std::to_string(known) + ")";
    parent_.start_fail(known, std::move(reason));
  }
  bool runs_work() const override { return parent_.runs_work(); }

 private:
  Step parents(Step step) const {
    TELEGRAD_CHECK(step < steps_);
    return first_step_ + step;
  }

  Transport& parent_;
  const std::vector<Rank> ranks_;
  const Rank self_;
  const bool shares_memory_;
  const Step first_step_;
  const Step steps_;
};

/// All of the parent's ranks, with steps of their own: for a collective behind another one in the same operation.
inline GroupTransport all_from_step(Transport& parent, Step first_step, Step steps) {
  std::vector<Rank> all(parent.size());
  std::iota(all.begin(), all.end(), Rank{0});
  return GroupTransport(parent, std::move(all), parent.rank(), parent.shares_memory(), first_step, steps);
}

}  // namespace telegrad
