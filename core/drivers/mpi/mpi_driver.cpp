#include "drivers/mpi/mpi_driver.hpp"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "drivers/mpi/mpi_transfer.hpp"
#include "drivers/processes/control_wire.hpp"
#include "drivers/processes/process_identity.hpp"

namespace telegrad {
namespace {

// Above it a message goes apart from its announcement, which costs a message and saves two copies.
constexpr std::size_t kShortMost = std::size_t{16} << 10;
constexpr int kTurnMost = 32;  // messages

// The nap is this part of the time waited so far, which bounds how late a message is found; the longest keeps an idle
// rank below 1 % of a core.
constexpr double kNapPart = 0.125;
constexpr double kNapLeast_s = 20e-6;
constexpr double kNapMost_s = 10e-3;

// How long a failed collective waits for the name of a peer that has ended or is silent: MPI does not give it.
constexpr double kExplained_s = 10.0;

enum class Kind : std::uint32_t { data = 0x74676d01, announcement = 0x74676d02, control = 0x74676d03 };
struct Head {
  Kind kind;
  std::int32_t ticket;  // of an announcement
};
constexpr std::size_t kControlMost =
    sizeof(Head) + sizeof(ControlHeader) + Control::kCallsMost * sizeof(Call) + Control::kReasonMost;
constexpr std::size_t kMessageMost = std::max(sizeof(Head) + sizeof(Envelope) + kShortMost, kControlMost);

struct Place {  // what connect() needs of a rank, beside its process
  std::int32_t network_rank;
  std::int32_t tag;
  std::int32_t has_collectives;
};

Buffer message_of(Kind kind, int ticket, ConstBytes header, ConstBytes payload) {
  const Head head{kind, ticket};
  Buffer message(sizeof head + header.size() + payload.size());
  std::byte* at = message.data();
  std::memcpy(at, &head, sizeof head);
  std::memcpy(at += sizeof head, header.data(), header.size());
  copy_bytes(at + header.size(), payload.data(), payload.size());
  return message;
}

template <class T>
ConstBytes bytes_of(const T& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof value};
}

}  // namespace

MpiDriver::MpiDriver(std::shared_ptr<MpiNetwork> network, Rank rank, Rank size)
    : network_(std::move(network)), rank_(rank), size_(size), tag_(network_->take_tag()) {
  nap_ = ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
  descriptor_ = ::epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  if (nap_ < 0 || descriptor_ < 0 || ::epoll_ctl(descriptor_, EPOLL_CTL_ADD, nap_, &event) != 0) {
    const std::string reason = std::string("cannot make a timer: ") + std::strerror(errno);
    for (const int descriptor : {nap_, descriptor_}) {
      if (descriptor >= 0) ::close(descriptor);
    }
    throw TransportError({.rank = rank_, .operation = "join", .reason = reason});
  }
  const std::scoped_lock lock(network_->gate());
  network_->add(this, [this] { let_go(); });
  has_collectives_ = size_ == network_->size() && rank_ == network_->rank() && network_->take_collectives();
}

MpiDriver::~MpiDriver() { shut_down(); }

std::vector<std::byte> MpiDriver::address() const {
  std::vector<std::byte> bytes;
  deaths_.self().append_to(bytes);
  const Place place{static_cast<std::int32_t>(network_->rank()), tag_, has_collectives_ ? 1 : 0};
  const ConstBytes fixed = bytes_of(place);
  bytes.insert(bytes.end(), fixed.begin(), fixed.end());
  return bytes;
}

