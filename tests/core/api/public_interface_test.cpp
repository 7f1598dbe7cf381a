// The interface for C++ programs, on ranks of this process: every operation, what is refused, and how it fails.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <complex>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "public_ranks.hpp"
#include "telegrad/telegrad.hpp"
#include "testing.hpp"

using telegrad::Communicator;
using telegrad::MismatchedCall;
using telegrad::PeerFailed;
using telegrad::Rank;
using telegrad::Reduction;
using telegrad::SparseVector;
using telegrad::TimeoutExpired;
using telegrad::Work;

namespace {

constexpr Rank kRanks = 3;

void on_all_ranks(const std::function<void(Communicator&)>& body) { on_ranks(kRanks, body); }

template <class V>
std::vector<V> listed(std::span<const V> values) {
  return {values.begin(), values.end()};
}

}  // namespace

TEST("a communicator knows its place") {
  auto ranks = Communicator::local(2);
  EXPECT_EQ(ranks.size(), 2);
  EXPECT_EQ(ranks[1].rank(), 1);
  EXPECT_EQ(ranks[1].size(), 2);
  EXPECT_EQ(ranks[1].driver(), "local");
  auto other = Communicator::local(1);
  Work pending = ranks[1].barrier();
  ranks[1] = std::move(other[0]);  // what was there closes
  EXPECT_EQ(ranks[1].size(), 1);
  EXPECT_THROWS(PeerFailed, "", ranks[0].barrier().wait());
  EXPECT_THROWS(std::invalid_argument, "moved from", other[0].rank());
  EXPECT_THROWS(std::invalid_argument, "moved from", other[0].barrier());
  EXPECT_THROWS(std::invalid_argument, "moved from", other[0].split(0));
  other[0] = std::move(ranks[0]);
  EXPECT_EQ(other[0].size(), 2);
}

TEST("a reduction of the caller's own") {
  const telegrad::CustomReduction<float> hypotenuse("hypot", 0.0F, [](float a, float b) { return std::hypot(a, b); });
  on_all_ranks([&](Communicator& comm) {
    std::vector<float> x(5, comm.rank() == 0 ? 2.0F : comm.rank() == 1 ? 3.0F : 6.0F);
    comm.all_reduce(x, hypotenuse).wait();
    EXPECT_EQ(x, std::vector<float>(5, 7.0F));
    comm.reduce(x, 1, hypotenuse).wait();
    EXPECT_EQ(x[4] > 12.0F, comm.rank() == 1);
    std::vector<float> many(6, 1.0F), own(2);
    comm.reduce_scatter(many, own, hypotenuse).wait();
    EXPECT_EQ(own[1], std::hypot(std::hypot(1.0F, 1.0F), 1.0F));
    EXPECT_THROWS(std::invalid_argument, "root", (void)comm.reduce(x, 9, hypotenuse));
    EXPECT_THROWS(std::invalid_argument, "x has 6 elements", (void)comm.reduce_scatter(many, x, hypotenuse));
    const telegrad::CustomReduction<float> other(comm.rank() == 1 ? "other" : "hypot", 0.0F, [](float a, float) { return a; });
    EXPECT_THROWS(MismatchedCall, "reduction=custom", comm.all_reduce(x, other).wait());
  });
  EXPECT_THROWS(std::invalid_argument, "neutral of reduction sum is not",
                telegrad::CustomReduction<float>("sum", 1.0F, [](float a, float b) { return a + b; }));
  on_all_ranks([](Communicator& comm) {
    const telegrad::CustomReduction<int> thrower("thrower", 0, [](int a, int b) {
      return a == 0 && b == 0 ? 0 : throw std::domain_error("no such number");
    });
    std::vector<int> x(3, 1);
    EXPECT_THROWS(telegrad::TransportError, "no such number", comm.all_reduce(x, thrower).wait());
    EXPECT_EQ(x, std::vector<int>(3, 1));
  });
}

