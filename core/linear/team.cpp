#include "linear/team.hpp"

#include <chrono>

#include "base/check.hpp"

namespace telegrad::linear {
namespace {

// condition_variable::wait() of GCC 12 is a symbol that libstdc++ of GCC 11 lacks; wheels are built for that one, too.
template <class Condition>
void wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition holds) {
  while (!changed.wait_for(lock, std::chrono::hours(1), holds)) {
  }
}

}  // namespace

Team::Team(std::size_t threads) {
  TELEGRAD_CHECK(threads >= 1);
  try {
    for (std::size_t part = 1; part < threads; ++part) helpers_.emplace_back([this, part] { help(part); });
  } catch (...) {  // the system has no more
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  begun_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Team::run(const std::function<void(std::size_t)>& work) {
  if (helpers_.empty()) {
    work(0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    working_ = helpers_.size();
    ++round_;
  }
  begun_.notify_all();
  work(0);
  std::unique_lock lock(mutex_);
  wait(done_, lock, [this] { return working_ == 0; });
}

void Team::help(std::size_t part) {
  std::unique_lock lock(mutex_);
  for (std::uint64_t seen = 0;;) {
    wait(begun_, lock, [&] { return ends_ || round_ != seen; });
    if (ends_) return;
    seen = round_;
    const auto& work = *work_;
    lock.unlock();
    work(part);
    lock.lock();
    if (--working_ == 0) done_.notify_one();
  }
}

}  // namespace telegrad::linear
