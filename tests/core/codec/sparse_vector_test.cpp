#include "codec/sparse_vector.hpp"

#include <limits>
#include <stdexcept>

#include "kernel_samples.hpp"
#include "kernels/reduce.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr double kNever = std::numeric_limits<double>::infinity();

template <class V>
SparseVector<V> random_vector(std::mt19937& random, std::uint64_t n, double density, bool whole = true) {
  const auto indices = samples::random_indices(random, 0, n, density);
  const auto values = whole ? samples::integers<V>(random, indices.size())
                            : samples::awkward_values<V>(random, indices.size());
  return SparseVector<V>::sparse(n, indices, values);
}

template <class V>
std::vector<float> dense_of(const SparseVector<V>& vector, float factor = 1.0F) {
  std::vector<V> out(vector.dimension(), V(99.0F));
  vector.write_dense(std::span<V>(out), Reduction::sum, factor);
  std::vector<float> wide;
  for (const V& value : out) wide.push_back(static_cast<float>(value));
  return wide;
}

template <class V>
auto bits_of(const SparseVector<V>& vector) {
  auto out = samples::bits(std::vector<V>(vector.values().begin(), vector.values().end()));
  out.insert(out.end(), vector.indices().begin(), vector.indices().end());
  return out;
}

TEST("a vector keeps what it is given, and a clone is apart from it") {
  const std::vector<std::uint32_t> indices{1, 4, 9};
  const std::vector<float> values{1.0F, -2.0F, 3.0F};
  auto vector = SparseVector<float>::sparse(10, indices, values);
  EXPECT_EQ(vector.dimension(), 10);
  EXPECT_EQ(vector.nnz(), 3);
  EXPECT(!vector.is_dense());
  auto twin = vector.clone();
  vector.scale(2.0F);
  EXPECT_EQ(dense_of(vector), (std::vector<float>{0, 2, 0, 0, -4, 0, 0, 0, 0, 6}));
  EXPECT_EQ(dense_of(twin), (std::vector<float>{0, 1, 0, 0, -2, 0, 0, 0, 0, 3}));
  twin.to_dense();
  EXPECT(twin.is_dense() && twin.indices().empty());
  EXPECT_EQ(twin.nnz(), 10);
  EXPECT_EQ(dense_of(twin, 0.5F), (std::vector<float>{0, 0.5F, 0, 0, -1, 0, 0, 0, 0, 1.5F}));
  const auto taken = vector.take_values();
  EXPECT_EQ(taken[2], 6.0F);
  EXPECT_EQ(vector.take_indices()[2], 9);
}

TEST("a borrowed dense vector reads the caller's memory, and copies it before any change") {
  const std::vector<float> values{1, 0, 3};
  const auto borrowed = [&] { return SparseVector<float>::borrow_dense(values); };
  EXPECT(borrowed().is_dense() && borrowed().is_borrowed() && borrowed().values().data() == values.data());
  EXPECT_EQ(borrowed().nnz(), 3U);
  SparseVector<float> scaled = borrowed();
  scaled.scale(2.0);
  EXPECT(!scaled.is_borrowed() && scaled.values()[2] == 6.0F);
  const SparseVector<float> total = reduce(borrowed(), borrowed(), Reduction::sum, 2.0);
  EXPECT(!total.is_borrowed() && total.values()[0] == 2.0F && total.values()[2] == 6.0F);
  const SparseVector<float> apart = borrowed().clone();
  EXPECT(apart.values().data() != values.data());
  const Array<float> taken = borrowed().take_values();
  EXPECT(taken.size() == 3 && taken.data() != values.data() && taken[2] == 3.0F);
  SparseVector<float> moved = borrowed();
  const SparseVector<float> to = std::move(moved);
  EXPECT(to.is_borrowed() && to.values().data() == values.data());
  EXPECT_EQ(values, (std::vector<float>{1, 0, 3}));
}

TEST("a vector without entries or without elements is a vector") {
  const SparseVector<bf16> none(7);
  EXPECT_EQ(dense_of(none), std::vector<float>(7));
  EXPECT_EQ(SparseVector<float>().dimension(), 0);
  EXPECT(dense_of(SparseVector<float>::dense(std::span<const float>())).empty());
  auto sum_of_nothing = reduce(SparseVector<float>(), SparseVector<float>(), Reduction::sum, 0.0);
  EXPECT_EQ(sum_of_nothing.nnz(), 0);
}

