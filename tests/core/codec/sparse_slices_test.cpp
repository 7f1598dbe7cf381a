#include "codec/assembly.hpp"
#include "codec/slices.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel_samples.hpp"
#include "codec/slice_reduction.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr double kNever = std::numeric_limits<double>::infinity();

template <class V>
std::vector<float> dense_of(const SparseView<V>& view, Reduction reduction = Reduction::sum) {
  std::vector<V> out(view.range.size());
  write_dense(view, std::span<V>(out), reduction);
  std::vector<float> wide;
  for (const V& value : out) wide.push_back(static_cast<float>(value));
  return wide;
}

template <class V>
SparseVector<V> random_vector(std::mt19937& random, std::uint64_t n, double density) {
  const auto indices = samples::random_indices(random, 0, n, density);
  return SparseVector<V>::sparse(n, indices, samples::integers<V>(random, indices.size()));
}

template <class V>
SparseVector<V> assembled(const std::vector<SparseView<V>>& slices, Reduction reduction, double delta) {
  std::vector<SliceContent> contents;
  for (const auto& slice : slices) contents.push_back({slice.range, slice.dense, slice.nnz()});
  VectorAssembly<V> whole(std::move(contents), reduction, delta);
  for (std::size_t i = 0; i < slices.size(); ++i) whole.place(i, slices[i]);
  return whole.finish();
}

// Reduces `ranks` vectors the way a split collective does: each slice by itself, then put together.
template <class V>
void expect_split_reduction(std::mt19937& random, Reduction reduction, std::size_t ranks, std::uint64_t n,
                            double density, double delta, std::size_t dense_ones) {
  std::vector<SparseVector<V>> vectors;
  std::vector<float> expected;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    vectors.push_back(random_vector<V>(random, n, rank % 4 == 1 ? 0.0 : density));
    if (reduction == Reduction::prod) {  // small enough to be exact
      for (V& value : vectors.back().own_values()) value = V(static_cast<float>(value) < 0.0F ? -1.0F : 2.0F);
    }
    if (rank < dense_ones) vectors.back().to_dense(reduction);
    const auto next = dense_of(vectors.back().view(), reduction);
    if (rank == 0) expected = next;
    for (std::size_t i = 0; rank != 0 && i < n; ++i) expected[i] = samples::combined(expected[i], next[i], reduction);
  }
  std::vector<OwnedSlice<V>> slices;
  for (std::size_t owner = 0; owner < ranks; ++owner) {
    const IndexRange range{n * owner / ranks, n * (owner + 1) / ranks};
    std::vector<SparseView<V>> pieces;
    for (const auto& vector : vectors) pieces.push_back(vector.slice(range.begin, range.end));
    slices.push_back(reduce_slices<V>(pieces, reduction, delta / static_cast<double>(ranks)));
    const SparseView<V> slice = slices.back().view();
    EXPECT_EQ(slice.range, range);
    if (dense_ones != 0) EXPECT(slice.dense);
    if (!slice.dense) {
      EXPECT(static_cast<double>(slice.nnz()) <= delta / static_cast<double>(ranks));
      validate_entries(range.end, slice.indices, slice.nnz());
    }
  }
  std::vector<SparseView<V>> views;
  for (const auto& slice : slices) views.push_back(slice.view());
  const SparseVector<V> joined = assembled(views, reduction, delta);
  EXPECT_EQ(joined.dimension(), n);
  EXPECT_EQ(dense_of(joined.view(), reduction), expected);
  if (delta == kNever && dense_ones == 0) EXPECT(!joined.is_dense());
}

