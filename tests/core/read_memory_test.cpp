#include "drivers/processes/read_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>

#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr std::size_t kBlock = ReadMemory::kBlockBytes;

// Anonymous memory in small pages, all of it there, that begins and ends at huge pages' borders, and other memory beside it.
class Memory {
 public:
  explicit Memory(std::size_t blocks) : size_((blocks + 3) * kBlock) {
    mapped_ = static_cast<std::byte*>(::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(mapped_ != MAP_FAILED);
    const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
    begin_ = mapped_ + (kBlock - address % kBlock) % kBlock + kBlock;
    ::madvise(mapped_, size_, MADV_NOHUGEPAGE);  // also where all memory has huge pages
    for (std::size_t i = 0; i < blocks * kBlock; ++i) begin_[i] = static_cast<std::byte>(i * 7 >> 3);
    ::madvise(mapped_, size_, MADV_HUGEPAGE);  // it may have them now, but nobody gives them at once
    blocks_ = blocks;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { ::munmap(mapped_, size_); }

  Bytes bytes() const { return {begin_, blocks_ * kBlock}; }
  bool unchanged() const {
    for (std::size_t i = 0; i < blocks_ * kBlock; ++i) {
      if (begin_[i] != static_cast<std::byte>(i * 7 >> 3)) return false;
    }
    return true;
  }
 private:
  std::size_t size_;
  std::size_t blocks_ = 0;
  std::byte* mapped_ = nullptr;
  std::byte* begin_ = nullptr;
};

// Of the whole process, in huge pages.
std::size_t huge_blocks() {
  std::ifstream smaps("/proc/self/smaps_rollup");
  std::string line;
  unsigned long kib = 0;
  while (std::getline(smaps, line)) {
    if (std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) return kib * 1024 / kBlock;
  }
  return 0;
}

bool kernel_collapses() {
  const Memory memory(1);
  const std::size_t before = huge_blocks();
  return ::madvise(memory.bytes().data(), kBlock, 25) == 0 && huge_blocks() == before + 1;
}

void leave(ReadMemory& read, ConstBytes bytes, std::size_t at_once) {
  for (std::size_t begin = 0; begin < bytes.size(); begin += at_once) {
    read.leaves(bytes.subspan(begin, std::min(at_once, bytes.size() - begin)));
  }
}

TEST("what is read for the third time lies in huge pages, with what it holds; what is read twice stays as it is") {
  const bool collapses = kernel_collapses();
  if (!collapses) std::printf("          this kernel has no huge pages to give: only what memory holds is looked at\n");
  for (const std::size_t at_once : {std::size_t{200'000}, kBlock, 5 * kBlock}) {
    const Memory memory(4);
    const std::size_t before = huge_blocks();
    ReadMemory read(true);
    for (std::uint64_t time = 1; time <= ReadMemory::kReadBefore; ++time) {
      if (collapses) EXPECT_EQ(huge_blocks(), before);
      leave(read, memory.bytes(), at_once);
    }
    if (collapses) EXPECT_EQ(huge_blocks(), before + 4);
    EXPECT(memory.unchanged());
  }
}

TEST("memory that cannot be moved is left alone, errno too, and what is not wanted is not done") {
  const Memory memory(3);
  ::mprotect(memory.bytes().data() + kBlock, kBlock, PROT_NONE);  // nobody's, within a range that is read
  ReadMemory read(true);
  ReadMemory unwanted(false);
  errno = ENOSPC;
  for (int time = 0; time < 20; ++time) {
    leave(read, memory.bytes().subspan(100, 2 * kBlock + 100), kBlock);
    leave(read, ConstBytes(static_cast<const std::byte*>(nullptr), std::size_t{0}), kBlock);
  }
  EXPECT_EQ(errno, ENOSPC);
  ::mprotect(memory.bytes().data() + kBlock, kBlock, PROT_READ | PROT_WRITE);
  EXPECT(memory.unchanged());
  const Memory other(2);
  const std::size_t before = huge_blocks();
  for (int time = 0; time < 20; ++time) leave(unwanted, other.bytes(), kBlock);
  EXPECT_EQ(huge_blocks(), before);
}

}  // namespace
