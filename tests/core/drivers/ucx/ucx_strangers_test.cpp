// Strangers connect to the ranks of a running job over UCX's TCP, and send what they like. None is admitted, and the job
// does not notice. TELEGRAD_STRANGERS says how many of each kind there are.
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "drivers/processes/job_key.hpp"
#include "drivers/ucx/ucx_driver.hpp"
#include "joining/join.hpp"
#include "session/reductions.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using Blob = std::vector<std::byte>;
using Blobs = std::vector<Blob>;

constexpr const char* kRight = "the key of this job, in 32 characters or more";
constexpr const char* kWrong = "another key, which has 32 characters or more";
constexpr std::size_t kOpening = 72;  // before the address in a greeting

int strangers() {
  const char* const wanted = std::getenv("TELEGRAD_STRANGERS");
  return wanted == nullptr ? 10 : std::atoi(wanted);
}

// TCP ports that this process listens on.
std::set<std::uint16_t> listening() {
  std::set<std::uint16_t> ports;
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    int listens = 0;
    socklen_t length = sizeof listens;
    sockaddr_in name{};
    socklen_t name_length = sizeof name;
    if (::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
    if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&name), &name_length) != 0 || name.sin_family != AF_INET) continue;
    ports.insert(ntohs(name.sin_port));
  }
  return ports;
}

sockaddr_in at(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int connected(std::uint16_t port) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = at(port);
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return descriptor;
  ::close(descriptor);
  return -1;
}

// Sends all of it, hears what comes for a moment, and goes.
void send_bytes(std::uint16_t port, ConstBytes bytes) {
  const int descriptor = connected(port);
  if (descriptor < 0) return;
  [[maybe_unused]] const auto sent = ::send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  const timeval most{.tv_sec = 0, .tv_usec = 2000};
  ::setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
  std::array<char, 4096> answer{};
  while (::recv(descriptor, answer.data(), answer.size(), 0) > 0) {
  }
  ::close(descriptor);
}

// What this process has received on connections that came in at a port, while it is recorded.
class Recording {
 public:
  static Recording& instance() {
    static Recording one;
    return one;
  }
  void take(int descriptor, ConstBytes bytes) {
    if (!records_) return;
    sockaddr_in name{};
    socklen_t length = sizeof name;
    if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&name), &length) != 0 || name.sin_family != AF_INET) return;
    const std::scoped_lock lock(mutex_);
    Blob& stream = streams_[{ntohs(name.sin_port), descriptor}];
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  }
  void start() {
    const std::scoped_lock lock(mutex_);
    streams_.clear();
    records_ = true;
  }
  /// By connection, those that came to `ports`.
  Blobs stop(const std::set<std::uint16_t>& ports) {
    records_ = false;
    return found(ports);
  }
  /// The same until now.
  Blobs found(const std::set<std::uint16_t>& ports) {
    const std::scoped_lock lock(mutex_);
    Blobs all;
    for (const auto& [where, stream] : streams_) {
      if (ports.contains(where.first)) all.push_back(stream);
    }
    return all;
  }

 private:
  std::atomic<bool> records_ = false;
  std::mutex mutex_;
  std::map<std::pair<std::uint16_t, int>, Blob> streams_;
};

// What a job's process and the test's share.
struct Shared {
  static constexpr std::size_t kRoom = std::size_t{1} << 20;
  struct Stored {
    std::size_t length = 0;
    std::array<std::byte, 8192> bytes{};
    void set(const Blob& blob) {
      length = std::min(blob.size(), bytes.size());
      std::copy_n(blob.begin(), length, bytes.begin());
    }
    Blob get() const { return {bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length)}; }
  };
  bool checks_payloads = false;
  bool gates = true;
  std::atomic<bool> begins = true;                // false: joined, they send no messages yet
  std::atomic<std::size_t> early_connections = 0;  // before the first message
  std::array<Stored, 2> blobs{};
  std::array<std::array<std::uint16_t, 8>, 2> ports{};
  std::uint32_t epoch = 0;
  pid_t pid = 0;
  std::atomic<int> joined = 0;
  std::atomic<int> failed = 0;
  std::atomic<bool> over = false;
  std::atomic<bool> gone = false;
  std::atomic<std::uint64_t> sums = 0;
  std::atomic<std::uint64_t> refused = 0;
  std::array<char, 1000> error{};
  std::array<std::size_t, 16> recorded{};  // bytes of each connection until they had joined, in `stream`
  std::array<std::byte, kRoom> stream{};
};

