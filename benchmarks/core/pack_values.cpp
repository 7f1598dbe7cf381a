// Packed values: bits per value, and the speed of planning, packing and unpacking at every level of this CPU, in one
// thread, beside a copy of the values. Rounds of all levels alternate; the fastest of each is printed. A plan is made once
// for each message, before its size is known.
//
//   pack_values [values, 2^20 without]

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "base/types.hpp"
#include "codec/pack_values.hpp"
#include "kernels/dispatch.hpp"
#include "stopwatch.hpp"

namespace {

using namespace telegrad;

constexpr int kRounds = 25;

struct Set {
  std::string name;
  std::vector<float> values;
};

double normal(Random& random) {
  return std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(6.283185307179586 * random.uniform());
}

// Student's t with three degrees of freedom, of magnitudes from `least` on.
Set heavy_tailed(const char* name, std::size_t count, double least) {
  Random random(7);
  Set set{name, {}};
  while (set.values.size() < count) {
    const double a = normal(random), b = normal(random), c = normal(random);
    const double one = normal(random) / std::sqrt((a * a + b * b + c * c) / 3);
    if (std::abs(one) >= least) set.values.push_back(static_cast<float>(1e-3 * one));
  }
  return set;
}

// `layers` blocks of standard normals of scales that are log-normal themselves.
Set of_layers(std::size_t count, std::size_t layers) {
  Random random(8);
  Set set{std::to_string(layers) + " layers of normals", {}};
  double scale = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % (count / layers + 1) == 0) scale = std::exp(2 * normal(random));
    set.values.push_back(static_cast<float>(scale * normal(random)));
  }
  return set;
}

Set noise(std::size_t count) {
  Random random(9);
  Set set{"bits at random", std::vector<float>(count)};
  for (float& one : set.values) {
    const auto word = static_cast<std::uint32_t>(random.below(std::uint64_t{1} << 32));
    std::memcpy(&one, &word, sizeof one);
  }
  return set;
}

struct Fastest {
  double plan_s = std::numeric_limits<double>::infinity();
  double pack_s = std::numeric_limits<double>::infinity();
  double unpack_s = std::numeric_limits<double>::infinity();
};

void measure(DType dtype, const std::string& name, ConstBytes values) {
  const auto count = static_cast<double>(values.size() / size_of(dtype));
  std::vector<std::byte> out(values.size());
  std::vector<std::byte> packed;
  double copy_s = std::numeric_limits<double>::infinity();
  const auto levels = static_cast<std::size_t>(kernels::best_simd_level()) + 1;
  std::vector<Fastest> fastest(levels);
  for (int round = 0; round < kRounds; ++round) {
    copy_s = std::min(copy_s, seconds([&] { std::memcpy(out.data(), values.data(), values.size()); }));
    for (std::size_t level = 0; level < levels; ++level) {
      const kernels::ScopedSimdLevel forced(static_cast<kernels::SimdLevel>(level));
      Fastest& one = fastest[level];
      kernels::ValuePlan plan;
      one.plan_s = std::min(one.plan_s, seconds([&] { plan = kernels::plan_values(dtype, values); }));
      packed.resize(plan.bytes);
      one.pack_s = std::min(one.pack_s, seconds([&] { kernels::pack_values(dtype, plan, values, packed); }));
      bool ok = false;
      one.unpack_s = std::min(one.unpack_s, seconds([&] { ok = kernels::unpack_values(dtype, packed, out); }));
      if (!ok || std::memcmp(out.data(), values.data(), out.size()) != 0) {
        std::fprintf(stderr, "%s: not what was packed\n", name.c_str());
        std::exit(1);
      }
    }
  }
  const double bits = 8.0 * static_cast<double>(packed.size()) / count;
  std::printf("%-4s %-22s %6.2f bits each, %.3f of native, copy %.2f ns\n", dtype == DType::f32 ? "f32" : "bf16",
              name.c_str(), bits, bits / 8 / static_cast<double>(size_of(dtype)), copy_s * 1e9 / count);
  for (std::size_t level = 0; level < levels; ++level) {
    const auto rate = [&](const char* what, double time_s) {
      std::printf("   %s %6.2f ns %6.2f G/s", what, time_s * 1e9 / count, count / time_s / 1e9);
    };
    std::printf("    %-12s", name_of(static_cast<kernels::SimdLevel>(level)));
    rate("plan", fastest[level].plan_s);
    rate("pack", fastest[level].pack_s);
    rate("unpack", fastest[level].unpack_s);
    std::printf("\n");
  }
}

}  // namespace

int main(int arguments, char** argument) {
  const std::size_t count = arguments > 1 ? std::strtoull(argument[1], nullptr, 10) : std::size_t{1} << 20;
  if (count == 0) {
    std::fprintf(stderr, "usage: %s [values]\n", argument[0]);
    return 2;
  }
  const Set sets[] = {heavy_tailed("Student's t", count, 0), heavy_tailed("its largest 1.5 %", count, 5),
                      of_layers(count, 100), Set{"all 1", std::vector<float>(count, 1.0F)}, noise(count)};
  for (const Set& set : sets) {
    measure(DType::f32, set.name, std::as_bytes(std::span(set.values)));
    const std::vector<bf16> halves(set.values.begin(), set.values.end());
    measure(DType::bf16, set.name, std::as_bytes(std::span(halves)));
  }
}
