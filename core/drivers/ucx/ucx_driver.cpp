#include "drivers/ucx/ucx_driver.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <set>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "base/ending.hpp"
#include "drivers/processes/control_wire.hpp"
#include "drivers/processes/memory_file.hpp"
#include "drivers/processes/process_identity.hpp"
#include "drivers/ucx/join_failure.hpp"
#include "drivers/ucx/transports.hpp"
#include "drivers/ucx/ucx_settings.hpp"
#include "drivers/ucx/ucx_worker.hpp"

namespace telegrad {
namespace {

constexpr unsigned kDataId = 1;
constexpr unsigned kControlId = 2;
constexpr const char* kSendingFailed = "sending failed: ";
constexpr const char* kReceivingFailed = "receiving failed: ";
constexpr const char* kHasClosed = "it has closed its communicator";
constexpr const char* kHasEnded = "its process has ended";
constexpr std::uint32_t kClosed = 0;  // in place of a wire version: what a broken connection says elsewhere
constexpr int kEndingMost_ms = 500;  // of a process, from the end of its files to its own
constexpr double kShutDownMost_s = 0.25;  // a peer that has gone first never answers
// Control connections to other hosts run over TCP, and a look at TCP is a system call. Nothing that is on time depends on
// them, so they are looked at in some turns only; before a sleep always.
constexpr unsigned kControlTurns = 32;

bool watch_descriptor(int epoll, int descriptor) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

// What a message begins with.
template <class First, class Proof>
struct ProvenHeader {
  First first{};
  Proof proof{};
};
static_assert(sizeof(ProvenHeader<Envelope, DataProof>) == sizeof(Envelope) + sizeof(DataProof));
static_assert(sizeof(ProvenHeader<ControlHeader, Seal>) == sizeof(ControlHeader) + sizeof(Seal));

template <class Value>
ConstBytes as_bytes(const Value& value) {
  return std::as_bytes(std::span(&value, 1));
}

std::string changed_text(Rank from, Rank to) {
  return "a message of rank " + std::to_string(from) + " to rank " + std::to_string(to) +
         " was changed on its way (TELEGRAD_INTEGRITY=1 checks it): look for a failing network card, switch or memory";
}

std::string unknown_control_text(std::size_t header, std::size_t payload) {
  return "a control message of " + std::to_string(header) + " + " + std::to_string(payload) +
         " bytes that no telegrad of this version sends: install the same telegrad on all hosts";
}

// A peer that stood still may answer a communicator that is closed here. UCX names memory by process and descriptor, so
// the answer would go into the memory of a later communicator that got the same descriptors. Those are left out.
class RetiredDescriptors {
 public:
  void add(std::span<const MemoryFile> files) {
    for (const MemoryFile& one : files) retired_.push_back(static_cast<int>(one.descriptor));
    while (retired_.size() > kMost) retired_.pop_front();
  }

  /// Takes those that are free.
  std::vector<int> taken() const {
    std::vector<int> taken;
    const int none = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (const int number : retired_) {
      const int got = ::fcntl(none, F_DUPFD_CLOEXEC, number);
      if (got == number) {
        taken.push_back(got);
      } else if (got >= 0) {
        ::close(got);
      }
    }
    if (none >= 0) ::close(none);
    return taken;
  }

 private:
  static constexpr std::size_t kMost = 64;
  std::deque<int> retired_;
};

std::mutex one_opens;  // or closes, so that each knows its own files
RetiredDescriptors retired;

}  // namespace

struct UcxDriver::Incoming {
  void* data = nullptr;
  std::size_t length = 0;
  bool rendezvous = false;  // the payload is still at the sender
  bool persistent = false;  // `data` is ours until we release it
  bool in_callback = false;
  bool taken = false;
  Buffer copy;
  DataProof proof{};  // of a payload that is still at the sender, if payloads are checked
};

struct UcxDriver::Unproven {
  Envelope envelope;
  Bytes payload;
  DataProof proof;
};

struct UcxDriver::Transfer {
  UcxDriver* driver = nullptr;
  Rank peer = 0;
  Pending* pending = nullptr;
  std::unique_ptr<Unproven> unproven{};  // null: nothing is to be checked
};

struct UcxDriver::Worker {
  struct Peer {
    UcxDriver* driver = nullptr;
    Rank rank = 0;
    ucp_ep_h data = nullptr;  // null: nothing has been sent yet
    ucp_ep_h control = nullptr;
    ucp_ep_h data_ahead = nullptr, control_ahead = nullptr;  // made, and not yet used
    bool broken = false;
    bool is_met = false;  // a message has been exchanged, or begun
    bool is_told = false;  // a control message has been sent
    ProcessIdentity process{};
    std::vector<std::byte> data_at{}, control_at{};  // addresses, until the endpoints are made
    std::vector<MemoryFile> memory{};
    bool shares_memory = false;
    // UCX shares no memory under its error handling, which nobody needs where the kernel tells of deaths.
    bool is_controlled_in_memory = false;
  };

