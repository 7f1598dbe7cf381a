#include "codec/pack_indices.hpp"

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "codec/elias_fano.hpp"
#include "codec/gap_code.hpp"
#include "codec/pack_plan.hpp"
#include "kernels/scan.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kPayloadMost = 8191;  // 13 bits

// Where one block's bytes are written or read with room for the kernels behind it.
struct Scratch {
  std::byte bytes[kPackedHeaderBytes + kPayloadMost + kEliasFanoSlackBytes];
};

// Which kernels run: the reference's pack the same blocks bit by bit.
struct Coders {
  decltype(elias_fano_encode)* encode;
  decltype(elias_fano_decode)* decode;
  decltype(gap_numbers)* to_numbers;
  decltype(gap_indices)* to_indices;
};
constexpr Coders kFast{elias_fano_encode, elias_fano_decode, gap_numbers, gap_indices};
constexpr Coders kReference{reference::elias_fano_encode, reference::elias_fano_decode, reference::gap_numbers,
                            reference::gap_indices};

std::uint64_t header_of(const PackedBlock& block) {
  return block.first | std::uint64_t{block.count - 1} << 32 | std::uint64_t{block.runs} << 42 |
         std::uint64_t{block.width} << 43 | std::uint64_t{block.payload_bytes} << 48;
}

PackedBlock block_of(std::uint64_t header) {
  return {.first = static_cast<std::uint32_t>(header),
          .count = static_cast<std::uint32_t>(header >> 32 & 1023U) + 1,
          .runs = (header >> 42 & 1U) != 0,
          .width = static_cast<unsigned>(header >> 43 & 31U),
          .payload_bytes = header >> 48 & kPayloadMost};
}

// The runs but the first one: how many of the block's indices, and of the numbers that are not in it, come before.
struct Runs {
  std::uint32_t present[kPackedBlockMost];
  std::uint32_t missing[kPackedBlockMost];
};

void write_runs(std::span<const std::uint32_t> indices, const PackedBlock& block, const Coders& coders,
                std::byte* out) {
  Runs runs;
  std::uint32_t breaks = 0;
  for (std::uint32_t i = 1; i < block.count; ++i) {
    runs.present[breaks] = i;
    runs.missing[breaks] = indices[i] - block.first - i;
    breaks += indices[i] - indices[i - 1] != 1 ? 1U : 0U;
  }
  const RunSections sections(block.count, breaks, block.width);
  const auto number = static_cast<std::uint16_t>(breaks);
  std::memcpy(out, &number, sizeof number);
  std::byte* const missing_lows = out + RunSections::kCountBytes;
  std::byte* const present_lows = missing_lows + sections.missing_low_bytes;
  std::byte* const present_highs = present_lows + sections.present_low_bytes;
  std::byte* const missing_highs = out + sections.missing_highs();
  // Kernels overwrite what is behind a section: so the earlier sequence's high section is put in its place at last.
  coders.encode({runs.missing, breaks}, 0, block.width, missing_lows, missing_highs,
                block.payload_bytes - sections.missing_highs());
  Scratch present;
  coders.encode({runs.present, breaks}, 0, sections.present_width, present.bytes,
                present.bytes + sections.present_low_bytes, sections.present_high_bytes);
  std::memcpy(present_lows, present.bytes, sections.present_low_bytes);
  std::memcpy(present_highs, present.bytes + sections.present_low_bytes, sections.present_high_bytes);
}

// Writes block.bytes() bytes and may overwrite kEliasFanoSlackBytes behind them.
void write_block(std::span<const std::uint32_t> indices, const PackedBlock& block, const Coders& coders,
                 std::byte* out) {
  const std::uint64_t header = header_of(block);
  std::memcpy(out, &header, sizeof header);
  if (block.payload_bytes == 0) return;
  std::byte* const payload = out + kPackedHeaderBytes;
  if (block.runs) return write_runs(indices, block, coders, payload);
  const std::size_t low_bytes = elias_fano_low_bytes(block.count - 1, block.width);
  std::uint32_t room[kPackedBlockMost];
  const std::span<std::uint32_t> numbers(room, block.count - 1);
  coders.to_numbers(indices, block.width, numbers);
  coders.encode(numbers, block.first, block.width, payload, payload + low_bytes, block.payload_bytes - low_bytes);
}

void pack(const IndexPlan& plan, std::span<const std::uint32_t> indices, Bytes out, const Coders& coders) {
  TELEGRAD_CHECK(out.size() >= plan.bytes);
  std::byte* at = out.data();
  std::size_t left = out.size();
  for (const PackedBlock& block : plan.blocks) {
    TELEGRAD_CHECK(block.count <= indices.size() && block.first == indices.front());  // it is the plan of these
    const auto part = indices.first(block.count);
    if (left >= block.bytes() + kEliasFanoSlackBytes) {
      write_block(part, block, coders, at);
    } else {
      Scratch scratch;
      write_block(part, block, coders, scratch.bytes);
      std::memcpy(at, scratch.bytes, block.bytes());
    }
    indices = indices.subspan(block.count);
    at += block.bytes();
    left -= block.bytes();
  }
  TELEGRAD_CHECK(indices.empty());
}

void fill_run(std::span<std::uint32_t> indices, std::uint32_t first) {
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = first + static_cast<std::uint32_t>(i);
}