void MpiDriver::connect(std::span<const std::vector<std::byte>> addresses) {
  TELEGRAD_CHECK(addresses.size() == size_);
  const ProcessIdentity& self = deaths_.self();
  peers_.resize(size_);
  ranks_.assign(network_->size(), kNoRank);
  shares_memory_ = true;
  reduces_ = has_collectives_;
  for (Rank rank = 0; rank < size_; ++rank) {
    std::span<const std::byte> address = addresses[rank];
    const auto identity = ProcessIdentity::take_from(address);
    Place place{-1, -1, 0};
    if (identity && address.size() == sizeof place) std::memcpy(&place, address.data(), sizeof place);
    const auto there = static_cast<std::size_t>(place.network_rank);
    if (place.network_rank < 0 || there >= ranks_.size() || ranks_[there] != kNoRank || place.tag < 0) {
      throw TransportError({.kind = FailureKind::transport,
                            .rank = rank_,
                            .peer = rank,
                            .operation = "join",
                            .reason = "the address of rank " + std::to_string(rank) +
                                      " is damaged; install the same telegrad on all hosts"});
    }
    ranks_[there] = rank;
    reduces_ = reduces_ && place.has_collectives != 0 && there == rank;
    peers_[rank] = {.network_rank = place.network_rank,
                    .tag = place.tag,
                    .shares_memory = identity->shares_memory_with(self),
                    .identity = {identity->host, identity->pid}};
    shares_memory_ = shares_memory_ && peers_[rank].shares_memory;
    if (rank != rank_ && deaths_.add(rank, *identity) == ProcessWatch::Found::ended) dead_.push_back(rank);
  }
  if (const std::scoped_lock lock(network_->gate()); has_collectives_ && !reduces_) {
    network_->give_collectives();
    has_collectives_ = false;
  }
  if (deaths_.descriptor() >= 0) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = 1}};
    ::epoll_ctl(descriptor_, EPOLL_CTL_ADD, deaths_.descriptor(), &event);  // else they are found after a nap
  }
  MpiCalls::watch(deaths_.descriptor());
  active_s_ = now_s();
}

PeerIdentity MpiDriver::identity(Rank rank) const {
  return rank < peers_.size() ? peers_[rank].identity : PeerIdentity{};
}

Rank MpiDriver::rank_of(int network_rank) const {
  const auto at = static_cast<std::size_t>(network_rank);
  return at < ranks_.size() ? ranks_[at] : kNoRank;
}

MpiDriver::Incoming* MpiDriver::make_incoming() {
  if (idle_incoming_.empty()) return incoming_.emplace_back(std::make_unique<Incoming>()).get();
  Incoming* const incoming = idle_incoming_.back();
  idle_incoming_.pop_back();
  return incoming;
}

void MpiDriver::recycle(Incoming* incoming) {
  *incoming = Incoming{};
  idle_incoming_.push_back(incoming);
}

void MpiDriver::send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) {
  const std::scoped_lock lock(network_->gate());
  active_s_ = now_s();
  if (!open_ || network_->ended() || peers_[to].dead) return;
  if (bytes.size() <= kShortMost) {
    post(to, message_of(Kind::data, 0, bytes_of(envelope), bytes));
    pending.complete(0);
    return;
  }
  const int ticket = network_->next_ticket();
  post(to, message_of(Kind::announcement, ticket, bytes_of(envelope), {}));
  send_payload(to, ticket, bytes, pending);
}

void MpiDriver::send_control(Rank to, const Control& control) {
  const std::scoped_lock lock(network_->gate());
  if (!open_ || network_->ended() || peers_[to].dead) return;
  const std::string payload = payload_of(control);
  post(to, message_of(Kind::control, 0, bytes_of(header_of(control)),
                      {reinterpret_cast<const std::byte*>(payload.data()), payload.size()}));
}

void MpiDriver::post(Rank to, Buffer message) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = network_->calls().run([&] {
    return MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_BYTE, peers_[to].network_rank, peers_[to].tag,
                     network_->comm(), &request);
  });
  if (code != MPI_SUCCESS && code != MpiCalls::kLeft) {
    peer_broke(to, "sending failed: " + describe_mpi(code));
    return;
  }
  int done = 0;
  const int tested = network_->calls().run([&] { return MPI_Test(&request, &done, MPI_STATUS_IGNORE); });
  if (tested == MPI_SUCCESS && done != 0) return;
  requests_.push_back(request);
  actives_.push_back({std::make_shared<Transfer>(Transfer{.peer = to, .buffer = std::move(message)}), 0});
}

