// Measured operations: times equal their closed forms, without payloads they are the same, histories repeat.
#include "testing.hpp"

#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulation/measure.hpp"

namespace {

using namespace telegrad;

constexpr SimCosts kPlain{.alpha_s = 10e-6, .beta_s_per_byte = 1e-9, .gamma_s_per_byte = 5e-10};
constexpr Rank kSizes[] = {2, 3, 8, 64, 512};
constexpr std::uint64_t kBytes = 4 * 3 * 512 * 20;  // all blocks equal

Workload dense(Operation operation, Algorithm algorithm, Rank ranks, std::uint64_t bytes) {
  return {.operation = operation, .algorithm = algorithm, .ranks = ranks, .bytes = bytes, .costs = kPlain};
}

void expect_close(double measured_s, double expected_s) { EXPECT_NEAR(measured_s / expected_s, 1.0, 0.01); }

double log2_of(Rank size) { return std::log2(static_cast<double>(size)); }

TEST("ring allreduce: 2(P-1)(α + n/P·β) + (P-1)/P·nγ, and 2(P-1)/P·n bytes") {
  for (const Rank size : kSizes) {
    const Measurement found = measure(dense(Operation::allreduce, Algorithm::ring, size, kBytes));
    const double block = static_cast<double>(kBytes) / size;
    expect_close(found.finish_s, 2.0 * (size - 1) * (kPlain.alpha_s + block * kPlain.beta_s_per_byte) +
                                     (size - 1) * block * kPlain.gamma_s_per_byte);
    REQUIRE(found.bytes_sent.size() == size && found.bytes_received.size() == size);
    for (Rank rank = 0; rank < size; ++rank) {
      EXPECT_EQ(found.bytes_sent[rank], 2 * (size - 1) * (kBytes / size));
      EXPECT_EQ(found.bytes_received[rank], found.bytes_sent[rank]);
      EXPECT_EQ(found.messages_sent[rank], 2 * (size - 1));
      EXPECT_EQ(found.messages_received[rank], 2 * (size - 1));
    }
  }
}

TEST("recursive doubling: log2 P (α + nβ + nγ), and two messages and an addition more where P is no power of two") {
  for (const Rank size : {2U, 3U, 5U, 8U, 48U, 64U, 512U, 4096U}) {
    constexpr std::uint64_t kWholeBytes = 48 << 10;  // longer ones go in segments
    const Measurement found = measure(dense(Operation::allreduce, Algorithm::recursive_doubling, size, kWholeBytes));
    const double rounds = std::floor(log2_of(size));
    const double folds = std::has_single_bit(size) ? 0.0 : 1.0;
    const auto bytes = static_cast<double>(kWholeBytes);
    expect_close(found.finish_s, (rounds + 2.0 * folds) * (kPlain.alpha_s + bytes * kPlain.beta_s_per_byte) +
                                     (rounds + folds) * bytes * kPlain.gamma_s_per_byte);
  }
}

TEST("allgather, gather, scatter, all-to-all: (P-1)nβ, and α as often as there are steps") {
  for (const Operation operation :
       {Operation::allgather, Operation::gather, Operation::scatter, Operation::all_to_all}) {
    for (const Rank size : kSizes) {
      Workload workload = dense(operation, Algorithm::automatic, size, kBytes);
      workload.costs.alpha_s = 1e-9;  // with none at all, the order of what happens at one moment counts
      workload.costs.gamma_s_per_byte = 0.0;
      const double bytes_s = (size - 1) * static_cast<double>(kBytes) * kPlain.beta_s_per_byte;
      expect_close(measure(workload).finish_s, bytes_s);
      workload.costs.alpha_s = kPlain.alpha_s;
      const bool rounds = operation == Operation::allgather || operation == Operation::all_to_all;
      const double steps = rounds ? size - 1 + std::ceil(log2_of(size)) : size;
      EXPECT(measure(workload).finish_s < 1.0001 * (bytes_s + steps * kPlain.alpha_s));
    }
  }
}

TEST("broadcast: log2 P (α + nβ), less for long vectors; barrier: ceil(log2 P) α") {
  for (const Rank size : {2U, 3U, 8U, 64U, 512U, 4096U}) {
    const Measurement barrier = measure(dense(Operation::barrier, Algorithm::automatic, size, 0));
    expect_close(barrier.finish_s, std::ceil(log2_of(size)) * kPlain.alpha_s);
    EXPECT_EQ(barrier.bytes_sent[0], 0);
    if (!std::has_single_bit(size)) continue;
    for (const std::uint64_t bytes : {std::uint64_t{64}, kBytes}) {
      Workload workload = dense(Operation::broadcast, Algorithm::automatic, size, bytes);
      workload.root = size / 3;
      const double tree_s = log2_of(size) * (kPlain.alpha_s + static_cast<double>(bytes) * kPlain.beta_s_per_byte);
      if (bytes == 64 || size == 2) {
        expect_close(measure(workload).finish_s, tree_s);
      } else {
        EXPECT(measure(workload).finish_s < 1.0001 * tree_s);
      }
    }
  }
}

TEST("a gigabyte per rank takes no memory without payloads") {
  constexpr std::uint64_t kGigabyte = std::uint64_t{1} << 30;
  for (const Operation operation : {Operation::allreduce, Operation::allgather, Operation::broadcast, Operation::gather,
                                    Operation::scatter, Operation::all_to_all}) {
    Workload workload = dense(operation, Algorithm::automatic, 256, kGigabyte);
    if (operation == Operation::allreduce) workload.algorithm = Algorithm::recursive_doubling;
    workload.costs.gamma_s_per_byte = 0.0;
    EXPECT(measure(workload).finish_s > static_cast<double>(kGigabyte) * kPlain.beta_s_per_byte);
  }
}

void expect_equal(const Measurement& a, const Measurement& b) {
  EXPECT_EQ(a.finish_s, b.finish_s);
  EXPECT_EQ(a.finish_by_rank_s, b.finish_by_rank_s);
  EXPECT_EQ(a.messages_sent, b.messages_sent);
  EXPECT_EQ(a.messages_received, b.messages_received);
  EXPECT_EQ(a.bytes_sent, b.bytes_sent);
  EXPECT_EQ(a.bytes_received, b.bytes_received);
  EXPECT_EQ(a.events, b.events);
}

struct Named {
  Operation operation;
  Algorithm algorithm;
};
constexpr Named kDense[] = {
    {Operation::allreduce, Algorithm::ring},
    {Operation::allreduce, Algorithm::recursive_doubling},
    {Operation::allgather, Algorithm::automatic},
    {Operation::gather, Algorithm::automatic},
    {Operation::scatter, Algorithm::automatic},
    {Operation::all_to_all, Algorithm::automatic},
    {Operation::broadcast, Algorithm::automatic},
    {Operation::barrier, Algorithm::automatic},
};

TEST("dense operations take the same times, messages and bytes with payloads and without, on any network") {
  SimCosts uneven = kPlain;
  uneven.jitter = 2.0;
  uneven.compute_noise = 1.0;
  uneven.start_noise_s = 1e-4;
  uneven.ranks_per_node = 4;
  uneven.node_alpha_s = 1e-6;
  uneven.node_beta_s_per_byte = 1e-10;
  uneven.oversubscription = 2.0;
  for (const auto& [operation, algorithm] : kDense) {
    for (const Rank size : {1U, 2U, 3U, 8U, 13U}) {
      for (const std::uint64_t bytes : {0UL, 4UL, 4000UL, 1'200'000UL}) {
        for (const SimCosts& costs : {kPlain, uneven}) {
          Workload workload = dense(operation, algorithm, size, bytes);
          workload.costs = costs;
          workload.root = size - 1;
          workload.seed = size + bytes;
          const Measurement sizes = measure(workload);
          workload.payloads = true;
          expect_equal(sizes, measure(workload));
        }
      }
    }
  }
}

TEST("long rings, in many segments and with two lanes, are the same without payloads too") {
  Workload workload = dense(Operation::allreduce, Algorithm::ring, 4, 5'000'004);
  const Measurement sizes = measure(workload);
  workload.payloads = true;
  expect_equal(sizes, measure(workload));
  EXPECT(sizes.messages_sent[0] > 6);
}

Workload sparse(Rank ranks, std::uint64_t dimension, std::uint64_t nnz, double overlap = 0.0) {
  return {.operation = Operation::sparse_allreduce,
          .ranks = ranks,
          .bytes = 4 * dimension,
          .nnz = nnz,
          .overlap = overlap,
          .seed = 7,
          .costs = kPlain};
}

std::uint64_t total(const std::vector<std::uint64_t>& counts) {
  std::uint64_t sum = 0;
  for (const std::uint64_t count : counts) sum += count;
  return sum;
}

void expect_similar(Workload workload, double tolerance) {
  const Measurement counted = measure(workload);
  workload.payloads = true;
  const Measurement real = measure(workload);
  const auto ratio = [](std::uint64_t a, std::uint64_t b) { return static_cast<double>(a) / static_cast<double>(b); };
  EXPECT_NEAR(counted.finish_s / real.finish_s, 1.0, tolerance);
  EXPECT_NEAR(ratio(total(counted.bytes_sent), total(real.bytes_sent)), 1.0, tolerance);
  EXPECT_NEAR(ratio(counted.result_nnz, real.result_nnz), 1.0, tolerance);
  EXPECT_EQ(counted.messages_sent, real.messages_sent);
}

TEST("counted entries take the times and bytes of real ones at random places") {
  expect_similar(sparse(16, 1'000'000, 10'000), 0.03);
  expect_similar(sparse(16, 1'000'000, 10'000, 0.5), 0.03);
  expect_similar(sparse(16, 1'000'000, 10'000, 1.0), 0.03);
  expect_similar(sparse(5, 200'000, 40'000, 0.2), 0.03);
  expect_similar(sparse(128, 100'000, 300), 0.03);
  expect_similar(sparse(200, 100'000, 8), 0.03);  // most shares are empty
}

TEST("counted messages have the lengths of real ones in every format, and real sums are right in each") {
  constexpr ValueEncoding kEncodings[] = {ValueEncoding::native, ValueEncoding::bf16,  ValueEncoding::f16,
                                          ValueEncoding::int8,   ValueEncoding::qsgd8, ValueEncoding::qsgd4,
                                          ValueEncoding::e3m0,   ValueEncoding::qsgd2, ValueEncoding::codebook2};
  std::uint64_t longest = 0;
  std::uint64_t shortest = 0;
  for (const IndexFormat indices : {IndexFormat::raw32, IndexFormat::none, IndexFormat::packed}) {
    for (const ValueEncoding values : kEncodings) {
      for (const Algorithm algorithm : {Algorithm::split_allgather, Algorithm::split_dense_allgather, Algorithm::ring}) {
        Workload workload = sparse(6, 400'000, 6000);
        workload.algorithm = algorithm;
        workload.wire = {.indices = indices, .values = values};
        expect_similar(workload, 0.03);
        if (algorithm != Algorithm::split_allgather) continue;
        const std::uint64_t bytes = total(measure(workload).bytes_sent);
        if (longest == 0) longest = bytes;
        shortest = bytes;
      }
    }
  }
  EXPECT(shortest * 5 < longest);  // 8.4 + 2 bits an entry, of 64
  Workload doubling = sparse(6, 400'000, 6000);
  doubling.algorithm = Algorithm::recursive_doubling;
  for (const IndexFormat indices : {IndexFormat::raw32, IndexFormat::packed}) {
    doubling.wire = {.indices = indices};
    expect_similar(doubling, 0.03);
  }
}

TEST("what sends real entries only: results are right, and what comes is what was sent") {
  for (const Operation operation :
       {Operation::sparse_allgather, Operation::sparse_reduce_scatter, Operation::allreduce_topk}) {
    for (const Rank ranks : {1U, 2U, 5U, 16U}) {
      for (const std::uint64_t nnz : {0UL, 40UL, 6000UL}) {
        Workload workload = sparse(ranks, 20'000, nnz, 0.3);
        workload.operation = operation;
        workload.algorithm = Algorithm::automatic;
        workload.payloads = true;
        workload.wire = {.indices = IndexFormat::packed, .packs_values = true};
        const Measurement found = measure(workload);
        EXPECT_EQ(total(found.bytes_sent), total(found.bytes_received));
        EXPECT_EQ(total(found.words_sent), total(found.words_received));
        if (operation == Operation::sparse_allgather) EXPECT_EQ(found.result_nnz, nnz * ranks);
      }
    }
  }
}

TEST("kept sums: as many as wanted of magnitudes that hardly tie, and later calls reuse what the first has found") {
  Workload workload = sparse(8, 100'000, 1000);
  workload.operation = Operation::allreduce_topk;
  workload.algorithm = Algorithm::automatic;
  workload.payloads = true;
  workload.keep = 700;
  const Measurement once = measure(workload);
  EXPECT_EQ(once.result_nnz, 700);
  EXPECT_EQ(once.words_sent.size(), 8);
  workload.calls = 3;
  const Measurement thrice = measure(workload);
  EXPECT(thrice.result_nnz > 525 && thrice.result_nnz < 875);
  EXPECT(thrice.finish_s < 2.5 * once.finish_s);
  EXPECT_EQ(measure(workload).finish_s, thrice.finish_s);
}

TEST("kept sums whose entries are rounded: right within what that may do, the same words, fewer bytes") {
  Workload workload = sparse(6, 200'000, 3600, 0.2);  // shares are long enough to be rounded
  workload.operation = Operation::allreduce_topk;
  workload.algorithm = Algorithm::automatic;
  workload.payloads = true;
  workload.calls = 2;
  workload.wire = {.indices = IndexFormat::raw32};
  const Measurement exact = measure(workload);
  std::uint64_t last = total(exact.bytes_sent);
  for (const ValueEncoding encoding : {ValueEncoding::bf16, ValueEncoding::qsgd8, ValueEncoding::qsgd4}) {
    workload.wire.values = encoding;
    const Measurement found = measure(workload);
    EXPECT(total(found.bytes_sent) < last);
    EXPECT(found.finish_s < exact.finish_s);
    EXPECT(total(found.words_sent) > total(exact.words_sent) / 2);
    last = total(found.bytes_sent);
  }
  for (const ValueEncoding encoding : {ValueEncoding::f16, ValueEncoding::int8}) {
    workload.wire.values = encoding;
    EXPECT(total(measure(workload).bytes_sent) < total(exact.bytes_sent));
  }
}

TEST("sums of counted entries become dense where real ones do") {
  constexpr std::uint64_t kDimension = 200'000;
  constexpr Rank kRanks = 8;
  bool was_dense = false;
  bool was_sparse = false;
  // The result is dense from 1/2 of the dimension on, slices on the wire from 2/3 on.
  for (const double filled : {0.1, 0.45, 0.48, 0.52, 0.6, 0.64, 0.7, 0.95}) {
    for (const double factor : {1.0, 0.3}) {
      const double density = 1.0 - std::pow(1.0 - filled, 1.0 / kRanks);
      Workload workload = sparse(kRanks, kDimension, static_cast<std::uint64_t>(density * kDimension));
      workload.switch_factor = factor;
      const bool dense = measure(workload).result_nnz == kDimension;
      EXPECT_EQ(dense, filled > 0.5 * factor);
      was_dense |= dense;
      was_sparse |= !dense;
      expect_similar(workload, 0.03);
    }
  }
  EXPECT(was_dense && was_sparse);
}

TEST("the same seed gives the same measurement; another seed another one") {
  for (const bool payloads : {false, true}) {
    Workload workload = sparse(9, 10'000, 200);
    workload.payloads = payloads;
    workload.costs.jitter = 1.0;
    const Measurement first = measure(workload);
    expect_equal(first, measure(workload));
    workload.seed += 1;
    EXPECT(measure(workload).finish_by_rank_s != first.finish_by_rank_s);
  }
}

TEST("links and the timeline are there if asked for, and agree with the counts") {
  Workload workload = dense(Operation::allreduce, Algorithm::ring, 5, 4000);
  EXPECT(measure(workload).links.empty() && measure(workload).timeline.empty());
  workload.links = true;
  workload.timeline = true;
  const Measurement found = measure(workload);
  REQUIRE(found.links.size() == 5);
  for (const SimLinkCounts& link : found.links) {
    EXPECT_EQ(link.to, (link.from + 1) % 5);
    EXPECT_EQ(link.messages, found.messages_sent[link.from]);
    EXPECT_EQ(link.bytes, found.bytes_sent[link.from]);
  }
  std::uint64_t sent = 0;
  for (const SimActivity& activity : found.timeline) {
    EXPECT(activity.start_s <= activity.end_s && activity.end_s <= found.finish_s * 1.0001);
    if (activity.kind == SimActivity::Kind::send) sent += activity.bytes;
  }
  EXPECT_EQ(sent, total(found.bytes_sent));
}

template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

TEST("arguments that make no sense are refused by name, with their value and a remedy") {
  const auto refused = [](const Workload& workload, const std::string& start) {
    const std::string error = error_of([&] { measure(workload); });
    EXPECT_EQ(error.substr(0, start.size()), start);
    EXPECT(error.size() > start.size());
  };
  Workload good = dense(Operation::allreduce, Algorithm::ring, 4, 400);
  EXPECT_EQ(error_of([&] { measure(good); }), "");
  const auto with = [&](auto change) {
    Workload workload = good;
    change(workload);
    return workload;
  };
  refused(with([](Workload& w) { w.ranks = 0; }), "ranks is 0: ");
  refused(with([](Workload& w) { w.bytes = 7; }), "bytes is 7: ");
  refused(with([](Workload& w) { w.nnz = 3; }), "nnz is 3: ");
  refused(with([](Workload& w) { w.root = 4; }), "root is 4: ");
  refused(with([](Workload& w) { w.overlap = 1.5; }), "overlap is 1.5: ");
  refused(with([](Workload& w) { w.switch_factor = -1; }), "switch_factor is -1: ");
  refused(with([](Workload& w) { w.switch_factor = std::nan(""); }), "switch_factor is nan: ");
  refused(with([](Workload& w) { w.algorithm = Algorithm::automatic; }), "algorithm is '': ");
  refused(with([](Workload& w) { w.algorithm = Algorithm::split_allgather; }), "algorithm is 'split_allgather': ");
  refused(with([](Workload& w) { w.costs.alpha_s = -1.0; }), "costs['alpha_s'] is -1: ");
  refused(with([](Workload& w) { w.costs.oversubscription = 0.0; }), "costs['oversubscription'] is 0: ");
  for (const Operation operation : {Operation::allgather, Operation::broadcast, Operation::barrier}) {
    refused(dense(operation, Algorithm::recursive_doubling, 2, 8), "algorithm is 'recursive_doubling': ");
  }
  refused(sparse(2, 100, 101), "nnz is 101: ");
  refused(sparse(2, std::uint64_t{1} << 32, 1), "bytes is 17179869184: ");
  Workload rounded = sparse(2, 100, 1);
  rounded.wire.values = ValueEncoding::bf16;
  EXPECT_EQ(error_of([&] { measure(rounded); }), "");
  rounded.algorithm = Algorithm::recursive_doubling;
  refused(rounded, "values is bf16: ");
  refused(with([](Workload& w) { w.wire.indices = IndexFormat::packed; }), "wire is packed indices and native values: ");
  refused(with([](Workload& w) { w.wire.packs_values = true; }), "wire is none indices and native values: ");
  Workload dense_only = sparse(2, 100, 1);
  dense_only.algorithm = Algorithm::rabenseifner;
  refused(dense_only, "algorithm is 'rabenseifner': ");
  Workload vectors = sparse(2, 100, 1);
  vectors.algorithm = Algorithm::automatic;
  vectors.keep = 5;
  refused(vectors, "keep is 5: ");
  vectors.operation = Operation::allreduce_topk;
  refused(vectors, "payloads is False: ");
  vectors.payloads = true;
  EXPECT_EQ(error_of([&] { measure(vectors); }), "");
  vectors.wire.values = ValueEncoding::bf16;
  EXPECT_EQ(error_of([&] { measure(vectors); }), "");
  vectors.operation = Operation::sparse_reduce_scatter;
  refused(vectors, "values is bf16: ");
}

TEST("names of operations, algorithms and costs") {
  EXPECT_EQ(operation_named("sparse_allreduce"), Operation::sparse_allreduce);
  EXPECT_EQ(operation_named("barrier"), Operation::barrier);
  EXPECT_EQ(algorithm_named(""), Algorithm::automatic);
  EXPECT_EQ(algorithm_named("recursive_doubling"), Algorithm::recursive_doubling);
  SimCosts costs;
  set_cost(costs, "oversubscription", 3.5);
  set_cost(costs, "ranks_per_node", 8.0);
  EXPECT_EQ(costs.oversubscription, 3.5);
  EXPECT_EQ(costs.ranks_per_node, 8);
  EXPECT_EQ(operation_named("all_to_all"), Operation::all_to_all);
  EXPECT(error_of([] { operation_named("gossip"); }).starts_with("operation is 'gossip': "));
  EXPECT(error_of([] { algorithm_named("auto"); }).starts_with("algorithm is 'auto': "));
  EXPECT(error_of([&] { set_cost(costs, "alpha", 1.0); }).starts_with("costs has 'alpha': "));
  EXPECT(error_of([&] { set_cost(costs, "ranks_per_node", 1.5); }).starts_with("costs['ranks_per_node'] is 1.5: "));
}

}  // namespace
