#include "drivers/processes/memory_file.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
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
