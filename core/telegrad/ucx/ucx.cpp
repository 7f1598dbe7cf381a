// The library's own headers first: once telegrad.hpp is read, its names stand beside theirs.
#include "drivers/ucx/ucx_driver.hpp"
#include "telegrad/joined.hpp"

#include "telegrad/ucx.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

namespace telegrad::ucx {
namespace {

// A rank's word to the others: the epoch, of which rank 0's counts, and its address.
std::vector<std::byte> packed(std::uint32_t epoch, const std::vector<std::byte>& address) {
  std::vector<std::byte> word(sizeof epoch + address.size());
  std::memcpy(word.data(), &epoch, sizeof epoch);
  std::ranges::copy(address, word.begin() + sizeof epoch);
  return word;
}

}  // namespace

api::Communicator join(Rank rank, Rank size, const Exchange& exchange, const api::Options& options,
                       const std::string& interface) {
  api::detail::check(options);
  api::detail::check_rank("rank", rank, size);
  auto driver = api::detail::translated(
      [&] { return std::make_unique<UcxDriver>(rank, size, UcxOptions{.interface = interface}); });
  std::uint32_t epoch = std::random_device{}();
  const auto words = exchange(packed(epoch, driver->address()));
  if (words.size() != size) {
    throw std::invalid_argument("exchange returned " + std::to_string(words.size()) + " addresses for size=" +
                                std::to_string(size) + " ranks: it must return what each rank gave it, by rank");
  }
  std::vector<std::vector<std::byte>> addresses;
  for (const std::vector<std::byte>& word : words) {
    if (word.size() <= sizeof epoch) {
      throw std::invalid_argument("exchange returned " + std::to_string(word.size()) +
                                  " bytes that are no address: it must return what each rank gave it, by rank");
    }
    addresses.emplace_back(word.begin() + sizeof epoch, word.end());
  }
  std::memcpy(&epoch, words.front().data(), sizeof epoch);
  api::detail::translated([&] { driver->connect(addresses); });
  auto joined = api::detail::make(std::move(driver), epoch, options);
  api::detail::greet(*joined);
  api::detail::await_join(*joined, options);
  return api::Communicator(std::move(joined));
}

}  // namespace telegrad::ucx
