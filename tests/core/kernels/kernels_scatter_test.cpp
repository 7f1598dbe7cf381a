#include "kernels/scatter.hpp"

#include "kernel_samples.hpp"
#include "kernels/operations.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

template <class V>
void expect_like_reference(std::size_t size, double density, std::uint64_t base, std::mt19937& random) {
  samples::Run<V> run{samples::random_indices(random, base, base + size, density), {}};
  run.values = samples::awkward_values<V>(random, run.indices.size());
  const auto before = samples::awkward_values<V>(random, size);
  const auto check = [&](auto kernel, auto reference) {
    Guarded<V> out(before, sizeof(V)), expected(before);
    kernel(out.span());
    reference(expected.span());
    EXPECT_EQ(samples::bits(out.copy()), samples::bits(expected.copy()));
    EXPECT(out.intact());
  };
  for (const Reduction reduction : samples::kReductions) {
    check([&](std::span<V> out) { kernels::scatter_reduce(reduction, out, run.entries(), base); },
          [&](std::span<V> out) { kernels::reference::scatter_reduce(reduction, out, run.entries(), base); });
    const V absent = kernels::absent_element<V>(reduction);
    check([&](std::span<V> out) { kernels::expand(out, run.entries(), absent, 0.3, base); },
          [&](std::span<V> out) { kernels::reference::expand(out, run.entries(), absent, 0.3, base); });
  }
}

TEST("scattering has the bits of the reference, also into a slice that begins anywhere") {
  std::mt19937 random(9);
  for (const std::size_t size : samples::kSizes) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      for (const std::uint64_t base : {std::uint64_t{0}, std::uint64_t{1000}, std::uint64_t{0xffffffffU} - 5000}) {
        expect_like_reference<float>(size, density, base, random);
        expect_like_reference<double>(size, density, base, random);
        expect_like_reference<bf16>(size, density, base, random);
        expect_like_reference<f16>(size, density, base, random);
        expect_like_reference<std::int32_t>(size, density, base, random);
        expect_like_reference<std::int64_t>(size, density, base, random);
      }
    }
  }
}

TEST("scattering with a reduction combines with what is there, expanding does not") {
  std::vector<float> dense{1.0F, 2.0F, 3.0F};
  const samples::Run<float> run{{11, 12}, {10.0F, -3.0F}};
  const auto scattered = [&](Reduction reduction) {
    std::vector<float> out = dense;
    kernels::scatter_reduce(reduction, std::span(out), run.entries(), 10);
    return out;
  };
  EXPECT_EQ(scattered(Reduction::sum), (std::vector<float>{1.0F, 12.0F, 0.0F}));
  EXPECT_EQ(scattered(Reduction::avg), (std::vector<float>{1.0F, 12.0F, 0.0F}));
  EXPECT_EQ(scattered(Reduction::prod), (std::vector<float>{1.0F, 20.0F, -9.0F}));
  EXPECT_EQ(scattered(Reduction::min), (std::vector<float>{1.0F, 2.0F, -3.0F}));
  EXPECT_EQ(scattered(Reduction::max), (std::vector<float>{1.0F, 10.0F, 3.0F}));
  EXPECT_EQ(scattered(Reduction::max_abs), (std::vector<float>{1.0F, 10.0F, 3.0F}));
  kernels::expand(std::span(dense), run.entries(), 5.0F, 2.0, 10);
  EXPECT_EQ(dense, (std::vector<float>{5.0F, 20.0F, -6.0F}));
  kernels::fill(std::span(dense), 7.0F);
  EXPECT_EQ(dense, (std::vector<float>{7.0F, 7.0F, 7.0F}));
}

TEST("an absent element changes nothing, whatever it is reduced with") {
  std::mt19937 random(31);
  const auto check = [&]<class V>(V) {
    for (const Reduction reduction : samples::kReductions) {
      const V absent = kernels::absent_element<V>(reduction);
      for (const V value : samples::awkward_values<V>(random, 200)) {
        samples::Run<V> run{{3}, {absent}};
        V there = value;
        kernels::scatter_reduce(reduction, std::span(&there, 1), run.entries(), 3);
        const bool zero = kernels::is_zero(value);  // +0 stands for both in sums and max_abs
        const V expected = kernels::is_nan(value) ? std::bit_cast<V>(kernels::Format<V>::kNan)
                           : zero && kernels::is_zero(absent) ? absent
                                                              : value;
        EXPECT_EQ(samples::bits(std::vector<V>{there}), samples::bits(std::vector<V>{expected}));
      }
    }
  };
  check(float{});
  check(double{});
  check(bf16{});
  check(f16{});
}

}  // namespace