  ucp_context_h data_context = nullptr;
  ucp_context_h control_context = nullptr;
  ucp_worker_h data = nullptr;
  ucp_worker_h control = nullptr;
  std::vector<MemoryFile> memory;
  std::vector<Peer> peers;

  static ucs_status_t on_data(void* self, const void* header, std::size_t header_length, void* data,
                              std::size_t length, const ucp_am_recv_param_t* param);
  static ucs_status_t on_control(void* self, const void* header, std::size_t header_length, void* data,
                                 std::size_t length, const ucp_am_recv_param_t* param);

  static void on_sent(void* request, ucs_status_t status, void* transfer) {
    finish(*static_cast<Transfer*>(transfer), status, 0, kSendingFailed);
    ucp_request_free(request);
  }
  static void on_received(void* request, ucs_status_t status, std::size_t length, void* transfer) {
    finish(*static_cast<Transfer*>(transfer), status, length, kReceivingFailed);
    ucp_request_free(request);
  }
  static void finish(Transfer& transfer, ucs_status_t status, std::size_t bytes, const char* what) {
    UcxDriver& driver = *transfer.driver;
    driver.guarded([&] {
      if (status == UCS_OK) {
        driver.complete(transfer, bytes);
      } else if (driver.sink_ != nullptr) {
        driver.lost_.emplace_back(transfer.peer, std::string(what) + ucs_status_string(status));
      }
    });
    driver.idle_transfers_.push_back(&transfer);
  }
  static void on_control_sent(void* request, ucs_status_t, void* payload) {
    delete static_cast<std::string*>(payload);
    ucp_request_free(request);
  }
  static void on_broken(void* peer, ucp_ep_h, ucs_status_t status) {
    auto* const broken = static_cast<Peer*>(peer);
    broken->broken = true;
    broken->driver->guarded([&] { broken->driver->peer_broke(broken->rank, ucs_status_string(status)); });
  }
};

// UCX calls back from C, which no exception may pass: progress() throws it.
template <class Body>
void UcxDriver::guarded(Body body) noexcept {
  try {
    body();
  } catch (...) {
    thrown_ = std::current_exception();
  }
}

UcxDriver::UcxDriver(Rank rank, Rank size, const UcxOptions& options)
    : rank_(rank),
      size_(size),
      options_(options),
      expects_memory_(options.only_memory()),
      huge_pages_(wants_huge_pages()),
      worker_(std::make_unique<Worker>()) {
  try {
    open_or_shut_down();
  } catch (const TransportError& error) {
    if (!allows_memory_) throw;
    lost_memory_ = why_no_memory_file();
    if (lost_memory_.empty()) throw;
    if (options_.only_memory()) options_.devices.clear();  // others are asked for it in connect()
    try {
      open_or_shut_down();
    } catch (const TransportError&) {
      throw error;  // which is about what was asked for
    }
  }
}

void UcxDriver::open_or_shut_down() {
  try {
    open();
  } catch (const TransportError&) {
    shut_down();
    throw;
  }
}

void UcxDriver::open() {
  const UcxConfig config = configured(rank_, options_);
  if (!lost_memory_.empty() && !leave_out_memory(config.get())) {
    throw TransportError({.rank = rank_, .operation = "join", .reason = "UCX has no transport but shared memory"});
  }
  allows_memory_ = allows_shared_memory(setting_of(config.get(), "UCX_TLS"));
  const std::scoped_lock lock(one_opens);
  struct Taken {
    ~Taken() { std::ranges::for_each(numbers, ::close); }
    std::vector<int> numbers = retired.taken();
  } const left_out;
  const std::vector<MemoryFile> before = allows_memory_ ? memory_files() : std::vector<MemoryFile>{};
  if (options_.guards_connections) gate_ = std::make_unique<ConnectionGate>(rank_);
  const ConnectionGate::Opening opening(gate_.get());
  const auto opened = [&](ucp_context_h& context, ucp_worker_h& worker, unsigned id, ucp_am_recv_callback_t callback) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.estimated_num_eps = size_;
    check_ucx(ucp_init(&params, config.get(), &context), rank_, "ucp_init");
    return open_worker(context, rank_, worker, id, callback, this);
  };
  const int data = opened(worker_->data_context, worker_->data, kDataId, &Worker::on_data);
  make_small(config.get());
  const int control = opened(worker_->control_context, worker_->control, kControlId, &Worker::on_control);
  if (allows_memory_) {
    worker_->memory = memory_files();
    std::erase_if(worker_->memory, [&](const MemoryFile& one) { return std::ranges::find(before, one) != before.end(); });
  }
  deaths_.open();
  descriptor_ = ::epoll_create1(EPOLL_CLOEXEC);
  const bool watches_deaths = deaths_.descriptor() < 0 || watch_descriptor(descriptor_, deaths_.descriptor());
  const bool watches_workers = watch_descriptor(descriptor_, data) && watch_descriptor(descriptor_, control);
  if (descriptor_ < 0 || !watches_workers || !watches_deaths) {
    throw TransportError({.rank = rank_,
                          .operation = "join",
                          .reason = std::string("cannot watch UCX and the ranks of this machine: ") + std::strerror(errno)});
  }
}

