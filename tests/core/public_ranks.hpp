#pragma once
// Ranks of this process as a C++ program has them, each on a thread of its own.

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "telegrad/telegrad.hpp"
#include "testing.hpp"

inline void on_ranks(telegrad::Rank size, const std::function<void(telegrad::Communicator&)>& body) {
  auto ranks = telegrad::Communicator::local(size, {.timeout_s = 30.0});
  std::vector<std::jthread> threads;
  for (telegrad::Communicator& comm : ranks) {
    threads.emplace_back([&] {
      try {
        body(comm);
      } catch (const std::exception& error) {
        testing::fail(__FILE__, __LINE__, error.what());
        comm.abort(error.what());
      }
    });
  }
}
