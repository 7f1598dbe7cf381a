// Dense sums in messages of encoded values: the same bits on every rank, as near the sum as the encoding allows, and what
// rounding lost is where error feedback finds it.
#include "testing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "codec/encode_values.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/dense/allreduce_quantised.hpp"
#include "collectives/support/exchange_order.hpp"
#include "session/reductions.hpp"
#include "world.hpp"

namespace {

using namespace telegrad;

constexpr World kWorlds[] = {World::simulated, World::local};
constexpr ValueEncoding kAll[] = {ValueEncoding::native, ValueEncoding::bf16,  ValueEncoding::f16,
                                  ValueEncoding::int8,   ValueEncoding::qsgd8, ValueEncoding::qsgd4,
                                  ValueEncoding::qsgd2,  ValueEncoding::e3m0,  ValueEncoding::codebook2};
constexpr float kMark = -12345.0F;

using Vectors = std::vector<std::vector<float>>;

Vectors inputs_of(Rank size, std::size_t count) {
  Vectors inputs(size);
  for (Rank rank = 0; rank < size; ++rank) {
    std::mt19937 random(rank + 17);
    std::normal_distribution<float> ordinary;
    for (std::size_t i = 0; i < count; ++i) inputs[rank].push_back(ordinary(random));
  }
  return inputs;
}

std::vector<double> exact_sum(const Vectors& inputs) {
  std::vector<double> sum(inputs[0].size());
  for (const auto& input : inputs) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(input[i]);
  }
  return sum;
}

RequestPtr request_of(const std::vector<float>& input, std::vector<float>& output, std::vector<float>& error,
                      ValueEncoding encoding, Reduction reduction = Reduction::sum, std::uint32_t call = 0) {
  return make_all_reduce_quantised({.input = std::as_bytes(std::span(input)),
                                    .output = std::as_writable_bytes(std::span(output)),
                                    .reduction = reduction},
                                   {.encoding = encoding, .key = {.seed = 5, .call = call}},
                                   std::as_writable_bytes(std::span(error)));
}

// How far one rounding of values up to `magnitude` can go.
double rounding_of(ValueEncoding encoding, double magnitude) {
  switch (encoding) {
    case ValueEncoding::mean:  // of vectors alone
    case ValueEncoding::native: return 0.0;
    case ValueEncoding::bf16: return magnitude / 256;
    case ValueEncoding::f16: return magnitude / 2048;
    case ValueEncoding::int8: return magnitude / 254;
    case ValueEncoding::qsgd8: return magnitude / 127;
    case ValueEncoding::qsgd4: return magnitude / 7;
    case ValueEncoding::qsgd2: return magnitude;
    case ValueEncoding::e3m0: return magnitude / 4;
    case ValueEncoding::codebook2: return 2 * magnitude;
  }
  return 0.0;
}

void check(World world, Rank size, std::size_t count, ValueEncoding encoding, Reduction reduction, bool in_place,
           bool with_error) {
  const Vectors inputs = inputs_of(size, count);
  Vectors memory = inputs;
  Vectors outputs(size, std::vector<float>(count, kMark));
  Vectors errors(size, std::vector<float>(with_error ? count : 0, kMark));
  const auto make = [&](Rank rank) {
    return request_of(memory[rank], in_place ? memory[rank] : outputs[rank], errors[rank], encoding, reduction);
  };
  EXPECT(run_ranks(world, size, make, size).all_succeeded());
  if (!in_place) EXPECT(memory == inputs);
  const Vectors& results = in_place ? memory : outputs;
  for (Rank rank = 1; rank < size; ++rank) EXPECT(results[rank] == results[0]);

  const std::vector<double> sum = exact_sum(inputs);
  const double divisor = reduction == Reduction::avg ? size : 1.0;
  const double bound = rounding_of(encoding, 5.5) * (size - 1) + rounding_of(encoding, 8.0 * std::sqrt(size) + size);
  for (std::size_t i = 0; i < count; ++i) {
    const double result = static_cast<double>(results[0][i]) * divisor;
    EXPECT_NEAR(result, sum[i], bound * 1.01 + 1e-5 * size);
    if (!with_error) continue;
    double lost = 0.0;
    for (const auto& error : errors) lost += static_cast<double>(error[i]);
    EXPECT_NEAR(result + lost, sum[i], 1e-5 * size);
  }
}

