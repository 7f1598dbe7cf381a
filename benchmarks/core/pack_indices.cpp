// Packed indices: bits per index beside the entropy bound, and the speed of packing and unpacking at every level of
// this CPU, in one thread, beside a copy of the raw indices. Rounds of all levels alternate; the fastest of each is
// printed. `plan` comes before `pack`, as an encoder must know the length first. Then whole messages with values
// in f32, packed or not, at the best level: encode() includes taking memory for them.
//
//   pack_indices [entries, 2^20 without]

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "codec/pack_indices.hpp"
#include "codec/wire.hpp"
#include "kernels/dispatch.hpp"
#include "stopwatch.hpp"

namespace {

using namespace telegrad;
using Indices = std::vector<std::uint32_t>;

constexpr int kRounds = 25;

struct Set {
  std::string name;
  Indices indices;
  double bound_bits;  // of an index; 0 where no bound is known
};

// Gaps of a geometric distribution: each index of an unbounded range with probability `density`.
Set uniform(double density, std::size_t entries) {
  Random random(7);
  Indices indices;
  double next = 0;
  while (indices.size() < entries) {
    next += std::floor(std::log1p(-random.uniform()) / std::log1p(-density));
    if (next >= 4294967295.0) break;
    indices.push_back(static_cast<std::uint32_t>(next));
    next += 1;
  }
  const double bound = -std::log2(density) - (1 - density) / density * std::log1p(-density) / std::log(2.0);
  char name[64];
  std::snprintf(name, sizeof name, "uniform, d = %g %%", 100 * density);
  return {name, std::move(indices), bound};
}

// Runs of `length` at 1 % of the range.
Set runs(std::uint32_t length, std::size_t entries) {
  Random random(8);
  Indices indices;
  std::uint32_t next = 0;
  while (indices.size() < entries) {
    for (std::uint32_t i = 0; i < length; ++i) indices.push_back(next++);
    next += static_cast<std::uint32_t>(random.below(198 * length));
  }
  return {"runs of " + std::to_string(length) + ", d = 1 %", std::move(indices), 0};
}

// Regions of 2,000 at density one half, at 1 % of the range.
Set crowds(std::size_t entries) {
  Random random(9);
  Indices indices;
  for (std::uint32_t begin = 0; indices.size() < entries; begin += 100'000) {
    for (std::uint32_t i = 0; i < 2000; ++i) {
      if (random.uniform() < 0.5) indices.push_back(begin + i);
    }
  }
  return {"crowds of 1,000, d = 1 %", std::move(indices), 0};
}

struct Fastest {
  double pack_s = std::numeric_limits<double>::infinity();
  double plan_s = std::numeric_limits<double>::infinity();
  double unpack_s = std::numeric_limits<double>::infinity();
};

void measure(const Set& set) {
  const std::size_t count = set.indices.size();
  const auto entries = static_cast<double>(count);
  std::vector<std::byte> packed(kernels::packed_size_most(count));
  Indices out(count);
  kernels::IndexPlan plan;
  double copy_s = std::numeric_limits<double>::infinity();
  const auto levels = static_cast<std::size_t>(kernels::best_simd_level()) + 1;
  std::vector<Fastest> fastest(levels);
  for (int round = 0; round < kRounds; ++round) {
    copy_s = std::min(copy_s, seconds([&] { std::memcpy(out.data(), set.indices.data(), 4 * count); }));
    for (std::size_t level = 0; level < levels; ++level) {
      const kernels::ScopedSimdLevel forced(static_cast<kernels::SimdLevel>(level));
      Fastest& one = fastest[level];
      one.plan_s = std::min(one.plan_s, seconds([&] { plan = kernels::plan_indices(set.indices); }));
      one.pack_s = std::min(one.pack_s, seconds([&] { kernels::pack_indices(plan, set.indices, packed); }));
      const ConstBytes section{packed.data(), plan.bytes};
      bool ok = false;
      one.unpack_s = std::min(one.unpack_s, seconds([&] { ok = kernels::unpack_indices(section, out); }));
      if (!ok || out != set.indices) {
        std::fprintf(stderr, "%s: not what was packed\n", set.name.c_str());
        std::exit(1);
      }
    }
  }
  const double bits = 8.0 * static_cast<double>(plan.bytes) / entries;
  std::printf("%-25s %9zu indices, %6.2f bits each", set.name.c_str(), count, bits);
  if (set.bound_bits > 0) std::printf(" (bound %.2f: +%.1f %%)", set.bound_bits, 100 * (bits / set.bound_bits - 1));
  std::printf(", copy %.2f ns\n", copy_s * 1e9 / entries);
  for (std::size_t level = 0; level < levels; ++level) {
    const auto rate = [&](double time_s) {
      std::printf("%6.2f ns %6.2f G/s", time_s * 1e9 / entries, entries / time_s / 1e9);
    };
    std::printf("    %-12s plan", name_of(static_cast<kernels::SimdLevel>(level)));
    rate(fastest[level].plan_s);
    std::printf("   pack");
    rate(fastest[level].pack_s);
    std::printf("   unpack");
    rate(fastest[level].unpack_s);
    std::printf("\n");
  }
}

void measure_messages(const Set& set) {
  struct Format {
    const char* name;
    WireFormat wire;
  };
  constexpr std::array kFormats{
      Format{"raw32", {.indices = IndexFormat::raw32}},
      Format{"blocked16", {.indices = IndexFormat::blocked16}},
      Format{"packed", {.indices = IndexFormat::packed}},
      Format{"packed, values too", {.indices = IndexFormat::packed, .packs_values = true}},
      Format{"packed, bf16", {.indices = IndexFormat::packed, .values = ValueEncoding::bf16}},
      Format{"packed, bf16 too",
             {.indices = IndexFormat::packed, .values = ValueEncoding::bf16, .packs_values = true}},
  };
  Random random(10);
  std::vector<float> values;  // of a Pareto distribution, as the largest of gradients are
  for (std::size_t i = 0; i < set.indices.size(); ++i) {
    values.push_back(static_cast<float>(1e-3 * std::pow(1 - random.uniform(), -1.0 / 3)));
  }
  const auto vector = SparseVector<float>::sparse(std::uint64_t{set.indices.back()} + 1, set.indices, values);
  const auto entries = static_cast<double>(set.indices.size());
  std::array<double, kFormats.size()> encode_s, decode_s, bytes;
  encode_s.fill(std::numeric_limits<double>::infinity());
  decode_s.fill(std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t format = 0; format < kFormats.size(); ++format) {
      Buffer message;
      encode_s[format] = std::min(encode_s[format], seconds([&] {
        message = encode(vector.view(), kFormats[format].wire);
      }));
      decode_s[format] = std::min(decode_s[format], seconds([&] {
        TELEGRAD_CHECK(decode<float>(message.bytes(), vector.view().range).ok());
      }));
      bytes[format] = static_cast<double>(message.size());
    }
  }
  std::printf("messages of f32, %s\n", set.name.c_str());
  for (std::size_t format = 0; format < kFormats.size(); ++format) {
    const double encode_ns = encode_s[format] * 1e9 / entries;
    const double decode_ns = decode_s[format] * 1e9 / entries;
    std::printf("    %-18s %5.2f bytes an entry   encode %6.2f ns %6.2f G/s   decode %6.2f ns %6.2f G/s\n",
                kFormats[format].name, bytes[format] / entries, encode_ns, 1 / encode_ns, decode_ns, 1 / decode_ns);
  }
}

}  // namespace

int main(int arguments, char** argument) {
  const std::size_t entries = arguments > 1 ? std::strtoull(argument[1], nullptr, 10) : std::size_t{1} << 20;
  if (entries == 0) {
    std::fprintf(stderr, "usage: %s [entries]\n", argument[0]);
    return 2;
  }
  for (const double density : {0.0001, 0.001, 0.00781, 0.01, 0.03, 0.1, 0.5}) measure(uniform(density, entries));
  for (const std::uint32_t length : {4U, 16U, 256U}) measure(runs(length, entries));
  measure(crowds(entries));
  for (const double density : {0.001, 0.00781, 0.1}) measure_messages(uniform(density, entries));
}
