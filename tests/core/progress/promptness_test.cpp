// Whether the engine's thread must know of a submission at once is told from how soon those before were waited for.
#include "progress/promptness.hpp"

#include "testing.hpp"

namespace {

using telegrad::Promptness;

constexpr double kSoon_s = Promptness::kPrompt_s / 2.0;
constexpr double kLate_s = Promptness::kPrompt_s * 2.0;

// Submits at `now_s` and waits so much later.
double submit_and_wait(Promptness& promptness, double now_s, double later_s) {
  const double may_lie_s = promptness.submitted(now_s);
  promptness.waits(now_s + later_s);
  return may_lie_s;
}

TEST("a program that has done nothing is not trusted") {
  Promptness promptness;
  EXPECT_EQ(promptness.submitted(1.0), 0.0);
}

TEST("prompt waits are trusted the more the more there are") {
  Promptness promptness;
  EXPECT_EQ(submit_and_wait(promptness, 1.0, kSoon_s), 0.0);
  EXPECT_EQ(submit_and_wait(promptness, 2.0, kSoon_s), Promptness::kHopeful_s);
  EXPECT_EQ(submit_and_wait(promptness, 3.0, kSoon_s), Promptness::kHopeful_s);
  EXPECT_EQ(submit_and_wait(promptness, 4.0, kSoon_s), Promptness::kSure_s);
  EXPECT_EQ(submit_and_wait(promptness, 5.0, kLate_s), Promptness::kSure_s);
  EXPECT_EQ(submit_and_wait(promptness, 6.0, kSoon_s), 0.0);
}

TEST("several that are waited for together are not prompt") {
  Promptness promptness;
  for (int step = 0; step < 10; ++step) {
    EXPECT_EQ(promptness.submitted(step), 0.0);
    EXPECT_EQ(promptness.submitted(step + 0.5), 0.0);
    for (int wait = 0; wait < 2; ++wait) promptness.waits(step + 0.5 + kSoon_s);
  }
}

TEST("what was never waited for ends the trust") {
  Promptness promptness;
  for (int i = 0; i < 5; ++i) submit_and_wait(promptness, i, kSoon_s);
  EXPECT_EQ(promptness.submitted(5.0), Promptness::kSure_s);
  for (int i = 6; i < 10; ++i) EXPECT_EQ(promptness.submitted(i), 0.0);  // those before are asked for, not waited for
}

TEST("who blocks is trusted a little") {
  Promptness promptness;
  for (int i = 0; i < 10; ++i) promptness.blocked();
  EXPECT_EQ(submit_and_wait(promptness, 1.0, kLate_s), Promptness::kHopeful_s);
  EXPECT_EQ(submit_and_wait(promptness, 2.0, kLate_s), 0.0);
  promptness.submitted(3.0);  // and then asks until it is over
  promptness.blocked();
  EXPECT_EQ(promptness.submitted(4.0), Promptness::kHopeful_s);
  promptness.waits(4.0 + kSoon_s);
  for (int i = 5; i < 10; ++i) submit_and_wait(promptness, i, kSoon_s);
  EXPECT_EQ(promptness.submitted(10.0), Promptness::kSure_s);
  for (int i = 11; i < 20; ++i) {
    promptness.blocked();
    EXPECT_EQ(promptness.submitted(i), Promptness::kHopeful_s);  // nobody has waited for the one before
  }
}

}  // namespace
