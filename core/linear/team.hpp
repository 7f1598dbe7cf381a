#pragma once
// Threads that do parts of one piece of work. Who does which part must not change the result: parts write apart.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace telegrad::linear {

class Team {
 public:
  /// Throws std::system_error if the system has not so many threads.
  explicit Team(std::size_t threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::size_t size() const { return helpers_.size() + 1; }

  /// Calls work(part) once for every part below size(), part 0 on this thread; returns when all are done. One call at
  /// a time; `work` does not throw.
  void run(const std::function<void(std::size_t)>& work);

 private:
  void help(std::size_t part);
  void end();

  std::mutex mutex_;
  std::condition_variable begun_, done_;
  const std::function<void(std::size_t)>* work_ = nullptr;
  std::uint64_t round_ = 0;
  std::size_t working_ = 0;
  bool ends_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace telegrad::linear
