// What the interface for C++ programs reduces from one buffer into another, and what it sends and receives at once, against
// the naive results.
#include <cstdint>
#include <string>
#include <vector>

#include "public_ranks.hpp"
#include "telegrad/telegrad.hpp"
#include "testing.hpp"

using telegrad::Communicator;
using telegrad::Rank;
using telegrad::Reduction;
using telegrad::Work;

namespace {

using Misuse = std::invalid_argument;

constexpr Rank kSizes[] = {1, 2, 3, 5};

// Small numbers, such that sums and averages of all ranks are exact in every type.
template <class T>
std::vector<T> input_of(Rank rank, std::size_t length) {
  std::vector<T> x;
  for (std::size_t i = 0; i < length; ++i) x.push_back(T(static_cast<float>(i % 7 + rank)));
  return x;
}

template <>
std::vector<std::int32_t> input_of(Rank rank, std::size_t length) {
  std::vector<std::int32_t> x;
  for (std::size_t i = 0; i < length; ++i) x.push_back(static_cast<std::int32_t>(i % 7 + rank));
  return x;
}

template <>
std::vector<std::int64_t> input_of(Rank rank, std::size_t length) {
  std::vector<std::int64_t> x;
  for (std::size_t i = 0; i < length; ++i) x.push_back(static_cast<std::int64_t>(i % 7 + rank));
  return x;
}

double reduced(Reduction reduction, Rank size, std::size_t i) {
  const double first = static_cast<double>(i % 7);
  double sum = 0;
  for (Rank rank = 0; rank < size; ++rank) sum += first + rank;
  switch (reduction) {
    case Reduction::sum: return sum;
    case Reduction::avg: return sum / size;
    case Reduction::min: return first;
    default: return first + (size - 1);  // max
  }
}

template <class T>
std::vector<double> as_doubles(const std::vector<T>& x) {
  std::vector<double> all;
  for (const T& value : x) {
    if constexpr (std::is_arithmetic_v<T>) {
      all.push_back(static_cast<double>(value));
    } else {
      all.push_back(static_cast<float>(value));
    }
  }
  return all;
}

void on_every_type(auto body) {
  body(float{});
  body(double{});
  body(telegrad::f16{});
  body(telegrad::bf16{});
  body(std::int32_t{});
  body(std::int64_t{});
}

}  // namespace

TEST("sums into another buffer are the naive ones, and the input stays") {
  for (const Rank size : kSizes) {
    on_ranks(size, [size](Communicator& comm) {
      on_every_type([&]<class T>(T) {
        for (const std::size_t length : {0, 1, 5, 1000}) {
          const std::vector<T> x = input_of<T>(comm.rank(), length);
          const std::vector<double> given = as_doubles(x);
          for (const Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::min, Reduction::max}) {
            if (reduction == Reduction::avg && std::is_integral_v<T>) continue;
            std::vector<double> wanted;
            for (std::size_t i = 0; i < length; ++i) wanted.push_back(reduced(reduction, size, i));
            for (const char* algorithm : {"auto", "ring", "recursive_doubling", "rabenseifner"}) {
              std::vector<T> out = input_of<T>(9, length);
              comm.all_reduce(x, out, reduction, algorithm).wait();
              EXPECT_EQ(as_doubles(out), wanted);
              EXPECT_EQ(as_doubles(x), given);
            }
            std::vector<T> both = x;
            comm.all_reduce(both, both, reduction).wait();
            EXPECT_EQ(as_doubles(both), wanted);
            for (Rank root = 0; root < size; ++root) {
              std::vector<T> out = input_of<T>(9, length);
              const std::vector<double> untouched = as_doubles(out);
              comm.reduce(x, out, root, reduction).wait();
              EXPECT_EQ(as_doubles(out), comm.rank() == root ? wanted : untouched);
              EXPECT_EQ(as_doubles(x), given);
            }
          }
        }
      });
    });
  }
}

TEST("sums into other buffers overlap, and a root alone has one") {
  on_ranks(3, [](Communicator& comm) {
    const std::vector<double> x = input_of<double>(comm.rank(), 50000);
    std::vector<double> sum(x.size()), least(x.size()), most(comm.rank() == 1 ? x.size() : 0);
    const Work first = comm.all_reduce(x, sum);
    const Work second = comm.all_reduce(x, least, Reduction::min);
    const Work third = comm.reduce(x, most, 1, Reduction::max);
    third.wait();
    second.wait();
    first.wait();
    EXPECT(first.is_completed());
    for (std::size_t i = 0; i < x.size(); i += 4999) {
      EXPECT_EQ(sum[i], reduced(Reduction::sum, 3, i));
      EXPECT_EQ(least[i], reduced(Reduction::min, 3, i));
      if (comm.rank() == 1) EXPECT_EQ(most[i], reduced(Reduction::max, 3, i));
    }
  });
}