TEST("misuse is refused with the place and the value") {
  using Error = std::invalid_argument;
  using Indices = std::vector<std::uint32_t>;
  const auto make = [](std::uint64_t n, const Indices& indices, std::size_t count) {
    return SparseVector<float>::sparse(n, indices, std::vector<float>(count));
  };
  EXPECT_THROWS(Error, "indices[2] = 4 is not above indices[1] = 7", make(10, {1, 7, 4}, 3));
  EXPECT_THROWS(Error, "indices[1] = 5 is not above indices[0] = 5", make(10, {5, 5}, 2));
  EXPECT_THROWS(Error, "indices[1] = 10 is out of range: the dimension is 10", make(10, {3, 10, 11}, 3));
  EXPECT_THROWS(Error, "there are 2 indices but 3 values", make(10, {3, 4}, 3));
  EXPECT_THROWS(Error, "dimension is 4294967296", make(std::uint64_t{1} << 32, {}, 0));
  EXPECT_THROWS(Error, "dimension is 4294967296", SparseVector<bf16>(std::uint64_t{1} << 32));
  EXPECT_EQ(make(0xffffffffU, {0xfffffffeU}, 1).nnz(), 1);

  std::vector<float> out(9);
  EXPECT_THROWS(Error, "out has 9 elements but the vector's dimension is 10", make(10, {}, 0).write_dense(out));
  EXPECT_THROWS(Error, "dimension 10 and 11 cannot be reduced",
                reduce(make(10, {}, 0), make(11, {}, 0), Reduction::sum, 1.0));
  EXPECT_THROWS(Error, "switch factor is -1", switch_entries(10, 4, 4, -1.0));
  EXPECT_THROWS(Error, "switch factor is nan", switch_entries(10, 4, 4, std::numeric_limits<double>::quiet_NaN()));
}

TEST("the switch comes where both forms take the same bytes") {
  EXPECT_EQ(switch_entries(1000, 4, 4), 500.0);
  EXPECT_EQ(switch_entries(0, 4, 4, std::numeric_limits<double>::infinity()), 0.0);
  EXPECT_EQ(switch_entries(900, 4, 2), 600.0);
  EXPECT_EQ(switch_entries(900, 2, 4, 0.5), 150.0);
}

// What the vectors are without vectors: an element that is absent is neutral.
template <class V>
std::vector<V> elements_of(const SparseVector<V>& vector, Reduction reduction) {
  std::vector<V> out(vector.dimension(), V(99.0F));
  vector.write_dense(std::span<V>(out), reduction);
  return out;
}

template <class V>
std::vector<V> reduced(const std::vector<V>& a, const std::vector<V>& b, Reduction reduction) {
  std::vector<V> out(a.size());
  kernels::reference::reduce_to(dtype_of<V>, reduction, std::as_bytes(std::span(a)), std::as_bytes(std::span(b)),
                                std::as_writable_bytes(std::span(out)));
  return out;
}

TEST("reductions of random vectors are those of their dense forms, whatever form they have") {
  std::mt19937 random(13);
  const auto check = [&]<class V>(V, Reduction reduction, std::uint64_t n, double density, double other, double delta,
                                  int dense) {
    auto a = random_vector<V>(random, n, density);
    auto b = random_vector<V>(random, n, other);
    if (dense & 1) a.to_dense(reduction);
    if (dense & 2) b.to_dense(reduction);
    const auto expected = reduced(elements_of(a, reduction), elements_of(b, reduction), reduction);
    const auto entries = static_cast<double>(a.nnz() + b.nnz());
    const auto total = reduce(std::move(a), std::move(b), reduction, delta);
    const auto found = elements_of(total, reduction);
    for (std::size_t i = 0; i < n; ++i) {  // by value: both zeros are one
      EXPECT(static_cast<double>(static_cast<kernels::Factor<V>>(found[i])) ==
             static_cast<double>(static_cast<kernels::Factor<V>>(expected[i])));
    }
    EXPECT_EQ(total.is_dense(), dense != 0 || entries > delta);
    if (!total.is_dense()) validate_entries(n, total.indices(), total.nnz());
  };
  for (const Reduction reduction : samples::kReductions) {
    for (const std::uint64_t n : {0, 1, 63, 1000, 10'000}) {
      for (const double density : {0.0, 0.01, 0.6}) {
        for (const double other : {0.0, 0.05, 1.0}) {
          for (const double delta : {0.0, static_cast<double>(n) / 4, kNever}) {
            for (const int dense : {0, 1, 2, 3}) {
              check(float{}, reduction, n, density, other, delta, dense);
              check(double{}, reduction, n, density, other, delta, dense);
              check(bf16{}, reduction, n, density, other, delta, dense);
              check(f16{}, reduction, n, density, other, delta, dense);
              check(std::int32_t{}, reduction, n, density, other, delta, dense);
              check(std::int64_t{}, reduction, n, density, other, delta, dense);
            }
          }
        }
      }
    }
  }
}

TEST("what no vector has is the reduction's neutral element in a dense result") {
  const auto vector = SparseVector<float>::sparse(3, std::vector<std::uint32_t>{1}, std::vector<float>{-4.0F});
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto& [reduction, absent] : std::vector<std::pair<Reduction, float>>{{Reduction::sum, 0.0F},
                                                                                  {Reduction::avg, 0.0F},
                                                                                  {Reduction::prod, 1.0F},
                                                                                  {Reduction::min, kInfinity},
                                                                                  {Reduction::max, -kInfinity},
                                                                                  {Reduction::max_abs, 0.0F}}) {
    const std::vector<float> expected{absent, -4.0F, absent};
    EXPECT_EQ(samples::bits(elements_of(vector, reduction)), samples::bits(expected));
    auto dense = vector.clone();
    dense.to_dense(reduction);
    EXPECT_EQ(samples::bits(elements_of(dense, reduction)), samples::bits(expected));
    const auto none = reduce(SparseVector<float>(3), SparseVector<float>(3), reduction, -1.0);
    EXPECT_EQ(samples::bits(elements_of(none, reduction)), samples::bits(std::vector<float>(3, absent)));
  }
}