UcxDriver::~UcxDriver() {
  or_end("closing UCX cannot go on", [this] { shut_down(); });
}

std::string UcxDriver::version() { return ucp_get_version_string(); }

std::vector<std::byte> UcxDriver::address() const {
  std::vector<std::byte> bytes;
  deaths_.self().append_to(bytes);
  bytes.push_back(static_cast<std::byte>(lost_memory_.empty() ? (allows_memory_ ? Memory::used : Memory::unused) : Memory::lost));
  for (const ucp_worker_h worker : {worker_->data, worker_->control}) append_address(worker, rank_, bytes);
  append_prefixed(std::as_bytes(std::span(worker_->memory)), bytes);
  if (gate_) {
    const std::vector<Place> places = gate_->places();
    const ConstBytes last = std::as_bytes(std::span(places));
    bytes.insert(bytes.end(), last.begin(), last.end());
  }
  return bytes;
}

// An address that ranks of other hosts have too is that of this host's.
std::vector<std::vector<Place>> UcxDriver::places_of(std::span<const std::vector<std::byte>> addresses) const {
  const ProcessIdentity& self = deaths_.self();
  std::vector<std::vector<Place>> places(size_);
  std::set<Place> own;
  for (const bool of_this_host : {true, false}) {
    for (Rank rank = 0; rank < size_; ++rank) {
      ConstBytes address = addresses[rank];
      const auto identity = ProcessIdentity::take_from(address);
      if (rank == rank_ || !identity || address.empty() || (identity->machine == self.machine) != of_this_host) continue;
      address = address.subspan(1);
      if (take_prefixed(address).empty() || take_prefixed(address).empty()) continue;
      take_prefixed(address);  // its memory
      for (; address.size() >= sizeof(Place); address = address.subspan(sizeof(Place))) {
        Place place;
        std::memcpy(&place, address.data(), sizeof place);
        if (own.insert(place).second) places[rank].push_back(place);
      }
    }
  }
  return places;
}

// What ranks say that are all alike here: each says it of every other, so that all come to the same.
bool UcxDriver::all_have_memory(std::span<const std::vector<std::byte>> addresses) const {
  return std::ranges::all_of(addresses, [&](ConstBytes address) {
    const auto identity = ProcessIdentity::take_from(address);
    return !identity || address.empty() ||  // damaged, which is another error
           (identity->shares_memory_with(deaths_.self()) && static_cast<Memory>(address.front()) == Memory::used);
  });
}