bool read_runs(const std::byte* payload, const PackedBlock& block, const Coders& coders,
               std::span<std::uint32_t> indices) {
  std::uint16_t breaks = 0;
  if (block.payload_bytes < sizeof breaks) return false;
  std::memcpy(&breaks, payload, sizeof breaks);
  if (breaks >= block.count) return false;
  const RunSections sections(block.count, breaks, block.width);
  if (sections.missing_highs() > block.payload_bytes) return false;
  const std::byte* const missing_lows = payload + RunSections::kCountBytes;
  const std::byte* const present_lows = missing_lows + sections.missing_low_bytes;
  const std::byte* const present_highs = present_lows + sections.present_low_bytes;
  Runs runs;
  if (!coders.decode(missing_lows, payload + sections.missing_highs(), block.payload_bytes - sections.missing_highs(),
                     0, block.width, {runs.missing, breaks})) {
    return false;
  }
  if (!coders.decode(present_lows, present_highs, sections.present_high_bytes, 0, sections.present_width,
                     {runs.present, breaks})) {
    return false;
  }
  std::uint32_t begin = 0;
  std::uint32_t first = block.first;
  for (std::size_t run = 0; run < breaks; ++run) {
    const std::uint32_t end = runs.present[run];
    if (end <= begin || end >= block.count) return false;
    fill_run(indices.subspan(begin, end - begin), first);
    begin = end;
    first = block.first + end + runs.missing[run];
  }
  fill_run(indices.subspan(begin), first);
  return true;
}

// Reads a payload behind which kEliasFanoSlackBytes may be read.
bool read_block(const std::byte* payload, const PackedBlock& block, const Coders& coders,
                std::span<std::uint32_t> indices) {
  indices[0] = block.first;
  if (block.payload_bytes == 0) {
    fill_run(indices, block.first);
    return !block.runs;
  }
  if (block.runs) return read_runs(payload, block, coders, indices);
  const std::size_t low_bytes = elias_fano_low_bytes(block.count - 1, block.width);
  if (low_bytes > block.payload_bytes) return false;
  if (!coders.decode(payload, payload + low_bytes, block.payload_bytes - low_bytes, block.first, block.width,
                     indices.subspan(1))) {
    return false;
  }
  coders.to_indices(indices, block.width);
  return true;
}

bool unpack(ConstBytes packed, std::span<std::uint32_t> indices, const Coders& coders) {
  std::size_t at = 0;
  std::size_t done = 0;
  while (done < indices.size()) {
    std::uint64_t header;
    if (packed.size() - at < sizeof header) return false;
    std::memcpy(&header, packed.data() + at, sizeof header);
    at += sizeof header;
    const PackedBlock block = block_of(header);
    if (header >> 61 != 0 || block.count > indices.size() - done || block.payload_bytes > packed.size() - at) {
      return false;
    }
    const auto part = indices.subspan(done, block.count);
    Scratch scratch;
    const std::byte* payload = packed.data() + at;
    if (packed.size() - at < block.payload_bytes + kEliasFanoSlackBytes) {
      std::memset(scratch.bytes + block.payload_bytes, 0, kEliasFanoSlackBytes);
      std::memcpy(scratch.bytes, payload, block.payload_bytes);
      payload = scratch.bytes;
    }
    if (!read_block(payload, block, coders, part)) return false;
    const std::size_t from = done == 0 ? 0 : done - 1;  // with the last index of the block before
    if (!strictly_increasing(indices.subspan(from, done + block.count - from))) return false;
    at += block.payload_bytes;
    done += block.count;
  }
  return at == packed.size();
}

}  // namespace

IndexPlan plan_indices(std::span<const std::uint32_t> indices) {
  IndexPlan plan;
  plan.blocks.reserve((indices.size() + kPackedBlockMost - 1) / kPackedBlockMost);
  for (std::size_t begin = 0; begin < indices.size(); begin += kPackedBlockMost) {
    const PackPlan chunk(indices.subspan(begin, std::min(kPackedBlockMost, indices.size() - begin)));
    for (const PackedBlock& block : chunk.blocks()) {
      plan.blocks.push_back(block);
      plan.bytes += block.bytes();
    }
  }
  return plan;
}

std::size_t packed_size_expected(std::uint64_t range_size, std::uint64_t count) {
  TELEGRAD_CHECK(count <= range_size && range_size <= 0xffffffffU);
  if (count == 0) return 0;
  const auto block_bytes = [&](std::uint64_t block_count) {
    if (block_count == 0) return std::size_t{0};
    const auto last = static_cast<std::uint32_t>((block_count - 1) * range_size / count);
    const auto held = static_cast<std::uint32_t>(block_count);
    const PackedBlock block = packed_block(0, last, held, held - 1);
    if (block.runs || block.payload_bytes == 0) return block.bytes();
    // A gap of random indices is at least so long with a probability of (1 − d)^length: its unary part has x/(1 − x) ones,
    // x = (1 − d)^(2^width). By multiplications alone, which all machines round alike.
    double beyond = 1.0 - static_cast<double>(count) / static_cast<double>(range_size);
    for (unsigned i = 0; i < block.width; ++i) beyond *= beyond;
    const double unary = static_cast<double>(held - 1) * beyond / (1.0 - beyond);
    return kPackedHeaderBytes + elias_fano_low_bytes(held - 1, block.width) +
           (held - 1 + static_cast<std::size_t>(unary) + 7) / 8;
  };
  return count / kPackedBlockMost * block_bytes(kPackedBlockMost) + block_bytes(count % kPackedBlockMost);
}

void pack_indices(const IndexPlan& plan, std::span<const std::uint32_t> indices, Bytes out) { pack(plan, indices, out, kFast); }

bool unpack_indices(ConstBytes packed, std::span<std::uint32_t> indices) { return unpack(packed, indices, kFast); }

namespace reference {

void pack_indices(const IndexPlan& plan, std::span<const std::uint32_t> indices, Bytes out) {
  pack(plan, indices, out, kReference);
}

bool unpack_indices(ConstBytes packed, std::span<std::uint32_t> indices) { return unpack(packed, indices, kReference); }

}  // namespace reference

}  // namespace telegrad::kernels
