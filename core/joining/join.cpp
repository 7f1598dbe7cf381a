#include "joining/join.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace telegrad {
namespace {

constexpr double kJoinMost_s = 60.0;

std::shared_ptr<Communicator> greet(std::unique_ptr<AddressedDriver> driver, CommunicatorOptions options,
                                    const Exchange& exchange, const Waiting& waiting) {
  const Rank rank = driver->rank();
  const Rank size = driver->size();
  const std::vector<std::byte> address = driver->address();
  std::uint32_t& epoch = options.session.epoch;
  epoch = std::random_device{}();
  std::vector<std::byte> mine(sizeof epoch + address.size());
  std::memcpy(mine.data(), &epoch, sizeof epoch);
  std::ranges::copy(address, mine.begin() + sizeof epoch);

  std::vector<std::vector<std::byte>> addresses = exchange(mine);
  for (std::vector<std::byte>& blob : addresses) {
    if (blob.size() <= sizeof epoch) throw std::invalid_argument("exchange returned a blob that is no address");
    if (&blob == addresses.data()) std::memcpy(&epoch, blob.data(), sizeof epoch);
    blob.erase(blob.begin(), blob.begin() + sizeof epoch);
  }
  if (addresses.size() != size) {
    throw std::invalid_argument("exchange returned " + std::to_string(addresses.size()) + " addresses for size=" +
                                std::to_string(size) + " ranks");
  }
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
                                   const Exchange& exchange, const Waiting& waiting) {
  const auto group = options.session.group;
  try {
    return greet(std::move(driver), std::move(options), exchange, waiting);
  } catch (const TransportError& error) {  // also of the driver, which knows of no groups
    Failure failure = error.failure();
    failure.group = group;
    throw TransportError(std::move(failure));
  }
}

}  // namespace telegrad