TEST("what an operation gave is used where it was moved to, and nowhere else") {
  auto ranks = Communicator::local(1);
  std::vector<float> x{1.0F};
  Work work = ranks[0].all_reduce(x);
  Work moved = std::move(work);
  moved.wait();
  EXPECT_THROWS(std::invalid_argument, "moved from", work.wait());
  EXPECT_THROWS(std::invalid_argument, "moved from", work.wait(1.0));
  EXPECT_THROWS(std::invalid_argument, "moved from", work.is_completed());
  EXPECT_THROWS(std::invalid_argument, "moved from", work.source());
  auto sum = ranks[0].all_reduce(SparseVector<float>(4, {1}, {2.0F}));
  auto kept = std::move(sum);
  EXPECT_THROWS(std::invalid_argument, "moved from", sum.result());
  sum = std::move(kept);
  EXPECT_EQ(sum.result().nnz(), 1);
  EXPECT_THROWS(std::invalid_argument, "moved from", kept.result());
  work = std::move(moved);
  EXPECT(work.is_completed());
}

TEST("dense reductions") {
  on_all_ranks([](Communicator& comm) {
    const float mine = static_cast<float>(comm.rank());
    for (const char* algorithm : {"auto", "ring", "recursive_doubling", "rabenseifner"}) {
      std::vector<float> x{mine, 1.0F};
      comm.all_reduce(x, Reduction::sum, algorithm).wait();
      EXPECT_EQ(x, (std::vector{3.0F, 3.0F}));
    }
    double average[] = {mine, 5.0};
    comm.all_reduce(average, Reduction::avg).wait();
    EXPECT_EQ(average[0], 1.0);
    std::array<long long, 2> most{static_cast<long long>(comm.rank()), -1};
    comm.all_reduce(std::span(most), Reduction::max).wait();
    EXPECT_EQ(most, (std::array<long long, 2>{2, -1}));
    std::vector<std::int32_t> one{7};
    comm.reduce(one, 1).wait();
    EXPECT_EQ(one[0], comm.rank() == 1 ? 21 : 7);

    const std::vector<float> x{1, 2, 3, 4, 5, 6};
    std::vector<float> block(2);
    comm.reduce_scatter(x, block).wait();
    EXPECT_EQ(block, (std::vector{3 * x[2 * comm.rank()], 3 * x[2 * comm.rank() + 1]}));
    const std::array<std::uint64_t, kRanks> counts{1, 2, 3};
    std::vector<float> part(comm.rank() + 1);
    comm.reduce_scatter(x, part, Reduction::sum, counts).wait();
    EXPECT_EQ(part.front(), comm.rank() == 0 ? 3.0F : comm.rank() == 1 ? 6.0F : 12.0F);
  });
}

TEST("a vector that is moved is not shared, so that its entries need no copy") {
  SparseVector<float> vector(10, {2, 3}, {1.0F, 2.0F});
  const SparseVector<float> copy = vector;
  EXPECT_EQ(copy.held().use_count(), 2);
  const float* const values = vector.values().data();
  SparseVector<float> other = std::move(vector);
  EXPECT_EQ(other.held().use_count(), 2);
  EXPECT(other.values().data() == values);
  vector = SparseVector<float>(7, {1}, {1.0F});
  EXPECT_EQ(vector.n(), 7);
}

TEST("moves of any type") {
  struct Pair {
    std::uint16_t a;
    std::uint16_t b;
    bool operator==(const Pair&) const = default;
  };
  on_all_ranks([](Communicator& comm) {
    const Rank rank = comm.rank();
    const auto of = [](Rank r) { return Pair{static_cast<std::uint16_t>(r), 9}; };
    const std::vector<Pair> mine{of(rank)};
    const std::vector<Pair> all{of(0), of(1), of(2)};
    std::vector<Pair> out(kRanks);
    comm.all_gather(mine, out).wait();
    EXPECT(out == all);
    std::vector<Pair> gathered(rank == 1 ? kRanks : 0);
    comm.gather(mine, gathered, 1).wait();
    EXPECT(gathered == (rank == 1 ? all : std::vector<Pair>{}));
    std::vector<Pair> block(1);
    comm.scatter(rank == 2 ? std::span(all) : std::span<const Pair>(), block, 2).wait();
    EXPECT(block == mine);
    comm.broadcast(block, 1).wait();
    EXPECT(block[0] == of(1));

    const std::array<std::uint64_t, kRanks> counts{0, 1, 2};
    std::vector<int> parts(3, -1);
    const std::vector<int> part(rank, static_cast<int>(rank));
    comm.all_gather(part, parts, counts).wait();
    EXPECT_EQ(parts, (std::vector{1, 2, 2}));
    std::fill(parts.begin(), parts.end(), -1);
    comm.gather(part, parts, 0, counts).wait();
    EXPECT_EQ(parts, rank == 0 ? (std::vector{1, 2, 2}) : (std::vector{-1, -1, -1}));
    std::vector<int> taken(rank);
    comm.scatter(parts, taken, 0, counts).wait();
    EXPECT_EQ(taken, part);

    std::vector<int> sent{10, 11, 12}, received(3);
    for (int& x : sent) x += 100 * static_cast<int>(rank);
    comm.all_to_all(sent, received).wait();
    EXPECT_EQ(received[2], static_cast<int>(210 + rank));
    const std::array<std::uint64_t, kRanks> even{1, 1, 1};
    std::fill(received.begin(), received.end(), 0);
    comm.all_to_all(sent, received, even, even).wait();
    EXPECT_EQ(received[0], static_cast<int>(10 + rank));
    comm.barrier().wait();
  });
}

