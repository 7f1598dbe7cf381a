// Receives that take whoever's message comes first, in virtual time with messages that overtake each other.
#include "testing.hpp"

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "session/messages.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr int kSeeds = 40;

SimulationOptions unruly(std::uint64_t seed, SessionOptions session = {}) {
  return {.costs = {.jitter = 20.0}, .seed = seed, .session = session, .clocks = true};
}

struct Message {
  std::vector<float> data;
  RequestPtr request;
};

class Messages {
 public:
  RequestPtr send(Rank to, float value, Step tag = 0) {
    Message& made = kept_.emplace_back(Message{{value, value, value}, nullptr});
    made.request = make_send(DType::f32, std::as_bytes(std::span(made.data)), to, tag);
    return made.request;
  }
  Message& receive(Rank source, Step tag = 0) {
    Message& made = kept_.emplace_back(Message{{-1.0F, -1.0F, -1.0F}, nullptr});
    made.request = make_receive(DType::f32, std::as_writable_bytes(std::span(made.data)), source, tag);
    return made;
  }

 private:
  std::deque<Message> kept_;
};

bool succeeded(const Message& message) { return message.request->done() && !message.request->failure(); }

TEST("every message is received once, with its sender's rank, each sender's in their order") {
  constexpr Rank kRanks = 5;
  constexpr int kEach = 6;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const double received_s : {0.0, 1.0}) {
      Simulation simulation(kRanks, unruly(seed));
      Messages messages;
      std::vector<Message*> got;
      for (int i = 0; i < kEach; ++i) {
        for (Rank from = 1; from < kRanks; ++from) {
          simulation.begin(from, messages.send(0, static_cast<float>(100 * from) + static_cast<float>(i)), 0.5);
          got.push_back(&messages.receive(kNoRank));
          simulation.begin(0, got.back()->request, received_s);
        }
      }
      EXPECT(!simulation.run().deadlock);
      std::map<Rank, int> seen;
      for (const Message* const one : got) {
        REQUIRE(succeeded(*one));
        REQUIRE(one->request->source());
        const Rank from = *one->request->source();
        EXPECT_EQ(one->data[2], static_cast<float>(100 * from) + static_cast<float>(seen[from]++));
      }
      EXPECT_EQ(seen.size(), kRanks - 1);
    }
  }
}

TEST("of the receives that fit the one that was called first gets the message, and other tags get none") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool any_first : {true, false}) {
      Simulation simulation(3, unruly(seed));
      Messages messages;
      Message& other_tag = messages.receive(kNoRank, 9);
      Message& first = messages.receive(any_first ? kNoRank : 1);
      Message& second = messages.receive(any_first ? 1 : kNoRank);
      for (const Message* const one : {&other_tag, &first, &second}) simulation.begin(0, one->request);
      simulation.begin(1, messages.send(0, 1.0F), 1.0);
      simulation.begin(1, messages.send(0, 2.0F), 1.0);
      simulation.begin(2, messages.send(0, 3.0F, 9), 1.0);
      EXPECT(!simulation.run().deadlock);
      EXPECT_EQ(first.data[0], 1.0F);
      EXPECT_EQ(second.data[0], 2.0F);
      EXPECT_EQ(other_tag.data[0], 3.0F);
      EXPECT_EQ(*other_tag.request->source(), 2);
    }
  }
}

TEST("of the messages that are here the one that came first is received") {
  Simulation simulation(4, unruly(7));
  Messages messages;
  const std::vector<Rank> order{2, 3, 1};
  for (std::size_t i = 0; i < order.size(); ++i) {
    simulation.begin(order[i], messages.send(0, static_cast<float>(order[i])), 1.0 + static_cast<double>(i));
  }
  std::vector<Message*> got;
  for (std::size_t i = 0; i < order.size(); ++i) {
    got.push_back(&messages.receive(kNoRank));
    simulation.begin(0, got.back()->request, 10.0);
  }
  EXPECT(!simulation.run().deadlock);
  for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(got[i]->data[0], static_cast<float>(order[i]));
}

TEST("it fails at once when all others have closed without sending, and not while one may still send") {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const bool one_sends : {true, false}) {
      for (const double posted_s : {0.5, 1.5}) {
        Simulation simulation(3, unruly(seed));
        Messages messages;
        Message& got = messages.receive(kNoRank);
        Message& more = messages.receive(kNoRank);
        simulation.act(1, [](Session& session) { session.part(); }, 1.0);
        if (one_sends) simulation.begin(2, messages.send(0, 5.0F), 1.0);
        simulation.act(2, [](Session& session) { session.part(); }, 1.0);
        for (const Message* const one : {&got, &more}) simulation.begin(0, one->request, posted_s);
        EXPECT(simulation.run().finish_s < 2.0);
        EXPECT_EQ(succeeded(got), one_sends);
        REQUIRE(more.request->failure());
        EXPECT_EQ(more.request->failure()->kind, FailureKind::peer_failed);
        EXPECT(more.request->failure()->reason.find("all other ranks closed their communicators without sending what "
                                                    "rank 0 waits for in recv(count=3, dtype=f32, source=any, tag=0)") !=
               std::string::npos);
      }
    }
  }
}

TEST("it times out, naming all others, and ends with a death") {
  Messages messages;
  Message& got = messages.receive(kNoRank, 7);
  {
    Simulation simulation(3, unruly(1, {.timeout_s = 20.0}));
    simulation.begin(0, got.request);
    EXPECT_NEAR(simulation.run().finish_s, 20.0, 0.01);
    REQUIRE(got.request->failure());
    EXPECT_EQ(got.request->failure()->kind, FailureKind::timeout);
    EXPECT(got.request->failure()->reason.find("source=any, tag=7) of rank 0 timed out after timeout_s=20 s, waiting "
                                               "for ranks 1, 2") != std::string::npos);
  }
  auto options = unruly(2);
  options.faults = {{.kind = SimFaultKind::kill, .rank = 1, .at_event = 5, .detect_s = 0.01}};
  Simulation simulation(3, options);
  Message& other = messages.receive(kNoRank);
  simulation.begin(0, other.request);
  EXPECT(!simulation.run().deadlock);
  REQUIRE(other.request->failure());
  EXPECT_EQ(other.request->failure()->kind, FailureKind::peer_failed);
  EXPECT_EQ(other.request->failure()->peer, 1);
}

TEST("a message of another length than anybody's receive is a mismatch, and nothing is written") {
  Simulation simulation(3, unruly(3));
  Messages messages;
  std::vector<float> data(5, 1.0F);
  Message& got = messages.receive(kNoRank);
  simulation.begin(0, got.request);
  simulation.begin(2, make_send(DType::f32, std::as_bytes(std::span(data)), 0, 0));
  simulation.run();
  REQUIRE(got.request->failure());
  EXPECT_EQ(got.request->failure()->kind, FailureKind::mismatched_call);
  EXPECT_EQ(got.data[0], -1.0F);
}

}  // namespace