void UcxDriver::connect(std::span<const std::vector<std::byte>> addresses) {
  TELEGRAD_CHECK(addresses.size() == size_);
  if (expects_memory_ && !all_have_memory(addresses)) throw MemoryMissing{};
  worker_->peers.resize(size_);  // never again: UCX keeps pointers to the elements
  const ProcessIdentity& self = deaths_.self();
  worker_->peers[rank_].process = self;
  shares_memory_ = allows_memory_;
  std::vector<Rank> without;  // of this host's ranks
  bool beside = false;        // others of this host are
  if (gate_) gate_->open(guard_, places_of(addresses));
  for (Rank rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    Worker::Peer& peer = worker_->peers[rank];
    peer.driver = this;
    peer.rank = rank;
    std::span<const std::byte> address = addresses[rank];
    const auto identity = ProcessIdentity::take_from(address);
    const auto peer_memory = address.empty() ? Memory::unused : static_cast<Memory>(address.front());
    if (!address.empty()) address = address.subspan(1);
    const ConstBytes data_at = take_prefixed(address);
    const ConstBytes control_at = take_prefixed(address);
    const ConstBytes memory = take_prefixed(address);
    if (!identity || data_at.empty() || control_at.empty()) {
      throw TransportError({.rank = rank_,
                            .peer = rank,
                            .operation = "join",
                            .reason = "the address of rank " + std::to_string(rank) +
                                      " is damaged; install the same telegrad on all hosts"});
    }
    peer.process = *identity;
    peer.data_at.assign(data_at.begin(), data_at.end());
    peer.control_at.assign(control_at.begin(), control_at.end());
    peer.memory.resize(memory.size() / sizeof(MemoryFile));
    std::memcpy(peer.memory.data(), memory.data(), peer.memory.size() * sizeof(MemoryFile));
    const bool same_host = identity->shares_memory_with(self);
    if (same_host && peer_memory == Memory::lost) without.push_back(rank);
    beside = beside || same_host;
    peer.shares_memory = allows_memory_ && peer_memory == Memory::used && same_host;
    peer.is_controlled_in_memory =
        peer.shares_memory && (expects_memory_ || identity->pid == self.pid || identity->can_be_watched_from(self));
    shares_memory_ = shares_memory_ && peer.shares_memory;
  }
  // One rank of the host says it: the first of those that it concerns.
  if (!lost_memory_.empty() && beside && (without.empty() || rank_ < without.front())) {
    without.insert(without.begin(), rank_);
    warning_ = lost_memory_text(identity(rank_).host, without, lost_memory_);
  }
  for (Rank rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !make_endpoints_ahead(rank)) blame_for(rank);
  }
  std::vector<MemoryFile> theirs;  // of which most ranks will never touch most
  for (const Worker::Peer& peer : worker_->peers) {
    if (peer.shares_memory) theirs.insert(theirs.end(), peer.memory.begin(), peer.memory.end());
  }
  put_pages_away(std::move(theirs));
  // A network that leads nowhere is an error of this rank's, before it waits for anybody.
  const Rank next = (rank_ + 1) % size_;
  if (next == rank_ || reach(next, false) || broken_.empty()) return;
  fail_joining(FailureKind::transport, next, broken_.back().second);
}

// A rank whose memory is gone may have closed its communicator because of one that has ended, or end itself: the kernel
// closes files first.
void UcxDriver::blame_for(Rank rank) {
  for (const Worker::Peer& peer : worker_->peers) {
    if (peer.shares_memory) meet(peer.rank);
  }
  pollfd ending{.fd = deaths_.descriptor(), .events = POLLIN, .revents = 0};
  if (dead_.empty() && ::poll(&ending, 1, kEndingMost_ms) > 0) deaths_.find_ended(dead_);
  if (!dead_.empty()) fail_joining(FailureKind::peer_failed, dead_.front(), kHasEnded);
  if (!holds_memory(rank)) fail_joining(FailureKind::peer_failed, rank, kHasClosed);
  fail_joining(FailureKind::transport, rank, broken_.front().second);
}

void UcxDriver::fail_joining(FailureKind kind, Rank peer, const std::string& reason) const {
  const PeerIdentity where = identity(peer);
  const std::string who = kind == FailureKind::peer_failed ? "rank " + std::to_string(peer) + " failed: " : "";
  throw TransportError({.kind = kind,
                        .rank = rank_,
                        .peer = peer,
                        .host = where.host,
                        .pid = where.pid,
                        .operation = "join",
                        .reason = who + reason});
}

bool UcxDriver::shares_memory_with(Rank rank) const {
  return rank == rank_ ? allows_memory_ : worker_->peers[rank].shares_memory;
}

PeerIdentity UcxDriver::identity(Rank rank) const {
  if (rank >= worker_->peers.size()) return {};
  const ProcessIdentity& process = worker_->peers[rank].process;
  return {process.host, process.pid};
}