// The ranks: two threads that sum without end, and check each sum.
class JobProcess {
 public:
  explicit JobProcess(Shared& shared) : shared_(shared), meet_(2) {}
  void run() {
    shared_.pid = ::getpid();
    Recording::instance().start();
    {
      std::vector<std::jthread> threads;
      for (Rank rank = 0; rank < 2; ++rank) {
        threads.emplace_back([this, rank] {
          try {
            join_one(rank);
            work(rank);
          } catch (const std::exception& error) {
            std::snprintf(shared_.error.data(), shared_.error.size(), "rank %u: %s", rank, error.what());
            ++shared_.failed;
          }
        });
      }
    }
    shared_.gone = true;
  }

 private:
  void join_one(Rank rank) {
    std::unique_ptr<UcxDriver> driver;
    {
      static std::mutex one_at_a_time;
      const std::scoped_lock lock(one_at_a_time);
      const auto before = listening();
      driver = std::make_unique<UcxDriver>(rank, 2, UcxOptions{.interface = "lo", .guards_connections = shared_.gates});
      std::size_t count = 0;
      for (const std::uint16_t port : listening()) {
        if (!before.contains(port)) shared_.ports[rank].at(count++) = port;
      }
    }
    ranks_[rank] = telegrad::join(
        std::move(driver), {.session = {.timeout_s = 60.0}},
        [&](ConstBytes mine) {
          shared_.blobs[rank].set(Blob(mine.begin(), mine.end()));
          meet_.arrive_and_wait();
          return Blobs{shared_.blobs[0].get(), shared_.blobs[1].get()};
        },
        wait_until, JobKey::of(kRight, shared_.checks_payloads));
    meet_.arrive_and_wait();
  }

  std::set<std::uint16_t> ports() const {
    std::set<std::uint16_t> all(shared_.ports[0].begin(), shared_.ports[0].end());
    all.insert(shared_.ports[1].begin(), shared_.ports[1].end());
    return all;
  }

  void keep_recorded() {
    std::size_t at = 0, count = 0;
    for (const Blob& blob : Recording::instance().stop(ports())) {
      if (count == shared_.recorded.size() || at + blob.size() > shared_.stream.size()) break;
      std::ranges::copy(blob, shared_.stream.begin() + static_cast<std::ptrdiff_t>(at));
      at += shared_.recorded[count++] = blob.size();
    }
  }

  void work(Rank rank) {
    Communicator& comm = *ranks_[rank];
    shared_.epoch = comm.epoch();
    if (!shared_.begins && rank == 0) shared_.joined = 2;
    while (!shared_.begins) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank == 0) shared_.early_connections = Recording::instance().found(ports()).size();
    meet_.arrive_and_wait();
    std::vector<float> data(300);  // the last says whether the ranks go on
    for (std::uint64_t sum = 1; data.back() >= 0.0F; ++sum) {
      for (float& value : data) value = static_cast<float>(rank + 1);
      data.back() = rank == 0 && shared_.over ? -100.0F : 1.0F;
      const auto bytes = std::as_writable_bytes(std::span(data));
      const RequestPtr request = comm.submit(make_all_reduce(2, Dense{.input = bytes, .output = bytes}), true);
      while (!comm.wait(*request, Engine::now_s() + 1.0)) {
      }
      request->rethrow();
      if (data.front() != 3.0F) throw std::runtime_error("a wrong sum");
      if (rank == 0) {
        if (sum == 3) keep_recorded();
        shared_.sums = sum;
        shared_.refused = ranks_[0]->counters().refused + ranks_[1]->counters().refused;
        if (sum == 3) shared_.joined = 2;
      }
      if (shared_.failed != 0) throw std::runtime_error("the other rank failed");
    }
    comm.close();
  }

  Shared& shared_;
  std::barrier<> meet_;
  std::array<std::shared_ptr<Communicator>, 2> ranks_;
};

