// What reads messages without a header, which Ok-Topk sends: libFuzzer's entry point, which the core's tests call too.

#include "fuzz/short_messages.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/check.hpp"
#include "codec/short_numbers.hpp"
#include "codec/short_share.hpp"

namespace telegrad::fuzz {
namespace {

template <class V>
bool read_share(ConstBytes message, IndexRange range, std::size_t wanted) {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  ShortShareReader<V> reader(message, range);
  bool is_whole = true;
  while (is_whole && !reader.rest().empty()) {
    std::uint32_t index = 0;
    V value{};
    is_whole = reader.take(index, value);
    if (!is_whole) break;
    TELEGRAD_CHECK(index < range.end && index >= (indices.empty() ? range.begin : std::uint64_t{indices.back()} + 1));
    indices.push_back(index);
    values.push_back(value);
  }
  std::vector<std::uint32_t> exact_indices(wanted);
  std::vector<V> exact_values(wanted);
  const bool is_exact = read_short<V>(message, range, exact_indices, exact_values);
  TELEGRAD_CHECK(is_exact == (is_whole && indices.size() == wanted));
  if (!is_whole) return false;
  const SparseView<V> view{range, false, indices, values};
  const Buffer again = encode_short(view);
  TELEGRAD_CHECK(again.size() <= message.size() && again.size() <= most_short_bytes<V>(indices.size()));
  std::vector<std::uint32_t> same_indices(indices.size());
  std::vector<V> same_values(values.size());
  TELEGRAD_CHECK(read_short<V>(again.bytes(), range, same_indices, same_values) && same_indices == indices);
  TELEGRAD_CHECK(values.empty() || std::memcmp(same_values.data(), values.data(), values.size() * sizeof(V)) == 0);
  return true;
}

bool read_counts(ConstBytes message, std::size_t wanted) {
  std::vector<std::uint64_t> counts(wanted);
  if (!decode_counts(message, counts)) return false;
  for (const std::uint64_t count : counts) TELEGRAD_CHECK(count < std::uint64_t{1} << 56);
  const Buffer again = encode_counts(counts);
  TELEGRAD_CHECK(again.size() <= most_count_bytes(wanted));
  std::vector<std::uint64_t> same(wanted);
  TELEGRAD_CHECK(decode_counts(again.bytes(), same) && same == counts);
  return true;
}

bool read_keys(ConstBytes message, std::size_t most) {
  std::vector<std::uint64_t> keys;
  if (!decode_keys(message, most, keys)) return false;
  TELEGRAD_CHECK(keys.size() <= most && std::ranges::is_sorted(keys));
  const Buffer again = encode_keys(keys);
  TELEGRAD_CHECK(again.size() <= message.size() && again.size() <= most_key_bytes(keys.size()));
  std::vector<std::uint64_t> same;
  TELEGRAD_CHECK(decode_keys(again.bytes(), most, same) && same == keys);
  return true;
}

}  // namespace

bool read_short_message(ConstBytes input) {
  ShortRecipe recipe;
  if (input.size() < sizeof recipe) return false;
  std::memcpy(&recipe, input.data(), sizeof recipe);
  // Memory of just that size, so that a sanitizer sees every read outside.
  const std::size_t size = input.size() - sizeof recipe;
  const auto copy = std::make_unique<std::byte[]>(size);
  if (size > 0) std::memcpy(copy.get(), input.data() + sizeof recipe, size);
  const ConstBytes message(copy.get(), size);
  if (recipe.kind % 3 == 1) return read_counts(message, recipe.count);
  if (recipe.kind % 3 == 2) return read_keys(message, recipe.count);
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{recipe.begin} + recipe.range_size, kDimensionMost);
  const IndexRange range{std::min<std::uint64_t>(recipe.begin, end), end};
  switch (recipe.dtype % 4) {
    case 1: return read_share<double>(message, range, recipe.count);
    case 2: return read_share<bf16>(message, range, recipe.count);
    case 3: return read_share<f16>(message, range, recipe.count);
    default: return read_share<float>(message, range, recipe.count);
  }
}

}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::read_short_message(std::as_bytes(std::span(data, size)));
  return 0;
}
