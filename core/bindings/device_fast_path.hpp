#pragma once
// Sums of a device's tensors as they are called most: a whole tensor, in place. What
// telegrad/communicator/cuda/transfers.py does for all operations, in as few steps as there are calls of the driver.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/binding.hpp"
#include "bindings/stream_driver.hpp"
#include "progress/communicator.hpp"

namespace telegrad::bindings {

/// Of one communicator and one device. It owns no memory: slots are lent to it, and its owner takes them back when nothing
/// is called any more. The interpreter's lock guards all of it.
class DeviceFastPath {
 public:
  /// A stream's input and output, apart from each other, and the words by which it and the engine meet.
  struct Slot {
    std::size_t bytes = 0;  // of each of both
    std::uintptr_t input = 0;
    std::uintptr_t output = 0;
    std::uintptr_t ready = 0;
    std::uintptr_t done = 0;
    std::uint32_t value = 0;   // of the words' last use
    std::uintptr_t event = 0;  // after the last use; while one is put into streams, what joins these
    RequestPtr request;        // of that; null: there was none
    bool lost = false;         // a use of it broke off: nobody knows what still uses it
  };

  /// `device`: a torch.device. `current_stream`: called with its `index`, gives a CUstream as a number.
  DeviceFastPath(std::shared_ptr<StreamDriver> driver, nb::object device, int index, nb::object current_stream)
      : driver_(std::move(driver)), device_(std::move(device)), index_(index), current_stream_(std::move(current_stream)) {}

  /// Its number, which counts from 0.
  std::size_t lend(const Slot& slot);
  const Slot& slot(std::size_t number) const { return slots_.at(number); }
  std::size_t slots() const { return slots_.size(); }

  /// Of the communicator's own: for inputs and for results.
  struct Streams {
    std::uintptr_t inputs = 0;
    std::uintptr_t results = 0;
  };
  void use(const Streams& streams) { streams_ = streams; }
  bool has_streams() const { return streams_.has_value(); }

  /// Puts it into the current stream, or `apart` into those of use(). Null where it is the method's, which knows all
  /// arguments, errors and waits. `member`: the Communicator of Python, whose abort() ends the others' operations if this
  /// breaks off after it has begun.
  RequestPtr all_reduce(nb::handle member, const std::shared_ptr<Communicator>& communicator, nb::handle x, nb::handle op,
                        bool apart);

  /// From now on everything is the method's, as after a failure of what was begun here.
  void stop() { is_stopped_ = true; }
  /// And what was lent is used no more.
  void close();

  bool has_outstanding() const { return !outstanding_.empty(); }
  /// Operations of which nobody knows yet that they have succeeded, with their slots, oldest first. They are forgotten here.
  std::vector<std::pair<RequestPtr, std::size_t>> take_outstanding();

 private:
  bool is_usable();
  bool is_free(const Slot& slot) const;

  std::shared_ptr<StreamDriver> driver_;
  nb::object device_;
  int index_;
  nb::object current_stream_;
  std::vector<Slot> slots_;
  std::map<std::size_t, std::deque<std::size_t>> by_bytes_;  // in the order of their last uses
  std::deque<std::pair<RequestPtr, std::size_t>> outstanding_;
  RequestPtr last_;  // that was begun: once a session has failed, so does that
  std::optional<Streams> streams_;
  bool is_stopped_ = false;
};

}  // namespace telegrad::bindings
