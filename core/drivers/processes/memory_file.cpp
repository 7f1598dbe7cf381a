#include "drivers/processes/memory_file.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

namespace telegrad {

std::vector<MemoryFile> memory_files() {
  std::vector<MemoryFile> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    if (std::filesystem::read_symlink(entry, none).string().find("/ucx_shm_posix_") == std::string::npos) continue;
    struct stat file {};
    if (::stat(entry.path().c_str(), &file) != 0) continue;
    found.push_back({file.st_dev, file.st_ino, std::strtoull(entry.path().filename().c_str(), nullptr, 10)});
  }
  return found;
}

void put_pages_away(std::vector<MemoryFile> files) {
  const auto place = [](const MemoryFile& file) { return std::pair(file.device, file.inode); };
  std::ranges::sort(files, {}, place);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/ucx_shm_posix_") == std::string::npos) continue;
    std::uintptr_t begin = 0, end = 0;
    unsigned major = 0, minor = 0;
    std::uint64_t inode = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %*s %*s %x:%x %" SCNu64, &begin, &end, &major, &minor, &inode) != 5) {
      continue;
    }
    const bool is_one = std::ranges::binary_search(files, std::pair<std::uint64_t, std::uint64_t>(makedev(major, minor), inode), {}, place);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the kernel says where
    if (is_one) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
}

bool MemoryFile::is_held_by(std::uint32_t pid) const {
  struct stat file {};
  if (::stat(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor)).c_str(), &file) != 0) return errno != ENOENT;
  return file.st_dev == device && file.st_ino == inode;
}

}  // namespace telegrad
