#include "drivers/mpi/mpi_network.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <utility>

#include "transport/failure.hpp"

namespace telegrad {
namespace {

using Networks = std::vector<std::weak_ptr<MpiNetwork>>;

[[noreturn]] void refuse(const std::string& reason) {
  throw TransportError({.kind = FailureKind::transport, .operation = "join", .reason = reason});
}

const char* name_of_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE: return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED: return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED: return "MPI_THREAD_SERIALIZED";
    default: return "an unknown thread level";
  }
}

void check_usable() {
  int initialised = 0;
  int finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (initialised == 0 || finalised != 0) {
    refuse(std::string("MPI is ") + (finalised != 0 ? "finalised" : "not initialised") +
           ": make communicators between MPI_Init_thread and MPI_Finalize");
  }
  int level = 0;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) {
    refuse(std::string("MPI runs with ") + name_of_level(level) +
           ", but telegrad's thread calls it beside the program's own: initialise it with MPI_THREAD_MULTIPLE (C and "
           "C++: MPI_Init_thread; mpi4py does so unless mpi4py.rc.thread_level or rc.threads says otherwise)");
  }
}

void check_kind(MPI_Comm comm) {
  if (comm == MPI_COMM_NULL) {
    throw std::invalid_argument("comm is MPI_COMM_NULL: this process is in no group; join on the members only");
  }
  int inter = 0;
  check_mpi(MPI_Comm_test_inter(comm, &inter), kNoRank, "MPI_Comm_test_inter");
  if (inter != 0) {
    throw std::invalid_argument(
        "comm is an inter-communicator: merge its two groups (MPI_Intercomm_merge), or give one of them");
  }
}

// Not destroyed: MPI may be finalised after static objects are gone.
std::mutex& networks_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
Networks& networks() {
  static auto* const all = new Networks;
  return *all;
}

int forget_network(MPI_Comm, int, void* attribute, void*) {
  delete static_cast<std::shared_ptr<MpiNetwork>*>(attribute);
  return MPI_SUCCESS;
}

int network_key() {
  static const int key = [] {
    int made = MPI_KEYVAL_INVALID;
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &forget_network, &made, nullptr), kNoRank,
              "MPI_Comm_create_keyval");
    return made;
  }();
  return key;
}

void wait_for(MPI_Request& request, Rank rank, const char* call, const MpiNetwork::Patience& patience) {
  int done = 0;
  while (true) {
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), rank, call);
    if (done != 0) return;
    patience();
  }
}

}  // namespace

std::string describe_mpi(int code) {
  if (code == MpiCalls::kLeft) return "MPI did not return";
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "error " + std::to_string(code);
  return std::string(text.data(), static_cast<std::size_t>(length));
}

void check_mpi(int code, Rank rank, const char* call) {
  if (code == MPI_SUCCESS) return;
  throw TransportError({.kind = FailureKind::transport,
                        .rank = rank,
                        .operation = "join",
                        .reason = std::string("MPI's ") + call + " failed: " + describe_mpi(code)});
}

void MpiNetwork::nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

MpiNetwork::Patience MpiNetwork::patience(double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  return [timeout_s, deadline] {
    nap();
    if (std::chrono::steady_clock::now() < deadline) return;
    std::array<char, 32> limit{};
    std::snprintf(limit.data(), limit.size(), "%g", timeout_s);
    throw TransportError({.kind = FailureKind::timeout,
                          .operation = "join",
                          .reason = std::string("not all ranks of the MPI communicator came within ") + limit.data() +
                                    " s: every one of them must join. It cannot be joined again: give a duplicate of it"});
  };
}

std::string MpiNetwork::library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  return std::string(text.data(), static_cast<std::size_t>(length));
}

// The attributes of MPI_COMM_SELF are deleted first of all in MPI_Finalize.
int mpi_finalises(MPI_Comm, int, void*, void*) {
  std::vector<std::shared_ptr<MpiNetwork>> living;
  {
    const std::scoped_lock lock(networks_mutex());
    for (const auto& weak : networks()) {
      if (auto network = weak.lock()) living.push_back(std::move(network));
    }
  }
  for (const auto& network : living) network->finalise();
  return MPI_SUCCESS;
}

std::shared_ptr<MpiNetwork> MpiNetwork::of(MPI_Comm comm, const Patience& patience) {
  check_usable();
  check_kind(comm);
  const int key = network_key();
  void* attribute = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(comm, key, &attribute, &found), kNoRank, "MPI_Comm_get_attr");
  if (found != 0) return *static_cast<std::shared_ptr<MpiNetwork>*>(attribute);

  static const bool hears_of_the_end = [] {
    int self_key = MPI_KEYVAL_INVALID;
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &mpi_finalises, &self_key, nullptr), kNoRank,
              "MPI_Comm_create_keyval");
    check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, self_key, nullptr), kNoRank, "MPI_Comm_set_attr");
    return true;
  }();
  static_cast<void>(hears_of_the_end);

  const std::shared_ptr<MpiNetwork> network(new MpiNetwork);
  network->open(comm, patience);
  {
    const std::scoped_lock lock(networks_mutex());
    std::erase_if(networks(), [](const auto& weak) { return weak.expired(); });
    networks().push_back(network);
  }
  check_mpi(MPI_Comm_set_attr(comm, key, new std::shared_ptr<MpiNetwork>(network)), network->rank_,
            "MPI_Comm_set_attr");
  return network;
}

