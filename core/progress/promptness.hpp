#pragma once
// Promptness: how soon a program waits for what it has submitted. Who waits at once makes the progress itself, and to wake
// the engine's thread for it costs more than a small operation; who does not wait needs the thread. Which of them a
// program is, is told from what it has done.

#include <atomic>

namespace telegrad {

/// From any thread. Where threads differ, it is any one's that is told.
class Promptness {
 public:
  /// So soon after its submission is an operation waited for that there was nothing to gain by beginning it meanwhile.
  static constexpr double kPrompt_s = 50e-6;
  /// So many prompt waits in a row say more than one.
  static constexpr int kSure = 3;
  static constexpr double kHopeful_s = 100e-6;
  static constexpr double kSure_s = 1e-3;

  /// A submission that nobody waits for yet. How long it may lie before the thread must know of it; 0: not at all.
  double submitted(double now_s) {
    submitted_s_ = now_s;
    if (open_.fetch_add(1) != 0) waits_ = 0;  // the one before was not waited for
    const int waits = waits_;
    return waits == 0 ? 0.0 : waits < kSure ? kHopeful_s : kSure_s;
  }

  /// A submission whose caller waits.
  void blocked() {
    if (open_.exchange(0) != 0) waits_ = 0;
    if (waits_ == 0) waits_ = 1;
  }

  /// Whether waits() has something to learn from.
  bool is_open() const { return open_ != 0; }
  /// Somebody begins to wait, for whatever it is.
  void waits(double now_s) {
    const int open = open_.exchange(0);
    if (open != 0) waits_ = open == 1 && now_s - submitted_s_ < kPrompt_s ? waits_ + 1 : 0;
  }

 private:
  std::atomic<double> submitted_s_ = 0.0;  // the last one
  std::atomic<int> open_ = 0;              // since anybody has waited
  std::atomic<int> waits_ = 0;             // prompt ones in a row, each for one operation
};

}  // namespace telegrad
