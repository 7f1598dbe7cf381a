#include "drivers/ucx/connection_gate.hpp"

#include <link.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <ucs/type/status.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "transport/failure.hpp"

namespace telegrad {
namespace {

constexpr int kDefer_s = 5;              // how long a connection may say nothing, outside of this process
constexpr int kConnects_ms = 5000;       // on a network whose hosts reach each other
constexpr useconds_t kNotYetOpen_us = 1000;  // ranks that have heard all addresses may be a moment ahead
constexpr std::uint64_t kMagic = 0x3164617267656c65;  // elegrad1

struct Preamble {
  std::uint64_t magic = kMagic;
  Rank from = 0;
  Rank to = 0;
  Seal seal{};
};
static_assert(sizeof(Preamble) == 40);
constexpr std::size_t kSealAt = sizeof(Preamble) - sizeof(Seal);

struct Registry {
  std::mutex mutex;
  std::map<int, ConnectionGate*> listeners;
  std::map<Place, std::pair<ConnectionGate*, Rank>> ranks;
};
Registry& registry() {
  static Registry& one = *new Registry;  // UCX's threads may outlive static objects
  return one;
}
thread_local ConnectionGate* opening = nullptr;

Place place_of(const sockaddr_storage& address) {
  Place place{.family = address.ss_family};
  if (address.ss_family == AF_INET) {
    const auto& own = reinterpret_cast<const sockaddr_in&>(address);
    std::memcpy(place.address.data(), &own.sin_addr, sizeof own.sin_addr);
    place.port = own.sin_port;
  } else if (address.ss_family == AF_INET6) {
    const auto& own = reinterpret_cast<const sockaddr_in6&>(address);
    std::memcpy(place.address.data(), &own.sin6_addr, sizeof own.sin6_addr);
    place.port = own.sin6_port;
  }
  return place;
}

int guarded_listen(int descriptor, int backlog) {
  if (opening != nullptr) {
    Registry& all = registry();
    const std::scoped_lock lock(all.mutex);
    all.listeners[descriptor] = opening;
    opening->listens(descriptor);
    ::setsockopt(descriptor, IPPROTO_TCP, TCP_DEFER_ACCEPT, &kDefer_s, sizeof kDefer_s);
  }
  return ::listen(descriptor, backlog);
}

int guarded_accept(int listener, sockaddr* address, socklen_t* length) {
  const socklen_t room = length != nullptr ? *length : 0;
  Registry& all = registry();
  while (true) {
    {
      const std::scoped_lock lock(all.mutex);
      const auto gate = all.listeners.find(listener);
      if (gate == all.listeners.end()) return ::accept(listener, address, length);
      if (gate->second->is_open()) {
        if (length != nullptr) *length = room;
        const int descriptor = ::accept4(listener, address, length, SOCK_CLOEXEC);
        if (descriptor < 0 || gate->second->admits(descriptor)) return descriptor;
        ::close(descriptor);
        continue;
      }
    }
    ::usleep(kNotYetOpen_us);
    errno = EAGAIN;
    return -1;
  }
}

// The proof must be the first that is sent. That the peer's kernel takes the connection does not depend on its threads.
int guarded_connect(int descriptor, const sockaddr* address, socklen_t length) {
  sockaddr_storage target{};
  std::memcpy(&target, address, std::min<std::size_t>(length, sizeof target));
  std::array<std::byte, sizeof(Preamble)> proof{};
  {
    Registry& all = registry();
    const std::scoped_lock lock(all.mutex);
    const auto rank = all.ranks.find(place_of(target));
    if (rank == all.ranks.end()) return ::connect(descriptor, address, length);
    proof = rank->second.first->proof_for(rank->second.second);
  }
  if (::connect(descriptor, address, length) != 0) {
    if (errno != EINPROGRESS) return -1;
    pollfd polled{.fd = descriptor, .events = POLLOUT, .revents = 0};
    int error = ETIMEDOUT;
    socklen_t error_length = sizeof error;
    if (::poll(&polled, 1, kConnects_ms) == 1) ::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &error_length);
    if (error != 0) {
      errno = error;
      return -1;
    }
  }
  if (::send(descriptor, proof.data(), proof.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(proof.size())) return 0;
  errno = ECONNRESET;
  return -1;
}

void* replacement_of(std::string_view name) {
  if (name == "listen") return reinterpret_cast<void*>(&guarded_listen);
  if (name == "accept") return reinterpret_cast<void*>(&guarded_accept);
  if (name == "connect") return reinterpret_cast<void*>(&guarded_connect);
  return nullptr;
}

struct Table {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
};

// A page that the loader has made read-only becomes so again.
void write_entry(ElfW(Addr) at, void* function, bool read_only) {
  const auto page = static_cast<ElfW(Addr)>(::sysconf(_SC_PAGESIZE));
  void* const begin = reinterpret_cast<void*>(at & ~(page - 1));
  if (read_only && ::mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return;
  __atomic_store_n(reinterpret_cast<void**>(at), function, __ATOMIC_RELEASE);
  if (read_only) ::mprotect(begin, page, PROT_READ);
}

// How many of the three were found in the library that `wanted` points into.
struct Search {
  ElfW(Addr) wanted = 0;
  int found = 0;
};

int look_into(dl_phdr_info* info, std::size_t, void* pointer) {
  auto& search = *static_cast<Search*>(pointer);
  const ElfW(Dyn)* dynamic = nullptr;
  bool is_it = false;
  ElfW(Addr) fixed_begin = 0, fixed_end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    const ElfW(Addr) begin = info->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD && search.wanted >= begin && search.wanted < begin + part.p_memsz) is_it = true;
    if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    if (part.p_type == PT_GNU_RELRO) fixed_begin = begin, fixed_end = begin + part.p_memsz;
  }
  if (!is_it || dynamic == nullptr) return 0;
  Table table;
  std::array<std::pair<const ElfW(Rela)*, std::size_t>, 2> relocations{};
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto address = reinterpret_cast<const void*>(dynamic->d_un.d_ptr);
    switch (dynamic->d_tag) {
      case DT_SYMTAB: table.symbols = static_cast<const ElfW(Sym)*>(address); break;
      case DT_STRTAB: table.names = static_cast<const char*>(address); break;
      case DT_JMPREL: relocations[0].first = static_cast<const ElfW(Rela)*>(address); break;
      case DT_PLTRELSZ: relocations[0].second = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
      case DT_RELA: relocations[1].first = static_cast<const ElfW(Rela)*>(address); break;
      case DT_RELASZ: relocations[1].second = dynamic->d_un.d_val / sizeof(ElfW(Rela)); break;
      default: break;
    }
  }
  if (table.symbols == nullptr || table.names == nullptr) return 1;
  for (const auto& [first, count] : relocations) {
    for (std::size_t i = 0; first != nullptr && i < count; ++i) {
      const auto symbol = ELF64_R_SYM(first[i].r_info);
      if (symbol == 0 || table.symbols[symbol].st_shndx != SHN_UNDEF) continue;
      void* const function = replacement_of(table.names + table.symbols[symbol].st_name);
      if (function == nullptr) continue;
      const ElfW(Addr) at = info->dlpi_addr + first[i].r_offset;
      write_entry(at, function, at >= fixed_begin && at < fixed_end);
      if (*reinterpret_cast<void* const*>(at) == function) ++search.found;
    }
  }
  return 1;
}