// From the first message on, in either direction, this rank hears of the peer's end by itself.
void UcxDriver::meet(Rank rank) {
  if (rank >= size_ || rank == rank_ || std::exchange(worker_->peers[rank].is_met, true)) return;
  Worker::Peer& peer = worker_->peers[rank];
  errno = 0;
  const ProcessWatch::Found found = deaths_.add(rank, peer.process);
  const bool is_watched = found == ProcessWatch::Found::watched || peer.process.pid == deaths_.self().pid;
  if (found == ProcessWatch::Found::ended) {
    dead_.push_back(rank);
  } else if (peer.is_controlled_in_memory && !is_watched) {
    peer_broke(rank, explained(std::string("its process cannot be watched: ") + std::strerror(errno), options_));
  } else {
    return;
  }
  peer.broken = true;  // and gets no endpoints
}

// Takes the peer's endpoint for data or control into use with the first such message. False, and the peer's failure is
// reported, where it cannot be had.
bool UcxDriver::reach(Rank rank, bool for_data) {
  Worker::Peer& peer = worker_->peers[rank];
  ucp_ep_h& endpoint = for_data ? peer.data : peer.control;
  if (endpoint != nullptr) return true;
  meet(rank);
  if (peer.broken || !holds_memory(rank)) return false;
  ucp_ep_h& ahead = for_data ? peer.data_ahead : peer.control_ahead;
  if (ahead == nullptr && !make_endpoint(rank, for_data)) return false;
  endpoint = std::exchange(ahead, nullptr);
  return true;
}

// UCX 1.22 ends this process where it first hears of a peer by a message of that peer's, and the peer has gone meanwhile:
// it finds no way back in memory. So a rank knows those that share its memory before it listens.
bool UcxDriver::make_endpoints_ahead(Rank rank) {
  const Worker::Peer& peer = worker_->peers[rank];
  if (!peer.shares_memory) return true;
  return holds_memory(rank) && make_endpoint(rank, true) && (!peer.is_controlled_in_memory || make_endpoint(rank, false));
}

bool UcxDriver::holds_memory(Rank rank) {
  Worker::Peer& peer = worker_->peers[rank];
  const auto is_held = [&](const MemoryFile& one) { return one.is_held_by(peer.process.pid); };
  if (!peer.shares_memory || std::ranges::all_of(peer.memory, is_held)) return true;
  peer.broken = true;
  peer_broke(rank, kHasClosed);
  return false;
}

bool UcxDriver::make_endpoint(Rank rank, bool for_data) {
  Worker::Peer& peer = worker_->peers[rank];
  ucp_ep_h& endpoint = for_data ? peer.data_ahead : peer.control_ahead;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  const std::vector<std::byte> address = std::exchange(for_data ? peer.data_at : peer.control_at, {});
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  if (!for_data && !peer.is_controlled_in_memory) {
    params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {.cb = &Worker::on_broken, .arg = &peer};
  }
  const ucs_status_t status = ucp_ep_create(for_data ? worker_->data : worker_->control, &params, &endpoint);
  if (status == UCS_OK) return true;
  peer.broken = true;
  peer_broke(rank, explained(std::string("connecting failed: ") + ucs_status_string(status), options_));
  return false;
}

void UcxDriver::send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_COPY_HEADER;
  param.cb.send = &Worker::on_sent;
  if (!reach(to, true)) return;
  if (bytes.size() >= kHostRendezvousLeast && worker_->peers[to].shares_memory) huge_pages_.will_be_read(bytes);
  Transfer* const transfer = make_transfer(to, pending);
  param.user_data = transfer;
  ProvenHeader<Envelope, DataProof> header{.first = envelope};
  std::size_t length = sizeof envelope;
  if (guard_) {
    header.proof = guard_->prove(to, as_bytes(envelope), bytes);
    length += guard_->data_proof_bytes();
  }
  void* const request = ucp_am_send_nbx(worker_->peers[to].data, kDataId, guard_ ? static_cast<const void*>(&header) : &envelope,
                                        length, bytes.data(), bytes.size(), &param);
  handed_over(*transfer, request, 0, kSendingFailed);
}

void UcxDriver::complete(Transfer& transfer, std::size_t bytes) {
  if (const auto unproven = std::exchange(transfer.unproven, nullptr)) {
    const Rank from = unproven->envelope.source;
    if (!guard_->is_whole(from, as_bytes(unproven->envelope), unproven->payload, unproven->proof)) {
      if (sink_ != nullptr) sink_->on_damage(changed_text(from, rank_));
      return;
    }
  }
  transfer.pending->complete(bytes);
}