TEST("sums and means are right, alike on all ranks, and errors make up for what they miss: every encoding, P, length") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U, 8U, 13U}) {
      for (const std::size_t count : {0UL, 1UL, 1000UL, 1024UL, 5000UL, 40'001UL}) {
        for (const ValueEncoding encoding : kAll) {
          check(world, size, count, encoding, Reduction::sum, size % 2 == 0, true);
          check(world, size, count, encoding, Reduction::avg, size % 2 == 1, count % 2 == 0);
        }
      }
    }
  }
}

// What a GPU does around the call of a rank: encodes before it, and decodes behind.
class OfGpu {
 public:
  OfGpu(Rank rank, Rank size, const std::vector<float>& x, ValueEncoding encoding, Reduction reduction, bool with_error)
      : rank_(rank), size_(size), with_error_(with_error), how_{encoding, {.seed = 5, .rank = rank}, reduction} {
    input_.resize(kernels::encoded_bytes(encoding, x.size()));
    output_.assign(input_.size(), std::byte{0xff});
    error_.assign(with_error ? x.size() : 0, kMark);
    kernels::encode_values(encoding, how_.key, 0, x, input_, error_);
    if (size > 2) own_range_ = quantised_slice(x.size(), size, rank);
    own_.assign(x.begin() + static_cast<std::ptrdiff_t>(own_range_.begin), x.begin() + static_cast<std::ptrdiff_t>(own_range_.end));
    count_ = x.size();
  }

  RequestPtr request() {
    const auto own_error = std::span(error_).subspan(with_error_ ? own_range_.begin : 0, with_error_ ? own_.size() : 0);
    return make_all_reduce_encoded(how_, {count_, input_, own_, output_, own_error});
  }
  std::vector<float> result() const {
    std::vector<float> sum(count_), mine(count_);
    EXPECT(kernels::decode_values(how_.encoding, output_, sum));
    if (size_ != 2) return sum;
    EXPECT(kernels::decode_values(how_.encoding, input_, mine));
    for (std::size_t i = 0; i < count_; ++i) {
      sum[i] = rank_ == 0 ? mine[i] + sum[i] : sum[i] + mine[i];
      if (how_.reduction == Reduction::avg) sum[i] *= 0.5F;
    }
    return sum;
  }
  const std::vector<float>& error() const { return error_; }

 private:
  Rank rank_, size_;
  bool with_error_;
  QuantisedSum how_;
  std::size_t count_ = 0;
  Range own_range_{0, 0};
  std::vector<std::byte> input_, output_;
  std::vector<float> own_, error_;
};

void check_encoded(World world, Rank size, std::size_t count, ValueEncoding encoding, Reduction reduction, bool with_error,
                   std::uint64_t hosts) {
  const Vectors inputs = inputs_of(size, count);
  const auto run = [&](std::uint64_t on_host, Vectors& outputs, Vectors& errors) {
    outputs.assign(size, std::vector<float>(count, kMark));
    errors.assign(size, std::vector<float>(with_error ? count : 0, kMark));
    std::vector<OfGpu> gpus;
    for (Rank rank = 0; rank < size; ++rank) gpus.emplace_back(rank, size, inputs[rank], encoding, reduction, with_error);
    const auto make = [&](Rank rank) {
      return on_host >> rank & 1 ? request_of(inputs[rank], outputs[rank], errors[rank], encoding, reduction)
                                 : gpus[rank].request();
    };
    EXPECT(run_ranks(world, size, make, size).all_succeeded());
    for (Rank rank = 0; rank < size; ++rank) {
      if (on_host >> rank & 1) continue;
      outputs[rank] = gpus[rank].result();
      errors[rank] = gpus[rank].error();
    }
  };
  Vectors expected, expected_errors, got, got_errors;
  run(~std::uint64_t{0}, expected, expected_errors);
  run(hosts, got, got_errors);
  EXPECT(got == expected && got_errors == expected_errors);
}

