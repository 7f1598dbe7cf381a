#include "progress/communicator.hpp"

#include <utility>

#include "base/check.hpp"
#include "collectives/allgather.hpp"
#include "collectives/allreduce_recursive_doubling.hpp"
#include "collectives/allreduce_ring.hpp"
#include "collectives/allreduce_split_allgather.hpp"
#include "collectives/barrier.hpp"
#include "collectives/broadcast.hpp"
#include "collectives/choice.hpp"

namespace telegrad {
namespace {

constexpr double kPartingMost_s = 5.0;

}  // namespace

Communicator::Communicator(std::shared_ptr<Engine> engine, std::unique_ptr<Driver> driver, SessionOptions options)
    : engine_(std::move(engine)), rank_(driver->rank()), size_(driver->size()), driver_name_(driver->name()) {
  participant_.driver = std::move(driver);
  participant_.session = std::make_unique<Session>(*participant_.driver, options);
  engine_->add(participant_);
}

Communicator::~Communicator() {
  if (!engine_->forked()) {
    close();
    return;
  }
  // The network belongs to the parent process.
  [[maybe_unused]] const auto* const session = participant_.session.release();
  [[maybe_unused]] const auto* const driver = participant_.driver.release();
}

void Communicator::join() {
  engine_->with_baton([this] { participant_.session->join(participant_.driver->now_s()); });
}

bool Communicator::await_join(double deadline_s) {
  const Session& session = *participant_.session;
  engine_->wait_until([&] { return session.joined() || session.failure(); }, deadline_s);
  bool joined = false;
  std::optional<Failure> failure;
  engine_->with_baton([&] {
    joined = session.joined();
    failure = session.failure();
  });
  if (failure) throw TransportError(*failure);
  return joined;
}

void Communicator::give_up_join(double timeout_s) {
  Failure failure{.kind = FailureKind::timeout, .rank = rank_, .operation = "join"};
  engine_->with_baton([&] {
    failure.reason =
        "no answer within " + std::to_string(timeout_s) + " s from " + participant_.session->missing();
    participant_.session->fail(failure);
  });
  throw TransportError(failure);
}

RequestPtr Communicator::submit(Call call, Request::Body body, bool caller_waits) {
  auto request = std::make_shared<Request>(call, std::move(body));
  if (closed_) {
    request->finish(Failure{.rank = rank_, .operation = describe(call), .reason = "the communicator is closed"});
    return request;
  }
  engine_->submit(participant_, request, caller_waits);
  return request;
}

RequestPtr Communicator::all_reduce(const Dense& dense, bool caller_waits) {
  const Algorithm algorithm = dense.algorithm == Algorithm::automatic ? choose_allreduce(size_, dense.input.size())
                                                                      : dense.algorithm;
  const Call call{.operation = Operation::allreduce,
                  .dtype = dense.dtype,
                  .reduction = dense.reduction,
                  .algorithm = algorithm,
                  .count = dense.input.size() / size_of(dense.dtype)};
  return submit(
      call,
      [dense, algorithm](Transport& net) {
        return algorithm == Algorithm::ring
                   ? allreduce_ring(net, dense.dtype, dense.reduction, dense.input, dense.output)
                   : allreduce_recursive_doubling(net, dense.dtype, dense.reduction, dense.input, dense.output);
      },
      caller_waits);
}

namespace {

template <class V>
Call sparse_call(const SparseStream<V>& stream, Reduction reduction) {
  return {.operation = Operation::sparse_allreduce,
          .dtype = dtype_of<V>,
          .reduction = reduction,
          .algorithm = Algorithm::split_allgather,
          .count = stream.dimension()};
}

template <class V>
Task<void> sum_streams(Transport& net, SparseStream<V> mine, Reduction reduction, double switch_factor,
                       std::shared_ptr<std::optional<SparseStream<V>>> result) {
  result->emplace(co_await allreduce_split_allgather(net, std::move(mine), reduction, switch_factor));
}

template <class V>
Task<void> sum_streams_into(Transport& net, SparseStream<V> mine, Reduction reduction, double switch_factor,
                            std::span<V> output) {
  const SparseStream<V> sum = co_await allreduce_split_allgather(net, std::move(mine), reduction, switch_factor);
  co_await write_dense(net, sum, output);
}

}  // namespace

template <class V>
SparseSum<V> Communicator::all_reduce(SparseStream<V> stream, Reduction reduction, double switch_factor,
                                      bool caller_waits) {
  const Call call = sparse_call(stream, reduction);
  auto result = std::make_shared<std::optional<SparseStream<V>>>();
  auto mine = std::make_shared<SparseStream<V>>(std::move(stream));
  auto request = submit(
      call,
      [=](Transport& net) { return sum_streams(net, std::move(*mine), reduction, switch_factor, result); },
      caller_waits);
  return {std::move(request), std::move(result)};
}

template <class V>
RequestPtr Communicator::all_reduce_into(SparseStream<V> stream, std::span<V> output, Reduction reduction,
                                         double switch_factor, bool caller_waits) {
  const Call call = sparse_call(stream, reduction);
  auto mine = std::make_shared<SparseStream<V>>(std::move(stream));
  return submit(
      call,
      [=](Transport& net) { return sum_streams_into(net, std::move(*mine), reduction, switch_factor, output); },
      caller_waits);
}

template SparseSum<float> Communicator::all_reduce(SparseStream<float>, Reduction, double, bool);
template SparseSum<bf16> Communicator::all_reduce(SparseStream<bf16>, Reduction, double, bool);
template RequestPtr Communicator::all_reduce_into(SparseStream<float>, std::span<float>, Reduction, double, bool);
template RequestPtr Communicator::all_reduce_into(SparseStream<bf16>, std::span<bf16>, Reduction, double, bool);

RequestPtr Communicator::all_gather(ConstBytes mine, Bytes all, bool caller_waits) {
  TELEGRAD_CHECK(all.size() == mine.size() * size_);
  return submit({.operation = Operation::allgather, .algorithm = Algorithm::ring, .count = mine.size()},
                [=](Transport& net) { return allgather(net, mine, all); }, caller_waits);
}

RequestPtr Communicator::broadcast(Bytes data, Rank root, bool caller_waits) {
  TELEGRAD_CHECK(root < size_);
  return submit({.operation = Operation::broadcast, .root = root, .count = data.size()},
                [=](Transport& net) { return telegrad::broadcast(net, root, data); }, caller_waits);
}

RequestPtr Communicator::barrier(bool caller_waits) {
  return submit({.operation = Operation::barrier}, [](Transport& net) { return telegrad::barrier(net); },
                caller_waits);
}

void Communicator::abort(const std::string& reason) {
  engine_->with_baton([&] {
    if (closed_) return;
    participant_.session->fail(
        {.kind = FailureKind::transport, .rank = rank_, .peer = rank_, .operation = "abort", .reason = reason});
  });
}

void Communicator::close() {
  if (closed_) return;
  Session& session = *participant_.session;
  engine_->with_baton([&] {
    if (session.running() != 0) {
      session.fail({.kind = FailureKind::transport,
                    .peer = rank_,
                    .operation = "close",
                    .reason = "rank " + std::to_string(rank_) + " closed its communicator with " +
                              std::to_string(session.running()) + " operations under way"});
    }
    session.part();
  });
  if (!session.failure()) {
    const double deadline_s = Engine::now_s() + kPartingMost_s;
    while (!engine_->wait_until([&] { return session.parted() || session.failure(); }, deadline_s) && Engine::now_s() < deadline_s) {
    }
  }
  last_counters_ = counters();
  closed_ = true;
  engine_->remove(participant_);
  participant_.driver->shut_down();
  session.release_quarantine();
}

Session::Counters Communicator::counters() {
  if (closed_) return last_counters_;
  Session::Counters counters;
  engine_->with_baton([&] { counters = participant_.session->counters(); });
  return counters;
}

}  // namespace telegrad
