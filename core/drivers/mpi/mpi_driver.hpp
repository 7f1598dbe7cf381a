#pragma once
// The mpi driver: one rank on MPI's point-to-point messages, for machines whose fabric only MPI reaches.
// A short message travels with its envelope; of a long one the envelope comes first, and the payload is received when
// it is accepted, straight into its place. MPI wakes nobody up: who waits looks again after naps that grow with the
// time waited, so an idle rank costs next to nothing and a message is found late by a fraction of the wait.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "drivers/mpi/mpi_network.hpp"
#include "drivers/processes/process_watch.hpp"
#include "transport/driver.hpp"

namespace telegrad {

class MpiDriver final : public AddressedDriver {
 public:
  /// `rank` of `size`, which need not be all ranks of the network, nor in its order.
  MpiDriver(std::shared_ptr<MpiNetwork> network, Rank rank, Rank size);
  ~MpiDriver() override;

  /// Which process this is, its rank in the network, and the tag that it proposes.
  std::vector<std::byte> address() const override;
  void connect(std::span<const std::vector<std::byte>> addresses) override;

  Rank rank() const override { return rank_; }
  Rank size() const override { return size_; }
  const char* name() const override { return "mpi"; }
  PeerIdentity identity(Rank rank) const override;
  bool shares_memory() const override { return shares_memory_; }
  bool shares_memory_with(Rank rank) const override { return peers_[rank].shares_memory; }
  void attach(EventSink& sink) override { sink_ = &sink; }

  void send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) override;
  void accept(const Arrival& arrival, Bytes into, Pending& pending) override;
  void discard(const Arrival& arrival) override;
  void send_control(Rank to, const Control& control) override;
  void compute(std::size_t bytes, Pending& pending) override { pending.complete(bytes); }

  bool reduces() const override { return reduces_; }
  std::uint64_t take_turn() override { return turns_++; }
  void reduce(std::uint64_t turn, DType dtype, Reduction reduction, Buffer& values, Pending& pending) override;

  bool progress() override;
  bool arm() override;
  int wait_descriptor() const override { return descriptor_; }
  double now_s() const override;
  void shut_down() override;

 private:
  struct Peer {
    int network_rank = 0;
    int tag = 0;  // of what is sent there
    bool dead = false;
    bool shares_memory = false;
    PeerIdentity identity{};
  };
  struct Transfer;  // bytes that MPI has not finished with
  struct Incoming;  // a message that has arrived and is not yet accepted
  struct Active {
    std::shared_ptr<Transfer> transfer;
    std::size_t expected;  // bytes, of a receive
  };

  struct Summand {
    DType dtype;
    Reduction reduction;
    Buffer* values;
    Pending* pending;
  };

  void begin_reduction(const Summand& one);
  void post(Rank to, Buffer message);
  void send_payload(Rank to, int ticket, ConstBytes bytes, Pending& pending);
  void begun(const std::shared_ptr<Transfer>& transfer, int code, MPI_Request request, std::size_t length);
  void receive_payload(const Incoming& incoming, Bytes into, const std::shared_ptr<Transfer>& transfer);
  void receive_piece(const std::shared_ptr<Transfer>& transfer, Bytes into, int ticket);
  void drop_payload(const Incoming& incoming);
  void drop_next(const std::shared_ptr<Transfer>& transfer);
  bool look_for_messages();
  void read(Rank from, Buffer message);
  void read_data(Rank from, Buffer message, bool announced, int ticket);
  bool finish_requests();
  void finish(const Active& active, const MPI_Status& status);
  void broke(const Transfer& transfer, int code);
  void drain();
  void let_go();
  void leak_reductions();
  void keep_buffers();
  void damage(const std::string& reason);
  void tell_the_end();
  void peer_broke(Rank peer, std::string reason) { broken_.emplace_back(peer, std::move(reason)); }
  Rank rank_of(int network_rank) const;
  Incoming* make_incoming();
  void recycle(Incoming* incoming);

  std::shared_ptr<MpiNetwork> network_;
  Rank rank_;
  Rank size_;
  int tag_;  // of what is sent here
  EventSink* sink_ = nullptr;
  bool shares_memory_ = false;
  bool has_collectives_ = false;  // of the network's one set
  bool reduces_ = false;          // all ranks have it
  std::uint64_t turns_ = 0;
  std::uint64_t turn_ = 0;  // of the reduction that begins next
  std::map<std::uint64_t, Summand> waiting_;  // by turn
  std::string collective_error_;  // not yet reported: a peer's end may explain it
  double collective_error_s_ = 0.0;
  bool open_ = true;
  bool told_the_end_ = false;  // the sink has heard that MPI must not be called any more
  int descriptor_ = -1;  // over nap_'s and that of deaths_
  int nap_ = -1;         // a timer
  double active_s_ = 0.0;  // when something happened last
  ProcessWatch deaths_;
  std::vector<Peer> peers_;
  std::vector<Rank> ranks_;              // by rank in the network; kNoRank: not one of ours
  std::vector<MPI_Request> requests_;
  std::vector<Active> actives_;          // what the requests are, at the same places
  std::vector<int> finished_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::unique_ptr<Incoming>> incoming_;  // all that were ever made
  std::vector<Incoming*> idle_incoming_;
  std::vector<std::pair<Rank, std::string>> broken_;
  std::vector<Rank> dead_;
};

}  // namespace telegrad