TEST("all ranks send round a ring and receive at once, short and long messages of other types and lengths") {
  for (const Rank size : {2U, 3U, 5U}) {
    on_ranks(size, [size](Communicator& comm) {
      const Rank next = (comm.rank() + 1) % size, last = (comm.rank() + size - 1) % size;
      on_every_type([&]<class T>(T) {
        for (const std::size_t length : {0, 1, 1000, 300000}) {
          const std::vector<T> x = input_of<T>(comm.rank(), length);
          std::vector<T> out(length);
          const Work work = comm.sendrecv(x, next, out, last, 3);
          work.wait();
          EXPECT(work.is_completed());
          EXPECT_EQ(*work.source(), last);
          EXPECT(as_doubles(out) == as_doubles(input_of<T>(last, length)));
        }
      });
    });
  }
  on_ranks(2, [](Communicator& comm) {
    const std::vector<float> floats(1000, 1.5F);
    const std::vector<char> text(7, 'x');
    if (comm.rank() == 0) {
      std::vector<char> got(7);
      comm.sendrecv(floats, 1, got, 1).wait(30.0);
      EXPECT_EQ(got, text);
    } else {
      std::vector<float> got(1000);
      comm.sendrecv(text, 0, got, 0).wait(30.0);
      EXPECT_EQ(got, floats);
    }
  });
}

TEST("a sendrecv is over when both of its messages are") {
  auto ranks = Communicator::local(2);
  const std::vector<float> x(1 << 20, 2.0F);  // too long to be sent before it is received
  const std::vector<int> word{7};
  std::vector<int> got(1);
  const Work both = ranks[0].sendrecv(x, 1, got, 1, 5);
  EXPECT(!both.is_completed());
  EXPECT(!both.source());
  EXPECT_THROWS(telegrad::TimeoutExpired, "sendrecv is still running", both.wait(0.001));
  ranks[1].send(word, 0, 5).wait();
  EXPECT_THROWS(telegrad::TimeoutExpired, "sendrecv is still running", both.wait(0.05));  // what it sends, nobody has taken
  EXPECT_EQ(got, word);
  EXPECT(!both.is_completed());
  EXPECT(!both.source());
  std::vector<float> taken(x.size());
  ranks[1].recv(taken, 0, 5).wait();
  both.wait();
  EXPECT(both.is_completed());
  EXPECT_EQ(*both.source(), 1);
  EXPECT(taken == x);
}

TEST("a sendrecv fails with either of its messages") {
  for (const bool receives : {true, false}) {
    auto ranks = Communicator::local(2);
    const std::vector<float> x(4);
    std::vector<float> out(4), taken(4), shorter(3);
    const Work both = ranks[0].sendrecv(x, 1, out, 1);
    const Work fits = receives ? ranks[1].recv(taken, 0) : ranks[1].send(x, 0);
    const Work other = receives ? ranks[1].send(shorter, 0) : ranks[1].recv(shorter, 0);
    EXPECT_THROWS(telegrad::MismatchedCall, "called different things", other.wait());
    EXPECT_THROWS(telegrad::MismatchedCall, "called different things", both.wait());
    EXPECT(both.is_completed());
  }
}

TEST("two buffers that do not fit are refused before anything is sent") {
  auto ranks = Communicator::local(2);
  Communicator& comm = ranks[0];
  std::vector<float> x(4), shorter(3), whole(8);
  const std::span all(whole);
  EXPECT_THROWS(Misuse, "out has 3 elements, but x has 4: give it as many", (void)comm.all_reduce(x, shorter));
  EXPECT_THROWS(Misuse, "out has 4 elements, but x has 3", (void)comm.reduce(shorter, x, 0));
  EXPECT_THROWS(Misuse, "x and out share memory: give out its own, or all of x's",
                (void)comm.all_reduce(all.first(4), all.subspan(2, 4)));
  EXPECT_THROWS(Misuse, "x and out share memory: give out its own, or all of x's",
                (void)comm.reduce(all.subspan(3, 4), all.first(4), 0));
  EXPECT_THROWS(Misuse, "algorithm=tree does not exist", (void)comm.all_reduce(x, all.first(4), Reduction::sum, "tree"));
  EXPECT_THROWS(Misuse, "reduction=none", (void)comm.all_reduce(x, all.first(4), Reduction::none));
  EXPECT_THROWS(Misuse, "root=2 is no rank of 2", (void)comm.reduce(x, all.first(4), 2));
  EXPECT_THROWS(Misuse, "to=0 is this rank itself", (void)comm.sendrecv(x, 0, shorter, 1));
  EXPECT_THROWS(Misuse, "to=2 is no rank of 2", (void)comm.sendrecv(x, 2, shorter, 1));
  EXPECT_THROWS(Misuse, "source=0 is this rank itself", (void)comm.sendrecv(x, 1, shorter, 0));
  EXPECT_THROWS(Misuse, "source=2 is no rank of 2", (void)comm.sendrecv(x, 1, shorter, 2));
  EXPECT_THROWS(Misuse, "tag=2147483648 must be below", (void)comm.sendrecv(x, 1, shorter, 1, 1U << 31));
  EXPECT_THROWS(Misuse, "x and out share memory: give each its own", (void)comm.sendrecv(x, 1, x, 1));
  EXPECT_THROWS(Misuse, "x and out share memory: give each its own",
                (void)comm.sendrecv(all.first(4), 1, all.subspan(3, 2), 1));
  const Work sum = comm.all_reduce(x, all.first(4));  // what was refused took no number
  std::vector<float> y(4);
  ranks[1].all_reduce(y).wait();
  sum.wait();
}
