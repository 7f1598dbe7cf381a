// Sparse sums between ranks that share memory: the bits that they have elsewhere, whatever goes in sections, and safe from
// damaged ones.
#include "testing.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "codec/slice_reduction.hpp"
#include "collectives/sparse/allgather_slices.hpp"
#include "collectives/sparse/sections.hpp"
#include "collectives/sparse/split.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/support/counts.hpp"
#include "session/reductions.hpp"
#include "sparse_samples.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr std::uint64_t kLong = 700'000;  // slices of five ranks are long enough for counts to go ahead

template <class V>
struct Sums {
  std::vector<std::shared_ptr<std::optional<SparseVector<V>>>> results;
  const SparseVector<V>& of(Rank rank) const { return **results[rank]; }
};

// Ranks take turns with formats of indices.
template <class V>
Sums<V> run_sum(World world, const std::vector<SparseVector<V>>& vectors, SparseReduction how, bool mixes) {
  constexpr IndexFormat kFormats[] = {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed};
  Sums<V> sums;
  const Ended ended = run_ranks(world, static_cast<Rank>(vectors.size()), [&](Rank rank) {
    SparseReduction here = how;
    if (mixes) here.wire.indices = kFormats[rank % std::size(kFormats)];
    auto sum = make_all_reduce(vectors[rank].clone(), here);
    sums.results.push_back(sum.result);
    return sum.request;
  });
  REQUIRE(ended.all_succeeded());
  return sums;
}

template <class V>
void check(const std::vector<SparseVector<V>>& vectors, const SparseReduction& how) {
  const auto size = static_cast<Rank>(vectors.size());
  const Sums<V> elsewhere = run_sum(World::local, vectors, how, false);
  std::vector<V> expected(static_cast<std::size_t>(vectors[0].dimension()));
  elsewhere.of(0).write_dense(expected, how.reduction);
  for (const bool mixes : {false, true}) {
    const Sums<V> sums = run_sum(World::memory, vectors, how, mixes);
    for (Rank rank = 0; rank < size; ++rank) {
      EXPECT(same_bits(sums.of(rank), sums.of(0)));
      if (!mixes) EXPECT(same_bits(sums.of(rank), elsewhere.of(0)));
    }
    std::vector<V> dense(expected.size());
    sums.of(0).write_dense(dense, how.reduction);
    EXPECT(std::ranges::equal(std::as_bytes(std::span(dense)), std::as_bytes(std::span(expected))));
  }
  std::vector<std::vector<V>> outputs(size, std::vector<V>(expected.size(), static_cast<V>(-77.0F)));
  const Ended ended = run_ranks(World::memory, size, [&](Rank rank) {
    return make_all_reduce_into(vectors[rank].clone(), std::span(outputs[rank]), how);
  });
  REQUIRE(ended.all_succeeded());
  for (const auto& output : outputs) {
    EXPECT(std::ranges::equal(std::as_bytes(std::span(output)), std::as_bytes(std::span(expected))));
  }
}

// Values whose sums depend on their order, which is that of the algorithm.
template <class V>
SparseVector<V> vector_of(std::uint64_t n, double density, Random& random) {
  Input<V> input;
  for (std::uint32_t i = 0; i < n; ++i) {
    if (random.uniform() >= density) continue;
    input.indices.push_back(i);
    input.values.push_back(static_cast<V>(static_cast<float>(random.uniform() - 0.5) * 1e3F));
  }
  return input.vector(n);
}

TEST("sums have the same bits in memory as elsewhere, of vectors alike and unlike, sparse and dense") {
  constexpr Algorithm kAlgorithms[] = {Algorithm::split_allgather, Algorithm::split_dense_allgather, Algorithm::ring};
  for (const Rank size : {Rank{2}, Rank{3}, Rank{4}, Rank{5}}) {
    Random random(size);
    std::vector<SparseVector<float>> alike, unlike;
    std::vector<SparseVector<bf16>> halves;
    for (Rank rank = 0; rank < size; ++rank) {
      alike.push_back(vector_of<float>(kLong, 0.08, random));
      halves.push_back(vector_of<bf16>(kLong, 0.1, random));
      unlike.push_back(vector_of<float>(kLong, rank == 1 ? 0.0 : rank == 2 ? 0.001 : 0.07, random));
    }
    for (const Algorithm algorithm : kAlgorithms) {
      SparseReduction how{.algorithm = algorithm};
      check(alike, how);
      how.reduction = Reduction::avg;
      check(halves, how);
      how.reduction = Reduction::max;
      check(unlike, how);
      how.reduction = Reduction::sum;
      how.slices = Slices::balanced;
      check(unlike, how);
    }
    unlike[0].to_dense();
    check(unlike, SparseReduction{});
    check(unlike, SparseReduction{.wire = {.values = ValueEncoding::bf16}});
  }
}