TEST("slices reduced and put together are the dense reduction, for any number of ranks, form and switch") {
  std::mt19937 random(17);
  for (const std::size_t ranks : {1, 2, 3, 4, 5, 8, 13}) {
    for (const std::uint64_t n : {0, 1, 7, 1000, 40'000}) {
      for (const double density : {0.0, 0.02, 0.5}) {
        for (const double delta : {kNever, static_cast<double>(n) / 2, 0.0}) {
          for (const Reduction reduction : samples::kReductions) {
            if (n > 1000 && reduction != Reduction::sum && reduction != Reduction::min) continue;
            expect_split_reduction<float>(random, reduction, ranks, n, density, delta, 0);
            expect_split_reduction<double>(random, reduction, ranks, n, density, delta, 0);
            expect_split_reduction<bf16>(random, reduction, ranks, n, density, delta, ranks / 2);
            expect_split_reduction<f16>(random, reduction, ranks, n, density, delta, ranks / 2);
          }
        }
      }
    }
  }
}

TEST("pieces are added in the order given: 1e8 - 1e8 + 1 is 1, 1 + 1e8 - 1e8 is 0") {
  std::vector<SparseVector<float>> vectors;
  for (const float value : {1e8F, -1e8F, 1.0F, 0.0F, 0.0F}) {
    vectors.push_back(
        SparseVector<float>::sparse(10, std::vector<std::uint32_t>{4}, std::vector<float>{value}));
  }
  for (const std::size_t count : {3, 4, 5}) {
    for (const double delta : {kNever, 0.0}) {
      std::vector<SparseView<float>> pieces;
      for (std::size_t i = 0; i < count; ++i) pieces.push_back(vectors[i].view());
      EXPECT_EQ(dense_of(reduce_slices<float>(pieces, Reduction::sum, delta).view())[4], 1.0F);
      std::swap(pieces[0], pieces[2]);
      EXPECT_EQ(dense_of(reduce_slices<float>(pieces, Reduction::sum, delta).view())[4], 0.0F);
    }
  }
}

// A rank of a doubling has its own piece first, its partner has the other one first.
template <class V>
void expect_no_order_of_two(Reduction reduction) {
  const V zero(-0.0F), value(2.5F), other(-2.5F);
  const std::vector<SparseVector<V>> vectors = [&] {
    std::vector<SparseVector<V>> made;
    made.push_back(SparseVector<V>::sparse(6, std::vector<std::uint32_t>{0, 1, 3, 4}, std::vector<V>{zero, zero, value, zero}));
    made.push_back(SparseVector<V>::sparse(6, std::vector<std::uint32_t>{1, 2, 3}, std::vector<V>{zero, zero, other}));
    made.push_back(SparseVector<V>(6));
    made.push_back(SparseVector<V>::dense(std::vector<V>{zero, value, zero, zero, other, zero}));
    made.push_back(SparseVector<V>::dense(std::vector<V>{zero, zero, value, zero, zero, other}));
    return made;
  }();
  const auto bits = [](const OwnedSlice<V>& sum) {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(sum.values.data());
    return std::vector<std::uint8_t>(first, first + sum.values.size() * sizeof(V));
  };
  for (const double delta : {kNever, 4.0, 3.0, 0.0}) {
    for (const auto& a : vectors) {
      for (const auto& b : vectors) {
        const std::vector<SparseView<V>> there{a.view(), b.view()}, back{b.view(), a.view()};
        const OwnedSlice<V> one = reduce_slices<V>(there, reduction, delta);
        const OwnedSlice<V> two = reduce_slices<V>(back, reduction, delta);
        EXPECT_EQ(one.dense, two.dense);
        EXPECT(bits(one) == bits(two));
        SliceReduction<V> in_parts(there, reduction, delta);
        for (const std::uint64_t end : {2, 3, 6}) in_parts.advance(end);
        EXPECT(bits(in_parts.finish()) == bits(one));
      }
    }
  }
}

TEST("two pieces have the same sum in either order, -0 too, whichever form they have") {
  for (const Reduction reduction : samples::kReductions) {
    expect_no_order_of_two<float>(reduction);
    expect_no_order_of_two<double>(reduction);
    expect_no_order_of_two<bf16>(reduction);
    expect_no_order_of_two<f16>(reduction);
  }
}

TEST("the sum goes dense by its own entries, not by those of the pieces together") {
  const auto vector = SparseVector<float>::sparse(10, std::vector<std::uint32_t>{1, 2}, std::vector<float>{1, 2});
  const std::vector<SparseView<float>> pieces(4, vector.view());
  EXPECT(!reduce_slices<float>(pieces, Reduction::sum, 2.0).dense);
  EXPECT(reduce_slices<float>(pieces, Reduction::sum, 1.9).dense);
}

TEST("what is put together goes dense where a slice is dense or there are too many entries") {
  const auto vector = SparseVector<float>::sparse(10, std::vector<std::uint32_t>{1, 8}, std::vector<float>{1, 2});
  auto dense = vector.clone();
  dense.to_dense();
  const std::vector<SparseView<float>> sparse{vector.slice(0, 5), vector.slice(5, 10)};
  const std::vector<SparseView<float>> mixed{dense.slice(0, 5), vector.slice(5, 10)};
  EXPECT(!assembled(sparse, Reduction::sum, 2.0).is_dense());
  EXPECT(assembled(sparse, Reduction::sum, 1.0).is_dense());
  EXPECT(assembled(mixed, Reduction::sum, kNever).is_dense());
  EXPECT_EQ(dense_of(assembled(mixed, Reduction::sum, kNever).view()), dense_of(vector.view()));
}

TEST("slices of a part of the vector are concatenated to a slice, and one of all becomes a vector, dense beyond delta") {
  std::mt19937 random(24);
  const auto vector = random_vector<float>(random, 1000, 0.2);
  const std::vector<SparseView<float>> slices{vector.slice(100, 100), vector.slice(100, 450), vector.slice(450, 900)};
  const OwnedSlice<float> part = concatenate_slices<float>(slices);
  EXPECT_EQ(part.range, (IndexRange{100, 900}));
  EXPECT_EQ(dense_of(part.view()), dense_of(vector.slice(100, 900)));
  for (const double delta : {kNever, 10.0}) {
    const auto whole = whole_vector(concatenate_slices<float>(std::vector<SparseView<float>>{vector.view()}), Reduction::sum, delta);
    EXPECT_EQ(whole.is_dense(), delta == 10.0);
    EXPECT_EQ(dense_of(whole.view()), dense_of(vector.view()));
  }
}

}  // namespace
