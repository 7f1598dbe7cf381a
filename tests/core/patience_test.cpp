// How long a waiting thread yields, told what time it is.
#include "progress/patience.hpp"

#include <cstdint>
#include <memory>

#include "drivers/local/local_driver.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr double kMost_s = 1.0;

// A job of as many processes on this machine as it has ranks.
class Crowd final : public LocalDriver {
 public:
  Crowd(const std::shared_ptr<LocalNetwork>& network, std::uint32_t processes)
      : LocalDriver(network, 0), processes_(processes) {}
  PeerIdentity identity(Rank rank) const override {
    return {.host = rank < processes_ ? "here" : "elsewhere", .pid = 1000 + rank};
  }

 private:
  std::uint32_t processes_;
};

TEST("a thread with a core of its own yields until its time is over") {
  Patience patience(kMost_s);
  patience.renew(10.0);
  for (const double now_s : {10.0, 10.00001, 10.5, 10.6, 10.7, 10.999}) EXPECT(patience.is_left(now_s));
  EXPECT(!patience.is_left(11.0));
  patience.renew(11.0);
  EXPECT(patience.is_left(11.9));
}

TEST("ranks elsewhere do not crowd this machine") {
  const auto network = std::make_shared<LocalNetwork>(4096);
  Patience patience(kMost_s);
  patience.learn_of(Crowd(network, 1));
  patience.renew(0.0);
  for (const double now_s : {0.1, 0.2, 0.3, 0.999}) EXPECT(patience.is_left(now_s));
}

long switches = 0;
bool others_wait = false;
constexpr CoreView kView{.switches = [] { return switches; }, .others_wait = [] { return others_wait; }};

// Seconds for which it yields, asked every microsecond; `switched`: each time with a switch in between.
double yields_for_s(Patience& patience, double from_s, bool switched = false) {
  patience.renew(from_s);
  int turns = 0;
  while (turns < 100'000 && patience.is_left(from_s + 1e-6 * turns)) {
    switches += switched ? 1 : 0;
    ++turns;
  }
  return 1e-6 * turns;
}

Patience crowded(double most_s) {
  Patience patience(most_s, kView);
  patience.learn_of(Crowd(std::make_shared<LocalNetwork>(4096), 4096));
  return patience;
}

TEST("where yielding lets others in, or nobody wants to, a crowded machine's thread yields as long as any") {
  Patience patience = crowded(300e-6);
  others_wait = true;
  EXPECT_NEAR(yields_for_s(patience, 1.0, true), 300e-6, 3e-6);
  others_wait = false;
  EXPECT_NEAR(yields_for_s(patience, 2.0), 300e-6, 3e-6);
}

TEST("who stays on a core that others want blocks soon, then sooner, until yielding lets others in again") {
  Patience patience = crowded(300e-6);
  others_wait = true;
  const double first_s = yields_for_s(patience, 1.0);
  EXPECT(first_s > 20e-6 && first_s < 60e-6);
  const double second_s = yields_for_s(patience, 2.0);
  EXPECT(second_s > 5e-6 && second_s < first_s / 2);
  EXPECT_NEAR(yields_for_s(patience, 3.0, true), 300e-6, 3e-6);
  EXPECT_NEAR(yields_for_s(patience, 4.0), first_s, 3e-6);
}

}  // namespace
