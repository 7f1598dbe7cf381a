#pragma once
// One MPI communicator of the program's, as telegrad uses it: a duplicate, so that no message of the program's can be
// taken for one of ours, and the numbers by which several drivers share it. It must not know what messages mean.

#include <mpi.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "drivers/mpi/mpi_calls.hpp"

namespace telegrad {

class MpiNetwork {
 public:
  /// Called again and again while other ranks are waited for: it sleeps a moment, and throws to give up.
  using Patience = std::function<void()>;
  /// Called as MPI_Finalize begins, with the gate locked, while MPI still works.
  using Farewell = std::function<void()>;

  /// The network of `comm`, an intracommunicator; all its ranks call this in the same order as their other collectives
  /// on it. It is made once for each communicator. Throws TransportError where MPI is not initialised, below
  /// MPI_THREAD_MULTIPLE, or fails, and std::invalid_argument for another kind of communicator.
  static std::shared_ptr<MpiNetwork> of(MPI_Comm comm, const Patience& patience);
  ~MpiNetwork() = default;
  MpiNetwork(const MpiNetwork&) = delete;
  MpiNetwork& operator=(const MpiNetwork&) = delete;

  static void nap();
  /// Naps, and throws TransportError once `timeout_s` are over.
  static Patience patience(double timeout_s);
  static std::string library_version();

  Rank rank() const { return rank_; }
  Rank size() const { return size_; }
  MPI_Comm comm() const { return comm_; }
  /// Another duplicate, for collectives of one driver at a time: their order must be the same on all ranks. With the gate
  /// held; false: some driver has it, or has left a collective there that is not over.
  bool take_collectives() { return !std::exchange(collectives_taken_, true); }
  void give_collectives() { collectives_taken_ = false; }
  MPI_Comm collectives() const { return collectives_; }

  /// Every rank's bytes, by rank; all ranks call it at once. Throws TransportError.
  std::vector<std::vector<std::byte>> exchange(ConstBytes mine, const Patience& patience);

  /// Of messages to a driver of this process: no other here has the same, whatever other ranks give theirs at the same
  /// time. Throws TransportError when all have been used.
  int take_tag();
  /// Of a payload that travels apart from its announcement: none of this process that is under way has the same.
  int next_ticket();
  /// Whether some rank's next_ticket() can have given it.
  bool is_ticket(int tag) const { return tag >= tags_ && tag < 2 * tags_; }

  /// Everything that calls MPI for this network holds it: the program may call MPI_Finalize at any time.
  std::recursive_timed_mutex& gate() { return gate_; }
  /// By them all drivers call MPI, with the gate held.
  MpiCalls& calls() { return calls_; }
  /// With the gate held. True: MPI must not be called any more.
  bool ended() const { return finalised_ || MpiCalls::lost(); }
  /// `whose` is only compared.
  void add(const void* whose, Farewell farewell);
  void remove(const void* whose);

 private:
  MpiNetwork() = default;
  void open(MPI_Comm comm, const Patience& patience);
  void finalise();
  friend int mpi_finalises(MPI_Comm, int, void*, void*);

  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Comm collectives_ = MPI_COMM_NULL;
  bool collectives_taken_ = false;
  Rank rank_ = 0;
  Rank size_ = 0;
  int tags_ = 0;     // [0, tags_) are drivers', [tags_, 2 · tags_) tickets
  std::atomic<int> next_tag_ = 0;
  std::atomic<unsigned> tickets_ = 0;
  std::recursive_timed_mutex gate_;
  std::atomic<bool> finalised_ = false;
  std::vector<std::pair<const void*, Farewell>> farewells_;
  MpiCalls calls_;
};

/// Throws TransportError with what MPI says of `code`, unless it is MPI_SUCCESS.
void check_mpi(int code, Rank rank, const char* call);
std::string describe_mpi(int code);

}  // namespace telegrad