void MpiDriver::accept(const Arrival& arrival, Bytes into, Pending& pending) {
  const std::scoped_lock lock(network_->gate());
  auto* const incoming = static_cast<Incoming*>(arrival.handle);
  TELEGRAD_CHECK(into.size() == incoming->length);
  if (!incoming->announced) {
    const std::byte* const payload = incoming->message.data() + (incoming->message.size() - incoming->length);
    copy_bytes(into.data(), payload, into.size());
    pending.complete(into.size());
  } else if (open_ && !network_->ended()) {
    const auto transfer =
        std::make_shared<Transfer>(Transfer{.what = Transfer::What::receives_payload, .pending = &pending});
    receive_payload(*incoming, into, transfer);
  }
  recycle(incoming);
}

void MpiDriver::discard(const Arrival& arrival) {
  const std::scoped_lock lock(network_->gate());
  auto* const incoming = static_cast<Incoming*>(arrival.handle);
  if (incoming->announced && open_ && !network_->ended()) drop_payload(*incoming);
  recycle(incoming);
}

bool MpiDriver::progress() {
  const std::scoped_lock lock(network_->gate());
  if (!open_) return false;
  if (network_->ended()) {
    if (std::exchange(told_the_end_, true)) return false;
    tell_the_end();
    return true;
  }
  bool any = finish_requests();
  any |= look_for_messages();
  if (network_->ended()) return true;
  if (!any) {
    deaths_.find_ended(dead_);
    for (const Rank rank : std::exchange(dead_, {})) {  // nothing of theirs is left to be read
      MpiCalls::rank_has_ended();
      peers_[rank].dead = true;
      peer_broke(rank, "its process has ended");
    }
  }
  if (broken_.empty()) {
    if (collective_error_.empty() || now_s() < collective_error_s_ + kExplained_s) return any;
    damage(std::exchange(collective_error_, {}));
    return true;
  }
  collective_error_.clear();
  for (const auto& [peer, reason] : std::exchange(broken_, {})) sink_->on_peer_failed(peer, reason);
  return true;
}

void MpiDriver::tell_the_end() {
  if (!MpiCalls::lost()) {
    damage("MPI was finalised while this communicator was open: close it before MPI_Finalize");
    return;
  }
  const char* const why = "MPI did not return from a call after a process had ended that shares memory with it. telegrad has "
                          "left the call, and this process can use MPI no more";
  deaths_.find_ended(dead_);
  for (const Rank rank : dead_) {
    peers_[rank].dead = true;
    if (sink_ != nullptr) sink_->on_peer_failed(rank, std::string("its process has ended; ") + why);
  }
  if (dead_.empty()) damage(why);
  dead_.clear();
}

// Each is matched before its length is looked at, so that no other thread of MPI's can take it in between.
bool MpiDriver::look_for_messages() {
  bool any = false;
  for (int turn = 0; turn < kTurnMost; ++turn) {
    int found = 0;
    MPI_Message matched = MPI_MESSAGE_NULL;
    MPI_Status status{};
    const int code = network_->calls().run(
        [&] { return MPI_Improbe(MPI_ANY_SOURCE, tag_, network_->comm(), &found, &matched, &status); });
    if (code == MpiCalls::kLeft) return any;
    if (code != MPI_SUCCESS) {
      damage("MPI cannot look for messages: " + describe_mpi(code));
      return true;
    }
    if (found == 0) return any;
    any = true;
    int length = 0;
    MPI_Get_count(&status, MPI_BYTE, &length);
    const Rank from = rank_of(status.MPI_SOURCE);
    const auto transfer = std::make_shared<Transfer>(Transfer{.what = Transfer::What::receives_message,
                                                              .peer = from,
                                                              .length = static_cast<std::size_t>(length),
                                                              .buffer = Buffer(static_cast<std::size_t>(length))});
    MPI_Request request = MPI_REQUEST_NULL;
    const int received = network_->calls().run(
        [&] { return MPI_Imrecv(transfer->buffer.data(), length, MPI_BYTE, &matched, &request); });
    if (received != MPI_SUCCESS && received != MpiCalls::kLeft) {
      damage("MPI cannot receive a message: " + describe_mpi(received));
      return true;
    }
    int done = 0;
    const int tested = network_->calls().run([&] { return MPI_Test(&request, &done, &status); });
    if (tested == MPI_SUCCESS && done != 0) {
      read(from, std::move(transfer->buffer));
    } else {
      requests_.push_back(request);
      actives_.push_back({transfer, transfer->length});
    }
  }
  return any;
}

