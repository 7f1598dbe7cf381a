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
  ProcessWatch() = default;
  ~ProcessWatch() { close(); }
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  /// From now on `rank`'s end is noticed, if its process can be watched. False: it has ended already.
  bool add(Rank rank, const ProcessIdentity& process);
  /// Appends the ranks that have ended since the last call; true if there were any.
  bool find_ended(std::vector<Rank>& ended);
  /// Readable when find_ended() would find one; -1: nobody is watched.
  int descriptor() const { return epoll_; }
  void close();

 private:
  int epoll_ = -1;
  std::vector<std::pair<Rank, int>> watched_;
};

}  // namespace telegrad
