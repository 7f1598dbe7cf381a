#pragma once
// Pooled, 64-byte aligned, uninitialised memory. Any thread may take and release a Buffer.
//
// Size-only buffers are for simulations in which only sizes matter: they have a head of real bytes and claim the rest.

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "base/check.hpp"
#include "base/types.hpp"

namespace telegrad {

/// While one lives, every new Buffer of its thread is size-only. Nests.
class SizeOnly {
 public:
  SizeOnly() : outer_(std::exchange(active_, true)) {}
  ~SizeOnly() { active_ = outer_; }
  SizeOnly(const SizeOnly&) = delete;
  SizeOnly& operator=(const SizeOnly&) = delete;

  static bool active() { return active_; }
  /// How many of a message's `size` bytes are there.
  static std::size_t there(std::size_t size) { return active_ ? std::min(size, kHeadBytes) : size; }
  /// So many bytes of a size-only buffer are there: enough for the headers of a message.
  static constexpr std::size_t kHeadBytes = 48;

 private:
  static thread_local constinit bool active_;
  bool outer_;
};

class Buffer {
 public:
  static constexpr std::size_t kHeadBytes = SizeOnly::kHeadBytes;

  Buffer() = default;
  /// `size` bytes from the process-wide pool, the first kHeadBytes of them where SizeOnly is active; throws
  /// std::bad_alloc.
  explicit Buffer(std::size_t size);
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Bytes bytes() const { return {data_, size_}; }
  /// Forgets the tail; the memory stays.
  void truncate(std::size_t size) {
    TELEGRAD_CHECK(size <= size_);
    size_ = size;
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// A Buffer seen as `size()` elements of a trivially copyable T; made while SizeOnly is active, it has only those in
/// the Buffer's head.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(std::size_t size) : buffer_(size * sizeof(T)) {}

  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  std::size_t size() const { return buffer_.size() / sizeof(T); }
  bool empty() const { return buffer_.empty(); }
  T* begin() const { return data(); }
  T* end() const { return data() + size(); }
  T& operator[](std::size_t i) const { return data()[i]; }
  std::span<T> span() const { return {data(), size()}; }
  void truncate(std::size_t size) { buffer_.truncate(size * sizeof(T)); }

 private:
  Buffer buffer_;
};

}  // namespace telegrad
