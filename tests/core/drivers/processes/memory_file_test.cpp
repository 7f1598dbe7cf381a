#include "drivers/processes/memory_file.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "testing.hpp"

using namespace telegrad;

TEST("a file of shared memory is known from another that has its number later") {
  char path[] = "/dev/shm/ucx_shm_posix_XXXXXX";
  const int descriptor = ::mkstemp(path);
  REQUIRE(descriptor >= 0);
  ::unlink(path);
  const std::vector<MemoryFile> found = memory_files();
  const auto own = std::ranges::find(found, static_cast<std::uint64_t>(descriptor), &MemoryFile::descriptor);
  REQUIRE(own != found.end());
  const auto pid = static_cast<std::uint32_t>(::getpid());
  EXPECT(own->is_held_by(pid));
  ::close(descriptor);
  EXPECT(!own->is_held_by(pid));
  char other[] = "/dev/shm/ucx_shm_posix_XXXXXX";
  const int later = ::mkstemp(other);
  EXPECT_EQ(later, descriptor);
  EXPECT(!own->is_held_by(pid));
  ::close(later);
  ::unlink(other);
  EXPECT(std::ranges::none_of(memory_files(), [&](const MemoryFile& one) { return one == *own; }));
}

TEST("pages that are put away take no memory of this process, and come back as they were") {
  char path[] = "/dev/shm/ucx_shm_posix_XXXXXX";
  const int descriptor = ::mkstemp(path);
  REQUIRE(descriptor >= 0);
  ::unlink(path);
  constexpr std::size_t kBytes = std::size_t{256} << 10;
  REQUIRE(::ftruncate(descriptor, kBytes) == 0);
  void* const mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  REQUIRE(mapped != MAP_FAILED);
  std::memset(mapped, 7, kBytes);
  const auto resident_kib = [&] {
    std::ifstream maps("/proc/self/smaps");
    bool here = false;
    for (std::string line; std::getline(maps, line);) {
      if (line.find(path) != std::string::npos) here = true;
      if (here && line.starts_with("Rss:")) return std::atol(line.c_str() + 4);
    }
    return -1L;
  };
  const std::vector<MemoryFile> files = memory_files();
  const auto own = std::ranges::find(files, static_cast<std::uint64_t>(descriptor), &MemoryFile::descriptor);
  REQUIRE(own != files.end());
  MemoryFile other = *own;
  other.inode += 1;
  EXPECT_EQ(resident_kib(), 256);
  put_pages_away({other});
  EXPECT_EQ(resident_kib(), 256);
  put_pages_away({other, *own});
  EXPECT_EQ(resident_kib(), 0);
  const char* const bytes = static_cast<const char*>(mapped);
  EXPECT(std::all_of(bytes, bytes + kBytes, [](char one) { return one == 7; }));
  ::munmap(mapped, kBytes);
  ::close(descriptor);
}