// Forks jobs from a process in which UCX has done nothing yet, and in which no stranger lives.
class Jobs {
 public:
  static constexpr std::size_t kMost = 16;
  Jobs() {
    ::setenv("UCX_TLS", "tcp,self", 1);
    void* const memory = ::mmap(nullptr, kMost * sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    all_ = static_cast<Shared*>(memory);
    std::array<int, 2> pipe{};
    if (memory == MAP_FAILED || ::pipe2(pipe.data(), O_CLOEXEC) != 0) std::abort();
    ask_ = pipe[1];
    if (::fork() != 0) {
      ::close(pipe[0]);
      return;
    }
    ::close(pipe[1]);
    std::uint8_t index = 0;
    while (::read(pipe[0], &index, 1) == 1) {
      if (::fork() != 0) continue;
      JobProcess(all_[index]).run();
      std::_Exit(0);
    }
    std::_Exit(0);
  }
  Shared& start(bool checks_payloads, bool gates, bool begins) {
    Shared& shared = *new (&all_[next_]) Shared;
    shared.checks_payloads = checks_payloads;
    shared.gates = gates;
    shared.begins = begins;
    const auto index = static_cast<std::uint8_t>(next_++);
    if (::write(ask_, &index, 1) != 1) throw std::runtime_error("no job starts");
    return shared;
  }

 private:
  Shared* all_ = nullptr;
  int ask_ = -1;
  std::size_t next_ = 0;
};
Jobs jobs;

class Job {
 public:
  explicit Job(bool checks_payloads = false, bool gates = true, bool begins = true)
      : shared_(jobs.start(checks_payloads, gates, begins)) {
    wait_for([this] { return shared_.joined == 2 || failed(); });
  }
  ~Job() {
    shared_.over = true;
    shared_.begins = true;
    wait_for([this] { return shared_.gone.load(); });
    if (shared_.error[0] != '\0') testing::fail(__FILE__, __LINE__, shared_.error.data());
  }

  Blob blob(Rank rank) const { return shared_.blobs[rank].get(); }
  std::vector<std::uint16_t> ports(Rank rank) const {
    std::vector<std::uint16_t> used(shared_.ports[rank].begin(), shared_.ports[rank].end());
    std::erase(used, 0);
    return used;
  }
  std::uint64_t sums() const { return shared_.sums; }
  bool failed() const {  // also if it is killed by a signal
    return shared_.failed != 0 || (shared_.pid != 0 && !shared_.gone && ::kill(shared_.pid, 0) != 0);
  }
  std::uint64_t refused() const { return shared_.refused; }
  std::uint32_t epoch() const { return shared_.epoch; }
  Blobs recorded() const {
    Blobs all;
    auto at = shared_.stream.begin();
    for (const std::size_t length : shared_.recorded) {
      if (length == 0) break;
      all.emplace_back(at, at + static_cast<std::ptrdiff_t>(length));
      at += static_cast<std::ptrdiff_t>(length);
    }
    return all;
  }
  std::size_t resident_bytes() const {
    std::ifstream file("/proc/" + std::to_string(shared_.pid) + "/statm");
    std::size_t total = 0, resident = 0;
    file >> total >> resident;
    return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  }
  std::size_t descriptors() const {
    std::error_code gone;
    const std::filesystem::directory_iterator all("/proc/" + std::to_string(shared_.pid) + "/fd", gone);
    return gone ? 0 : static_cast<std::size_t>(std::distance(begin(all), end(all)));
  }
  /// The ranks send their first messages; returns how many connections they had until then, and how many since.
  std::pair<std::size_t, std::size_t> send_first_messages() const {
    shared_.begins = true;
    go_on(5);
    return {shared_.early_connections.load(), recorded().size() - shared_.early_connections.load()};
  }
  /// Waits until so many further sums are done.
  void go_on(std::uint64_t further) const {
    const std::uint64_t until = sums() + further;
    wait_for([&] { return sums() >= until || failed(); });
  }

