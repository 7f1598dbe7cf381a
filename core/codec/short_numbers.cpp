#include "codec/short_numbers.hpp"

#include "base/check.hpp"
#include "codec/varint.hpp"

namespace telegrad {
namespace {

// A count is its varint plus one. Zero says that more zeros follow than these.
constexpr std::uint64_t kZerosLeast = 3;
constexpr std::uint64_t kCountsEnd = std::uint64_t{1} << 56;

}  // namespace

std::size_t most_count_bytes(std::size_t counts) { return (counts + 1) * kVarintBytesMost; }
std::size_t most_key_bytes(std::size_t keys) { return (keys + 1) * kVarintBytesMost; }

Buffer encode_counts(std::span<const std::uint64_t> counts) {
  Buffer message(most_count_bytes(counts.size()));
  std::byte* at = message.data();
  for (std::size_t i = 0; i < counts.size();) {
    std::size_t end = i;
    while (end < counts.size() && counts[end] == 0) ++end;
    if (end - i >= kZerosLeast) {
      at = put_varint(at, 0);
      at = put_varint(at, end - i - kZerosLeast);
      i = end;
      continue;
    }
    TELEGRAD_CHECK(counts[i] < kCountsEnd);
    at = put_varint(at, counts[i++] + 1);
  }
  message.truncate(static_cast<std::size_t>(at - message.data()));
  return message;
}

bool decode_counts(ConstBytes bytes, std::span<std::uint64_t> counts) {
  for (std::size_t i = 0; i < counts.size();) {
    std::uint64_t number = 0;
    if (!take_varint(bytes, number) || number > kCountsEnd) return false;
    if (number > 0) {
      counts[i++] = number - 1;
      continue;
    }
    std::uint64_t more = 0;
    if (!take_varint(bytes, more) || more > counts.size() || more + kZerosLeast > counts.size() - i) return false;
    for (std::uint64_t zeros = more + kZerosLeast; zeros > 0; --zeros) counts[i++] = 0;
  }
  return bytes.empty();
}

Buffer encode_keys(std::span<const std::uint64_t> keys) {
  Buffer message(most_key_bytes(keys.size()));
  std::byte* at = message.data();
  std::uint64_t last = 0;
  for (const std::uint64_t key : keys) {
    TELEGRAD_CHECK(key >= last);
    at = put_varint(at, key - last);
    last = key;
  }
  message.truncate(static_cast<std::size_t>(at - message.data()));
  return message;
}

bool decode_keys(ConstBytes bytes, std::size_t most, std::vector<std::uint64_t>& keys) {
  std::uint64_t last = 0;
  for (std::size_t count = 0; !bytes.empty(); ++count) {
    std::uint64_t difference = 0;
    if (count == most || !take_varint(bytes, difference) || difference > ~last) return false;
    last += difference;
    keys.push_back(last);
  }
  return true;
}

}  // namespace telegrad