bool lead_through() {
  Search search{.wanted = reinterpret_cast<ElfW(Addr)>(ucs_status_string(UCS_OK))};  // a text of that library
  ::dl_iterate_phdr(&look_into, &search);
  return search.found >= 3;
}

}  // namespace

ConnectionGate::ConnectionGate(Rank rank) : rank_(rank) {
  static const bool leads_through = lead_through();
  if (leads_through) return;
  throw TransportError({.rank = rank,
                        .operation = "join",
                        .reason = "TELEGRAD_JOB_KEY cannot protect the connections of this UCX, which is linked in another way: "
                                  "use telegrad's own UCX (TELEGRAD_UCX=wheel), or unset the key"});
}

ConnectionGate::~ConnectionGate() {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  std::erase_if(all.listeners, [this](const auto& entry) { return entry.second == this; });
  std::erase_if(all.ranks, [this](const auto& entry) { return entry.second.first == this; });
}

ConnectionGate::Opening::Opening(ConnectionGate* gate) { opening = gate; }
ConnectionGate::Opening::~Opening() { opening = nullptr; }

std::vector<Place> ConnectionGate::places() const {
  std::vector<Place> places;
  for (const int descriptor : listeners_) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0) places.push_back(place_of(address));
  }
  return places;
}

void ConnectionGate::open(std::shared_ptr<MessageGuard> guard, std::span<const std::vector<Place>> places_by_rank) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  guard_ = std::move(guard);
  for (Rank rank = 0; rank < places_by_rank.size(); ++rank) {
    for (const Place& place : places_by_rank[rank]) all.ranks.insert_or_assign(place, std::pair(this, rank));
  }
}

bool ConnectionGate::admits(int descriptor) {
  Preamble preamble;
  const bool is_here = ::recv(descriptor, &preamble, sizeof preamble, MSG_DONTWAIT) == sizeof preamble;
  const auto bytes = std::as_bytes(std::span(&preamble, 1));
  if (is_here && preamble.magic == kMagic && preamble.to == rank_ &&
      guard_->opens_connection(preamble.from, bytes.first(kSealAt), preamble.seal)) {
    return true;
  }
  guard_->refuse();
  return false;
}

std::array<std::byte, 40> ConnectionGate::proof_for(Rank rank) {
  Preamble preamble{.from = rank_, .to = rank};
  preamble.seal = guard_->seal_connection(rank, std::as_bytes(std::span(&preamble, 1)).first(kSealAt));
  std::array<std::byte, sizeof preamble> bytes{};
  std::memcpy(bytes.data(), &preamble, sizeof preamble);
  return bytes;
}

}  // namespace telegrad
