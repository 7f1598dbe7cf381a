#include "kernels/scatter.hpp"

#include "kernel_samples.hpp"
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
  check([&](std::span<V> out) { kernels::scatter_add(out, run.entries(), base); },
        [&](std::span<V> out) { kernels::reference::scatter_add(out, run.entries(), base); });
  check([&](std::span<V> out) { kernels::scatter_set(out, run.entries(), base); },
        [&](std::span<V> out) { kernels::reference::scatter_set(out, run.entries(), base); });
  check([&](std::span<V> out) { kernels::expand(out, run.entries(), 0.25F, base); },
        [&](std::span<V> out) { kernels::reference::expand(out, run.entries(), 0.25F, base); });
}

TEST("scattering has the bits of the reference, also into a slice that begins anywhere") {
  std::mt19937 random(9);
  for (const std::size_t size : samples::kSizes) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      for (const std::uint64_t base : {std::uint64_t{0}, std::uint64_t{1000}, std::uint64_t{0xffffffffU} - 5000}) {
        expect_like_reference<float>(size, density, base, random);
        expect_like_reference<bf16>(size, density, base, random);
      }
    }
  }
}

TEST("scatter_add adds to what is there, expand does not") {
  std::vector<float> dense{1.0F, 2.0F, 3.0F};
  const samples::Run<float> run{{11, 12}, {10.0F, -3.0F}};
  kernels::scatter_add(std::span(dense), run.entries(), 10);
  EXPECT_EQ(dense, (std::vector<float>{1.0F, 12.0F, 0.0F}));
  kernels::expand(std::span(dense), run.entries(), 2.0F, 10);
  EXPECT_EQ(dense, (std::vector<float>{0.0F, 20.0F, -6.0F}));
  kernels::fill_zero(std::as_writable_bytes(std::span(dense)));
  EXPECT_EQ(dense, (std::vector<float>{0.0F, 0.0F, 0.0F}));
}

}  // namespace
