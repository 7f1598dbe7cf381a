#include "drivers/processes/huge_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <string>

#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr std::size_t kBlock = HugePages::kBlockBytes;

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
  static const bool collapses = [] {
    const Memory memory(1);
    const std::size_t before = huge_blocks();
    for (int time = 0; time < 5; ++time) {  // it may be busy
      if (::madvise(memory.bytes().data(), kBlock, 25) == 0) return huge_blocks() == before + 1;
    }
    return false;
  }();
  return collapses;
}

void leave(HugePages& read, ConstBytes bytes, std::size_t at_once) {
  for (std::size_t begin = 0; begin < bytes.size(); begin += at_once) {
    read.will_be_read(bytes.subspan(begin, std::min(at_once, bytes.size() - begin)));
  }
}

TEST("what is read for the third time or soon after lies in huge pages, with what it holds; what is read twice stays as it is") {
  const bool collapses = kernel_collapses();
  if (!collapses) std::printf("          this kernel has no huge pages to give: only what memory holds is looked at\n");
  for (const std::size_t at_once : {std::size_t{200'000}, kBlock, 5 * kBlock}) {
    const Memory memory(4);
    const std::size_t before = huge_blocks();
    HugePages read(true);
    for (std::uint64_t time = 1; time <= HugePages::kReadBefore; ++time) {
      if (collapses) EXPECT_EQ(huge_blocks(), before);
      leave(read, memory.bytes(), at_once);
    }
    for (int time = 0; time < 20; ++time) leave(read, memory.bytes(), at_once);  // what was busy is tried again
    if (collapses) EXPECT_EQ(huge_blocks(), before + 4);
    EXPECT(memory.unchanged());
  }
}

TEST("what lies beside an array is not moved, also where both share a block") {
  const Memory memory(3);
  const std::size_t before = huge_blocks();
  HugePages read(true);
  for (int time = 0; time < 20; ++time) leave(read, memory.bytes().subspan(100, 2 * kBlock), kBlock);
  EXPECT_EQ(huge_blocks(), before + (kernel_collapses() ? 1 : 0));
  EXPECT(memory.unchanged());
}

TEST("one message moves a few blocks at most, the next ones the others") {
  if (!kernel_collapses()) return;
  constexpr std::size_t kBlocks = 2 * HugePages::kAtOnce + 3;
  const Memory memory(kBlocks);
  const std::size_t before = huge_blocks();
  HugePages read(true);
  for (std::uint64_t time = 1; time < HugePages::kReadBefore; ++time) read.will_be_read(memory.bytes());
  EXPECT_EQ(huge_blocks(), before);
  for (std::size_t moved = HugePages::kAtOnce; moved < kBlocks + HugePages::kAtOnce; moved += HugePages::kAtOnce) {
    read.will_be_read(memory.bytes());
    EXPECT(huge_blocks() <= before + std::min(moved, kBlocks));
  }
  for (int time = 0; time < 20; ++time) read.will_be_read(memory.bytes());  // what was busy is tried again
  EXPECT_EQ(huge_blocks(), before + kBlocks);
  EXPECT(memory.unchanged());
}

TEST("blocks that are pinned are tried again, and moved once they are free") {
  if (!kernel_collapses()) return;
  const Memory memory(1);
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  iovec page{memory.bytes().data() + 4096, 4096};
  EXPECT_EQ(::vmsplice(ends[1], &page, 1, 0), ssize_t{4096});
  const std::size_t before = huge_blocks();
  HugePages read(true);
  for (int time = 0; time < 20; ++time) read.will_be_read(memory.bytes());
  EXPECT_EQ(huge_blocks(), before);
  ::close(ends[0]);
  ::close(ends[1]);
  for (int time = 0; time < 20; ++time) read.will_be_read(memory.bytes());
  EXPECT_EQ(huge_blocks(), before + 1);
  EXPECT(memory.unchanged());
}

TEST("memory that is not there is left alone, errno too, and after some such nothing is moved any more") {
  errno = ENOSPC;
  for (const unsigned failures : {HugePages::kFailuresMost - 1, HugePages::kFailuresMost}) {
    HugePages read(true);
    Bytes gone;
    {
      const Memory memory(2 * HugePages::kFailuresMost);
      gone = memory.bytes();
    }
    for (unsigned failure = 0; failure < failures; ++failure) {
      for (std::uint64_t time = 0; time < HugePages::kReadBefore; ++time) {
        read.will_be_read(gone.subspan(2 * failure * kBlock, kBlock));
      }
    }
    EXPECT_EQ(errno, ENOSPC);
    const Memory memory(2);
    const std::size_t before = huge_blocks();
    for (int time = 0; time < 20; ++time) read.will_be_read(memory.bytes());
    const bool moves = failures < HugePages::kFailuresMost && kernel_collapses();
    EXPECT_EQ(huge_blocks(), before + (moves ? 2 : 0));
  }
}

TEST("what may have no huge pages is left alone and says nothing of others; what is not wanted is not done") {
  const Memory memory(2);
  ::madvise(memory.bytes().data(), memory.bytes().size(), MADV_NOHUGEPAGE);
  const Memory other(2);
  const std::size_t before = huge_blocks();
  HugePages unwanted(false);
  for (int time = 0; time < 20; ++time) unwanted.will_be_read(other.bytes());
  HugePages read(true);
  for (int time = 0; time < 20; ++time) {
    for (std::size_t begin = 0; begin < memory.bytes().size(); begin += kBlock) read.will_be_read(memory.bytes().subspan(begin, kBlock));
  }
  EXPECT_EQ(huge_blocks(), before);
  for (int time = 0; time < 20; ++time) read.will_be_read(other.bytes());
  EXPECT_EQ(huge_blocks(), before + (kernel_collapses() ? 2 : 0));
}

}  // namespace
