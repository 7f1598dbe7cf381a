#pragma once
// Communicator: what a program holds. It turns a call into an operation, chooses its algorithm and hands it to the
// engine. All ranks make the same calls in the same order. Arguments have been checked by whoever offers this to users.

#include <memory>
#include <optional>
#include <string>

#include "base/types.hpp"
#include "progress/engine.hpp"
#include "session/request.hpp"
#include "sparse/stream.hpp"

namespace telegrad {

/// The caller's memory must stay as it is until the request is done; after a failure until the communicator is closed.
struct Dense {
  ConstBytes input;
  Bytes output;  // may be the input
  DType dtype = DType::f32;
  Reduction reduction = Reduction::sum;
  Algorithm algorithm = Algorithm::automatic;
};

template <class V>
struct SparseSum {
  RequestPtr request;
  std::shared_ptr<std::optional<SparseStream<V>>> result;  // set once the request has succeeded
};

class Communicator {
 public:
  Communicator(std::shared_ptr<Engine> engine, std::unique_ptr<Driver> driver, SessionOptions options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Rank rank() const { return rank_; }
  Rank size() const { return size_; }
  const char* driver_name() const { return driver_name_; }

  /// Greets the peers; every Communicator of the process does so before any waits in await_join().
  void join();
  /// True once all peers have greeted; false at `deadline_s` or after a signal. Throws TransportError.
  bool await_join(double deadline_s);
  /// Throws TransportError naming the ranks that did not answer within `timeout_s`.
  [[noreturn]] void give_up_join(double timeout_s);

  /// `caller_waits`: the caller calls wait() at once, so the engine's thread need not wake up.
  RequestPtr all_reduce(const Dense& dense, bool caller_waits);
  template <class V>
  SparseSum<V> all_reduce(SparseStream<V> stream, Reduction reduction, double switch_factor, bool caller_waits);
  /// The same, written densely into `output`, a zero where no rank had an entry.
  template <class V>
  RequestPtr all_reduce_into(SparseStream<V> stream, std::span<V> output, Reduction reduction, double switch_factor,
                             bool caller_waits);
  RequestPtr all_gather(ConstBytes mine, Bytes all, bool caller_waits);
  RequestPtr broadcast(Bytes data, Rank root, bool caller_waits);
  RequestPtr barrier(bool caller_waits);

  /// True if done by `deadline_s` (Engine::now_s()); false then, or after a signal.
  bool wait(const Request& request, double deadline_s) { return engine_->wait(request, deadline_s); }

  /// Ends all operations on all ranks with an error that says `reason`.
  void abort(const std::string& reason);
  /// Waits a few seconds for the peers to close too, then lets go of everything. Idempotent.
  void close();
  bool forked() const { return engine_->forked(); }
  Session::Counters counters();

 private:
  RequestPtr submit(Call call, Request::Body body, bool caller_waits);

  std::shared_ptr<Engine> engine_;
  Participant participant_;
  Rank rank_;
  Rank size_;
  const char* driver_name_;
  bool closed_ = false;
  Session::Counters last_counters_;
};

}  // namespace telegrad
