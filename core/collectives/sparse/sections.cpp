#include "collectives/sparse/sections.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "collectives/sparse/messages.hpp"
#include "collectives/support/any_size.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kSectionedBytesLeast = std::size_t{32} << 10;
constexpr Step kSections = 2;  // each of which may end in a piece that is not full

// Sends or receives of one section, in pieces between which others have their turn.
template <class Message, class Span>
void begin_pieces(std::deque<Message>& messages, Transport& net, Rank peer, Step& step, Span section) {
  while (!section.empty()) {
    const std::size_t taken = std::min(section.size(), longest_piece(net));
    messages.emplace_back(net, peer, step++, section.first(taken));
    section = section.subspan(taken);
  }
}

Task<void> receive_pieces(Transport& net, Rank from, Step step, Bytes indices, Bytes values) {
  std::deque<Transport::Receiving> receives;
  begin_pieces(receives, net, from, step, indices);
  begin_pieces(receives, net, from, step, values);
  for (auto& one : receives) co_await one;
}

}  // namespace

template <class V>
bool goes_in_sections(const Transport& net, const SparseView<V>& view, const WireFormat& format) {
  const bool plain = format.values == ValueEncoding::native && !format.packs_values &&
                     (format.indices == IndexFormat::none || format.indices == IndexFormat::raw32);
  return net.shares_memory() && plain && bytes_of(view) >= kSectionedBytesLeast;
}

Step vector_steps(const Transport& net, std::size_t most_bytes) {
  return any_size_steps(net, most_bytes) + (net.shares_memory() ? kSections : 0);
}

template <class V>
Task<void> send_in_sections(Transport& net, Rank to, Step first_step, SparseView<V> view) {
  const VectorHeader header = plain_header(view);
  Step step = first_step;
  std::deque<Transport::Sending> sends;
  sends.emplace_back(net, to, step++, std::as_bytes(std::span(&header, 1)));
  begin_pieces(sends, net, to, step, std::as_bytes(view.indices));
  begin_pieces(sends, net, to, step, std::as_bytes(view.values));
  for (auto& one : sends) co_await one;
}

bool begins_sections(ConstBytes first) { return first.size() == sizeof(VectorHeader) && claimed_header(first).nnz > 0; }

template <class V>
Task<void> receive_sections(Transport& net, Rank from, Step first_step, ConstBytes first, IndexRange range,
                            std::span<std::uint32_t> indices, std::span<V> values, const char* content) {
  std::string error = section_header_error(first, dtype_of<V>, range);
  const VectorHeader header = claimed_header(first);
  const bool dense = header.kind == VectorKind::dense;
  if (error.empty() && (header.nnz != values.size() || indices.size() != (dense ? 0 : values.size()))) {
    error = "it does not hold the " + std::to_string(values.size()) + " entries that were announced";
  }
  if (!error.empty()) co_await fail_damaged(net, from, content, error);
  co_await receive_pieces(net, from, first_step + 1, std::as_writable_bytes(indices), std::as_writable_bytes(values));
  co_await decide(net, indices.size_bytes(), [&] { error = indices_error(range, indices); });
  if (!error.empty()) co_await fail_damaged(net, from, content, error);
}

Task<Buffer> receive_rest_of_vector(Transport& net, Rank from, Step first_step, Buffer first, ExpectedVector expected) {
  if (has_several_pieces(net, first.size())) {
    co_return co_await receive_rest(net, from, first_step, std::move(first), expected.most_bytes);
  }
  if (!net.shares_memory() || !begins_sections(first.bytes())) co_return first;
  // Whoever reads the message says what is wrong with it; here no room is made for what cannot be.
  if (!section_header_error(first.bytes(), expected.dtype, expected.range).empty()) co_return first;
  const VectorHeader header = claimed_header(first.bytes());
  Buffer whole(encoded_size(header));
  const MessageSections sections = sections_of(header, whole.bytes());
  co_await receive_pieces(net, from, first_step + 1, sections.indices, sections.values);
  co_return whole;
}

Task<Buffer> receive_vector(Transport& net, Rank from, Step first_step, ExpectedVector expected) {
  Buffer first = co_await net.receive_any_size(from, first_step, first_piece_bytes(net, expected.most_bytes));
  co_return co_await receive_rest_of_vector(net, from, first_step, std::move(first), expected);
}

#define TELEGRAD_INSTANTIATE(V)                                                                            \
  template bool goes_in_sections(const Transport&, const SparseView<V>&, const WireFormat&);              \
  template Task<void> send_in_sections(Transport&, Rank, Step, SparseView<V>);                             \
  template Task<void> receive_sections(Transport&, Rank, Step, ConstBytes, IndexRange, std::span<std::uint32_t>, \
                                       std::span<V>, const char*);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
