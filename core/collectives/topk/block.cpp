#include "collectives/topk/block.hpp"

#include <algorithm>
#include <functional>

#include "base/check.hpp"

namespace telegrad {
namespace {

template <class T>
void write_section(Bytes block, std::size_t begin, std::size_t end, std::span<const T> elements) {
  TELEGRAD_CHECK(begin + elements.size_bytes() <= end);
  if (!elements.empty()) std::memcpy(block.data() + begin, elements.data(), elements.size_bytes());
  std::memset(block.data() + begin + elements.size_bytes(), 0, end - begin - elements.size_bytes());
}

}  // namespace

template <class V>
void write_block(const BlockShape<V>& shape, const SparseView<V>& entries, Bytes block) {
  TELEGRAD_CHECK(block.size() == shape.bytes() && !entries.dense && entries.nnz() <= shape.capacity);
  const std::uint64_t count = entries.nnz();
  std::memcpy(block.data(), &count, sizeof count);
  write_section(block, shape.values_at(), shape.indices_at(), entries.values);
  write_section(block, shape.indices_at(), shape.bytes(), entries.indices);
}

template <class V>
std::string read_block(const BlockShape<V>& shape, ConstBytes block, IndexRange range, SparseView<V>& into) {
  TELEGRAD_CHECK(block.size() == shape.bytes());
  std::uint64_t count = 0;
  std::memcpy(&count, block.data(), sizeof count);
  if (count > shape.capacity) {
    return "a block for " + std::to_string(shape.capacity) + " entries says that it has " + std::to_string(count);
  }
  const auto held = static_cast<std::size_t>(count);
  const std::span indices(reinterpret_cast<const std::uint32_t*>(block.data() + shape.indices_at()), held);
  if (std::ranges::adjacent_find(indices, std::greater_equal<>()) != indices.end()) {
    return "the indices of a block do not ascend";
  }
  if (held > 0 && (indices.front() < range.begin || indices.back() >= range.end)) {
    return "a block of the indices from " + std::to_string(range.begin) + " below " + std::to_string(range.end) +
           " has some from " + std::to_string(indices.front()) + " to " + std::to_string(indices.back());
  }
  into = {range, false, indices, {reinterpret_cast<const V*>(block.data() + shape.values_at()), held}};
  return {};
}

#define TELEGRAD_INSTANTIATE(V)                                                    \
  template void write_block(const BlockShape<V>&, const SparseView<V>&, Bytes);    \
  template std::string read_block(const BlockShape<V>&, ConstBytes, IndexRange, SparseView<V>&);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
