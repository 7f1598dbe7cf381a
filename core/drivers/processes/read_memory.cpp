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
  for (std::uintptr_t block = begin / kBlockBytes; block * kBlockBytes < end; ++block) {
    const std::uint64_t here = std::min(end, (block + 1) * kBlockBytes) - std::max(begin, block * kBlockBytes);
    if (bytes_until_.size() == kBlocksMost && !bytes_until_.contains(block)) bytes_until_.clear();
    std::uint64_t& until = bytes_until_.try_emplace(block, kReadBefore * kBlockBytes).first->second;
    if (until > here) {
      until -= here;
    } else {
      settle(block, until);
    }
  }
}

void ReadMemory::settle(std::uintptr_t block, std::uint64_t& until) {
  until = kReadAgain * kBlockBytes;
  const int caller_errno = errno;
  const bool failed = ::madvise(reinterpret_cast<void*>(block * kBlockBytes), kBlockBytes, MADV_COLLAPSE) != 0;
  // Memory that is none of these, at an array's ends for instance, says nothing of others.
  const bool found_none = failed && errno != EINVAL;
  errno = caller_errno;
  failures_ = found_none ? failures_ + 1 : 0;
  if (failures_ == kFailuresMost) enabled_ = false;
}

}  // namespace telegrad
