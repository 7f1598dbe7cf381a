#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// One number of every rank, on its way to all others while other messages are. For few ranks: one message goes from each
/// to each, at `step`.
class Counts {
 public:
  Counts(Transport& net, Step step, std::uint64_t mine);

  bool all_known() const;
  /// By rank; done when all are known. Once, before finish().
  Task<std::vector<std::uint64_t>> wait();
  /// Done when this object may go.
  Task<void> finish();

 private:
  Transport& net_;
  const std::uint64_t mine_;
  bool waited_ = false;
  std::deque<Transport::ReceivingAny> receiving_;  // which also bring what they say where messages are of size only
  std::deque<Transport::Sending> sending_;
};

}  // namespace telegrad
