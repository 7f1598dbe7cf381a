#include "base/buffer.hpp"

#include <array>
#include <bit>
#include <mutex>
#include <new>
#include <vector>

namespace telegrad {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr std::size_t kSmallest = 256;
constexpr std::size_t kKeptBytesMost = std::size_t{512} << 20;  // past this, memory goes back to the system

// Free lists by power of two. Never destroyed: buffers may outlive static destructors.
class Pool {
 public:
  std::byte* take(std::size_t capacity) {
    {
      const std::scoped_lock lock(mutex_);
      auto& list = free_[class_of(capacity)];
      if (!list.empty()) {
        std::byte* block = list.back();
        list.pop_back();
        kept_bytes_ -= capacity;
        return block;
      }
    }
    return static_cast<std::byte*>(::operator new(capacity, kAlignment));
  }

  void give_back(std::byte* block, std::size_t capacity) {
    {
      const std::scoped_lock lock(mutex_);
      if (kept_bytes_ + capacity <= kKeptBytesMost) {
        free_[class_of(capacity)].push_back(block);
        kept_bytes_ += capacity;
        return;
      }
    }
    ::operator delete(block, kAlignment);
  }

 private:
  static std::size_t class_of(std::size_t capacity) { return static_cast<std::size_t>(std::countr_zero(capacity)); }

  std::mutex mutex_;
  std::array<std::vector<std::byte*>, 64> free_;
  std::size_t kept_bytes_ = 0;
};

Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

Buffer::Buffer(std::size_t size) : size_(size) {
  if (size == 0) return;
  capacity_ = std::bit_ceil(size < kSmallest ? kSmallest : size);
  data_ = pool().take(capacity_);
}

Buffer::~Buffer() {
  if (data_ != nullptr) pool().give_back(data_, capacity_);
}

}  // namespace telegrad
