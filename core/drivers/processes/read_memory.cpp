#include "drivers/processes/read_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it
#endif

namespace telegrad {
namespace {

constexpr std::size_t kBlocksMost = std::size_t{1} << 16;  // are remembered: 128 GiB
constexpr std::uint64_t kReadAgain = 1000;  // times: it may have been given back and taken anew, in small pages
constexpr unsigned kFailuresMost = 8;       // the system has no huge pages left, and looking for them takes time

}  // namespace

void ReadMemory::leaves(ConstBytes bytes) {
  if (!enabled_ || bytes.empty()) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t end = begin + bytes.size();
  for (std::uintptr_t number = begin / kBlockBytes; number * kBlockBytes < end; ++number) {
    const std::uint64_t here = std::min(end, (number + 1) * kBlockBytes) - std::max(begin, number * kBlockBytes);
    if (blocks_.size() == kBlocksMost && !blocks_.contains(number)) blocks_.clear();
    Block& block = blocks_[number];
    if (block.bytes_left > here) {
      block.bytes_left -= here;
    } else {
      settle(number, block);
    }
  }
}

void ReadMemory::settle(std::uintptr_t number, Block& block) {
  const int caller_errno = errno;
  const bool done = ::madvise(reinterpret_cast<void*>(number * kBlockBytes), kBlockBytes, MADV_COLLAPSE) == 0;
  const int error = done ? 0 : errno;
  errno = caller_errno;
  // Busy: somebody reads it just now, or has it pinned for good.
  block.bytes_left = (error == EAGAIN ? block.retry : kReadAgain) * kBlockBytes;
  if (error == EAGAIN) block.retry = std::min(2 * block.retry, kReadAgain);
  failures_ = error == ENOMEM || error == EBUSY ? failures_ + 1 : 0;  // no page, or no room in the control group
  if (failures_ == kFailuresMost) enabled_ = false;
}

}  // namespace telegrad