TEST("messages between two ranks") {
  on_all_ranks([](Communicator& comm) {
    std::vector<double> x{1.5, 2.5};
    if (comm.rank() == 0) comm.send(x, 2, 7).wait();
    if (comm.rank() == 2) {
      std::vector<double> got(2);
      const Work work = comm.recv(got, 0, 7);
      work.wait();
      EXPECT_EQ(got, x);
      EXPECT_EQ(*work.source(), 0);
      const Work any = comm.recv(got, std::nullopt);
      any.wait(30.0);
      EXPECT_EQ(*any.source(), 1);
      EXPECT(any.is_completed());
    }
    if (comm.rank() == 1) comm.send(x, 2).wait();
  });
}

TEST("sparse sums: as vectors, into dense vectors, in slices") {
  on_all_ranks([](Communicator& comm) {
    const std::uint32_t own = 10 * (comm.rank() + 1);
    const SparseVector<float> mine(1000, {5, own}, {1.0F, 2.0F});
    const std::vector<std::uint32_t> where{5, 10, 20, 30};
    const std::vector<float> sums{3, 2, 2, 2};
    for (const char* algorithm : {"auto", "split_allgather", "recursive_doubling", "ring"}) {
      for (const auto wire : {telegrad::Wire::automatic, telegrad::Wire::raw, telegrad::Wire::blocked, telegrad::Wire::packed}) {
        const auto work = comm.all_reduce(mine, Reduction::sum, {.algorithm = algorithm, .wire = wire});
        const SparseVector<float> sum = work.result();
        EXPECT(!sum.is_dense());
        EXPECT_EQ(sum.n(), 1000);
        EXPECT_EQ(listed(sum.indices()), where);
        EXPECT_EQ(listed(sum.values()), sums);
        EXPECT(work.result().values().data() == sum.values().data());
      }
    }
    const auto dense = comm.all_reduce(mine, Reduction::sum, {.algorithm = "split_dense_allgather"}).result();
    EXPECT(dense.is_dense());
    EXPECT_EQ(dense.nnz(), 1000);
    EXPECT_EQ(dense.values()[30], 2.0F);
    std::vector<float> out(1000);
    comm.all_reduce_into(mine, out, Reduction::avg).wait();
    EXPECT_EQ(out[5], 1.0F);
    EXPECT_EQ(out[6], 0.0F);
    const std::array<std::uint64_t, kRanks> counts{6, 14, 980};
    const auto slice = comm.reduce_scatter(mine, Reduction::sum, counts).result();
    EXPECT_EQ(listed(slice.indices()), comm.rank() == 0   ? (std::vector<std::uint32_t>{5})
                                       : comm.rank() == 1 ? (std::vector<std::uint32_t>{10})
                                                          : (std::vector<std::uint32_t>{20, 30}));
    const auto all = comm.all_gather(mine).result();
    EXPECT_EQ(all.size(), kRanks);
    EXPECT_EQ(listed(all[2].indices()), (std::vector<std::uint32_t>{5, 30}));
  });
}

