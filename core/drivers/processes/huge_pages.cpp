#include "drivers/processes/huge_pages.hpp"

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

}  // namespace

void HugePages::will_be_read(ConstBytes bytes) {
  if (!enabled_ || bytes.empty()) return;
  const auto first = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t last = first + bytes.size();
  bool settled = false;  // what else is due has its turn the next time
  for (std::uintptr_t number = first / kBlockBytes; number * kBlockBytes < last; ++number) {
    if (blocks_.size() == kBlocksMost && !blocks_.contains(number)) blocks_.clear();
    Block& block = blocks_[number];
    const std::uintptr_t origin = number * kBlockBytes;
    const std::size_t begin = std::max(first, origin) - origin;
    const std::size_t end = std::min(last, origin + kBlockBytes) - origin;
    block.begin = std::min(block.begin, begin);
    block.end = std::max(block.end, end);
    block.bytes_left -= std::min<std::uint64_t>(block.bytes_left, end - begin);
    if (settled || !block.is_due(0)) continue;
    settle(number);
    settled = true;
  }
}

bool HugePages::is_due(std::uintptr_t number, std::uint64_t within) const {
  const auto found = blocks_.find(number);
  return found != blocks_.end() && found->second.is_due(within);
}

// With its neighbours that would follow soon: one call takes far less time than one for each, on busy cores above all.
void HugePages::settle(std::uintptr_t number) {
  std::uintptr_t begin = number;
  std::uintptr_t end = number + 1;
  while (end - begin < kAtOnce && is_due(end, kBlockBytes)) ++end;
  while (end - begin < kAtOnce && is_due(begin - 1, kBlockBytes)) --begin;
  const int caller_errno = errno;
  const bool done =
      ::madvise(reinterpret_cast<void*>(begin * kBlockBytes), (end - begin) * kBlockBytes, MADV_COLLAPSE) == 0;
  const int error = done ? 0 : errno;
  errno = caller_errno;
  for (std::uintptr_t moved = begin; moved < end; ++moved) {
    Block& block = blocks_.at(moved);
    // Busy: somebody reads it just now, or has it pinned for good.
    block.bytes_left = (error == EAGAIN ? block.retry : kReadAgain) * kBlockBytes;
    if (error == EAGAIN) block.retry = std::min(2 * block.retry, kReadAgain);
  }
  failures_ = error == ENOMEM || error == EBUSY ? failures_ + 1 : 0;  // no page, or no room in the control group
  if (failures_ == kFailuresMost) enabled_ = false;
}

}  // namespace telegrad
