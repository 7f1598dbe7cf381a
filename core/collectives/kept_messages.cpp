#include "collectives/kept_messages.hpp"

#include <algorithm>
#include <cstring>

namespace telegrad {
namespace {

constexpr std::size_t kCopiedMost = 512;
constexpr std::size_t kLeastBlockBytes = std::size_t{1} << 10;
constexpr std::size_t kMostBlockBytes = std::size_t{32} << 10;

}  // namespace

std::byte* KeptMessages::take(std::size_t bytes) {
  if (blocks_.empty() || blocks_.back().size - blocks_.back().used < bytes) {
    const std::size_t size = blocks_.empty() ? kLeastBlockBytes : std::min(2 * blocks_.back().size, kMostBlockBytes);
    blocks_.push_back({std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(::operator new(size, kAlignment))),
                       size});
  }
  Block& block = blocks_.back();
  std::byte* const taken = block.memory.get() + block.used;
  block.used += bytes;
  return taken;
}

ConstBytes KeptMessages::add(Rank source, Buffer message) {
  const std::size_t there = SizeOnly::there(message.size());
  const std::size_t copied = there <= kCopiedMost ? there : 0;
  const std::size_t step = sizeof(Record) + (copied + 7) / 8 * 8;
  std::byte* const place = take(step);
  ConstBytes bytes = message.bytes();
  if (copied > 0) {
    std::memcpy(place + sizeof(Record), bytes.data(), copied);
    bytes = {place + sizeof(Record), bytes.size()};
  } else if (!bytes.empty()) {
    large_.push_back(std::move(message));
  }
  new (place) Record{bytes, source, static_cast<std::uint32_t>(step)};
  return bytes;
}

std::vector<ConstBytes> KeptMessages::by_source(Rank size, ConstBytes missing) const {
  std::vector<ConstBytes> messages(size, missing);
  for (const Block& block : blocks_) {
    for (std::size_t at = 0; at < block.used;) {
      const auto* const record = std::launder(reinterpret_cast<const Record*>(block.memory.get() + at));
      messages[record->source] = record->bytes;
      at += record->step;
    }
  }
  return messages;
}

}  // namespace telegrad