TEST("sums of every type of values, of full and of empty vectors") {
  on_all_ranks([](Communicator& comm) {
    const auto sums_to_three = [&]<class V>(V one) {
      const auto sum = comm.all_reduce(SparseVector<V>(4, {1}, {one})).result();
      std::vector<V> all(4);
      sum.write_dense(all);
      EXPECT(static_cast<double>(static_cast<float>(all[1])) == 3.0);
      EXPECT(static_cast<double>(static_cast<float>(all[0])) == 0.0);
    };
    sums_to_three(1.0F);
    sums_to_three(1.0);
    sums_to_three(telegrad::bf16(1.0F));
    sums_to_three(telegrad::f16(1.0F));
    sums_to_three(std::int32_t{1});
    sums_to_three(std::int64_t{1});
    sums_to_three(std::uint32_t{1});
    sums_to_three(std::uint64_t{1});
    const std::vector<double> values{1, 2};
    EXPECT_EQ(listed(comm.all_reduce(SparseVector<double>::dense(values)).result().values()), (std::vector{3.0, 6.0}));
    EXPECT_EQ(comm.all_reduce(SparseVector<double>(9, {}, {})).result().nnz(), 0);
    SparseVector<float> smallest(2, {0}, {-1.0F});
    std::vector<float> out(2);
    comm.all_reduce_into(std::move(smallest), out, Reduction::min).wait();
    EXPECT_EQ(out[0], -1.0F);
    EXPECT(std::isinf(out[1]));
  });
}

TEST("sparse integers wrap round, and unsigned ones are ordered as such") {
  on_all_ranks([](Communicator& comm) {
    const auto check = [&]<class V>(V) {
      constexpr V kHighest = std::numeric_limits<V>::max();
      const SparseVector<V> mine(300, {7, 9 + comm.rank()}, {static_cast<V>(kHighest - comm.rank()), V{1}});
      const std::vector<std::uint32_t> where{7, 9, 10, 11};
      const auto values = [&](Reduction reduction) {
        const auto found = comm.all_reduce(mine, reduction).result();
        EXPECT_EQ(listed(found.indices()), where);
        return listed(found.values());
      };
      const V wrapped = static_cast<V>(3 * static_cast<std::uint64_t>(kHighest) - 3);
      EXPECT_EQ(values(Reduction::sum), (std::vector<V>{wrapped, 1, 1, 1}));
      EXPECT_EQ(values(Reduction::max), (std::vector<V>{kHighest, 1, 1, 1}));
      EXPECT_EQ(values(Reduction::min), (std::vector<V>{static_cast<V>(kHighest - 2), 1, 1, 1}));
      std::vector<V> out(300, V{5}), written(300);
      comm.all_reduce_into(mine, out, Reduction::min).wait();
      EXPECT_EQ(out[7], static_cast<V>(kHighest - 2));
      EXPECT_EQ(out[8], kHighest);
      comm.all_reduce_into(mine, out, Reduction::max).wait();
      EXPECT_EQ(out[8], std::numeric_limits<V>::min());
      comm.all_reduce(mine, Reduction::min).result().write_dense(written, Reduction::min);
      EXPECT_EQ(written[7], static_cast<V>(kHighest - 2));
      EXPECT_EQ(written[8], kHighest);
      EXPECT_EQ(listed(comm.reduce_scatter(mine, Reduction::max).result().values()),
                comm.rank() == 0 ? (std::vector<V>{kHighest, 1, 1, 1}) : std::vector<V>{});
      EXPECT_EQ(comm.all_gather(mine).result()[1].values()[0], static_cast<V>(kHighest - 1));
      EXPECT_THROWS(std::invalid_argument, "reduction=avg is not for sparse vectors of", (void)comm.all_reduce(mine, Reduction::avg));
      EXPECT_THROWS(std::invalid_argument, "reduction=bor is not for sparse vectors of", (void)comm.all_reduce(mine, Reduction::bor));
      EXPECT_THROWS(std::invalid_argument, "is for vectors of float",
                    (void)comm.all_reduce(mine, Reduction::sum, {.values = telegrad::ValueEncoding::int8}));
    };
    check(std::int32_t{});
    check(std::int64_t{});
    check(std::uint32_t{});
    check(std::uint64_t{});
  });
  auto ranks = Communicator::local(2);
  auto one = ranks[0].all_reduce(SparseVector<std::uint32_t>(4, {1}, {1}));
  auto other = ranks[1].all_reduce(SparseVector<std::int32_t>(4, {1}, {1}));
  EXPECT_THROWS(MismatchedCall, "dtype=u32", one.wait());
  EXPECT_THROWS(MismatchedCall, "dtype=i32", other.wait());
}