 private:
  static void wait_for(const std::function<bool()>& done) {
    for (int i = 0; i < 60'000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!done()) throw std::runtime_error("the job stands still");
  }
  Shared& shared_;
};

class Deaf final : public EventSink {
  void on_arrival(const Arrival&) override {}
  void on_control(const Control&) override {}
  void on_peer_failed(Rank, const std::string&) override {}
  void on_damage(const std::string&) override {}
};

enum class Kind : std::uint8_t { no_proof, wrong_key, other_job };

// Speaks the protocol as rank 1 of the job, to its rank 0, with the epoch that it has read in the store.
void pose_as_a_rank(const Job& job, Kind kind) {
  UcxDriver driver(1, 2, UcxOptions{.interface = "lo"});
  Deaf deaf;
  driver.attach(deaf);
  const JobKey key = kind == Kind::no_proof ? JobKey() : JobKey::of(kind == Kind::wrong_key ? kWrong : kRight, false);
  Greeting greeting(key, 1, 2);  // another nonce than rank 1's
  if (key.guards()) {
    Greeting other(key, 0, 2);
    Blobs said{other.say(Blob(8)), greeting.say(Blob(8))};
    greeting.hear(said);
    driver.guard_by(greeting.guard());
  }
  Blobs addresses(2);
  const Blob blob = job.blob(0);
  addresses[0].assign(blob.begin() + kOpening, blob.end());
  addresses[1] = driver.address();
  driver.connect(addresses);
  for (const ControlKind said : {ControlKind::hello, ControlKind::abort, ControlKind::goodbye}) {
    driver.send_control(0, {.kind = said, .source = 1, .origin = 1, .culprit = 1, .epoch = job.epoch(), .reason = "a stranger"});
  }
  ReadyQueue ready;
  std::vector<std::byte> payload(200'000);  // short, and by rendezvous
  Pending short_one(ready), long_one(ready);
  for (std::uint32_t ahead = 1; ahead <= 3; ++ahead) {
    Envelope envelope;
    envelope.epoch = job.epoch();
    envelope.sequence = static_cast<std::uint32_t>(job.sums()) + ahead;
    envelope.source = 1;
    envelope.call = {.operation = Operation::allreduce, .count = 4};
    envelope.length = 16;
    driver.send(0, envelope, ConstBytes(payload).first(16), short_one);
    envelope.length = payload.size();
    driver.send(0, envelope, payload, long_one);
  }
  const double until_s = driver.now_s() + 0.02;
  while (driver.now_s() < until_s) {
    if (!driver.progress()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  driver.shut_down();
}

// No stranger leaves anything behind in the job's process.
void unaffected(Job& job, const std::function<void(int)>& stranger) {
  for (int i = 0; i < strangers() / 2 + 1; ++i) stranger(i);  // pools fill
  const std::size_t before = job.resident_bytes(), descriptors = job.descriptors();
  for (int i = 0; i < strangers(); ++i) {
    stranger(i);
    if (job.failed()) return;
  }
  job.go_on(200);
  EXPECT(!job.failed());
  const std::size_t after = job.resident_bytes();
  EXPECT(after < before + (std::size_t{4} << 20));
  EXPECT(job.descriptors() <= descriptors);
  std::cerr << "  " << strangers() << " strangers: " << job.refused() << " messages refused, " << job.sums() << " sums, "
            << static_cast<double>(after) / 1048576.0 - static_cast<double>(before) / 1048576.0 << " MiB more\n";
}

TEST("random bytes change nothing") {
  Job job;
  std::mt19937 random(1);
  unaffected(job, [&](int) {
    for (const Rank rank : {0U, 1U}) {
      for (const std::uint16_t port : job.ports(rank)) {
        Blob noise(random() % 5000);
        for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
        send_bytes(port, noise);
      }
    }
  });
  EXPECT(job.refused() >= static_cast<std::uint64_t>(strangers()));
}

TEST("a process that speaks the protocol without proof, with another key or of another job is refused") {
  for (const Kind kind : {Kind::no_proof, Kind::wrong_key, Kind::other_job}) {
    Job job;
    unaffected(job, [&](int) { pose_as_a_rank(job, kind); });
    EXPECT(job.refused() >= static_cast<std::uint64_t>(strangers()));
  }
}

void replay(const Job& job, const Blobs& recorded) {
  for (const Rank rank : {0U, 1U}) {
    for (const std::uint16_t port : job.ports(rank)) {
      for (const Blob& blob : recorded) send_bytes(port, blob);
    }
  }
}

// Data has connections of its own, which are made with the first message.
TEST("a connection that is made late proves the key, too, and strangers that come before it are refused") {
  Job job(false, true, false);
  for (int i = 0; i < strangers(); ++i) pose_as_a_rank(job, i % 2 == 0 ? Kind::no_proof : Kind::wrong_key);
  const auto [early, late] = job.send_first_messages();
  EXPECT(late > 0);
  EXPECT(!job.failed());
  job.go_on(200);
  const std::uint64_t refused = job.refused();
  EXPECT(refused >= static_cast<std::uint64_t>(strangers()));
  const Blobs recorded = job.recorded();
  replay(job, {recorded.begin() + static_cast<std::ptrdiff_t>(early), recorded.end()});
  job.go_on(200);
  EXPECT(!job.failed());
  EXPECT(job.refused() > refused);
}

Blobs recorded_by(const Job& job) {
  Blobs recorded = job.recorded();
  std::size_t bytes = 0;
  for (const Blob& blob : recorded) bytes += blob.size();
  std::cerr << "  recorded " << recorded.size() << " connections, " << bytes << " bytes\n";
  EXPECT(bytes > 200);  // more than a proof and how UCX begins, of each
  return recorded;
}

// As over a network whose connections have no gate.
TEST("where UCX takes a stranger's connection, each of its messages is refused") {
  for (const Kind kind : {Kind::no_proof, Kind::wrong_key, Kind::other_job}) {
    Job job(kind == Kind::wrong_key, false);
    unaffected(job, [&](int) { pose_as_a_rank(job, kind); });
    EXPECT(job.refused() >= static_cast<std::uint64_t>(strangers()));
  }
}

TEST("the recorded bytes of an earlier join change nothing when they come again") {
  const Blobs recorded = recorded_by(Job());
  Job job;
  unaffected(job, [&](int) { replay(job, recorded); });
  EXPECT(job.refused() >= static_cast<std::uint64_t>(strangers()));
}

TEST("the recorded bytes of a running job's join change nothing when they come again") {
  Job job;
  const Blobs recorded = recorded_by(job);
  unaffected(job, [&](int) { replay(job, recorded); });
  EXPECT(job.refused() >= static_cast<std::uint64_t>(strangers()));
}

}  // namespace

// Between UCX and the C library: a program's functions come before those of libraries.
extern "C" ssize_t recv(int descriptor, void* into, std::size_t most, int flags) {
  const ssize_t length = ::recvfrom(descriptor, into, most, flags, nullptr, nullptr);
  if (length > 0) Recording::instance().take(descriptor, {static_cast<const std::byte*>(into), static_cast<std::size_t>(length)});
  return length;
}