TEST("where the choice of the algorithm is open, sums are exact in memory") {
  for (const Rank size : {Rank{2}, Rank{3}, Rank{4}, Rank{5}}) {
    for (const double density : {0.001, 0.08, 0.6}) {
      Random random(size);
      std::vector<SparseVector<float>> vectors;
      for (Rank rank = 0; rank < size; ++rank) vectors.push_back(uniform<float>(kLong, density, random).vector(kLong));
      std::vector<float> expected(kLong);
      run_sum(World::local, vectors, SparseReduction{}, false).of(0).write_dense(expected);
      const auto sums = run_sum(World::memory, vectors, SparseReduction{.algorithm = Algorithm::automatic}, false);
      std::vector<float> dense(kLong);
      sums.of(0).write_dense(dense);
      EXPECT(dense == expected);
      for (Rank rank = 0; rank < size; ++rank) EXPECT(same_bits(sums.of(rank), sums.of(0)));
    }
  }
}

TEST("a sum of short slices, or of short shares, has the same bits too") {
  for (const std::uint64_t n : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{3000}, std::uint64_t{60'000}, kLong}) {
    Random random(n);
    std::vector<SparseVector<float>> vectors;
    for (int rank = 0; rank < 4; ++rank) vectors.push_back(vector_of<float>(n, n == kLong ? 0.01 : 0.5, random));
    check(vectors, SparseReduction{});
  }
}

// On which nothing comes, and work goes on when the test says so.
struct StillTransport final : Transport {
  explicit StillTransport(Rank ranks, bool shares = true) : size_(ranks), shares_memory_(shares) {}
  Rank rank() const override { return 0; }
  Rank size() const override { return size_; }
  bool shares_memory() const override { return shares_memory_; }
  ReadyQueue& ready() override { return ready_; }
  MovedBytes moved() const override { return {}; }
  void start_send(Rank, Step step, ConstBytes, Pending&) override { sent.push_back(step); }
  void start_receive(Rank, Step step, Bytes, Pending&) override { received.push_back(step); }
  void start_receive_any(Rank, Step step, std::size_t, Buffer&, Pending&) override { received.push_back(step); }
  void start_compute(std::size_t, Pending& pending) override {
    ++turns;
    working.push_back(&pending);
  }
  void start_fail(Rank, std::string) override {}

  /// Ends the work under way; what waits for it goes on.
  void finish_work() {
    for (Pending* const one : std::exchange(working, {})) one->complete(0);
    std::vector<std::coroutine_handle<>> going_on;
    for (ready_.swap(going_on); !going_on.empty(); going_on.clear(), ready_.swap(going_on)) {
      for (const auto coroutine : going_on) coroutine.resume();
    }
  }

  std::vector<Step> sent, received;
  std::vector<Pending*> working;
  int turns = 0;

 private:
  const Rank size_;
  const bool shares_memory_;
  ReadyQueue ready_;
};

TEST("long vectors of the plain format go in sections, and others in one message") {
  const StillTransport memory(2);
  const StillTransport network(2, false);
  Random random(1);
  const auto entries = vector_of<float>(20'000, 0.5, random);
  const auto few = vector_of<float>(20'000, 0.01, random);
  EXPECT(goes_in_sections(memory, entries.view(), {}));
  EXPECT(goes_in_sections(memory, entries.view(), {.indices = IndexFormat::raw32}));
  EXPECT(!goes_in_sections(memory, few.view(), {}));
  EXPECT(!goes_in_sections(network, entries.view(), {}));
  EXPECT(!goes_in_sections(memory, entries.view(), {.indices = IndexFormat::packed}));
  EXPECT(!goes_in_sections(memory, entries.view(), {.packs_values = true}));
  EXPECT(!goes_in_sections(memory, entries.view(), {.values = ValueEncoding::bf16}));
}

TEST("shares that have to be encoded are so one at a time, and few of them wait for their receivers") {
  constexpr Rank kSize = 12;
  constexpr std::uint64_t kN = 400'000;
  Random random(5);
  const auto mine = vector_of<float>(kN, 0.3, random);
  const Partition slices(kN, kSize);
  for (const bool in_sections : {false, true}) {
    StillTransport net(kSize);
    const SparseReduction how{.wire = {.indices = in_sections ? IndexFormat::none : IndexFormat::packed}};
    Task<OwnedSlice<float>> sum = reduce_owned_slice(net, mine, slices, how);
    sum.start();
    EXPECT_EQ(net.received.size(), kSize - 1U);
    EXPECT_EQ(net.sent.size(), in_sections ? 3 * (kSize - 1U) : 0U);
    EXPECT_EQ(net.turns, in_sections ? 0 : 1);
    if (in_sections) continue;
    for (std::size_t share = 1; share <= 4; ++share) {
      net.finish_work();
      EXPECT_EQ(net.sent.size(), share);
      EXPECT_EQ(net.working.size(), 1U);
    }
    for (int more = 0; more < 3; ++more) net.finish_work();  // nothing has left
    EXPECT_EQ(net.sent.size(), 4U);
    EXPECT_EQ(net.turns, 5);
  }
}

TEST("sections keep to their steps, also where pieces are long because there are many ranks") {
  constexpr std::uint64_t kN = 1'000'000;
  Array<std::uint32_t> indices(kN);
  Array<float> values(kN);
  std::iota(indices.begin(), indices.end(), 0U);
  std::ranges::fill(values, 1.0F);
  const auto vector = SparseVector<float>::adopt_sparse(kN, std::move(indices), std::move(values));
  for (const Rank size : {Rank{2}, Rank{300}, Rank{512}, Rank{2000}}) {
    StillTransport net(size);
    constexpr Step kFirst = 70;
    Task<void> sending = send_in_sections(net, 1, kFirst, vector.view());
    sending.start();
    const Step end = kFirst + vector_steps(net, most_bytes<float>(IndexRange{0, kN}));
    EXPECT(std::ranges::all_of(net.sent, [&](Step step) { return kFirst <= step && step < end; }));

    const VectorHeader header = plain_header(vector.view());
    Buffer message(sizeof header);
    std::ranges::copy(std::as_bytes(std::span(&header, 1)), message.bytes().begin());
    Task<Buffer> receiving = receive_rest_of_vector(
        net, 1, kFirst, std::move(message), {DType::f32, {0, kN}, most_bytes<float>(IndexRange{0, kN})});
    receiving.start();
    EXPECT(std::ranges::equal(net.received, std::span(net.sent).subspan(1)));
  }
}

TEST("an owner makes its slice dense where that is shorter than what it sends, which in memory has raw indices") {
  constexpr std::uint64_t kN = 400'000;
  Random random(6);
  for (const auto& [density, dense_in_memory] : {std::pair{0.45, false}, std::pair{0.55, true}}) {
    for (const bool memory : {false, true}) {
      StillTransport net(2, memory);
      const auto vector = vector_of<float>(kN, density, random);
      EncodedSlice<float> slice{.slices = Partition(kN, 2)};
      const SparseView<float> share = vector.slice(0, kN / 2);
      OwnedSlice<float> owned{share.range, false, Array<std::uint32_t>(share.nnz()), Array<float>(share.nnz())};
      std::ranges::copy(share.indices, owned.indices.begin());
      std::ranges::copy(share.values, owned.values.begin());
      const SparseReduction how{.algorithm = Algorithm::automatic};
      Task<void> encoding = encode_slice(net, std::move(owned), how, 1.0F, slice);
      encoding.start();
      while (!encoding.done()) net.finish_work();
      EXPECT_EQ(slice.count, memory && dense_in_memory ? kDenseSlice : share.nnz());
      EXPECT_EQ(slice.encoded.empty(), memory);
    }
  }
}

// A rank that sends what it likes.
using Body = std::function<Task<void>(Transport&, SparseVector<float>)>;

void check_damage(double density, const Body& body, const std::string& reason) {
  constexpr std::uint64_t kN = 400'000;
  constexpr Rank kDamaged = 2;
  Random random(3);
  const auto vector = vector_of<float>(kN, density, random);
  const Ended ended = run_ranks(World::memory, 3, [&](Rank rank) {
    RequestPtr request = make_all_reduce(vector.clone(), SparseReduction{}).request;
    if (rank != kDamaged) return request;
    return std::make_shared<Request>(request->call(), [&](Transport& net) { return body(net, vector.clone()); });
  });
  for (const Rank rank : {Rank{0}, Rank{1}}) {
    REQUIRE(ended.requests[rank]->failure());
    EXPECT_EQ(ended.requests[rank]->failure()->peer, kDamaged);
    EXPECT(ended.requests[rank]->failure()->reason.find(reason) != std::string::npos);
  }
}

Task<void> send_share(Transport& net, SparseVector<float> mine, int damage) {
  std::deque<Transport::Sending> sends;
  std::deque<std::pair<VectorHeader, Array<std::uint32_t>>> kept;
  const Partition slices(mine.dimension(), net.size());
  for (const Rank to : {Rank{0}, Rank{1}}) {
    const SparseView<float> share = mine.slice(slices[to].begin, slices[to].end);
    auto& [header, indices] = kept.emplace_back(plain_header(share), Array<std::uint32_t>(share.nnz()));
    std::ranges::copy(share.indices, indices.begin());
    if (damage == 0) std::swap(indices[5], indices[6]);
    if (damage == 1) indices[share.nnz() - 1] = static_cast<std::uint32_t>(share.range.end);
    if (damage == 2) header.nnz = static_cast<std::uint32_t>(share.range.size() + 1);
    if (damage == 3) header.index_format = IndexFormat::packed;
    if (damage == 4) header.end += 1;
    sends.emplace_back(net, to, 0, std::as_bytes(std::span(&header, 1)));
    sends.emplace_back(net, to, 1, std::as_bytes(indices.span()));
    sends.emplace_back(net, to, 2, std::as_bytes(share.values));
  }
  for (auto& one : sends) co_await one;
  co_await net.receive_any_size(0, 9999, 0);  // never comes
}

TEST("damaged sections end the operation on all ranks, and name their sender") {
  for (int damage = 0; damage < 5; ++damage) {
    const Body body = [damage](Transport& net, SparseVector<float> mine) {
      return send_share(net, std::move(mine), damage);
    };
    for (const double density : {0.1, 0.005}) check_damage(density, body, "rank 2 sent damaged entries");  // long, short
  }
}

Task<void> send_sum(Transport& net, SparseVector<float> mine, int damage) {
  const SparseReduction how;
  EncodedSlice<float> slice{.slices = Partition(static_cast<std::size_t>(mine.dimension()), net.size())};
  slice.first_step = split_steps<float>(net, slice.slices);
  OwnedSlice<float> owned = co_await reduce_owned_slice(net, mine, slice.slices, how);
  co_await encode_slice(net, std::move(owned), how, 1.0F, slice);
  TELEGRAD_CHECK(slice.encoded.empty() && !slice.owned.dense);
  std::span<std::uint32_t> indices = slice.owned.indices.span();
  if (damage == 0) std::swap(indices[5], indices[6]);
  if (damage == 1) indices.front() = 0;  // of another slice
  if (damage == 2) slice.count -= 1;
  if (damage == 3) slice.count = mine.dimension();
  const Step round_a_ring = (net.size() - 1) * any_size_steps(net, slice.most_bytes);
  Counts counts(net, slice.first_step + std::max(round_a_ring, vector_steps(net, slice.most_bytes)), 1);
  counts.say({slice.count});
  std::vector<Task<void>> both;
  for (const Rank to : {Rank{0}, Rank{1}}) {
    both.push_back(send_in_sections(net, to, slice.first_step, slice.owned.view()));
  }
  co_await when_all(std::move(both));
  co_await net.receive_any_size(0, 9999, 0);  // never comes
}

TEST("damaged sums end the operation on all ranks, and name their owner") {
  for (int damage = 0; damage < 4; ++damage) {
    const Body body = [damage](Transport& net, SparseVector<float> mine) {
      return send_sum(net, std::move(mine), damage);
    };
    check_damage(0.1, body, "rank 2 sent damaged sums");
  }
}

TEST("a slice that is reduced in parts has the bits of one that is not") {
  Random random(7);
  constexpr std::uint64_t kN = 5000;
  for (const double density : {0.0, 0.01, 0.4}) {
    std::vector<SparseVector<float>> vectors;
    for (int i = 0; i < 5; ++i) vectors.push_back(vector_of<float>(kN, density, random));
    for (const bool one_is_dense : {false, true}) {
      if (one_is_dense) vectors[3].to_dense();
      std::vector<SparseView<float>> pieces;
      for (const auto& vector : vectors) pieces.push_back(vector.slice(100, 4900));
      for (const double delta : {0.0, 10.0, 1000.0, 3000.0, 1e9}) {
        const OwnedSlice<float> whole = reduce_slices<float>(pieces, Reduction::sum, delta);
        for (const std::vector<std::uint64_t>& ends : {std::vector<std::uint64_t>{4900}, {100, 101, 4900, 4900},
                                                      {1300, 2500, 3700, 4900}}) {
          SliceReduction<float> parts(pieces, Reduction::sum, delta);
          EXPECT_EQ(parts.range(), (IndexRange{100, 4900}));
          std::size_t bytes = 0;
          for (const std::uint64_t end : ends) bytes += parts.advance(end);
          EXPECT_EQ(bytes, parts.bytes());
          const OwnedSlice<float> sum = parts.finish();
          EXPECT_EQ(sum.dense, whole.dense);
          EXPECT(std::ranges::equal(sum.indices.span(), whole.indices.span()));
          EXPECT(std::ranges::equal(std::as_bytes(sum.values.span()), std::as_bytes(whole.values.span())));
        }
      }
    }
  }
}

}  // namespace
