#include "collectives/support/kept_messages.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace telegrad {
namespace {

constexpr std::size_t kCopiedMost = 512;
constexpr std::size_t kLeastBlockBytes = std::size_t{1} << 10;
constexpr std::size_t kMostBlockBytes = std::size_t{32} << 10;

}  // namespace

// A block that is full ends with a record without a message.
void KeptMessages::begin_block() {
  if (next_ != nullptr) new (next_) Record{{}, kNoRank, 0};
  block_bytes_ = block_bytes_ == 0 ? kLeastBlockBytes : std::min(2 * block_bytes_, kMostBlockBytes);
  blocks_.emplace_back(static_cast<std::byte*>(::operator new(block_bytes_, kAlignment)));
  next_ = blocks_.back().get();
  left_ = block_bytes_ - sizeof(Record);
}

std::byte* KeptMessages::take(std::size_t bytes) {
  if (left_ < bytes) begin_block();
  std::byte* const taken = std::exchange(next_, next_ + bytes);
  left_ -= bytes;
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
    for (const std::byte* place = block.get(); place != next_;) {
      const Record& record = *std::launder(reinterpret_cast<const Record*>(place));
      if (record.step == 0) break;
      messages[record.source] = record.bytes;
      place += record.step;
    }
  }
  return messages;
}

}  // namespace telegrad