TEST("disjoint ranges are concatenated, and an index whose sum is zero stays") {
  const auto low = SparseVector<float>::sparse(100, std::vector<std::uint32_t>{1, 2}, std::vector<float>{1, 2});
  const auto high = SparseVector<float>::sparse(100, std::vector<std::uint32_t>{3, 99}, std::vector<float>{3, 4});
  for (const auto& total : {reduce(low.clone(), high.clone(), Reduction::sum, kNever),
                            reduce(high.clone(), low.clone(), Reduction::sum, kNever)}) {
    EXPECT_EQ(std::vector(total.indices().begin(), total.indices().end()), (std::vector<std::uint32_t>{1, 2, 3, 99}));
    EXPECT_EQ(std::vector(total.values().begin(), total.values().end()), (std::vector<float>{1, 2, 3, 4}));
  }
  auto negative = low.clone();
  negative.scale(-1.0F);
  EXPECT_EQ(reduce(low.clone(), std::move(negative), Reduction::sum, kNever).nnz(), 2);
}

TEST("a ∘ b and b ∘ a have equal bits, with NaNs, infinities and both zeros, in every form") {
  std::mt19937 random(14);
  const auto check = [&]<class V>(V, Reduction reduction, double density, double delta, int dense) {
    auto a = random_vector<V>(random, 2000, density, false);
    auto b = random_vector<V>(random, 2000, 0.2, false);
    if (dense & 1) a.to_dense(reduction);
    if (dense & 2) b.to_dense(reduction);
    const auto left = reduce(a.clone(), b.clone(), reduction, delta);
    const auto right = reduce(b.clone(), a.clone(), reduction, delta);
    EXPECT_EQ(left.is_dense(), right.is_dense());
    EXPECT_EQ(bits_of(left), bits_of(right));
  };
  for (const Reduction reduction : samples::kReductions) {
    for (const double density : {0.0, 0.01, 0.7}) {
      for (const double delta : {0.0, 500.0, kNever}) {
        for (const int dense : {0, 1, 2, 3}) {
          check(float{}, reduction, density, delta, dense);
          check(double{}, reduction, density, delta, dense);
          check(bf16{}, reduction, density, delta, dense);
          check(f16{}, reduction, density, delta, dense);
          check(std::int32_t{}, reduction, density, delta, dense);
          check(std::int64_t{}, reduction, density, delta, dense);
        }
      }
    }
  }
}

TEST("a long sum of vectors that switches on its way is exact on integers") {
  std::mt19937 random(15);
  SparseVector<float> total(5000);
  std::vector<float> expected(5000);
  const double delta = switch_entries(5000, 4, 4);
  bool switched = false;
  for (int step = 0; step < 40; ++step) {
    auto next = random_vector<float>(random, 5000, 0.03);
    const auto addend = dense_of(next);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += addend[i];
    total = reduce(std::move(total), std::move(next), Reduction::sum, delta);
    switched = switched || total.is_dense();
    EXPECT(!switched || total.is_dense());
  }
  EXPECT(switched);
  EXPECT_EQ(dense_of(total), expected);
}

TEST("slices of a vector make up the vector") {
  std::mt19937 random(16);
  for (const bool dense : {false, true}) {
    auto vector = random_vector<float>(random, 1000, 0.1);
    if (dense) vector.to_dense();
    std::vector<float> pieces;
    for (const auto& [begin, end] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
             {0, 0}, {0, 1}, {1, 333}, {333, 333}, {333, 1000}, {1000, 1000}}) {
      const auto slice = vector.slice(begin, end);
      EXPECT_EQ(slice.dense, dense);
      EXPECT_EQ(slice.range, (IndexRange{begin, end}));
      for (const std::uint32_t index : slice.indices) EXPECT(index >= begin && index < end);
      std::vector<float> out(end - begin);
      write_dense(slice, std::span<float>(out));
      pieces.insert(pieces.end(), out.begin(), out.end());
    }
    EXPECT_EQ(pieces, dense_of(vector));
  }
}

}  // namespace
