// Things under way in a ring of places.
#include "testing.hpp"

#include <deque>

#include "base/random.hpp"
#include "transport/window.hpp"

namespace {

using namespace telegrad;

struct Counted {
  explicit Counted(int number, int& living) : number(number), living(living) { ++living; }
  ~Counted() { --living; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  int number;
  int& living;
};

TEST("first in, first out, and nothing lives longer than its place") {
  int living = 0;
  {
    Window<Counted, 5> window;
    std::deque<int> expected;
    Random random(3);
    for (int i = 0; i < 1000; ++i) {
      EXPECT_EQ(window.empty(), expected.empty());
      EXPECT_EQ(window.full(), expected.size() == 5);
      if (!window.full() && (window.empty() || random.below(2) == 0)) {
        const Counted& made = window.emplace_back(i, living);
        EXPECT_EQ(made.number, i);
        expected.push_back(i);
      } else {
        EXPECT_EQ(window.front().number, expected.front());
        window.pop_front();
        expected.pop_front();
      }
      EXPECT_EQ(living, static_cast<int>(expected.size()));
    }
  }
  EXPECT_EQ(living, 0);
}

}  // namespace
