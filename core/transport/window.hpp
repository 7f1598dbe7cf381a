#pragma once
// Window<T, N>: up to N things under way, the first in the first out. They lie in one place and never move, since the
// network knows their addresses.

#include <array>
#include <cstddef>
#include <new>
#include <utility>

#include "base/check.hpp"

namespace telegrad {

template <class T, std::size_t N>
class Window {
 public:
  Window() = default;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ~Window() {
    while (!empty()) pop_front();
  }

  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == N; }

  template <class... Arguments>
  T& emplace_back(Arguments&&... arguments) {
    TELEGRAD_CHECK(!full());
    T* const made = new (place((first_ + count_) % N)) T(std::forward<Arguments>(arguments)...);
    ++count_;
    return *made;
  }
  T& front() {
    TELEGRAD_CHECK(!empty());
    return *std::launder(reinterpret_cast<T*>(place(first_)));
  }
  void pop_front() {
    front().~T();
    first_ = (first_ + 1) % N;
    --count_;
  }

 private:
  std::byte* place(std::size_t index) { return storage_.data() + index * sizeof(T); }

  std::size_t first_ = 0;
  std::size_t count_ = 0;
  alignas(T) std::array<std::byte, N * sizeof(T)> storage_;
};

}  // namespace telegrad
