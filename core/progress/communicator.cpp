#include "progress/communicator.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.hpp"
#include "base/ending.hpp"

namespace telegrad {
namespace {

bool write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const auto written = ::write(descriptor, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<std::size_t>(written);
  }
  return true;
}

// Writes `text` into `folder`/`name`, by another name first. The folder is made for this user alone if it does not
// exist. Returns what to tell the user: where the report is, or why there is none. Never throws.
std::string write_report_file(const std::string& folder, const std::string& name, const std::string& text) noexcept {
  try {
    const std::string path = folder + "/" + name;
    const std::string draft = path + "." + std::to_string(::getpid()) + ".part";
    const auto failed = [&](const char* what) {
      const std::string why = std::strerror(errno);
      ::unlink(draft.c_str());
      return "no report: " + std::string(what) + " " + draft + " failed: " + why +
             " (another folder: TELEGRAD_REPORT_DIR in Python, Options::report_folder in C++)";
    };
    std::error_code unmade;  // mkdir says what is wrong
    std::filesystem::create_directories(std::filesystem::path(folder).parent_path(), unmade);
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return failed("making the folder of");
    ::unlink(draft.c_str());
    const int descriptor = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0) return failed("opening");
    const bool written = write_all(descriptor, text);
    if (::close(descriptor) != 0 || !written) return failed("writing");
    if (::rename(draft.c_str(), path.c_str()) != 0) return failed("renaming");
    return "report: " + path + " (`telegrad report " + folder + "` reads those of all ranks)";
  } catch (const std::exception&) {
    return {};
  }
}

constexpr double kPartingMost_s = 5.0;

