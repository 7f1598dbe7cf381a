// What a session says of an operation that waits for longer than stall_s.
#include "testing.hpp"

#include <map>
#include <string>
#include <vector>

#include "collectives/dense/barrier.hpp"
#include "simulation/simulation.hpp"

namespace {

using namespace telegrad;

RequestPtr barrier_request() {
  return std::make_shared<Request>(Call{.operation = Operation::barrier},
                                   [](Transport& net) { return barrier(net); });
}

struct Told {
  double at_s;
  std::string line;
};

struct Job {
  Job(Rank ranks, SessionOptions session) : simulation(ranks, {.session = session, .clocks = true}) {
    for (Rank rank = 0; rank < ranks; ++rank) {
      simulation.session(rank).when_stalled(
          [this, rank](const std::string& line) { told[rank].push_back({simulation.now_s(), line}); });
    }
  }
  void begin(Rank rank, double at_s) { simulation.begin(rank, requests.emplace_back(barrier_request()), at_s); }

  Simulation simulation;
  std::map<Rank, std::vector<Told>> told;
  std::vector<RequestPtr> requests;
};

TEST("a stall names the ranks that have not called, and their last call, once") {
  Job job(3, {.timeout_s = 100.0, .stall_s = 10.0});
  for (Rank rank = 0; rank < 3; ++rank) job.begin(rank, 0.0);
  for (const Rank rank : {0, 2}) job.begin(rank, 5.0);
  job.simulation.run();
  REQUIRE(job.told[0].size() == 1);
  EXPECT_NEAR(job.told[0][0].at_s, 15.0, 1.1);
  EXPECT_EQ(job.told[0][0].line,
            "rank 0: has waited 10 s in barrier(count=0, dtype=u8, reduction=none, algorithm=auto) (operation 1); rank 1 has "
            "not called it (the last call of rank 1 was operation 0, barrier(count=0, dtype=u8, reduction=none, "
            "algorithm=auto)); an error follows after timeout_s=100 s");
  // On the same host: it only reports. So does the rank that the others wait for.
  REQUIRE(job.told[2].size() == 1);
  EXPECT_EQ(job.told[2][0].line, "");
  REQUIRE(job.told[1].size() == 1);
  EXPECT_EQ(job.told[1][0].line, "");
}

TEST("nothing is told of operations that end in time, and less and less of those that end late") {
  Job job(2, {.timeout_s = 100.0, .stall_s = 10.0});
  job.begin(0, 0.0);
  job.begin(1, 8.0);
  job.begin(0, 20.0);
  job.begin(1, 35.0);  // 15 s: told
  job.begin(0, 40.0);
  job.begin(1, 55.0);  // 15 s again, but now it takes 20 s
  job.begin(0, 60.0);
  job.begin(1, 85.0);  // 25 s: told
  job.simulation.run();
  REQUIRE(job.told[0].size() == 2);
  EXPECT(job.told[0][0].line.find("(operation 1)") != std::string::npos);
  EXPECT(job.told[0][1].line.find("(operation 3)") != std::string::npos);
}

TEST("operations behind one that stalls are not told, and a hint stands for the missing ranks") {
  Job job(2, {.timeout_s = 100.0, .stall_s = 10.0});
  job.begin(0, 0.0);
  job.begin(1, 0.0);
  job.begin(0, 1.0);
  job.simulation.run(0.5);
  job.simulation.session(0).hint_at_stalls("perhaps {} forgot the hook", "perhaps {} has fewer batches");
  for (int i = 0; i < 5; ++i) job.begin(0, 2.0);
  job.simulation.run();
  REQUIRE(job.told[0].size() == 1);
  EXPECT(job.told[0][0].line.find("(operation 1)") != std::string::npos);
  EXPECT(job.told[0][0].line.find("; perhaps rank 1 forgot the hook;") != std::string::npos);
}

TEST("a rank that has called something since the hint was given gets the other one") {
  Job job(2, {.timeout_s = 100.0, .stall_s = 10.0});
  job.simulation.session(0).hint_at_stalls("perhaps {} forgot the hook", "perhaps {} has fewer batches");
  for (const Rank rank : {0, 1}) job.begin(rank, 0.0);
  job.begin(0, 1.0);
  job.simulation.run();
  REQUIRE(job.told[0].size() == 1);
  EXPECT(job.told[0][0].line.find("; perhaps rank 1 has fewer batches;") != std::string::npos);
}

}  // namespace
