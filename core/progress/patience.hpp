#pragma once
// How long a thread that has nothing to do yields before it blocks. It must not know what the thread waits for.

namespace telegrad {

class Driver;

/// What the kernel says of the calling thread's core.
struct CoreView {
  long (*switches)();      // how often the thread has been switched away from though it wanted to run
  bool (*others_wait)();   // more threads of the machine want to run than it has cores
};
CoreView kernel_view();

/// On a crowded machine a thread that yields may go on running all the same: where every session has a scheduling group of its
/// own (the kernel's autogroups) it keeps its core until its group has had its share, for milliseconds, and whom it waits
/// for may be next in the queue of that core. Only blocking lets that one run. So who is not switched away from although
/// it yields blocks sooner, the more so while that has happened before.
class Patience {
 public:
  explicit Patience(double most_s, CoreView view = kernel_view()) : most_s_(most_s), view_(view) {}

  /// A job is crowded that has more processes on this machine than cores that the calling thread may use.
  void learn_of(const Driver& driver);
  /// Something has happened, or a wait begins.
  void renew(double now_s);
  /// True: yield once more; false: block.
  bool is_left(double now_s);

 private:
  bool stays_on_core(double now_s);

  double most_s_;
  CoreView view_;
  bool crowded_ = false;
  bool stayed_ = false;  // on its core, when it last looked for long enough
  double since_s_ = 0.0;
  double looked_s_ = 0.0;  // 0: not since something happened
  long switches_ = 0;
};

}  // namespace telegrad