namespace {

// An error of a call on the caller's communicator, such as that MPI has no more of them, would end the job.
class ErrorsReturned {
 public:
  explicit ErrorsReturned(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_get_errhandler(comm_, &before_);
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  }
  ~ErrorsReturned() {
    MPI_Comm_set_errhandler(comm_, before_);
    MPI_Errhandler_free(&before_);
  }
  ErrorsReturned(const ErrorsReturned&) = delete;
  ErrorsReturned& operator=(const ErrorsReturned&) = delete;

 private:
  MPI_Comm comm_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

constexpr const char* kDuplicating =
    "MPI_Comm_idup (each communicator that telegrad is given costs MPI two duplicates until MPI_Finalize, and MPI has some "
    "thousands: join once and keep it)";

}  // namespace

// The duplicate is left to MPI_Finalize: a message to a driver that closed first may still be on its way, and a later
// communicator could be given the same context.
void MpiNetwork::open(MPI_Comm comm, const Patience& patience) {
  const ErrorsReturned returned(comm);
  for (MPI_Comm* const duplicate : {&comm_, &collectives_}) {
    MPI_Request request = MPI_REQUEST_NULL;
    auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);  // who gives up leaves it to MPI
    check_mpi(MPI_Comm_idup(comm, made.get(), &request), kNoRank, kDuplicating);
    try {
      wait_for(request, kNoRank, kDuplicating, patience);
    } catch (...) {
      [[maybe_unused]] const auto* const kept = made.release();
      throw;
    }
    *duplicate = *made;
    check_mpi(MPI_Comm_set_errhandler(*duplicate, MPI_ERRORS_RETURN), kNoRank, "MPI_Comm_set_errhandler");
  }
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(comm_, &rank);
  MPI_Comm_size(comm_, &size);
  rank_ = static_cast<Rank>(rank);
  size_ = static_cast<Rank>(size);
  void* most = nullptr;
  int known = 0;
  check_mpi(MPI_Comm_get_attr(comm_, MPI_TAG_UB, &most, &known), rank_, "MPI_Comm_get_attr");
  tags_ = (known != 0 ? *static_cast<int*>(most) : 32767) / 2;
}

std::vector<std::vector<std::byte>> MpiNetwork::exchange(ConstBytes mine, const Patience& patience) {
  struct Round {  // who gives up leaves it to MPI, which may still write there
    std::vector<std::byte> mine;
    int length = 0;
    std::vector<int> lengths;
    std::vector<int> places;
    std::vector<std::byte> all;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  auto round = std::make_unique<Round>();
  round->mine.assign(mine.begin(), mine.end());
  round->length = static_cast<int>(mine.size());
  round->lengths.resize(size_);
  try {
    check_mpi(MPI_Iallgather(&round->length, 1, MPI_INT, round->lengths.data(), 1, MPI_INT, comm_, &round->request),
              rank_, "MPI_Iallgather");
    wait_for(round->request, rank_, "MPI_Iallgather", patience);
    std::int64_t place = 0;
    for (const int length : round->lengths) {
      round->places.push_back(static_cast<int>(place));
      place += length;
    }
    if (place > INT32_MAX) refuse("the ranks' addresses have " + std::to_string(place) + " bytes, too many for MPI");
    round->all.resize(static_cast<std::size_t>(place));
    check_mpi(MPI_Iallgatherv(round->mine.data(), round->length, MPI_BYTE, round->all.data(), round->lengths.data(),
                              round->places.data(), MPI_BYTE, comm_, &round->request),
              rank_, "MPI_Iallgatherv");
    wait_for(round->request, rank_, "MPI_Iallgatherv", patience);
  } catch (...) {
    [[maybe_unused]] const auto* const kept = round.release();
    throw;
  }
  std::vector<std::vector<std::byte>> result;
  for (Rank rank = 0; rank < size_; ++rank) {
    const auto* const first = round->all.data() + round->places[rank];
    result.emplace_back(first, first + round->lengths[rank]);
  }
  return result;
}

int MpiNetwork::take_tag() {
  const int tag = next_tag_.fetch_add(1);
  if (tag >= tags_) {
    next_tag_ = tags_;
    refuse("this MPI communicator has carried " + std::to_string(tags_) +
           " communicators of telegrad, for which its tags suffice: give a duplicate of it");
  }
  return tag;
}

int MpiNetwork::next_ticket() {
  return tags_ + static_cast<int>(tickets_.fetch_add(1) % static_cast<unsigned>(tags_));
}

void MpiNetwork::add(const void* whose, Farewell farewell) {
  const std::scoped_lock lock(gate_);
  farewells_.emplace_back(whose, std::move(farewell));
}

void MpiNetwork::remove(const void* whose) {
  const std::scoped_lock lock(gate_);
  std::erase_if(farewells_, [&](const auto& entry) { return entry.first == whose; });
}

// An MPI that calls us with its own lock held, while a thread of ours waits for that lock, cannot be waited for.
void MpiNetwork::finalise() {
  constexpr auto kMost = std::chrono::seconds(2);
  const std::unique_lock lock(gate_, kMost);
  if (lock.owns_lock()) {
    for (const auto& [whose, farewell] : farewells_) farewell();
  }
  finalised_ = true;
}

}  // namespace telegrad
