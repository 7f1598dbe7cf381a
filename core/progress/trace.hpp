#pragma once
// Trace: when a communicator's operations were submitted, begun and over, and when its callers waited, for people who look
// at a timeline. Its memory is bounded: the oldest records go first, and are counted. It must not know of files.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "session/request.hpp"

namespace telegrad {

/// Times are Engine::now_s().
struct TracedOperation {
  Call call{};
  std::optional<Request::Begun> begun{};  // empty: it was refused
  double submitted_s = 0.0;
  double ended_s = 0.0;
  bool failed = false;
};
struct TracedWait {
  Call call{};
  std::uint32_t thread = 0;  // the kernel's number of the thread that waited
  double begin_s = 0.0;
  double end_s = 0.0;
};

/// The last so many of what was added; memory grows as they come.
template <class Record>
class LastRecords {
 public:
  explicit LastRecords(std::size_t most) : most_(most) {}
  void add(const Record& record) {
    if (records_.size() < most_) {
      records_.push_back(record);
    } else {
      records_[added_ % most_] = record;
    }
    ++added_;
  }
  /// The one added `back` before the last; null if it is not there.
  Record* find_last(std::size_t back) {
    return back < records_.size() ? &records_[(added_ - 1 - back) % most_] : nullptr;
  }
  std::uint64_t dropped() const { return added_ - records_.size(); }
  /// Oldest first.
  std::vector<Record> in_order() const {
    std::vector<Record> all = records_;
    std::ranges::rotate(all, all.begin() + static_cast<std::ptrdiff_t>(records_.empty() ? 0 : added_ % records_.size()));
    return all;
  }

 private:
  std::size_t most_;
  std::vector<Record> records_;
  std::uint64_t added_ = 0;
};

class Trace {
 public:
  /// Keeps the last `most` operations and as many waits.
  explicit Trace(std::size_t most) : operations_(most), waits_(most) {}

  /// Records `request`, which is about to be submitted, once it is over. The trace must outlive its operation.
  void watch(Request& request);
  /// A caller has waited. What one thread waits for in several goes is one wait.
  void waited(const Request& request, double begin_s, double end_s);

  struct Records {
    std::vector<TracedOperation> operations{};  // in the order in which they ended
    std::vector<TracedWait> waits{};
    std::uint64_t operations_dropped = 0;
    std::uint64_t waits_dropped = 0;
  };
  Records records() const;

 private:
  struct Wait : TracedWait {
    const Request* request = nullptr;  // only to be compared, while it is not over: then its memory may be another's
    bool is_over = false;
  };

  mutable std::mutex mutex_;
  LastRecords<TracedOperation> operations_;  // mutex_
  LastRecords<Wait> waits_;                  // mutex_
};

}  // namespace telegrad
