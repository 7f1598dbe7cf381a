#include "codec/pack_values.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "codec/value_groups.hpp"

namespace telegrad::kernels {
namespace {

constexpr std::size_t kSamples = 64;  // of a block, at least, unless it has fewer values

constexpr ValueBlock kRawBlock{.width = kRawWidth};

// Noise shall cost little: after so many raw blocks in a row only every eighth one is looked at, until one is not raw.
constexpr std::size_t kRawBlocksMost = 4;
constexpr std::size_t kLookEvery = 8;

// How the exponents of a few values lie.
class Sample {
 public:
  template <class W>
  Sample(const std::byte* values, std::size_t count, W) {
    const std::size_t step = std::max<std::size_t>(1, count / kSamples);
    for (std::size_t i = 0; i < count; i += step) {
      const unsigned exponent = ValueParts<W>::exponent(ValueParts<W>::load(values + i * sizeof(W)));
      ++counts_[exponent];
      ++size_;
      low_ = std::min(low_, exponent);
      high_ = std::max(high_, exponent);
    }
  }

  /// The width that takes the fewest bits for the sample, and the window of exponents; raw where none saves one bit a value.
  ValueBlock cheapest() const {
    const unsigned range = high_ - low_ + 1;
    if (range == 1) return {.top = static_cast<std::uint8_t>(high_), .width = 0};
    const Cumulated before = cumulated();
    ValueBlock best = kRawBlock;
    unsigned best_bits = 7 * size_;
    for (unsigned width = 1; width <= kCodeWidthMost; ++width) {
      const unsigned window = coded_exponents(width);
      unsigned top = high_;
      unsigned covered = size_;
      if (range <= window) {
        top = high_ + (window - range) / 2;  // room on both sides; exponents beyond 255 are those from 0
      } else {
        covered = most_covered(before, window, top);
      }
      const unsigned bits = width * size_ + 8 * (size_ - covered);
      if (bits < best_bits) {
        best_bits = bits;
        best = {.top = static_cast<std::uint8_t>(top), .width = static_cast<std::uint8_t>(width)};
      }
      if (range <= window) break;
    }
    return best;
  }

 private:
  using Cumulated = std::array<std::uint8_t, 256 + 1>;

  // How many have an exponent less than low_ + i.
  Cumulated cumulated() const {
    Cumulated before;
    std::uint8_t sum = 0;
    for (unsigned i = 0; i <= high_ - low_; ++i) {
      before[i] = sum;
      sum = static_cast<std::uint8_t>(sum + counts_[low_ + i]);
    }
    before[high_ - low_ + 1] = sum;
    return before;
  }

  unsigned most_covered(const Cumulated& before, unsigned window, unsigned& top) const {
    std::uint8_t most = 0;  // without a branch: of noise, which has all exponents, this is most of the work
    for (unsigned end = window; end <= high_ - low_ + 1; ++end) {
      most = std::max(most, static_cast<std::uint8_t>(before[end] - before[end - window]));
    }
    unsigned end = window;
    while (before[end] - before[end - window] != most) ++end;
    top = low_ + end - 1;
    return most;
  }