TEST("rounded values leave their error") {
  on_all_ranks([](Communicator& comm) {
    std::vector<float> error(100);
    const float value = 1.0F + 1.0F / 1024;  // more digits than bf16 has
    const auto sum = comm.all_reduce(SparseVector<float>(100, {3}, {value}), Reduction::sum,
                                     {.values = telegrad::ValueEncoding::bf16, .error = error})
                         .result();
    EXPECT(sum.values()[0] != 3 * value);
    EXPECT(error[3] != 0.0F);
    EXPECT_EQ(error[4], 0.0F);
  });
}

TEST("what cannot be is refused before anything is sent") {
  using Misuse = std::invalid_argument;
  EXPECT_THROWS(Misuse, "size=0", Communicator::local(0));
  EXPECT_THROWS(Misuse, "was it a negative number?", Communicator::local(static_cast<telegrad::Rank>(-1)));
  EXPECT_THROWS(Misuse, "size=4097 is more ranks than one process can hold", Communicator::local(4097));
  float one = 1.0F;
  auto alone = Communicator::local(1);
  EXPECT_THROWS(Misuse, "reduction=99", alone[0].all_reduce(std::span(&one, 1), static_cast<Reduction>(99)));
  const SparseVector<float> entry(4, {1}, {1.0F});
  EXPECT_THROWS(Misuse, "reduction=99", alone[0].all_reduce(entry, static_cast<Reduction>(99)));
  EXPECT_THROWS(Misuse, "values=99",
                alone[0].all_reduce(entry, Reduction::sum, {.values = static_cast<telegrad::ValueEncoding>(99)}));
  EXPECT_THROWS(Misuse, "timeout_s=-1", Communicator::local(1, {.timeout_s = -1.0}));
  EXPECT_THROWS(Misuse, "liveness_timeout_s=", Communicator::local(1, {.liveness_timeout_s = 0.0}));
  EXPECT_THROWS(Misuse, "", SparseVector<float>(4, {2, 1}, {1.0F, 1.0F}));
  EXPECT_THROWS(Misuse, "", SparseVector<float>(4, {4}, {1.0F}));
  EXPECT_THROWS(Misuse, "", SparseVector<float>(4, {1}, {}));

  auto ranks = Communicator::local(2);
  Communicator& comm = ranks[0];
  std::vector<float> x(4), y(2), z(3);
  std::vector<int> whole(4);
  EXPECT_THROWS(Misuse, "algorithm=tree does not exist for this operation: use one of auto, ring",
                (void)comm.all_reduce(x, Reduction::sum, "tree"));
  EXPECT_THROWS(Misuse, "reduction=none", (void)comm.all_reduce(x, Reduction::none));
  EXPECT_THROWS(Misuse, "reduction=avg of i32 does not exist", (void)comm.all_reduce(whole, Reduction::avg));
  EXPECT_THROWS(Misuse, "root=2 is no rank of 2", (void)comm.reduce(x, 2));
  EXPECT_THROWS(Misuse, "root=3", (void)comm.broadcast(x, 3));
  EXPECT_THROWS(Misuse, "x has 3 elements, but the blocks of all ranks have 4", (void)comm.reduce_scatter(z, y));
  EXPECT_THROWS(Misuse, "out has 3 elements", (void)comm.all_gather(y, z));
  EXPECT_THROWS(Misuse, "out has 3 elements", (void)comm.gather(y, z, 0));
  EXPECT_THROWS(Misuse, "x has 3 elements", (void)comm.scatter(z, y, 0));
  EXPECT_THROWS(Misuse, "its own block of the other", (void)comm.all_gather(std::span(x).subspan(1, 2), x));
  const std::array<std::uint64_t, 3> three{1, 1, 1};
  const std::array<std::uint64_t, 2> uneven{1, 2}, other{2, 1};
  EXPECT_THROWS(Misuse, "counts has 3 numbers for 2 ranks", (void)comm.all_gather(y, x, three));
  const std::array<std::uint64_t, 2> below{static_cast<std::uint64_t>(-5), 15}, wraps{(1ULL << 62) + 1, 1};
  EXPECT_THROWS(Misuse, "counts[0]=18446744073709551611 is more than memory can hold", (void)comm.all_gather(y, x, below));
  EXPECT_THROWS(Misuse, "counts[0]=4611686018427387905", (void)comm.all_gather(y, x, wraps));
  EXPECT_THROWS(Misuse, "counts[0]=18446744073709551611",
                (void)comm.reduce_scatter(SparseVector<float>(10, {1}, {1.0F}), Reduction::sum, below));
  EXPECT_THROWS(Misuse, "send_counts[0]=18446744073709551611", (void)comm.all_to_all(x, z, below, below));
  EXPECT_THROWS(Misuse, "send_counts is given, receive_counts is not: give both", (void)comm.all_to_all(x, z, uneven));
  EXPECT_THROWS(Misuse, "what it keeps has one length", (void)comm.all_to_all(z, std::span(x).first(3), uneven, other));
  std::vector<float> w(3);
  EXPECT_THROWS(Misuse, "cannot share evenly", (void)comm.all_to_all(z, w));
  EXPECT_THROWS(Misuse, "to=0 is this rank itself", (void)comm.send(x, 0));
  EXPECT_THROWS(Misuse, "source=2 is no rank", (void)comm.recv(x, 2));
  EXPECT_THROWS(Misuse, "tag=2147483648", (void)comm.send(x, 1, 1U << 31));
  EXPECT_THROWS(Misuse, "no other rank", (void)Communicator::local(1)[0].recv(x, std::nullopt));

  const SparseVector<float> vector(8, {1}, {1.0F});
  const SparseVector<double> precise(8, {1}, {1.0});
  EXPECT_THROWS(Misuse, "use one of auto, split_allgather",
                (void)comm.all_reduce(vector, Reduction::sum, {.algorithm = "rabenseifner"}));
  EXPECT_THROWS(Misuse, "reduction=none", (void)comm.all_reduce(vector, Reduction::none));
  EXPECT_THROWS(Misuse, "switch_factor=-1", (void)comm.all_reduce(vector, Reduction::sum, {.switch_factor = -1.0}));
  EXPECT_THROWS(Misuse, "balanced slices",
                (void)comm.all_reduce(vector, Reduction::sum, {.algorithm = "recursive_doubling", .balanced = true}));
  constexpr auto kRounded = telegrad::ValueEncoding::int8;
  EXPECT_THROWS(Misuse, "values=int8 is for vectors of float",
                (void)comm.all_reduce(precise, Reduction::sum, {.values = kRounded}));
  EXPECT_THROWS(Misuse, "sums and averages", (void)comm.all_reduce(vector, Reduction::max, {.values = kRounded}));
  EXPECT_THROWS(Misuse, "recursive_doubling cannot",
                (void)comm.all_reduce(vector, Reduction::sum, {.algorithm = "recursive_doubling", .values = kRounded}));
  EXPECT_THROWS(Misuse, "error has 4 elements", (void)comm.all_reduce(vector, Reduction::sum, {.error = x}));
  EXPECT_THROWS(Misuse, "out has 4 elements", (void)comm.all_reduce_into(vector, x));
  std::vector<float> eight(12);
  const auto out = std::span(eight).first(8);
  EXPECT_THROWS(Misuse, "error shares memory with out",
                (void)comm.all_reduce_into(vector, out, Reduction::sum, {.error = std::span(eight).last(8)}));
  EXPECT_THROWS(Misuse, "wire=77", (void)comm.all_reduce(vector, Reduction::sum, {.wire = static_cast<telegrad::Wire>(77)}));
  EXPECT_THROWS(Misuse, "counts has 3", (void)comm.reduce_scatter(vector, Reduction::sum, three));
  EXPECT_THROWS(Misuse, "counts add up to 3", (void)comm.reduce_scatter(vector, Reduction::sum, uneven));
  EXPECT_THROWS(Misuse, "which has one way", (void)comm.reduce_scatter(vector, Reduction::sum, {}, {.balanced = true}));
  for (const telegrad::SparseOptions& unused :
       {telegrad::SparseOptions{.algorithm = "ring"}, {.switch_factor = 2.0}, {.balanced = true}}) {
    EXPECT_THROWS(Misuse, "all_gather, which adds nothing: leave them out", (void)comm.all_gather(vector, unused));
  }
  EXPECT_THROWS(Misuse, "out has", vector.write_dense(x));
}