TEST("a rank whose vector is given encoded has the bits of a host's, among its like and among hosts") {
  for (const World world : kWorlds) {
    for (const Rank size : {1U, 2U, 3U, 4U, 5U}) {
      for (const std::size_t count : {0UL, 1UL, 1024UL, 5000UL, 40'001UL}) {
        for (const ValueEncoding encoding : kAll) {
          check_encoded(world, size, count, encoding, Reduction::sum, true, 0);
          check_encoded(world, size, count, encoding, Reduction::avg, count % 2 == 0, 0b01010);
        }
      }
    }
    check_encoded(world, 2, 700'003, ValueEncoding::qsgd4, Reduction::avg, true, 0);
    check_encoded(world, 3, 1'000'003, ValueEncoding::bf16, Reduction::avg, true, 0b001);
  }
}

TEST("long vectors, in several pieces and chunks, and many ranks") {
  for (const World world : kWorlds) {
    for (const ValueEncoding encoding : {ValueEncoding::bf16, ValueEncoding::qsgd4, ValueEncoding::codebook2}) {
      check(world, 2, 700'003, encoding, Reduction::sum, true, true);
      check(world, 3, 1'000'003, encoding, Reduction::avg, false, true);
      check(world, 64, 70'000, encoding, Reduction::sum, false, true);
    }
  }
}

TEST("integers that all fit are summed exactly as bf16, and of native values nothing is lost") {
  const Rank size = 4;
  Vectors inputs(size), outputs(size), errors(size);
  for (Rank rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < 3000; ++i) inputs[rank].push_back(static_cast<float>((rank * 5 + i * 3) % 7) - 3.0F);
    outputs[rank].resize(3000);
    errors[rank].resize(3000, kMark);
  }
  for (const ValueEncoding encoding : {ValueEncoding::native, ValueEncoding::bf16, ValueEncoding::f16}) {
    const auto make = [&](Rank rank) { return request_of(inputs[rank], outputs[rank], errors[rank], encoding); };
    EXPECT(run_ranks(World::local, size, make).all_succeeded());
    const auto sum = exact_sum(inputs);
    for (std::size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(outputs[0][i], sum[i]);
    for (const auto& error : errors) EXPECT(error == std::vector<float>(3000));
  }
}

TEST("the result does not depend on the network, is the same again, and another call rounds otherwise") {
  const Rank size = 3;
  const Vectors inputs = inputs_of(size, 9000);
  const auto result = [&](World world, std::uint32_t call, std::uint64_t seed) {
    Vectors outputs(size, std::vector<float>(9000)), errors(size);
    const auto make = [&](Rank rank) {
      return request_of(inputs[rank], outputs[rank], errors[rank], ValueEncoding::qsgd4, Reduction::sum, call);
    };
    EXPECT(run_ranks(world, size, make, seed).all_succeeded());
    return outputs[1];
  };
  const auto first = result(World::simulated, 0, 1);
  EXPECT(result(World::simulated, 0, 2) == first);
  EXPECT(result(World::local, 0, 0) == first);
  EXPECT(result(World::local, 1, 0) != first);
}

// Over many calls the mean of an unbiased result is the sum: its standard error is 1 / √calls of one call's.
TEST("QSGD is unbiased from end to end") {
  const Rank size = 3;
  constexpr int kCalls = 300;
  const Vectors inputs = inputs_of(size, 64);
  const auto sum = exact_sum(inputs);
  for (const ValueEncoding encoding : {ValueEncoding::qsgd8, ValueEncoding::qsgd4, ValueEncoding::qsgd2}) {
    std::vector<double> total(64);
    for (int call = 0; call < kCalls; ++call) {
      Vectors outputs(size, std::vector<float>(64)), errors(size);
      const auto make = [&](Rank rank) {
        return request_of(inputs[rank], outputs[rank], errors[rank], encoding, Reduction::sum,
                          static_cast<std::uint32_t>(call));
      };
      EXPECT(run_ranks(World::local, size, make).all_succeeded());
      for (std::size_t i = 0; i < 64; ++i) total[i] += static_cast<double>(outputs[0][i]);
    }
    const double spread = rounding_of(encoding, 3.5) * std::sqrt(size - 1) / 2 + rounding_of(encoding, 7.0) / 2;
    for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(total[i] / kCalls, sum[i], 5.0 * spread / std::sqrt(kCalls));
  }
}

TEST("a NaN spoils what shares a scale with it, on every rank alike, and nothing is kept of it") {
  const Rank size = 3;
  for (const ValueEncoding encoding : kAll) {
    for (Rank culprit = 0; culprit < size; ++culprit) {
      Vectors inputs = inputs_of(size, 5000);
      inputs[culprit][2000] = std::numeric_limits<float>::quiet_NaN();
      Vectors outputs(size, std::vector<float>(5000)), errors(size, std::vector<float>(5000));
      const auto make = [&](Rank rank) { return request_of(inputs[rank], outputs[rank], errors[rank], encoding); };
      EXPECT(run_ranks(World::local, size, make).all_succeeded());
      for (Rank rank = 0; rank < size; ++rank) {
        EXPECT(std::isnan(outputs[rank][2000]));
        for (std::size_t i = 0; i < 5000; ++i) {
          EXPECT(std::isfinite(errors[rank][i]));
          EXPECT_EQ(std::bit_cast<std::uint32_t>(outputs[rank][i]), std::bit_cast<std::uint32_t>(outputs[0][i]));
          if (i / 1024 != 2000 / 1024) EXPECT(std::isfinite(outputs[rank][i]));
        }
      }
    }
  }
}

TEST("outputs stay untouched as long as one rank has not called") {
  for (const World world : kWorlds) {
    for (const Rank size : {2U, 3U, 4U}) {
      for (Rank absent = 0; absent < size; ++absent) {
        for (const std::size_t count : {10UL, 10'000UL}) {
          const Vectors inputs = inputs_of(size, count);
          Vectors memory = inputs, errors(size);
          const Ended ended = run_ranks(world, size, [&](Rank rank) -> RequestPtr {
            if (rank == absent) return nullptr;
            return request_of(memory[rank], memory[rank], errors[rank], ValueEncoding::qsgd8);
          });
          EXPECT(ended.stuck);
          EXPECT(memory == inputs);
        }
      }
    }
  }
}

// Memory is claimed, not there: whoever touches it crashes.
TEST("a simulation without values sends the bytes that one with values sends, of vectors that fit no memory") {
  const auto bytes_sent = [](std::size_t count, ValueEncoding encoding, bool values) {
    constexpr Rank kSize = 4;
    std::optional<SizeOnly> size_only;
    if (!values) size_only.emplace();
    Vectors vectors(kSize, std::vector<float>(values ? count : 0, 1.0F));
    auto* const nowhere = reinterpret_cast<std::byte*>(std::uintptr_t{4096});
    Simulation simulation(kSize, {});
    for (Rank rank = 0; rank < kSize; ++rank) {
      const Bytes x = values ? std::as_writable_bytes(std::span(vectors[rank])) : Bytes(nowhere, count * sizeof(float));
      simulation.begin(rank, make_all_reduce_quantised({.input = x, .output = x}, {.encoding = encoding}, {}));
    }
    EXPECT(!simulation.run().deadlock);
    return simulation.session(1).counters().bytes_sent;
  };
  for (const ValueEncoding encoding : kAll) {
    EXPECT_EQ(bytes_sent(100'000, encoding, false), bytes_sent(100'000, encoding, true));
    constexpr std::size_t kMany = std::size_t{1} << 32;
    EXPECT_EQ(bytes_sent(kMany, encoding, false), 2 * kernels::encoded_bytes(encoding, kMany) / 4 * 3);
  }
}

// Rank 1 of three, which owns the second of three units, follows the protocol with bytes that nobody encodes.
Task<void> send_damaged(Transport& net, bool in_share) {
  constexpr Step kSplitSteps = Step{1} << 20;
  const std::size_t bytes = kernels::encoded_bytes(ValueEncoding::qsgd8, 1024);
  const std::vector<std::byte> sound(bytes), damaged(bytes, std::byte{0xff});
  std::vector<std::byte> received(bytes), all(net.size() * bytes);
  const ExchangeOrder order(net.rank(), net.size());
  for (Rank round = 1; round < net.size(); ++round) {
    auto sending = net.send(order.receiver(round), kSplitSteps, in_share ? damaged : sound);
    co_await net.receive(order.sender(round), kSplitSteps, received);
    co_await sending;
  }
  const std::vector<std::uint64_t> lengths(net.size(), bytes);
  co_await allgather(net, in_share ? sound : damaged, all, Partition{std::span<const std::uint64_t>(lengths)});
}

// Rank 1 of two sends both of its units, of which the second is damaged.
Task<void> send_damaged_vector(Transport& net) {
  const std::size_t bytes = kernels::encoded_bytes(ValueEncoding::qsgd8, 1024);
  std::vector<std::byte> half_sound(2 * bytes), received(2 * bytes);
  std::fill(half_sound.begin() + static_cast<std::ptrdiff_t>(bytes), half_sound.end(), std::byte{0xff});
  auto sending = net.send(0, Step{1} << 20, half_sound);
  co_await net.receive(0, Step{1} << 20, received);
  co_await sending;
}

void expect_damage_is_told(Rank size, const std::string& text, const std::function<Task<void>(Transport&)>& damage) {
  for (const bool encoded : {false, true}) {
    std::vector<std::vector<float>> results(size, std::vector<float>(size * 1024, kMark));
    std::vector<float> x(size * 1024, 1.0F), error;
    OfGpu gpu(0, size, x, ValueEncoding::qsgd8, Reduction::sum, false);
    const Ended ended = run_ranks(World::local, size, [&](Rank rank) {
      const RequestPtr sound = request_of(x, results[rank], error, ValueEncoding::qsgd8);
      if (rank == 0 && encoded) return gpu.request();
      return rank == 1 ? std::make_shared<Request>(sound->call(), damage) : sound;
    });
    REQUIRE(ended.requests[0]->done() && ended.requests[0]->failure());
    EXPECT(ended.requests[0]->failure()->reason.find(text) != std::string::npos);
    EXPECT(std::ranges::count(results[0], kMark) >= 1024);
  }
}

TEST("a rank that sends damaged bytes is named, and no result is given") {
  expect_damage_is_told(2, "rank 1 sent damaged values", send_damaged_vector);
  expect_damage_is_told(3, "rank 1 sent damaged values", [](Transport& net) { return send_damaged(net, true); });
  expect_damage_is_told(3, "rank 1 sent a damaged sum", [](Transport& net) { return send_damaged(net, false); });
}

TEST("of two ranks a unit has the same sum and errors wherever in the vector it is") {
  constexpr std::size_t kUnit = kernels::kEncodingUnit, kUnits = 21;
  const Vectors inputs = inputs_of(2, kUnits * kUnit);
  const auto turned = [&](std::span<const float> x, std::size_t by) {
    std::vector<float> moved(x.begin(), x.end());
    std::ranges::rotate(moved, moved.begin() + static_cast<std::ptrdiff_t>(by * kUnit));
    return moved;
  };
  const auto sum_of = [&](std::size_t by, Vectors& errors) {
    Vectors memory{turned(inputs[0], by), turned(inputs[1], by)};
    errors.assign(2, std::vector<float>(kUnits * kUnit));
    run_ranks(World::simulated, 2, [&](Rank rank) {
      return request_of(memory[rank], memory[rank], errors[rank], ValueEncoding::int8, Reduction::avg);
    });
    EXPECT(memory[0] == memory[1]);
    return memory[0];
  };
  Vectors errors, moved_errors;
  const std::vector<float> sum = sum_of(0, errors), moved = sum_of(5, moved_errors);
  EXPECT(moved == turned(sum, 5));
  EXPECT(moved_errors[1] == turned(errors[1], 5));
}

TEST("ranks that disagree on the encoding are told, and a call says which it has") {
  std::vector<float> x(10), y(10), error;
  const auto call_of = [&](ValueEncoding encoding) { return request_of(x, x, error, encoding)->call(); };
  EXPECT(call_of(ValueEncoding::qsgd8) != call_of(ValueEncoding::qsgd4));
  EXPECT(describe(call_of(ValueEncoding::qsgd4)).find("wire=qsgd4") != std::string::npos);
  EXPECT(describe(call_of(ValueEncoding::native)).find("wire") == std::string::npos);
  const Ended ended = run_ranks(World::local, 2, [&](Rank rank) {
    return request_of(rank == 0 ? x : y, rank == 0 ? x : y, error,
                      rank == 0 ? ValueEncoding::qsgd8 : ValueEncoding::int8);
  });
  for (const auto& request : ended.requests) {
    REQUIRE(request->done() && request->failure());
    EXPECT(request->failure()->kind == FailureKind::mismatched_call);
  }
}

}  // namespace
