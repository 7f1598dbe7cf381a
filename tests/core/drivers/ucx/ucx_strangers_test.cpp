// Strangers connect to the ranks of a running job over UCX's TCP, and send what they like. None is admitted, and the job
// does not notice. TELEGRAD_STRANGERS says how many of each kind there are.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
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

// Two ranks of this process that sum without end, and check each sum.
class Job {
 public:
  explicit Job(bool checks_payloads = false) : blobs_(2), meet_(2) {
    for (Rank rank = 0; rank < 2; ++rank) {
      threads_.emplace_back([this, rank, checks_payloads] {
        try {
          join_one(rank, checks_payloads);
          work(rank);
        } catch (const std::exception& error) {
          testing::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
          ++failed_;
        }
        ranks_[rank].reset();
      });
    }
    while (joined_ < 2 && failed_ == 0) std::this_thread::yield();
  }
  ~Job() {
    over_ = true;
    for (auto& thread : threads_) thread.join();
  }

  const Blobs& blobs() const { return blobs_; }
  const std::set<std::uint16_t>& ports(Rank rank) const { return ports_[rank]; }
  std::uint64_t sums() const { return sums_; }
  bool failed() const { return failed_ != 0; }
  std::uint64_t refused() { return ranks_[0]->counters().refused + ranks_[1]->counters().refused; }
  std::uint32_t epoch() const { return ranks_[0]->epoch(); }
  /// Waits until so many further sums are done.
  void go_on(std::uint64_t further) const {
    const std::uint64_t until = sums_ + further;
    while (sums_ < until && failed_ == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  void join_one(Rank rank, bool checks_payloads) {
    static std::mutex one_at_a_time;
    std::unique_ptr<UcxDriver> driver;
    {
      const std::scoped_lock lock(one_at_a_time);
      const auto before = listening();
      driver = std::make_unique<UcxDriver>(rank, 2, UcxOptions{.interface = "lo"});
      for (const std::uint16_t port : listening()) {
        if (!before.contains(port)) ports_[rank].insert(port);
      }
    }
    ranks_[rank] = telegrad::join(
        std::move(driver), {.session = {.timeout_s = 60.0}},
        [&](ConstBytes mine) {
          blobs_[rank] = Blob(mine.begin(), mine.end());
          meet_.arrive_and_wait();
          return blobs_;
        },
        wait_until, JobKey::of(kRight, checks_payloads));
    ++joined_;
  }

  void work(Rank rank) {
    Communicator& comm = *ranks_[rank];
    std::vector<float> data(300);  // the last says whether the ranks go on
    for (std::uint64_t sum = 1; data.back() >= 0.0F; ++sum) {
      for (float& value : data) value = static_cast<float>(rank + 1);
      data.back() = rank == 0 && over_ ? -100.0F : 1.0F;
      const auto bytes = std::as_writable_bytes(std::span(data));
      const RequestPtr request = comm.submit(make_all_reduce(2, Dense{.input = bytes, .output = bytes}), true);
      while (!comm.wait(*request, Engine::now_s() + 1.0)) {
      }
      request->rethrow();
      EXPECT_EQ(data.front(), 3.0F);
      if (rank == 0) sums_ = sum;
    }
    comm.close();
  }

  Blobs blobs_;
  std::barrier<> meet_;
  std::array<std::set<std::uint16_t>, 2> ports_;
  std::array<std::shared_ptr<Communicator>, 2> ranks_;
  std::atomic<int> joined_ = 0;
  std::atomic<int> failed_ = 0;
  std::atomic<bool> over_ = false;
  std::atomic<std::uint64_t> sums_ = 0;
  std::vector<std::thread> threads_;
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
  addresses[0].assign(job.blobs()[0].begin() + kOpening, job.blobs()[0].end());
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

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// Of the ranks, of which no stranger may leave anything behind.
void unaffected(Job& job, const std::function<void(int)>& stranger) {
  for (int i = 0; i < strangers() / 2 + 1; ++i) stranger(i);  // pools fill
  const std::size_t before = resident_bytes();
  for (int i = 0; i < strangers(); ++i) {
    stranger(i);
    if (job.failed()) return;
  }
  job.go_on(200);
  EXPECT(!job.failed());
  const std::size_t after = resident_bytes();
  EXPECT(after < before + (std::size_t{16} << 20));
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
  EXPECT_EQ(job.refused(), 0);  // UCX has not taken any for a message
}

TEST("a process that speaks the protocol without proof, with another key or of another job is refused") {
  for (const Kind kind : {Kind::no_proof, Kind::wrong_key, Kind::other_job}) {
    Job job(kind == Kind::wrong_key);
    unaffected(job, [&](int) { pose_as_a_rank(job, kind); });
    EXPECT(job.refused() >= static_cast<std::uint64_t>(strangers()));
  }
}

// Joins, and records what rank 0 hears meanwhile.
std::unique_ptr<Job> recorded_job(Blobs& recorded) {
  Recording::instance().start();
  auto job = std::make_unique<Job>();
  job->go_on(3);
  recorded = Recording::instance().stop(job->ports(0));
  std::size_t bytes = 0;
  for (const Blob& blob : recorded) bytes += blob.size();
  std::cerr << "  recorded " << recorded.size() << " connections, " << bytes << " bytes\n";
  EXPECT(bytes > 500);  // more than how UCX begins
  return job;
}

void replay(const Job& job, const Blobs& recorded) {
  for (const std::uint16_t port : job.ports(0)) {
    for (const Blob& blob : recorded) send_bytes(port, blob);
  }
}

TEST("the recorded bytes of an earlier join change nothing when they come again") {
  Blobs recorded;
  recorded_job(recorded).reset();
  Job job;
  unaffected(job, [&](int) { replay(job, recorded); });
}

TEST("the recorded bytes of a running job's join change nothing when they come again") {
  Blobs recorded;
  const auto job = recorded_job(recorded);
  unaffected(*job, [&](int) { replay(*job, recorded); });
}

[[maybe_unused]] const int environment_is_set = ::setenv("UCX_TLS", "tcp,self", 1);

}  // namespace

// Between UCX and the C library: a program's functions come before those of libraries.
extern "C" ssize_t recv(int descriptor, void* into, std::size_t most, int flags) {
  const ssize_t length = ::recvfrom(descriptor, into, most, flags, nullptr, nullptr);
  if (length > 0) Recording::instance().take(descriptor, {static_cast<const std::byte*>(into), static_cast<std::size_t>(length)});
  return length;
}
