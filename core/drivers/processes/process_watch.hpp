#pragma once
// Hears from the kernel which ranks of this machine have died: at once, and also where a forked child keeps the dead
// process's connections open. Ranks of other machines are not its business.

#include <utility>
#include <vector>

#include "base/types.hpp"
#include "drivers/processes/process_identity.hpp"

namespace telegrad {

class ProcessWatch {
 public:
  ProcessWatch() { open(); }
  ~ProcessWatch() { close(); }
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  enum class Found { watched, unwatched, ended };
  /// From now on `rank`'s end is noticed, if its process can be watched.
  Found add(Rank rank, const ProcessIdentity& process);
  /// Appends the ranks that have ended since the last call; true if there were any.
  bool find_ended(std::vector<Rank>& ended);
  /// Readable when find_ended() would find one; -1: nobody can be watched.
  int descriptor() const { return epoll_; }
  const ProcessIdentity& self() const { return self_; }
  void close();
  /// Again, after close().
  void open();

 private:
  ProcessIdentity self_ = ProcessIdentity::of_this_process();
  int epoll_ = -1;
  std::vector<std::pair<Rank, int>> watched_;
};

}  // namespace telegrad