// Unless it is over at once, with `request` null or an error, UCX calls back when it is.
void UcxDriver::handed_over(Transfer& transfer, void* request, std::size_t bytes, const char* what) {
  if (UCS_PTR_IS_PTR(request)) return;
  idle_transfers_.push_back(&transfer);
  if (request == nullptr) {
    complete(transfer, bytes);
  } else {
    peer_broke(transfer.peer, std::string(what) + ucs_status_string(UCS_PTR_STATUS(request)));
  }
}

// Not before progress() has read what has come: where the peer has closed its connection, to write to it would drop that,
// and with it the peer's last words.
void UcxDriver::send_control(Rank to, const Control& control) { unsaid_.emplace_back(to, control); }

void UcxDriver::say(Rank to, const Control& control) {
  Worker::Peer& peer = worker_->peers[to];
  if (peer.broken || !reach(to, false)) return;
  ProvenHeader<ControlHeader, Seal> header{.first = header_of(control)};
  auto payload = std::make_unique<std::string>(payload_of(control));
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_COPY_HEADER | UCP_AM_SEND_FLAG_EAGER;
  // The workers then make each other's acquaintance, which UCX otherwise puts off to the first message of more than 92
  // bytes. That may be an abort to a process that stands still, and whose answer this one does not live to see.
  if (!std::exchange(peer.is_told, true)) param.flags |= UCP_AM_SEND_FLAG_REPLY;
  param.cb.send = &Worker::on_control_sent;
  param.user_data = payload.get();
  control_armed_ = false;
  std::size_t length = sizeof header.first;
  if (guard_) {
    header.proof = guard_->seal(to, as_bytes(header.first), std::as_bytes(std::span(*payload)));
    length += sizeof header.proof;
  }
  void* const request = ucp_am_send_nbx(peer.control, kControlId, &header, length, payload->data(), payload->size(), &param);
  if (request != nullptr && !UCS_PTR_IS_ERR(request)) {
    [[maybe_unused]] const auto* const kept = payload.release();  // until on_control_sent
  }
}

UcxDriver::Transfer* UcxDriver::make_transfer(Rank peer, Pending& pending) {
  if (idle_transfers_.empty()) {
    transfers_.push_back(std::make_unique<Transfer>());
    idle_transfers_.reserve(transfers_.capacity());  // so that giving one back takes no memory
    idle_transfers_.push_back(transfers_.back().get());
  }
  Transfer* const transfer = idle_transfers_.back();
  idle_transfers_.pop_back();
  *transfer = {.driver = this, .peer = peer, .pending = &pending};
  return transfer;
}

UcxDriver::Incoming* UcxDriver::make_incoming() {
  if (idle_incoming_.empty()) return incoming_.emplace_back(std::make_unique<Incoming>()).get();
  Incoming* const incoming = idle_incoming_.back();
  idle_incoming_.pop_back();
  return incoming;
}

void UcxDriver::recycle(Incoming* incoming) {
  *incoming = Incoming{};
  idle_incoming_.push_back(incoming);
}

ucs_status_t UcxDriver::Worker::on_data(void* self, const void* header, std::size_t header_length, void* data,
                                        std::size_t length, const ucp_am_recv_param_t* param) {
  auto& driver = *static_cast<UcxDriver*>(self);
  bool kept = false;
  driver.guarded([&] {
    kept = driver.take_data({static_cast<const std::byte*>(header), header_length}, data, length, param->recv_attr);
  });
  return kept ? UCS_INPROGRESS : UCS_OK;
}