// One more for as long as it lives.
class Counted {
 public:
  explicit Counted(std::atomic<int>& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

Communicator::Communicator(std::shared_ptr<Engine> engine, std::unique_ptr<Driver> driver, CommunicatorOptions options)
    : engine_(std::move(engine)),
      rank_(driver->rank()),
      size_(driver->size()),
      driver_name_(driver->name()),
      shares_memory_(driver->shares_memory()),
      network_sums_(driver->reduces()),
      warning_(driver->warning()),
      allreduce_table_(AllreduceTable(size_).with_network_sums(network_sums_)),
      sparse_choice_(std::make_shared<SparseChoice>(allreduce_table_)),
      epoch_(options.session.epoch),
      report_folder_(std::move(options.report_folder)),
      group_(options.session.group) {
  participant_.driver = std::move(driver);
  options.session.count_peers = true;
  participant_.session = std::make_unique<Session>(*participant_.driver, options.session);
  if (!report_folder_.empty()) {
    participant_.write_report = [this] { write_report_aside("signal"); };
    participant_.session->when_timed_out([this] { return "; " + write_report("timeout"); });
  }
  participant_.session->when_stalled([this](const std::string& line) { tell_stall(line); });
  engine_->add(participant_);
}

Communicator::~Communicator() {
  if (!engine_->forked()) {
    or_end("closing cannot go on", [this] { close(); });
    return;
  }
  // The network belongs to the parent process.
  [[maybe_unused]] const auto* const session = participant_.session.release();
  [[maybe_unused]] const auto* const driver = participant_.driver.release();
}

void Communicator::use_nodes(std::span<const std::uint32_t> labels) {
  TELEGRAD_CHECK(labels.size() == size_);
  bool memory = true;  // of one node's ranks, which all find the same
  engine_->with_baton([&] {
    for (Rank peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && labels[peer] == labels[rank_]) {
        memory = memory && participant_.driver->shares_memory_with(peer);
      }
    }
  });
  nodes_ = std::make_shared<const Nodes>(labels, memory);
  use(allreduce_table_, sparse_choice_->costs(), sparse_choice_->node_costs());
}

void Communicator::join() {
  engine_->with_baton([this] { participant_.session->join(participant_.driver->now_s()); });
}

bool Communicator::await_join(double deadline_s) {
  const Session& session = *participant_.session;
  engine_->wait_until([&] { return session.joined() || session.failure(); }, deadline_s);
  bool joined = false;
  std::optional<Failure> failure;
  engine_->with_baton([&] {
    joined = session.joined();
    failure = session.failure();
  });
  if (failure) throw TransportError(*failure);
  return joined;
}

void Communicator::give_up_join(double timeout_s) {
  Failure failure{.kind = FailureKind::timeout, .rank = rank_, .operation = "join", .group = group_};
  engine_->with_baton([&] {
    failure.reason =
        "no answer within " + std::to_string(static_cast<int>(timeout_s)) + " s from " + participant_.session->missing();
    participant_.session->fail(failure);
  });
  throw TransportError(failure);
}

RequestPtr Communicator::submit(RequestPtr request, bool caller_waits) {
  const Counted within(submitting_);  // before it is looked whether the communicator closes, which then waits for this
  if (closing_) {
    request->finish(
        named({.rank = rank_, .reason = "the communicator is closed", .group = group_}, request->call(), 0));
  } else {
    if (trace_) trace_->watch(*request);
    engine_->submit(participant_, request, caller_waits);
  }
  return request;
}

bool Communicator::wait(const Request& request, double deadline_s) {
  if (request.done()) return true;
  const double begin_s = Engine::now_s();
  const bool done = engine_->wait(request, deadline_s);
  const double end_s = Engine::now_s();
  waiting_s_.fetch_add(end_s - begin_s, std::memory_order_relaxed);
  if (trace_) trace_->waited(request, begin_s, end_s);
  return done;
}

std::string Communicator::report_now(const char* why) const {
  const PeerIdentity self = participant_.driver->identity(rank_);
  const std::chrono::duration<double> since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return to_json(participant_.session->report(participant_.driver->now_s()), {.why = why,
                                                                             .driver = driver_name_,
                                                                             .host = self.host,
                                                                             .pid = static_cast<std::uint32_t>(::getpid()),
                                                                             .unix_s = since_epoch.count()});
}

std::string Communicator::report_name() const {
  char name[48];
  std::snprintf(name, sizeof name, "%08x-rank%u.json", epoch_, rank_);
  return name;
}

std::string Communicator::write_report(const char* why) const {
  return write_report_file(report_folder_, report_name(), report_now(why));
}

// Heartbeats must not wait for a slow file system or terminal. `told` goes to stderr.
void Communicator::write_report_aside(const char* why, std::string told) const {
  try {
    const bool reports = !report_folder_.empty();
    std::thread([folder = report_folder_, name = report_name(), report = reports ? report_now(why) : std::string(),
                 told = std::move(told)] {
      if (!folder.empty()) write_report_file(folder, name, report);
      write_all(STDERR_FILENO, told);
    }).detach();
  } catch (const std::exception&) {
    // No thread to be had: no report.
  }
}

// Every rank that is concerned writes a report; `line` is empty where another rank tells.
void Communicator::tell_stall(const std::string& line) const {
  const std::string next = report_folder_.empty() ? "" : "; for more: `telegrad report " + report_folder_ + "`";
  write_report_aside("stall", line.empty() ? std::string() : "telegrad: " + line + next + "\n");
}

void Communicator::hint_at_stalls(std::string at_once, std::string later) {
  engine_->with_baton([&] {
    if (!closed_) participant_.session->hint_at_stalls(std::move(at_once), std::move(later));
  });
}

std::string Communicator::report() {
  std::string text;
  engine_->with_baton([&] {
    if (!closed_) text = report_now("asked");
  });
  return text;
}

void Communicator::abort(const std::string& reason) {
  engine_->with_baton([&] {
    if (!closed_) participant_.session->give_up(reason);
  });
}

void Communicator::part() {
  const std::lock_guard lock(parting_);
  if (closing_.exchange(true)) return;
  while (submitting_ != 0) std::this_thread::yield();
  Session& session = *participant_.session;
  engine_->with_baton([&] {
    if (session.running() != 0) {
      session.give_up("rank " + std::to_string(rank_) + " closed its communicator with " +
                      std::to_string(session.running()) +
                      (session.running() == 1 ? " operation" : " operations") + " under way");
    }
    session.part();
    peers_need_us_ = !session.failure() && (session.failing() || !participant_.driver->delivers_after_shut_down());
  });
  leaves_s_ = Engine::now_s() + kPartingMost_s;
}

void Communicator::close() {
  if (forked()) return;
  part();
  if (left_.exchange(true)) return;
  Session& session = *participant_.session;
  Driver& driver = *participant_.driver;
  if (peers_need_us_) {
    const auto over = [&] { return session.failure() || (session.parted() && !session.failing()); };
    while (!engine_->wait_until(over, leaves_s_) && Engine::now_s() < leaves_s_) {
    }
  }
  last_counters_ = counters();
  closed_ = true;
  engine_->remove(participant_);
  engine_->with_baton([&] { driver.shut_down(); });  // ranks of one process reach into each other
  session.release_quarantine();
}

Communicator::Counters Communicator::counters() {
  Counters counters;
  if (closed_) {
    counters = last_counters_;
  } else {
    engine_->with_baton([&] {
      const Session& session = *participant_.session;
      counters = {session.counters(), session.running(), 0.0, participant_.driver->refused()};
    });
  }
  counters.waiting_s = waiting_s_.load(std::memory_order_relaxed);
  return counters;
}

}  // namespace telegrad
