// The mpi driver among the three ranks that mpiexec starts of this program (core/CMakeLists.txt).
#include <mpi.h>
#include <sys/resource.h>

#include <array>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "drivers/mpi/mpi_driver.hpp"
#include "joining/join.hpp"
#include "joining/mpi.hpp"
#include "session/messages.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

struct MpiProgram {
  MpiProgram() {
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  }
  ~MpiProgram() { MPI_Finalize(); }
};
const MpiProgram program;

Rank size_of_world() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return static_cast<Rank>(size);
}

Rank rank_in_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return static_cast<Rank>(rank);
}

void finish(Communicator& communicator, const RequestPtr& request) {
  while (!communicator.wait(*request, std::numeric_limits<double>::infinity())) {
  }
  request->rethrow();
}

RequestPtr begin_sum(Communicator& communicator, std::vector<float>& data, Algorithm algorithm = Algorithm::ring) {
  const auto bytes = std::as_writable_bytes(std::span(data));
  return communicator.submit(
      make_all_reduce(communicator.allreduce_table(), Dense{.input = bytes, .output = bytes, .algorithm = algorithm}),
      false);
}

}  // namespace

TEST("short and long messages, several operations at a time") {
  const auto communicator = mpi::join(MPI_COMM_WORLD);
  EXPECT_EQ(std::string(communicator->driver_name()), "mpi");
  EXPECT_EQ(communicator->size(), size_of_world());
  EXPECT_EQ(communicator->rank(), rank_in_world());
  const float total = static_cast<float>(communicator->size() * (communicator->size() + 1)) / 2.0F;
  std::vector<std::vector<float>> data;
  std::vector<RequestPtr> requests;
  for (const std::size_t count : {1U, 1000U, 70'001U, 1'000'000U}) {
    data.emplace_back(count, static_cast<float>(communicator->rank() + 1));
  }
  for (auto& one : data) requests.push_back(begin_sum(*communicator, one));
  for (const auto& request : requests) finish(*communicator, request);
  for (const auto& one : data) EXPECT(one == std::vector<float>(one.size(), total));
  communicator->close();
}

TEST("errors on the program's own communicator go where they went") {
  MPI_Errhandler before = MPI_ERRHANDLER_NULL;
  MPI_Errhandler after = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before);
  mpi::join(MPI_COMM_WORLD)->close();
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &after);
  EXPECT(before == after);
}

TEST("communicators of one MPI communicator do not meet") {
  const auto first = mpi::join(MPI_COMM_WORLD);
  const auto second = mpi::join(MPI_COMM_WORLD);
  std::vector<float> a(100'000, 1.0F);
  std::vector<float> b(100'000, 2.0F);
  const RequestPtr of_first = begin_sum(*first, a);
  const RequestPtr of_second = begin_sum(*second, b);
  finish(*second, of_second);
  finish(*first, of_first);
  EXPECT_EQ(a.front(), static_cast<float>(first->size()));
  EXPECT_EQ(b.back(), 2.0F * static_cast<float>(first->size()));
  second->close();
  first->close();
}

TEST("a payload that its receiver does not want any more does not stay in its sender") {
  const auto communicator = mpi::join(MPI_COMM_WORLD, {.session = {.timeout_s = 20.0}});
  // Two ranks that call different things announce long messages to each other that nobody accepts.
  std::vector<float> data(communicator->rank() == 1 ? 300'001 : 300'000, 1.0F);
  const RequestPtr request = begin_sum(*communicator, data);
  try {
    finish(*communicator, request);
    EXPECT(false);
  } catch (const TransportError& error) {
    EXPECT(error.failure().kind == FailureKind::mismatched_call);
    EXPECT_EQ(error.failure().peer, Rank{1});
  }
  communicator->close();
}

TEST("a message that is refused takes no memory of its length") {
  constexpr std::size_t kLong = std::size_t{160} << 20;
  const auto communicator = mpi::join(MPI_COMM_WORLD, {.session = {.timeout_s = 20.0}});
  const Rank rank = communicator->rank();
  std::vector<std::byte> data(rank == 1 ? kLong : 10);
  const auto peak_bytes = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
  };
  const std::size_t before = peak_bytes();
  if (rank < 2) {
    const RequestPtr message = rank == 1 ? make_send(DType::u8, data, 0, 0) : make_receive(DType::u8, data, 1, 0);
    try {
      finish(*communicator, communicator->submit(message, false));
      EXPECT(false);
    } catch (const TransportError& error) {
      EXPECT(error.failure().kind == FailureKind::mismatched_call);
    }
  }
  communicator->close();
  if (rank == 0) EXPECT(peak_bytes() - before < kLong / 2);
}

TEST("bytes that no telegrad sends end the communicator, and are received nowhere else") {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  const auto network = MpiNetwork::of(comm, MpiNetwork::nap);
  const int tag = network->take_tag() + 1;  // that of the next driver
  const auto communicator = mpi::join(comm, {.session = {.timeout_s = 20.0}});
  constexpr std::size_t kLong = 100'000;
  const std::vector<std::byte> garbage(rank_in_world() == 1 ? kLong : 12, std::byte{0x5a});
  const int next = static_cast<int>((rank_in_world() + 1) % size_of_world());
  MPI_Send(garbage.data(), static_cast<int>(garbage.size()), MPI_BYTE, next, tag, network->comm());
  std::vector<float> data(10, 1.0F);
  try {
    for (int round = 0; round < 1'000'000; ++round) finish(*communicator, begin_sum(*communicator, data));
    EXPECT(false);
  } catch (const TransportError& error) {
    EXPECT(error.failure().reason.find("that no telegrad of this version sends") != std::string::npos);
  }
  communicator->close();
}

TEST("damaged addresses are refused") {
  const auto network = MpiNetwork::of(MPI_COMM_WORLD, MpiNetwork::nap);
  MpiDriver driver(network, network->rank(), network->size());
  auto addresses = network->exchange(driver.address(), MpiNetwork::nap);
  addresses[1].pop_back();
  try {
    driver.connect(addresses);
    EXPECT(false);
  } catch (const TransportError& error) {
    EXPECT(error.failure().reason.find("the address of rank 1 is damaged") != std::string::npos);
  }
}
