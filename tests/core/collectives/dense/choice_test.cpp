// Which algorithm sums a dense vector if none is named: the built-in table, and one of one's own.
#include "testing.hpp"

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "collectives/dense/choice.hpp"
#include "session/reductions.hpp"
#include "simulation/simulation.hpp"

namespace {

using namespace telegrad;

TEST("short vectors are doubled, long ones go round the ring, and the choice depends on P") {
  EXPECT_EQ(choose_allreduce(4, 1024), Algorithm::recursive_doubling);
  EXPECT_EQ(choose_allreduce(4, 16 << 20), Algorithm::ring);
  EXPECT_EQ(choose_allreduce(3, 32 << 10), Algorithm::rabenseifner);
  EXPECT_EQ(choose_allreduce(1024, 1 << 20), Algorithm::rabenseifner);
  for (Rank size = 1; size < 5000; size = size * 3 / 2 + 1) {
    EXPECT_EQ(choose_allreduce(size, 0), Algorithm::recursive_doubling);
    EXPECT_EQ(choose_allreduce(size, std::size_t{1} << 30), Algorithm::ring);
  }
}

std::string refusal_of(std::vector<AllreduceChoice> choices) {
  try {
    const AllreduceTable table(4, std::move(choices));
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST("a table of one's own chooses by its rows, a number of ranks by the built-in ones") {
  const AllreduceTable table(4, {{0, Algorithm::ring}, {1000, Algorithm::recursive_doubling}, {5000, Algorithm::ring}});
  EXPECT_EQ(table.choose(0), Algorithm::ring);
  EXPECT_EQ(table.choose(999), Algorithm::ring);
  EXPECT_EQ(table.choose(1000), Algorithm::recursive_doubling);
  EXPECT_EQ(table.choose(4999), Algorithm::recursive_doubling);
  EXPECT_EQ(table.choose(std::size_t{1} << 40), Algorithm::ring);
  const AllreduceTable built_in = 4;
  for (std::size_t bytes = 4; bytes < (64 << 20); bytes *= 2) {
    EXPECT_EQ(built_in.choose(bytes), choose_allreduce(4, bytes));
  }
}

TEST("a table that is none is refused") {
  const auto says = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT(says(refusal_of({}), "no choice from 0 bytes"));
  EXPECT(says(refusal_of({{4, Algorithm::ring}}), "no choice from 0 bytes"));
  EXPECT(says(refusal_of({{0, Algorithm::ring}, {8, Algorithm::ring}, {8, Algorithm::ring}}),
              "do not ascend after 8 bytes"));
  for (const Algorithm none : {Algorithm::automatic, Algorithm::split_allgather, static_cast<Algorithm>(99)}) {
    EXPECT(says(refusal_of({{0, none}}), "does not sum dense vectors"));
  }
  EXPECT_EQ(refusal_of({{0, Algorithm::recursive_doubling}}), "");
}

TEST("all ranks take what the table they were given says") {
  constexpr Rank kSize = 4;
  for (const Algorithm algorithm : kAllreduceAlgorithms) {
    Simulation simulation(kSize, {});
    std::vector<std::vector<float>> data(kSize, std::vector<float>(100, 1.0F));
    std::vector<RequestPtr> requests;
    for (auto& one : data) {
      const auto memory = std::as_writable_bytes(std::span(one));
      requests.push_back(make_all_reduce(AllreduceTable(kSize, {{0, algorithm}}), {.input = memory, .output = memory}));
      EXPECT_EQ(requests.back()->call().algorithm, algorithm);
      simulation.begin(static_cast<Rank>(requests.size() - 1), requests.back());
    }
    EXPECT(!simulation.run().deadlock);
    for (const auto& one : data) EXPECT_EQ(one.front(), 4.0F);
  }
}

TEST("two_level is chosen where ranks live on two levels, and nowhere else") {
  const AllreduceTable built_in(8);
  EXPECT(built_in.choose(16 << 20) == Algorithm::ring);
  EXPECT(built_in.on_two_levels(true).choose(16 << 20) == Algorithm::two_level);
  EXPECT(built_in.on_two_levels(true).choose(64) == Algorithm::recursive_doubling);
  EXPECT(built_in.on_two_levels(true).choose_flat(16 << 20) == Algorithm::ring);
  const AllreduceTable measured(8, {{0, Algorithm::rabenseifner}, {1000, Algorithm::two_level}});
  EXPECT(measured.on_two_levels(true).choose(999) == Algorithm::rabenseifner);
  EXPECT(measured.on_two_levels(true).choose(1000) == Algorithm::two_level);
  EXPECT(measured.choose(16 << 20) == Algorithm::ring);
  EXPECT(measured.on_two_levels(true).on_two_levels(false).choose(1000) == choose_allreduce(8, 1000));
}

TEST("MPI's own collective is chosen where the network has it and can reduce that, elsewhere something else") {
  const AllreduceTable measured(8, {{0, Algorithm::ring}, {1000, Algorithm::mpi}});
  const AllreduceTable has_it = measured.with_network_sums(true);
  EXPECT(has_it.choose(1000, true) == Algorithm::mpi);
  EXPECT(has_it.choose(999, true) == Algorithm::ring);
  EXPECT(has_it.choose(1000, false) == choose_allreduce(8, 1000));
  EXPECT(measured.choose(1000, true) == choose_allreduce(8, 1000));
  EXPECT(has_it.on_two_levels(true).choose(16 << 20, true) == Algorithm::mpi);
  EXPECT(has_it.on_two_levels(true).choose(16 << 20, false) == Algorithm::two_level);
  EXPECT(mpi_reduces(DType::f32, Reduction::avg) && mpi_reduces(DType::u8, Reduction::min));
  EXPECT(!mpi_reduces(DType::f32, Reduction::min) && !mpi_reduces(DType::f16, Reduction::sum));
  EXPECT(!mpi_reduces(DType::i32, Reduction::max_abs) && !mpi_reduces(DType::boolean, Reduction::sum));
}

TEST("owners of a slice sum it as others do, but for two that only exchange") {
  EXPECT(choose_between(2, 64) == Algorithm::recursive_doubling);
  EXPECT(choose_between(2, 16 << 20) == Algorithm::rabenseifner);
  EXPECT(choose_between(4, 16 << 20) == Algorithm::ring);
}

}  // namespace