  std::array<std::uint8_t, 256> counts_{};  // fewer than 2 kSamples values
  unsigned size_ = 0;
  unsigned low_ = 255;
  unsigned high_ = 0;
};

ValueBlock plan_block(DType dtype, const std::byte* values, std::size_t count) {
  const Sample sample = dtype == DType::f32 ? Sample(values, count, std::uint32_t{}) : Sample(values, count, std::uint16_t{});
  ValueBlock block = sample.cheapest();
  if (block.width == kRawWidth) return kRawBlock;
  block.escapes = static_cast<std::uint16_t>(count_escapes(dtype, values, count, block));
  if (block.width == 0 && block.escapes != 0) block.width = 1;  // which tells one exponent apart, too
  return block_bytes(dtype, block, count) < block_bytes(dtype, kRawBlock, count) ? block : kRawBlock;
}

// Calls body(block number, first value, count) for all blocks until one returns false.
template <class Body>
bool for_blocks(std::size_t count, Body body) {
  for (std::size_t number = 0; number * kValueBlock < count; ++number) {
    const std::size_t begin = number * kValueBlock;
    if (!body(number, begin, std::min(kValueBlock, count - begin))) return false;
  }
  return true;
}

std::size_t count_of(DType dtype, std::size_t bytes) {
  TELEGRAD_CHECK(packs_values(dtype) && bytes % size_of(dtype) == 0);
  return bytes / size_of(dtype);
}

template <class WriteGroups>
void pack(DType dtype, const ValuePlan& plan, ConstBytes values, Bytes out, WriteGroups write) {
  const std::size_t count = count_of(dtype, values.size());
  TELEGRAD_CHECK(out.size() == plan.bytes && plan.blocks.size() == (count + kValueBlock - 1) / kValueBlock);
  std::byte* to = out.data();
  for_blocks(count, [&](std::size_t number, std::size_t begin, std::size_t held) {
    const ValueBlock block = plan.blocks[number];
    const std::byte* const from = values.data() + begin * size_of(dtype);
    std::memcpy(to, &block, sizeof block);
    std::byte* const payload = to + sizeof block;
    if (block.width == kRawWidth) {
      copy_bytes(payload, from, held * size_of(dtype));
    } else {
      write(dtype, from, held, block, ValuePlanes<std::byte>(dtype, block, held, payload));
    }
    to += block_bytes(dtype, block, held);
    return true;
  });
  std::fill(to, out.data() + out.size(), std::byte{0});
}

template <class ReadGroups>
bool unpack(DType dtype, ConstBytes packed, Bytes values, ReadGroups read) {
  const std::size_t count = count_of(dtype, values.size());
  const bool all_read = for_blocks(count, [&](std::size_t, std::size_t begin, std::size_t held) {
    ValueBlock block;
    if (packed.size() < sizeof block) return false;
    std::memcpy(&block, packed.data(), sizeof block);
    const bool raw = block.width == kRawWidth;
    if (raw ? block.top != 0 || block.escapes != 0 : block.width > kCodeWidthMost) return false;
    const std::size_t bytes = block_bytes(dtype, block, held);
    if (bytes > packed.size()) return false;
    const std::byte* const payload = packed.data() + sizeof block;
    std::byte* const to = values.data() + begin * size_of(dtype);
    if (raw) {
      copy_bytes(to, payload, held * size_of(dtype));
    } else if (!read(dtype, ValuePlanes<const std::byte>(dtype, block, held, payload), block, to, held)) {
      return false;
    }
    packed = packed.subspan(bytes);
    return true;
  });
  return all_read && packed.size() < 8 && std::ranges::all_of(packed, [](std::byte one) { return one == std::byte{0}; });
}

}  // namespace

std::size_t packed_values_expected(DType dtype, std::size_t count) {
  TELEGRAD_CHECK(packs_values(dtype));
  const std::size_t exponent_bytes = (count * 21 + 79) / 80;
  return packed_values_least(dtype, count) + (exponent_bytes + 7) / 8 * 8;
}

ValuePlan plan_values(DType dtype, ConstBytes values) {
  const std::size_t count = count_of(dtype, values.size());
  ValuePlan plan;
  plan.blocks.reserve((count + kValueBlock - 1) / kValueBlock);
  std::size_t raw_blocks = 0;  // in a row
  for_blocks(count, [&](std::size_t number, std::size_t begin, std::size_t held) {
    const bool skips = raw_blocks >= kRawBlocksMost && number % kLookEvery != 0;
    plan.blocks.push_back(skips ? kRawBlock : plan_block(dtype, values.data() + begin * size_of(dtype), held));
    raw_blocks = plan.blocks.back().width == kRawWidth ? raw_blocks + 1 : 0;
    plan.bytes += block_bytes(dtype, plan.blocks.back(), held);
    return true;
  });
  plan.bytes = (plan.bytes + 7) / 8 * 8;
  return plan;
}

void pack_values(DType dtype, const ValuePlan& plan, ConstBytes values, Bytes out) {
  pack(dtype, plan, values, out, write_groups);
}

bool unpack_values(DType dtype, ConstBytes packed, Bytes values) { return unpack(dtype, packed, values, read_groups); }

namespace reference {
namespace {

template <class W>
void write_values(const std::byte* values, std::size_t count, ValueBlock block, ValuePlanes<std::byte> planes) {
  using Parts = ValueParts<W>;
  std::memset(planes.codes, 0, static_cast<std::size_t>(planes.heads - planes.codes));
  for (std::size_t i = 0; i < count; ++i) {
    const W word = Parts::load(values + i * sizeof(W));
    const unsigned below = (block.top - Parts::exponent(word)) & 255U;
    const unsigned code = std::min(below, block.width == 0 ? 0 : coded_exponents(block.width));
    for (unsigned bit = 0; bit < block.width; ++bit) {
      const std::size_t at = (i / kValueGroup * block.width + bit) * kValueGroup + i % kValueGroup;
      planes.codes[at / 8] |= std::byte{static_cast<std::uint8_t>((code >> bit & 1U) << at % 8)};
    }
    planes.heads[i] = std::byte{Parts::head(word)};
    const std::uint16_t tail = Parts::tail(word);
    if (Parts::kTails) std::memcpy(planes.tails + 2 * i, &tail, sizeof tail);
    if (below >= coded_exponents(block.width) && planes.escapes != planes.end) {
      *planes.escapes++ = std::byte{Parts::exponent(word)};
    }
  }
}

template <class W>
bool read_values(ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values, std::size_t count) {
  const std::size_t groups = (count + kValueGroup - 1) / kValueGroup;
  for (std::size_t i = 0; i < groups * kValueGroup; ++i) {
    unsigned code = 0;
    for (unsigned bit = 0; bit < block.width; ++bit) {
      const std::size_t at = (i / kValueGroup * block.width + bit) * kValueGroup + i % kValueGroup;
      code |= (std::to_integer<unsigned>(planes.codes[at / 8]) >> at % 8 & 1U) << bit;
    }
    if (i >= count) {
      if (code != 0) return false;
      continue;
    }
    auto exponent = static_cast<std::uint8_t>(block.top - code);
    if (block.width != 0 && code == coded_exponents(block.width)) {
      if (planes.escapes == planes.end) return false;
      exponent = std::to_integer<std::uint8_t>(*planes.escapes++);
    }
    std::uint16_t tail = 0;
    if (ValueParts<W>::kTails) std::memcpy(&tail, planes.tails + 2 * i, sizeof tail);
    const W word = ValueParts<W>::join(exponent, std::to_integer<std::uint8_t>(planes.heads[i]), tail);
    std::memcpy(values + i * sizeof word, &word, sizeof word);
  }
  return planes.escapes == planes.end;
}

}  // namespace

void pack_values(DType dtype, const ValuePlan& plan, ConstBytes values, Bytes out) {
  pack(dtype, plan, values, out, [](DType type, auto... arguments) {
    type == DType::f32 ? write_values<std::uint32_t>(arguments...) : write_values<std::uint16_t>(arguments...);
  });
}

bool unpack_values(DType dtype, ConstBytes packed, Bytes values) {
  return unpack(dtype, packed, values, [](DType type, auto... arguments) {
    return type == DType::f32 ? read_values<std::uint32_t>(arguments...) : read_values<std::uint16_t>(arguments...);
  });
}

}  // namespace reference

}  // namespace telegrad::kernels
