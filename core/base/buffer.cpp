#include "base/buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <new>
#include <vector>

namespace telegrad {
namespace {

constexpr std::size_t kSmallest = 64;
constexpr std::size_t kKeptBytesMost = std::size_t{512} << 20;  // past this, memory goes back to the system

// Blocks up to here are cut from slabs and stay: allocated one by one, an aligned block of 64 bytes would take twice
// that, and there may be millions.
constexpr std::size_t kCutMost = 1024;
constexpr std::size_t kSlabBytes = std::size_t{64} << 10;

// Blocks from here to half a huge page are cut from huge pages too, of an arena of their own, as long as that lasts.
constexpr std::size_t kArenaBlockLeast = std::size_t{16} << 10;
constexpr std::size_t kArenaBytes = std::size_t{64} << 20;

constexpr bool kOneByOne = TELEGRAD_SANITIZED;  // so that a sanitizer knows each buffer's bounds and life

// Long blocks ask for huge pages: the kernel copies between processes page by page.
constexpr std::size_t kHugePage = std::size_t{2} << 20;

constexpr std::align_val_t alignment_of(std::size_t bytes) {
  return std::align_val_t{bytes >= kHugePage ? kHugePage : std::size_t{64}};
}

std::byte* allocate(std::size_t bytes) {
  void* const block = ::operator new(bytes, alignment_of(bytes));
  if (bytes >= kHugePage) ::madvise(block, bytes, MADV_HUGEPAGE);  // a kernel without them has its reasons
  return static_cast<std::byte*>(block);
}

void release(std::byte* block, std::size_t bytes) { ::operator delete(block, alignment_of(bytes)); }

// Free lists by power of two. Never destroyed: buffers may outlive static destructors.
class Pool {
 public:
  std::byte* take(std::size_t capacity) {
    {
      const std::scoped_lock lock(mutex_);
      auto& list = free_[class_of(capacity)];
      if (list.empty() && capacity <= kCutMost) cut(list, allocate(kSlabBytes), kSlabBytes, capacity);
      if (list.empty() && capacity >= kArenaBlockLeast && capacity < kHugePage) cut_huge_page(list, capacity);
      if (!list.empty()) {
        std::byte* block = list.back();
        list.pop_back();
        if (!stays(block, capacity)) kept_bytes_ -= capacity;
        return block;
      }
    }
    return allocate(capacity);
  }

  void give_back(std::byte* block, std::size_t capacity) {
    {
      const std::scoped_lock lock(mutex_);
      auto& list = free_[class_of(capacity)];
      if (stays(block, capacity)) {
        list.push_back(block);
        return;
      }
      if (kept_bytes_ + capacity <= kKeptBytesMost) {
        list.push_back(block);
        kept_bytes_ += capacity;
        return;
      }
    }
    release(block, capacity);
  }

 private:
  static std::size_t class_of(std::size_t capacity) { return static_cast<std::size_t>(std::countr_zero(capacity)); }

  static void cut(std::vector<std::byte*>& list, std::byte* slab, std::size_t bytes, std::size_t capacity) {
    list.reserve(list.size() + bytes / capacity);
    for (std::size_t end = bytes; end > 0; end -= capacity) list.push_back(slab + end - capacity);
  }

  void cut_huge_page(std::vector<std::byte*>& list, std::size_t capacity) {
    if (arena_ == nullptr) arena_ = allocate(kArenaBytes);  // touched, and so taken, page by page
    if (arena_used_ == kArenaBytes) return;
    cut(list, arena_ + arena_used_, kHugePage, capacity);
    arena_used_ += kHugePage;
  }

  bool stays(const std::byte* block, std::size_t capacity) const {
    return capacity <= kCutMost || (arena_ != nullptr && arena_ <= block && block < arena_ + kArenaBytes);
  }

  std::mutex mutex_;
  std::array<std::vector<std::byte*>, 64> free_;
  std::size_t kept_bytes_ = 0;
  std::byte* arena_ = nullptr;
  std::size_t arena_used_ = 0;
};

Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

thread_local constinit bool SizeOnly::active_ = false;

Buffer::Buffer(std::size_t size) : size_(size) {
  if (size == 0) return;
  const std::size_t real = SizeOnly::there(size);
  capacity_ = kOneByOne ? real : std::bit_ceil(std::max(real, kSmallest));
  data_ = kOneByOne ? allocate(capacity_) : pool().take(capacity_);
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (kOneByOne) {
    release(data_, capacity_);
  } else {
    pool().give_back(data_, capacity_);
  }
}

}  // namespace telegrad
