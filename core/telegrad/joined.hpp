#pragma once
// Behind the public types: the library's own communicator and requests, and its failures as public exceptions. Not
// installed.

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "session/request.hpp"
#include "sparse/stream.hpp"
#include "telegrad/communicator.hpp"
#include "telegrad/errors.hpp"
#include "transport/driver.hpp"

namespace telegrad {
class Communicator;
struct CommunicatorOptions;
}

namespace telegrad::api::detail {

struct Joined {
  std::shared_ptr<telegrad::Communicator> core;
  std::atomic<std::uint32_t> encoded_calls = 0;  // so far: no two of them round alike
};

struct Begun {
  std::shared_ptr<Joined> joined;
  RequestPtr request;
};

template <class V>
struct Held {
  telegrad::SparseStream<V> stream;
};

[[noreturn]] void raise(const Failure& failure);

/// What `body` returns; the library's own TransportError becomes the public one of its kind.
template <class Body>
auto translated(Body body) {
  try {
    return body();
  } catch (const telegrad::TransportError& error) {
    raise(error.failure());
  }
}

/// Throws std::invalid_argument.
void check(const Options& options);
CommunicatorOptions own_options(const Options& options);
/// `epoch`: the same on all ranks, and another for every group. Every rank of the process is made before any greets its
/// peers, and has greeted before any waits in await_join(), which closes if that fails. They throw TransportError.
std::shared_ptr<Joined> make(std::unique_ptr<Driver> driver, std::uint32_t epoch, const Options& options);
void greet(Joined& joined);
void await_join(Joined& joined, const Options& options);

/// Throws std::invalid_argument, naming what was given, unless `size` ranks have such a one.
void check_rank(const char* name, Rank rank, Rank size);

}  // namespace telegrad::api::detail