TEST("a vector that was moved from says so") {
  auto ranks = Communicator::local(1);
  SparseVector<float> mine(8, {1}, {1.0F});
  SparseVector<float> kept = std::move(mine);
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_THROWS(std::invalid_argument, "this sparse vector was moved from", (void)mine.nnz());
  EXPECT_THROWS(std::invalid_argument, "this sparse vector was moved from", (void)ranks[0].all_reduce(mine));
  EXPECT_THROWS(std::invalid_argument, "this sparse vector was moved from", (void)ranks[0].all_gather(mine));
  // NOLINTEND(bugprone-use-after-move)
  mine = kept;
  EXPECT_EQ(mine.nnz(), 1U);
}

template <class Sent, class Received>
void expect_mismatch() {
  auto ranks = Communicator::local(2);
  std::array<Sent, 16 / sizeof(Sent)> x{};
  std::array<Received, 16 / sizeof(Received)> y{};
  const Work sending = ranks[0].send(x, 1);
  const Work receiving = ranks[1].recv(y, 0);
  EXPECT_THROWS(telegrad::MismatchedCall, "", receiving.wait());
}

TEST("elements of as many bytes, but of another type, are another call") {
  expect_mismatch<std::int16_t, std::uint64_t>();
  expect_mismatch<std::uint32_t, std::uint16_t>();
  expect_mismatch<std::uint32_t, std::int32_t>();
  expect_mismatch<bool, std::int8_t>();
  expect_mismatch<std::complex<float>, double>();
  expect_mismatch<std::complex<double>, std::complex<float>>();
  auto ranks = Communicator::local(2);
  std::vector<long long> x{1, 2};
  std::vector<std::int64_t> y(2);
  const Work sending = ranks[0].send(x, 1);
  ranks[1].recv(y, 0).wait();
  sending.wait();
  EXPECT_EQ(y[1], 2);
}

