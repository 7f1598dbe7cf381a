// Vectors of counts: slices add up, sums have as many entries and messages as many bytes as real ones.
#include "testing.hpp"

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "base/random.hpp"
#include "codec/counted.hpp"
#include "session/reductions.hpp"
#include "simulation/simulation.hpp"

namespace {

using namespace telegrad;

using Counted = SparseVector<CountedF32>;
using View = SparseView<CountedF32>;

TEST("under SizeOnly a buffer claims its size and has a head; scopes nest") {
  constexpr std::size_t kHuge = std::size_t{1} << 50;
  Buffer claimed;
  EXPECT(!SizeOnly::active());
  {
    const SizeOnly outer;
    {
      const SizeOnly inner;
      EXPECT(SizeOnly::active());
    }
    EXPECT(SizeOnly::active());
    claimed = Buffer(kHuge);
    std::memset(claimed.data(), 1, Buffer::kHeadBytes);
    EXPECT_EQ(Array<float>(kHuge).size(), kHuge);
    EXPECT_EQ(Buffer(10).size(), 10);
  }
  EXPECT(!SizeOnly::active());
  EXPECT_EQ(claimed.size(), kHuge);
  EXPECT_EQ(claimed.bytes().size(), kHuge);
  const Buffer real(1000);
  std::memset(real.data(), 2, real.size());
}

TEST("the slices of any partition hold as many entries as the whole, whatever the places") {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t n = 1 + random.below(round % 2 == 0 ? 1000 : kDimensionMost);
    const std::uint64_t common = random.below(n / 2 + 1);
    const std::uint64_t own = random.below(n / 4 + 1);
    const Counted vector = Counted::sparse(n, {.common = common, .own = own, .seed = random.next()});
    EXPECT_EQ(vector.nnz(), common + own);
    std::uint64_t common_sum = 0;
    std::uint64_t own_sum = 0;
    for (std::uint64_t begin = 0; begin < n;) {
      const std::uint64_t end = std::min(n, begin + 1 + random.below(n / 8 + 1));
      const View slice = vector.slice(begin, end);
      EXPECT(slice.nnz() <= end - begin);
      common_sum += slice.entries.common;
      own_sum += slice.entries.own;
      begin = end;
    }
    EXPECT_EQ(common_sum, common);
    EXPECT_EQ(own_sum, own);
  }
}

