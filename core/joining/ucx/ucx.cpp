#include "joining/ucx.hpp"

#include <utility>

#include "drivers/ucx/join_failure.hpp"
#include "drivers/ucx/ucx_driver.hpp"

namespace telegrad::ucx {

std::shared_ptr<Communicator> join(Rank rank, Rank size, const UcxOptions& ucx, CommunicatorOptions options,
                                   const Exchange& exchange, const Waiting& waiting) {
  const auto group = options.session.group;
  const JobKey key = JobKey::of_environment();
  UcxOptions guarded = ucx;
  guarded.guards_connections = key.is_given();
  const auto joined = [&] {
    return telegrad::join(std::make_unique<UcxDriver>(rank, size, guarded), options, exchange, waiting, key);
  };
  try {
    try {
      return joined();
    } catch (const MemoryMissing&) {
      guarded.devices.clear();
      return joined();
    }
  } catch (const TransportError& error) {
    Failure failure = error.failure();
    failure.group = group;
    failure.reason = explained(failure.reason, ucx);
    throw TransportError(std::move(failure));
  }
}

}  // namespace telegrad::ucx