// True if `data` stays ours; otherwise UCX has it back.
bool UcxDriver::take_data(ConstBytes header, void* data, std::size_t length, std::uint64_t attributes) {
  if (sink_ == nullptr) return false;
  Arrival arrival;
  const bool is_here = (attributes & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  DataProof proof;
  if (guard_) {
    if (!is_of_the_job(header, {static_cast<const std::byte*>(data), is_here ? length : 0}, is_here)) return false;
    std::memcpy(&proof, header.data() + sizeof(Envelope), guard_->data_proof_bytes());
    header = header.first(sizeof(Envelope));
  }
  if (header.size() != sizeof(Envelope)) {
    sink_->on_damage("a message with a header of " + std::to_string(header.size()) +
                     " bytes: install the same telegrad on all hosts");
    return false;
  }
  std::memcpy(&arrival.envelope, header.data(), sizeof(Envelope));
  if (arrival.envelope.length != length) {
    sink_->on_damage("a message of " + std::to_string(length) + " bytes that says it has " +
                     std::to_string(arrival.envelope.length));
    return false;
  }
  meet(arrival.envelope.source);
  Incoming* const incoming = make_incoming();
  incoming->data = data;
  incoming->length = length;
  incoming->rendezvous = !is_here;
  incoming->proof = proof;
  incoming->in_callback = true;
  arrival.handle = incoming;
  arrival.held = is_here ? length : 0;
  sink_->on_arrival(arrival);
  incoming->in_callback = false;
  if (incoming->taken) {
    recycle(incoming);
    return false;
  }
  incoming->persistent = (attributes & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;
  if (incoming->rendezvous || incoming->persistent) return true;
  incoming->copy = Buffer(length);
  copy_bytes(incoming->copy.data(), data, length);
  incoming->data = incoming->copy.data();
  return false;
}

ucs_status_t UcxDriver::Worker::on_control(void* self, const void* header, std::size_t header_length, void* data,
                                           std::size_t length, const ucp_am_recv_param_t* param) {
  auto& driver = *static_cast<UcxDriver*>(self);
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (driver.sink_ == nullptr) return UCS_OK;
  const ConstBytes header_bytes(static_cast<const std::byte*>(header), header_length);
  const ConstBytes payload(static_cast<const std::byte*>(data), rendezvous ? 0 : length);
  driver.guarded([&] {
    if (!rendezvous) {
      driver.hear(header_bytes, payload);
    } else if (driver.guard_) {
      driver.guard_->refuse();
    } else {
      driver.sink_->on_damage(unknown_control_text(header_length, length));
    }
  });
  return UCS_OK;
}

void UcxDriver::hear(ConstBytes header, ConstBytes payload) {
  if (guard_) {
    ControlHeader wire;
    Seal seal;
    const bool fits = header.size() == sizeof wire + sizeof seal;
    if (fits) {
      std::memcpy(&wire, header.data(), sizeof wire);
      std::memcpy(&seal, header.data() + sizeof wire, sizeof seal);
      header = header.first(sizeof wire);
    }
    if (!fits || !guard_->opens(wire.source, header, payload, seal)) {
      guard_->refuse();
      return;
    }
  }
  if (const auto control = decode_control(header, payload)) {
    meet(control->source);
    if (control->wire_version == kClosed && control->source < size_) {
      peer_broke(control->source, kHasClosed);
      worker_->peers[control->source].broken = true;
      return;
    }
    sink_->on_control(*control);
  } else {
    sink_->on_damage(unknown_control_text(header.size(), payload.size()));
  }
}

// With the word of its pair, and a payload that is here and whole; what has changed on its way ends the job.
bool UcxDriver::is_of_the_job(ConstBytes header, ConstBytes payload, bool is_here) {
  Envelope envelope;
  DataProof proof;
  const bool fits = header.size() == sizeof envelope + guard_->data_proof_bytes();
  if (fits) {
    std::memcpy(&envelope, header.data(), sizeof envelope);
    std::memcpy(&proof, header.data() + sizeof envelope, guard_->data_proof_bytes());
  }
  if (!fits || !guard_->is_of(envelope.source, proof.word)) {
    guard_->refuse();
    return false;
  }
  if (!is_here || !guard_->checks_payloads() || guard_->is_whole(envelope.source, as_bytes(envelope), payload, proof)) return true;
  sink_->on_damage(changed_text(envelope.source, rank_));
  return false;
}

void UcxDriver::accept(const Arrival& arrival, Bytes into, Pending& pending) {
  auto* const incoming = static_cast<Incoming*>(arrival.handle);
  TELEGRAD_CHECK(into.size() == incoming->length);
  if (!incoming->rendezvous) {
    copy_bytes(into.data(), incoming->data, into.size());
    pending.complete(into.size());
    discard(arrival);
    return;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = &Worker::on_received;
  Transfer* const transfer = make_transfer(arrival.envelope.source, pending);
  if (guard_ && guard_->checks_payloads()) {
    transfer->unproven = std::make_unique<Unproven>(Unproven{arrival.envelope, into, incoming->proof});
  }
  param.user_data = transfer;
  void* const request = ucp_am_recv_data_nbx(worker_->data, incoming->data, into.data(), into.size(), &param);
  incoming->taken = true;
  if (!incoming->in_callback) recycle(incoming);
  handed_over(*transfer, request, into.size(), kReceivingFailed);
}

void UcxDriver::discard(const Arrival& arrival) {
  auto* const incoming = static_cast<Incoming*>(arrival.handle);
  incoming->taken = true;
  if (incoming->in_callback) return;  // UCX drops what its callback did not keep
  if (incoming->rendezvous || incoming->persistent) ucp_am_data_release(worker_->data, incoming->data);
  recycle(incoming);
}

bool UcxDriver::progress() {
  unsigned events = progressed(worker_->data);
  const bool was_woken = std::exchange(is_armed_, false) && events == 0;  // likely by what is not data
  if (was_woken || !dead_.empty() || !lost_.empty() || !unsaid_.empty() || ++turns_without_control_ >= kControlTurns) {
    turns_without_control_ = 0;
    control_armed_ = false;
    const auto unsaid = std::exchange(unsaid_, {});
    events += progressed(worker_->control);
    for (const auto& [to, control] : unsaid) say(to, control);
  }
  if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
  if (events == 0) {
    for (auto& [peer, reason] : std::exchange(lost_, {})) peer_broke(peer, std::move(reason));
    for (const Rank rank : std::exchange(dead_, {})) {
      worker_->peers[rank].broken = true;
      peer_broke(rank, kHasEnded);
    }
  }
  if (broken_.empty()) return events != 0;
  for (const auto& [peer, reason] : std::exchange(broken_, {})) sink_->on_peer_failed(peer, reason);
  return true;
}

bool UcxDriver::arm() {
  if (!broken_.empty() || !dead_.empty() || !lost_.empty() || !unsaid_.empty()) return false;
  if (!control_armed_) control_armed_ = ucp_worker_arm(worker_->control) == UCS_OK;
  if (!control_armed_) {
    turns_without_control_ = kControlTurns;
    return false;
  }
  is_armed_ = ucp_worker_arm(worker_->data) == UCS_OK && !deaths_.find_ended(dead_);
  return is_armed_;
}

double UcxDriver::now_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Endpoints of living peers are flushed, so that our last words reach them; those of dead ones go with the worker.
void UcxDriver::shut_down() {
  if (!worker_ || worker_->data_context == nullptr) return;
  sink_ = nullptr;
  if (worker_->data != nullptr && worker_->control != nullptr) {
    for (const auto& [to, control] : std::exchange(unsaid_, {})) say(to, control);
    for (Worker::Peer& peer : worker_->peers) {
      if (peer.control == nullptr || peer.broken || !peer.is_controlled_in_memory) continue;
      say(peer.rank, {.kind = ControlKind::goodbye, .source = rank_, .wire_version = kClosed});
    }
    std::vector<void*> closing;
    for (Worker::Peer& peer : worker_->peers) {
      for (const ucp_ep_h endpoint : {peer.data, peer.control}) {
        const bool force = peer.broken && endpoint == peer.control && !peer.is_controlled_in_memory;
        if (endpoint == nullptr || (peer.broken && !force)) continue;
        ucp_request_param_t param{};
        param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        if (force) param.flags = UCP_EP_CLOSE_FLAG_FORCE;
        void* const request = ucp_ep_close_nbx(endpoint, &param);
        if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
      }
    }
    const double deadline_s = now_s() + kShutDownMost_s;
    while (!closing.empty() && now_s() < deadline_s) {
      if (progressed(worker_->data) + progressed(worker_->control) == 0) ::sched_yield();
      std::erase_if(closing, [](void* request) {
        if (ucp_request_check_status(request) == UCS_INPROGRESS) return false;
        ucp_request_free(request);
        return true;
      });
    }
  }
  deaths_.close();
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  const std::scoped_lock lock(one_opens);
  retired.add(worker_->memory);
  for (ucp_worker_h* const worker : {&worker_->data, &worker_->control}) {
    if (*worker != nullptr) ucp_worker_destroy(std::exchange(*worker, nullptr));
  }
  gate_.reset();
  for (ucp_context_h* const context : {&worker_->data_context, &worker_->control_context}) {
    if (*context != nullptr) ucp_cleanup(std::exchange(*context, nullptr));
  }
}

}  // namespace telegrad
