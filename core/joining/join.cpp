#include "joining/join.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace telegrad {
namespace {

constexpr double kJoinMost_s = 60.0;

std::shared_ptr<Communicator> greet(std::unique_ptr<AddressedDriver> driver, CommunicatorOptions options,
                                    const Exchange& exchange, const Waiting& waiting, const JobKey& key) {
  const Rank rank = driver->rank();
  const Rank size = driver->size();
  Greeting greeting(key, rank, size);
  std::vector<std::vector<std::byte>> addresses = exchange(greeting.say(driver->address()));
  if (addresses.size() != size) {
    throw std::invalid_argument("exchange returned " + std::to_string(addresses.size()) + " addresses for size=" +
                                std::to_string(size) + " ranks");
  }
  greeting.hear(addresses);
  options.session.epoch = greeting.epoch();
  if (auto guard = greeting.guard()) driver->guard_by(std::move(guard));
  driver->connect(addresses);
  const double join_s = std::min(options.session.timeout_s, kJoinMost_s);
  auto communicator = std::make_shared<Communicator>(Engine::shared(), std::move(driver), std::move(options));
  communicator->join();
  try {
    const auto attempt = [&](double slice_s) { return communicator->await_join(slice_s); };
    if (!waiting(Engine::now_s() + join_s, attempt)) communicator->give_up_join(join_s);
  } catch (...) {  // Ctrl-C too: the others need not wait, and closing takes a moment
    communicator->abort("rank " + std::to_string(rank) + " did not join");
    communicator->close();
    throw;
  }
  return communicator;
}

}  // namespace

bool wait_until(double deadline_s, const std::function<bool(double)>& attempt) {
  while (!attempt(deadline_s)) {
    if (Engine::now_s() >= deadline_s) return false;
  }
  return true;
}

std::shared_ptr<Communicator> join(std::unique_ptr<AddressedDriver> driver, CommunicatorOptions options,
                                   const Exchange& exchange, const Waiting& waiting, const JobKey& key) {
  const auto group = options.session.group;
  try {
    return greet(std::move(driver), std::move(options), exchange, waiting, key);
  } catch (const TransportError& error) {  // also of the driver, which knows of no groups
    Failure failure = error.failure();
    failure.group = group;
    throw TransportError(std::move(failure));
  }
}

}  // namespace telegrad
