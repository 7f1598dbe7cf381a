#pragma once
// From a driver whose ranks are processes to a Communicator in which all of them have greeted each other. It must not
// know which network that is, nor how the addresses travel.

#include <functional>
#include <memory>
#include <vector>

#include "base/types.hpp"
#include "drivers/processes/job_key.hpp"
#include "progress/communicator.hpp"
#include "transport/driver.hpp"

namespace telegrad {

/// Every rank's bytes, by rank, for one's own; all ranks call it, once.
using Exchange = std::function<std::vector<std::vector<std::byte>>(ConstBytes)>;
/// Tries until `attempt(deadline_s of this try)` is true, or until `deadline_s` with false. May throw, to give up.
using Waiting = std::function<bool(double deadline_s, const std::function<bool(double)>& attempt)>;

/// Waits on the calling thread; signals do not end it.
bool wait_until(double deadline_s, const std::function<bool(double)>& attempt);

/// All ranks call it. The epoch is rank 0's. Throws TransportError if a rank fails or does not come, and
/// std::invalid_argument if `exchange` does not return what each rank gave it. `key`: what the ranks prove to each other.
std::shared_ptr<Communicator> join(std::unique_ptr<AddressedDriver> driver, CommunicatorOptions options,
                                   const Exchange& exchange, const Waiting& waiting = wait_until, const JobKey& key = {});

}  // namespace telegrad
