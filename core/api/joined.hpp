#pragma once
// Behind the public types: the library's own communicator and requests, and its failures as public exceptions. Not
// installed.

#include <atomic>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "codec/sparse_vector.hpp"
#include "joining/join.hpp"
#include "session/request.hpp"
#include "telegrad/communicator.hpp"
#include "telegrad/errors.hpp"
#include "transport/failure.hpp"

namespace telegrad::api::detail {

using CorePtr = std::shared_ptr<telegrad::Communicator>;

/// Joins one of `size` ranks over the network of the communicator that has it.
using Connect = std::function<CorePtr(Rank rank, Rank size, CommunicatorOptions options, const Exchange& exchange)>;

/// Of the ranks of one process: what one of them has made in split(), and the others have not fetched yet.
struct LocalEnds {
  std::mutex mutex;
  std::int64_t tokens = 0;                             // given so far
  std::map<std::int64_t, std::vector<CorePtr>> made;  // by token, then by rank; null: fetched
};

struct Joined {
  CorePtr core;
  Options options;  // as given, for what is split from this one
  Connect connect;  // empty: in this process, by `ends`
  std::shared_ptr<LocalEnds> ends;
  std::string group;  // what errors call it; empty: it was not split from another
  std::atomic<std::uint32_t> encoded_calls = 0;  // so far: no two of them round alike
};

struct Begun {
  std::shared_ptr<Joined> joined;
  RequestPtr request;
  RequestPtr sent{};  // of a sendrecv, whose `request` receives; null: there is none
};

/// What the library holds a vector's values as: unsigned integers as signed ones.
template <class V>
struct Signed {
  using Value = V;
};
template <std::unsigned_integral V>
struct Signed<V> {
  using Value = std::make_signed_t<V>;
};

template <class V>
struct Held {
  telegrad::SparseVector<typename Signed<V>::Value> vector;
};
/// The same memory.
template <class V>
std::span<const typename Signed<V>::Value> as_held(std::span<const V> values) {
  return {reinterpret_cast<const typename Signed<V>::Value*>(values.data()), values.size()};
}
template <class V>
std::span<typename Signed<V>::Value> as_held(std::span<V> values) {
  return {reinterpret_cast<typename Signed<V>::Value*>(values.data()), values.size()};
}

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
/// All ranks of a communicator within this process, joined. `group`: null: it is not split from another.
std::vector<CorePtr> made_local(Rank size, const Options& options, const std::shared_ptr<const Group>& group);
/// Throws std::invalid_argument for no ranks, or more than there can be.
void check_size(Rank size);
/// The same of ranks within this process.
void check_local_size(Rank size);
/// Throws std::invalid_argument, naming what was given, unless `size` ranks have such a one.
void check_rank(const char* name, Rank rank, Rank size);

}  // namespace telegrad::api::detail