TEST("failures are exceptions of their kind, with their facts") {
  auto ranks = Communicator::local(2);
  std::vector<float> x(4), longer(5);
  const Work waiting = ranks[0].all_reduce(x);
  EXPECT_THROWS(std::invalid_argument, "timeout_s=0", waiting.wait(0.0));
  EXPECT_THROWS(TimeoutExpired, "still running", waiting.wait(0.001));
  EXPECT(!waiting.is_completed());
  EXPECT(!waiting.source());
  const Work differs = ranks[1].all_reduce(longer);
  EXPECT_THROWS(MismatchedCall, "called different things", waiting.wait());
  try {
    differs.wait();
    EXPECT(false);
  } catch (const telegrad::TransportError& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT(error.peer().has_value());
    EXPECT(error.operation().find("allreduce") != std::string::npos);
    EXPECT_EQ(*error.tag(), 0);
  }

  auto left = Communicator::local(2);
  left[1].abort("enough");
  EXPECT_THROWS(PeerFailed, "enough", left[0].barrier().wait());
  left[0].close();
  EXPECT_THROWS(telegrad::TransportError, "closed", left[0].barrier().wait());

  auto slow = Communicator::local(2, {.timeout_s = 0.05});
  EXPECT_THROWS(TimeoutExpired, "", slow[0].barrier().wait());
}

TEST("a forked child leaves its parent's communicators alone") {
  auto ranks = Communicator::local(2);
  std::vector<float> x(4), y(4);
  const Work under_way = ranks[0].all_reduce(x);
  const auto refused = [](const auto& call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    const bool all = refused([&] { ranks[0].abort("of the child"); }) && refused([&] { (void)ranks[0].barrier(); }) &&
                     refused([&] { under_way.wait(); }) && refused([&] { (void)ranks[0].split(1); });
    ranks[0].close();
    ::_exit(all ? 0 : 1);
  }
  REQUIRE(child > 0);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ranks[1].all_reduce(y).wait();
  under_way.wait();
}