TEST("few entries lie in other slices on every rank") {
  std::vector<int> entries_in(100);
  for (std::uint64_t rank = 0; rank < 1000; ++rank) {
    const Counted vector = Counted::sparse(100'000, {.own = 3, .seed = mix(rank + 1)});
    for (std::uint64_t slice = 0; slice < 100; ++slice) {
      entries_in[slice] += static_cast<int>(vector.slice(slice * 1000, (slice + 1) * 1000).nnz());
    }
  }
  for (const int entries : entries_in) EXPECT(entries > 10 && entries < 60);  // 30 are to be expected
}

TEST("more entries than elements are refused") {
  constexpr EntryCounts kTooMany[] = {{.common = 11}, {.own = 11}, {.common = 5, .own = 6}};
  for (const EntryCounts& entries : kTooMany) {
    bool refused = false;
    try {
      Counted::sparse(10, entries);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    EXPECT(refused);
  }
  EXPECT_EQ(Counted::sparse(10, {.common = 4, .own = 6}).nnz(), 10);
  EXPECT_EQ(Counted::dense(10).nnz(), 10);
}

// A real piece with as many entries at random places.
SparseVector<float> random_piece(std::uint64_t n, const std::vector<std::uint32_t>& common, double density,
                                 Random& random) {
  std::vector<bool> is_common(n);
  for (const std::uint32_t index : common) is_common[index] = true;
  std::vector<std::uint32_t> indices;
  for (std::uint32_t i = 0; i < n; ++i) {
    if (is_common[i] || random.uniform() < density) indices.push_back(i);
  }
  return SparseVector<float>::sparse(n, indices, std::vector<float>(indices.size(), 1.0F));
}

TEST("the union of independent entries is as large as that of real ones at random places") {
  constexpr std::uint64_t kN = 100'000;
  Random random(3);
  for (const double density : {0.001, 0.02, 0.2}) {
    for (const std::size_t common_count : {std::size_t{0}, std::size_t{5000}}) {
      std::vector<std::uint32_t> common;
      for (std::uint32_t i = 0; i < common_count; ++i) common.push_back(i * 17);
      std::vector<SparseVector<float>> vectors;
      std::vector<SparseView<float>> real;
      std::vector<View> counted;
      for (int piece = 0; piece < 6; ++piece) {
        vectors.push_back(random_piece(kN, common, density * (1 + piece % 2), random));
        counted.push_back({{0, kN}, false, {.common = common_count, .own = vectors.back().nnz() - common_count}});
      }
      for (const auto& vector : vectors) real.push_back(vector.view());
      const auto expected = static_cast<double>(reduce_slices<float>(real, Reduction::sum, kN).view().nnz());
      const auto found = static_cast<double>(reduce_slices<CountedF32>(counted, Reduction::sum, kN).view().nnz());
      EXPECT_NEAR(found / expected, 1.0, 0.02);
    }
  }
}

TEST("common entries alone stay as they are, one piece's own too; sums of many small slices are unbiased") {
  const View common{{0, 1000}, false, {.common = 10}};
  const View own{{0, 1000}, false, {.common = 10, .own = 7}};
  const std::vector<View> pieces{common, own, common};
  const auto sum = reduce_slices<CountedF32>(pieces, Reduction::sum, 1000.0);
  EXPECT_EQ(sum.entries.common, 10);
  EXPECT_EQ(sum.entries.own, 7);

  std::uint64_t entries = 0;
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    const View one{{i * 4, i * 4 + 4}, false, {.own = 1}};
    entries += reduce_slices<CountedF32>(std::vector<View>{one, one}, Reduction::sum, 4.0).view().nnz();
  }
  EXPECT_NEAR(static_cast<double>(entries) / 10'000, 1.75, 0.02);  // 4(1 − (3/4)²)
}

TEST("dense where a piece is, or beyond δ, as real slices are") {
  const IndexRange range{0, 100};
  const View sparse{range, false, {.own = 20}};
  const View dense{range, true, {}};
  const auto is_dense = [](std::vector<View> pieces, double delta) {
    return reduce_slices<CountedF32>(pieces, Reduction::sum, delta).dense;
  };
  EXPECT(!is_dense({sparse, sparse}, 40.0));
  EXPECT(is_dense({sparse, dense}, 40.0));
  EXPECT(is_dense({sparse}, 19.0));
  EXPECT(is_dense({sparse, sparse}, 30.0));  // 36 entries are to be expected
  const OwnedSlice<CountedF32> whole{range, false, {.own = 20}};
  EXPECT_EQ(whole_vector<CountedF32>(whole, Reduction::sum, 20.0).nnz(), 20);
  EXPECT_EQ(whole_vector<CountedF32>(whole, Reduction::sum, 19.0).nnz(), 100);
}

TEST("messages are as long as real ones, and read back what was written") {
  Random random(5);
  for (const std::uint64_t n : {1UL, 7UL, 1000UL, 70'000UL, 1'000'000UL}) {
    for (const double density : {0.0, 0.001, 0.03, 0.6, 1.0}) {
      const SparseVector<float> vector = random_piece(n, {}, density, random);
      const std::uint64_t common = vector.nnz() / 3;
      const View counted{{0, n}, false, {.common = common, .own = vector.nnz() - common}};
      const std::size_t dense_bytes = encoded_size(SparseVector<float>::dense(std::vector<float>(n)).view());
      const SizeOnly size_only;
      const Buffer message = encode(counted);
      EXPECT_EQ(message.size(), encoded_size(vector.view()));
      const auto decoded = decode<CountedF32>(message.bytes(), {0, n});
      REQUIRE(decoded.ok());
      EXPECT_EQ(decoded.view().entries.common, common);
      EXPECT_EQ(decoded.view().entries.own, counted.entries.own);

      const Buffer dense = encode(View{{0, n}, true, {}});
      EXPECT_EQ(dense.size(), dense_bytes);
      EXPECT(decode<CountedF32>(dense.bytes(), {0, n}).view().dense);
    }
  }
}

TEST("packed values make messages shorter by what the exponents of selected gradients save, but not dense ones") {
  const View many{{0, 1'000'000}, false, {.own = 10'000}};
  const auto saved = [](const View& view, ValueEncoding values) {
    const std::size_t as_is = encoded_size(view, {.values = values});
    const Buffer packed = encode(view, {.values = values, .packs_values = true});
    EXPECT_EQ(decode<CountedF32>(packed.bytes(), view.range).view().nnz(), view.nnz());
    return static_cast<double>(as_is - packed.size()) / static_cast<double>(view.nnz());
  };
  EXPECT_NEAR(saved(many, ValueEncoding::native), 5.9 / 8, 0.02);
  EXPECT_NEAR(saved(many, ValueEncoding::bf16), 5.9 / 8, 0.02);
  EXPECT_EQ(saved(many, ValueEncoding::int8), 0.0);
  EXPECT_EQ(saved(many, ValueEncoding::mean), 0.0);
  EXPECT_EQ(saved({{0, 1000}, true, {}}, ValueEncoding::native), 0.0);
}

TEST("messages with packed indices are as long as real ones of random indices, within 1 %") {
  Random random(6);
  constexpr WireFormat kPacked{.indices = IndexFormat::packed};
  for (const std::uint64_t n : {1UL, 7UL, 300'000UL, 1'000'000UL}) {
    for (const double density : {0.0, 0.01, 0.1, 0.6, 1.0}) {
      const SparseVector<float> vector = random_piece(n, {}, density, random);
      const View counted{{0, n}, false, {.common = 0, .own = vector.nnz()}};
      const std::size_t size = encoded_size(counted, kPacked);
      const auto real = static_cast<double>(encoded_size(vector.view(), kPacked));
      EXPECT(std::abs(static_cast<double>(size) / real - 1) < 0.01);
      const SizeOnly size_only;
      const Buffer message = encode(counted, kPacked);
      EXPECT_EQ(message.size(), size);
      const auto decoded = decode<CountedF32>(message.bytes(), {0, n});
      REQUIRE(decoded.ok());
      EXPECT_EQ(decoded.view().nnz(), vector.nnz());
    }
  }
}

TEST("damaged messages are found out") {
  const View view{{0, 100}, false, {.common = 3, .own = 4}};
  const auto error_after = [&](auto damage) {
    Buffer message = encode(view);
    damage(message);
    return decode<CountedF32>(message.bytes(), {0, 100}).error();
  };
  EXPECT_EQ(error_after([](Buffer&) {}), "");
  EXPECT(error_after([](Buffer& m) { m.data()[0] ^= std::byte{1}; }).find("magic") != std::string::npos);
  EXPECT(error_after([](Buffer& m) { m.truncate(31); }).find("fewer than its header") != std::string::npos);
  EXPECT(error_after([](Buffer& m) { m.truncate(40); }).find("its header says") != std::string::npos);
  EXPECT(error_after([](Buffer& m) { m.data()[24] = std::byte{101}; }).find("nnz is 101") != std::string::npos);
  EXPECT(error_after([](Buffer& m) { m.data()[32] = std::byte{8}; }).find("8 of its 7") != std::string::npos);
  EXPECT(decode<CountedF32>(encode(view).bytes(), {0, 99}).error().find("range") != std::string::npos);
}

struct Seen {
  double finish_s;
  std::vector<std::uint64_t> bytes_sent;
  std::size_t result_nnz;
  friend bool operator==(const Seen&, const Seen&) = default;
};

template <class V, class Make>
Seen run(Rank size, double switch_factor, bool size_only, Make make) {
  Simulation simulation(size, {.costs = {.gamma_s_per_byte = 1e-10}, .size_only = size_only});
  std::vector<SparseSum<V>> sums;
  simulation.begin_all([&](Rank) {
    sums.push_back(make_all_reduce<V>(make(), {.switch_factor = switch_factor}));
    return sums.back().request;
  });
  Seen seen{};
  EXPECT(!simulation.run().deadlock);
  for (Rank rank = 0; rank < size; ++rank) {
    seen.finish_s = std::max(seen.finish_s, simulation.finish_s(rank));
    seen.bytes_sent.push_back(simulation.network().counts(rank).bytes_sent);
  }
  seen.result_nnz = (*sums[0].result)->nnz();
  return seen;
}

TEST("entries that are the same on all ranks take exactly the times and bytes of real ones, sparse and dense") {
  for (const std::uint64_t n : {1000UL, 99'991UL}) {
    for (const Rank size : {1U, 2U, 5U, 16U}) {
      for (const double density : {0.0, 0.01, 0.3, 0.49, 0.51, 0.65, 0.68, 1.0}) {
        for (const double factor : {0.1, 1.0, 2.0}) {
          const auto count = static_cast<std::uint64_t>(density * static_cast<double>(n));
          std::vector<std::uint32_t> indices;
          for (std::uint64_t i = 0; i < count; ++i) {
            indices.push_back(static_cast<std::uint32_t>((2 * i + 1) * n / (2 * count)));
          }
          const Seen real = run<float>(size, factor, false, [&] {
            return SparseVector<float>::sparse(n, indices, std::vector<float>(count, 1.0F));
          });
          const Seen counted =
              run<CountedF32>(size, factor, true, [&] { return Counted::sparse(n, {.common = count}); });
          EXPECT_NEAR(real.finish_s / counted.finish_s, 1.0, 1e-9);
          EXPECT(real.bytes_sent == counted.bytes_sent);
          EXPECT_EQ(counted.result_nnz, real.result_nnz);
        }
      }
    }
  }
}

}  // namespace
