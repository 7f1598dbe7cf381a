#include "simulation/explorer/values.hpp"

#include <algorithm>
#include <array>

namespace telegrad::explorer {

Contribution::Contribution(const PlannedCall& call, Rank rank, Rank size) {
  Random random(call.seed + 0x1000 * (std::uint64_t{rank} + 1));
  values_ = random.next();
  entries_ = random.next();
  in_place_ = random.below(2) == 0;
  // bf16 holds every integer up to 256, f32 up to 2^24.
  bound_ = call.dtype == DType::bf16 ? std::clamp<std::uint64_t>(256 / size, 1, 7) : 1000;
  if (call.operation != Operation::sparse_allreduce) return;
  // Most calls have one density for all ranks; in each some ranks have one of their own.
  constexpr std::array kDensities{0.0, 0.002, 0.02, 0.1, 0.5, 1.0};
  Random common(call.seed);
  const std::uint64_t own = random.below(8);
  density_ = kDensities[(own < 2 ? random : common).below(kDensities.size())];
  dense_ = own == 2;
}

Expected expected_sum(const PlannedCall& call, Rank size, const std::vector<const PlannedCall*>& by_rank) {
  std::vector<int> sum(call.count);
  std::vector<char> present(call.operation == Operation::sparse_allreduce ? call.count : 0);
  for (Rank rank = 0; rank < size; ++rank) {
    const Contribution share(*by_rank[rank], rank, size);
    for (std::size_t i = 0; i < call.count; ++i) {
      if (!present.empty() || call.operation == Operation::sparse_allreduce) {
        if (!share.has(i)) continue;
        present[i] = 1;
      }
      sum[i] += share.value(i);
    }
  }
  Expected expected{.dense = std::vector<std::byte>(call.bytes()), .indices = {}};
  const float factor = call.reduction == Reduction::avg ? 1.0F / static_cast<float>(size) : 1.0F;
  std::byte* next = expected.dense.data();
  for (const int value : sum) next += put_value(call.dtype, next, static_cast<float>(value) * factor);
  for (std::uint32_t i = 0; i < present.size(); ++i) {
    if (present[i] != 0) expected.indices.push_back(i);
  }
  return expected;
}

}  // namespace telegrad::explorer
