#include "kernels/reduce_marked.hpp"

#include "kernel_samples.hpp"
#include "kernels/marks.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

constexpr double kNoMarks = 2.0;  // in place of a density: all values, without marks

template <class V>
struct Input {
  std::vector<std::uint64_t> marks;
  std::vector<V> values;
};

template <class V>
Input<V> input_of(std::size_t range, double density, std::mt19937& random) {
  Input<V> input;
  if (density == kNoMarks) {
    input.values = samples::awkward_values<V>(random, range);
    return input;
  }
  std::bernoulli_distribution is_there(density);
  input.marks.resize(kernels::mark_words(range));
  std::size_t count = 0;
  for (std::size_t i = 0; i < range; ++i) {
    if (!is_there(random)) continue;
    input.marks[i / 64] |= std::uint64_t{1} << i % 64;
    ++count;
  }
  input.values = samples::awkward_values<V>(random, count);
  return input;
}

template <class V>
void expect_reduced(std::size_t range, const std::vector<double>& densities, std::mt19937& random) {
  std::vector<Input<V>> inputs;
  std::vector<kernels::MarkedValues<V>> plain;
  for (const double density : densities) inputs.push_back(input_of<V>(range, density, random));
  for (const Input<V>& input : inputs) plain.push_back({input.marks, input.values});
  for (const Reduction reduction : samples::kReductions) {
    std::vector<V> expected(range);
    kernels::reference::reduce_marked<V>(reduction, plain, expected);
    samples::at_every_level([&] {
      std::vector<Guarded<std::uint64_t>> marks;
      std::vector<Guarded<V>> values;
      std::vector<kernels::MarkedValues<V>> read;
      for (const Input<V>& input : inputs) {
        marks.emplace_back(input.marks, 8);
        values.emplace_back(input.values, sizeof(V));
      }
      for (std::size_t i = 0; i < inputs.size(); ++i) read.push_back({marks[i].span(), values[i].span()});
      Guarded<V> out(range, sizeof(V));
      kernels::reduce_marked<V>(reduction, read, out.span());
      EXPECT_EQ(samples::bits(out.copy()), samples::bits(expected));
      EXPECT(out.intact());
      if (!inputs[0].marks.empty() || range == 0) return;
      read[0].values = values[0].span();
      kernels::reduce_marked<V>(reduction, read, values[0].span());  // in place
      EXPECT_EQ(samples::bits(values[0].copy()), samples::bits(expected));
      EXPECT(values[0].intact());
    });
  }
}

TEST("ranges of marks and values have the reference's sum and its bits, at any density, without marks, and of many inputs") {
  std::mt19937 random(7);
  const std::vector<std::vector<double>> inputs = {
      {0.6, 0.9}, {kNoMarks, 0.5}, {0.5, kNoMarks, 0.97}, {0.0, 0.0, 0.3, 1.0}, {kNoMarks, kNoMarks}, {0.02, 0.0},
      {0.9, 0.1, 0.5, 0.5, kNoMarks}, {0.5, 0.6, 0.7, 0.8, 0.9, 0.0, 1.0, kNoMarks, 0.3}};
  std::vector<std::size_t> ranges(std::begin(samples::kSizes), std::end(samples::kSizes));
  ranges.insert(ranges.end(), {2048, 4096, 8192 + 64, 10000});
  for (const std::size_t range : ranges) {
    for (const auto& densities : inputs) {
      expect_reduced<float>(range, densities, random);
      expect_reduced<double>(range, densities, random);
      expect_reduced<bf16>(range, densities, random);
      expect_reduced<f16>(range, densities, random);
      expect_reduced<std::int32_t>(range, densities, random);
      expect_reduced<std::int64_t>(range, densities, random);
    }
  }
}

}  // namespace
