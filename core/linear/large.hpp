#pragma once
// Arrays with an element for each feature, read and written at random: in huge pages where the kernel has them, as most
// of the time would else go to finding pages.

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace telegrad::linear {

template <class T>
struct HugePages {
  using value_type = T;

  HugePages() = default;
  template <class Other>
  explicit HugePages(const HugePages<Other>&) {}

  T* allocate(std::size_t count) {
    if (count > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
    const std::size_t bytes = (count * sizeof(T) + kPage - 1) / kPage * kPage;
    const bool small = bytes == kPage;
    void* const block = small ? std::malloc(count * sizeof(T)) : std::aligned_alloc(kPage, bytes);
    if (block == nullptr) throw std::bad_alloc();
    if (!small) ::madvise(block, bytes, MADV_HUGEPAGE);  // a kernel without them has its reasons
    return static_cast<T*>(block);
  }
  void deallocate(T* block, std::size_t) { std::free(block); }

  template <class Other>
  bool operator==(const HugePages<Other>&) const {
    return true;
  }

 private:
  static constexpr std::size_t kPage = std::size_t{2} << 20;
};

template <class T>
using LargeVector = std::vector<T, HugePages<T>>;

}  // namespace telegrad::linear
