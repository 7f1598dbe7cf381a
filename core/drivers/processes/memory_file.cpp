#include "drivers/processes/memory_file.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

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

bool MemoryFile::is_held_by(std::uint32_t pid) const {
  struct stat file {};
  if (::stat(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor)).c_str(), &file) != 0) return errno != ENOENT;
  return file.st_dev == device && file.st_ino == inode;
}

}  // namespace telegrad
