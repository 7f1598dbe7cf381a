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
#include "transport/failure.hpp"

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
  RequestPtr sent{};  // of a sendrecv, whose `request` receives; null: there is none
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
/// As the library's own; of no epoch yet.
CommunicatorOptions own_options(const Options& options);
/// Throws std::invalid_argument, naming what was given, unless `size` ranks have such a one.
void check_rank(const char* name, Rank rank, Rank size);

}  // namespace telegrad::api::detail
