// What a trace keeps of operations and waits, and what it drops.
#include "progress/trace.hpp"

#include "progress/engine.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

Request request_of(Operation operation) {
  return {Call{.operation = operation}, [](Transport&) -> Task<void> { co_return; }};
}

}  // namespace

TEST("the last records stay, oldest first, and the others are counted") {
  for (const std::uint32_t added : {0U, 1U, 4U, 5U, 8U, 11U}) {
    LastRecords<std::uint32_t> records(4);
    for (std::uint32_t i = 0; i < added; ++i) records.add(i);
    const std::uint32_t first = added < 4 ? 0 : added - 4;
    EXPECT_EQ(records.dropped(), first);
    std::vector<std::uint32_t> expected;
    for (std::uint32_t i = first; i < added; ++i) expected.push_back(i);
    EXPECT_EQ(records.in_order(), expected);
    EXPECT(records.find_last(expected.size()) == nullptr);
    for (std::uint32_t back = 0; back < expected.size(); ++back) EXPECT_EQ(*records.find_last(back), added - 1 - back);
  }
}

TEST("an operation is recorded once it is over: submitted, begun, ended, failed or not") {
  Trace trace(8);
  Request first = request_of(Operation::barrier);
  Request second = request_of(Operation::broadcast);
  const double before_s = Engine::now_s();
  trace.watch(first);
  trace.watch(second);
  EXPECT(trace.records().operations.empty());
  first.note_begun({.sequence = 7, .when_s = Engine::now_s()});
  second.finish(Failure{.reason = "refused"});
  first.finish(std::nullopt);
  const double after_s = Engine::now_s();
  const auto records = trace.records();
  REQUIRE(records.operations.size() == 2);
  const TracedOperation& refused = records.operations[0];
  EXPECT(refused.call.operation == Operation::broadcast && refused.failed && !refused.begun);
  const TracedOperation& done = records.operations[1];
  EXPECT(done.call.operation == Operation::barrier && !done.failed);
  EXPECT_EQ(done.begun->sequence, 7U);
  EXPECT(before_s <= done.submitted_s && done.submitted_s <= done.begun->when_s);
  EXPECT(done.begun->when_s <= done.ended_s && done.ended_s <= after_s);
}

TEST("a wait in several goes is one wait; another request, or a long pause, begins another") {
  Trace trace(8);
  const Request one = request_of(Operation::allreduce);
  const Request other = request_of(Operation::allgather);
  trace.waited(one, 1.0, 1.1);
  trace.waited(one, 1.101, 1.2);
  trace.waited(other, 1.2, 1.3);
  trace.waited(one, 1.3, 1.4);
  trace.waited(one, 2.0, 2.1);
  const auto waits = trace.records().waits;
  REQUIRE(waits.size() == 4);
  EXPECT_EQ(waits[0].begin_s, 1.0);
  EXPECT_EQ(waits[0].end_s, 1.2);
  EXPECT(waits[1].call.operation == Operation::allgather);
  EXPECT_EQ(waits[2].begin_s, 1.3);
  EXPECT_EQ(waits[3].end_s, 2.1);
  EXPECT_EQ(waits[0].thread, waits[3].thread);
}

TEST("the next operation is waited for anew, though it lies where the one before has lain") {
  Trace trace(8);
  Request one = request_of(Operation::allreduce);
  trace.waited(one, 1.0, 1.001);
  one.finish(std::nullopt);
  trace.waited(one, 1.001, 1.002);
  trace.waited(one, 1.003, 1.004);
  const auto waits = trace.records().waits;
  REQUIRE(waits.size() == 2);
  EXPECT_EQ(waits[0].end_s, 1.002);
  EXPECT_EQ(waits[1].begin_s, 1.003);
}