void MpiDriver::read(Rank from, Buffer message) {
  Head head{};
  if (message.size() >= sizeof head) std::memcpy(&head, message.data(), sizeof head);
  const bool data = head.kind == Kind::data || head.kind == Kind::announcement;
  const bool known = data || head.kind == Kind::control;
  if (from == kNoRank || !known || message.size() > kMessageMost) {
    damage("a message of " + std::to_string(message.size()) +
           " bytes that no telegrad of this version sends: install the same telegrad on all hosts");
  } else if (data) {
    read_data(from, std::move(message), head.kind == Kind::announcement, head.ticket);
  } else if (sink_ != nullptr) {
    const ConstBytes rest = message.bytes().subspan(sizeof head);
    const std::size_t header = std::min(rest.size(), sizeof(ControlHeader));
    const auto control = decode_control(rest.first(header), rest.subspan(header));
    if (!control || control->source != from) {
      damage("a control message of " + std::to_string(rest.size()) +
             " bytes that no telegrad of this version sends: install the same telegrad on all hosts");
    } else {
      sink_->on_control(*control);
    }
  }
}

void MpiDriver::read_data(Rank from, Buffer message, bool announced, int ticket) {
  active_s_ = now_s();
  constexpr std::size_t kHeads = sizeof(Head) + sizeof(Envelope);
  Arrival arrival;
  const bool whole = message.size() >= kHeads;
  if (whole) std::memcpy(&arrival.envelope, message.data() + sizeof(Head), sizeof(Envelope));
  const std::uint64_t length = arrival.envelope.length;
  const bool fits = announced ? message.size() == kHeads && length > kShortMost && network_->is_ticket(ticket)
                              : message.size() - kHeads == length;
  if (!whole || !fits || arrival.envelope.source != from) {
    damage("a message of " + std::to_string(message.size()) + " bytes that says it has " + std::to_string(length) +
           " from rank " + std::to_string(arrival.envelope.source));
    return;
  }
  Incoming* const incoming = make_incoming();
  *incoming = {.source = from, .live = true, .announced = announced, .ticket = ticket, .length = length,
               .message = std::move(message)};
  arrival.handle = incoming;
  arrival.held = announced ? 0 : length;
  if (sink_ != nullptr) {
    sink_->on_arrival(arrival);
  } else {
    discard(arrival);
  }
}

void MpiDriver::damage(const std::string& reason) {
  if (sink_ != nullptr) sink_->on_damage(reason);
}

bool MpiDriver::arm() {
  if (!broken_.empty() || !dead_.empty() || deaths_.find_ended(dead_)) return false;
  const double nap_s = std::clamp((now_s() - active_s_) * kNapPart, kNapLeast_s, kNapMost_s);
  const itimerspec when{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = static_cast<long>(nap_s * 1e9)}};
  return ::timerfd_settime(nap_, 0, &when, nullptr) == 0;
}

double MpiDriver::now_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void MpiDriver::shut_down() {
  const std::scoped_lock lock(network_->gate());
  if (!std::exchange(open_, false)) return;
  sink_ = nullptr;
  network_->remove(this);
  if (!network_->ended()) {
    if (!peers_.empty()) drain();
    let_go();
    if (has_collectives_) network_->give_collectives();
  } else {
    leak_reductions();
    keep_buffers();
  }
  MpiCalls::forget(deaths_.descriptor());
  deaths_.close();
  for (int* const descriptor : {&nap_, &descriptor_}) ::close(std::exchange(*descriptor, -1));
}

}  // namespace telegrad
