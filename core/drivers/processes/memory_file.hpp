#pragma once
// Files of shared memory that ranks of one host open by another process's number of them.

#include <cstdint>
#include <vector>

namespace telegrad {

/// A file of shared memory, as its process's number of an open file names it to UCX. Numbers are used again: a peer that
/// connects later must see that it is the same file, or it would write into another one.
struct MemoryFile {
  std::uint64_t device, inode, descriptor;

  bool operator==(const MemoryFile&) const = default;
  /// False: that process has closed it.
  bool is_held_by(std::uint32_t pid) const;
};
/// UCX's, in this process.
std::vector<MemoryFile> memory_files();
/// Takes the pages of these files out of this process's memory, though not the mappings: they come back as they are
/// touched. To read one page of a file in memory maps 16 of them.
void put_pages_away(std::vector<MemoryFile> files);

}  // namespace telegrad
