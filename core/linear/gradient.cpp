#include "linear/gradient.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "base/check.hpp"

namespace telegrad::linear {
namespace {

constexpr std::size_t kBits = 64;
constexpr std::size_t kBlock = kBits * kBits;  // features of one word of words_
constexpr std::size_t kRowsAhead = 4;
constexpr std::size_t kRowsAtOnce = 16;
constexpr std::size_t kSampledRows = 64, kSampledEntries = 32;

constexpr std::size_t words_for(std::size_t bits) { return (bits + kBits - 1) / kBits; }

// Calls visit(base + position) for every bit of `word`, rising.
template <class Visit>
void for_each_bit(std::uint64_t word, std::size_t base, Visit&& visit) {
  for (; word != 0; word &= word - 1) visit(base + static_cast<std::size_t>(std::countr_zero(word)));
}

}  // namespace

BatchGradient::BatchGradient(std::size_t features, Team& team)
    : features_(features),
      team_(team),
      touched_(words_for(features)),
      words_(words_for(words_for(features))),
      parts_(team.size()) {}

// Rows come in random order, which no hardware foresees. Their features' numbers are not fetched: popular ones are in the
// caches, and of the others a processor waits for several at once, which costs less than a request for each.
inline void BatchGradient::fetch_ahead(const RowsView& rows, std::span<const std::uint64_t> chosen, std::size_t i) {
  constexpr std::uint64_t kLine = 64 / sizeof(float);
  if (i + kRowsAhead >= chosen.size()) return;
  const std::uint64_t row = chosen[i + kRowsAhead];
  for (std::uint64_t entry = rows.offsets[row]; entry < rows.offsets[row + 1]; entry += kLine) {
    __builtin_prefetch(rows.indices.data() + entry);
    __builtin_prefetch(rows.values.data() + entry);
  }
}

BatchGradient::Sums BatchGradient::add(const RowsView& rows, std::span<const float> targets,
                                       std::span<const std::uint64_t> chosen, const ModelView& model, Loss loss) {
  sums_.resize(features_);
  divide(rows, chosen);
  if (team_.size() == 1) return add_alone(rows, targets, chosen, model, loss);
  const Sums total = find_slopes(rows, targets, chosen, model, loss);
  team_.run([&](std::size_t own) {
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (slopes_[i].slope == 0) continue;
      const auto [begin, end] = own_entries(parts_[own], rows, chosen[i]);
      add_entries(parts_[own], rows, begin, end, static_cast<float>(slopes_[i].slope));
    }
  });
  return total;
}

BatchGradient::Sums BatchGradient::find_slopes(const RowsView& rows, std::span<const float> targets,
                                               std::span<const std::uint64_t> chosen, const ModelView& model,
                                               Loss loss) {
  slopes_.resize(chosen.size());
  std::atomic<std::size_t> next{0};
  team_.run([&](std::size_t) {
    for (std::size_t first; (first = next.fetch_add(kRowsAtOnce)) < chosen.size();) {
      const auto found = [&](std::size_t i, double score) {
        const LossAt at = loss_at(loss, score, targets[chosen[i]]);
        slopes_[i] = {at.value, at.slope};
      };
      const std::size_t end = std::min(first + kRowsAtOnce, chosen.size());
      std::size_t i = first;
      for (; i + 1 < end; i += 2) {
        fetch_ahead(rows, chosen, i);
        fetch_ahead(rows, chosen, i + 1);
        const auto [one, other] = scores_of(rows, chosen[i], chosen[i + 1], model);
        found(i, one);
        found(i + 1, other);
      }
      if (i < end) found(i, score_of(rows, chosen[i], model));
    }
  });
  Sums total;
  for (const RowSlope& row : slopes_) {
    total.loss += row.loss;
    total.slope += row.slope;
  }
  return total;
}

std::size_t BatchGradient::subtract_entries(const RowsView& rows, std::span<const std::uint64_t> chosen,
                                            std::span<float> weights, float factor) {
  divide(rows, chosen);
  team_.run([&](std::size_t own) {
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const auto slope = static_cast<float>(slopes_[i].slope);
      fetch_ahead(rows, chosen, i);
      if (slope == 0) continue;
      const auto [begin, end] = own_entries(parts_[own], rows, chosen[i]);
      for (std::uint64_t entry = begin; entry < end; ++entry) {
        weights[rows.indices[entry]] -= factor * (slope * rows.values[entry]);
      }
    }
  });
  divided_ = false;
  std::size_t count = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (slopes_[i].slope != 0) count += rows.offsets[chosen[i] + 1] - rows.offsets[chosen[i]];
  }
  return count;
}

std::pair<std::uint64_t, std::uint64_t> BatchGradient::own_entries(const Part& part, const RowsView& rows,
                                                                   std::uint64_t row) {
  const std::uint32_t* const indices = rows.indices.data();
  const std::uint32_t *begin = indices + rows.offsets[row], *end = indices + rows.offsets[row + 1];
  if (begin == end) return {0, 0};
  if (*begin < part.begin) begin = std::lower_bound(begin, end, part.begin);
  if (begin != end && *(end - 1) >= part.end) end = std::lower_bound(begin, end, part.end);
  return {static_cast<std::uint64_t>(begin - indices), static_cast<std::uint64_t>(end - indices)};
}

BatchGradient::Sums BatchGradient::add_alone(const RowsView& rows, std::span<const float> targets,
                                             std::span<const std::uint64_t> chosen, const ModelView& model,
                                             Loss loss) {
  Sums total;
  const auto add_row = [&](std::uint64_t row, double score) {
    const LossAt found = loss_at(loss, score, targets[row]);
    total.loss += found.value;
    total.slope += found.slope;
    if (found.slope == 0) return;
    add_entries(parts_[0], rows, rows.offsets[row], rows.offsets[row + 1], static_cast<float>(found.slope));
  };
  std::size_t i = 0;
  for (; i + 1 < chosen.size(); i += 2) {
    fetch_ahead(rows, chosen, i);
    fetch_ahead(rows, chosen, i + 1);
    const auto [one, other] = scores_of(rows, chosen[i], chosen[i + 1], model);
    add_row(chosen[i], one);
    add_row(chosen[i + 1], other);
  }
  if (i < chosen.size()) add_row(chosen[i], score_of(rows, chosen[i], model));
  return total;
}

void BatchGradient::add_entries(Part& part, const RowsView& rows, std::uint64_t begin, std::uint64_t end,
                                float slope) {
  if (part.first.size() < part.firsts + (end - begin)) part.first.resize(2 * part.first.size() + (end - begin));
  float* const sums = sums_.data();
  std::uint32_t* const first = part.first.data();
  std::size_t firsts = part.firsts;
  for (std::uint64_t entry = begin; entry < end; ++entry) {
    const std::uint32_t index = rows.indices[entry];
    const float before = sums[index];
    sums[index] = before + slope * rows.values[entry];
    first[firsts] = index;
    firsts += before == 0;
  }
  part.firsts = firsts;
}

// Equal shares of entries, as far as some rows can tell. Features that have been touched keep their part.
void BatchGradient::divide(const RowsView& rows, std::span<const std::uint64_t> chosen) {
  if (divided_) return;
  divided_ = true;
  std::vector<std::uint32_t> seen;
  if (parts_.size() > 1) {
    for (std::size_t i = 0; i < chosen.size(); i += chosen.size() / kSampledRows + 1) {
      const std::uint64_t begin = rows.offsets[chosen[i]], end = rows.offsets[chosen[i] + 1];
      for (std::uint64_t entry = begin; entry < end; entry += (end - begin) / kSampledEntries + 1) {
        seen.push_back(rows.indices[entry]);
      }
    }
    std::sort(seen.begin(), seen.end());
  }
  std::size_t begin = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const std::size_t place = seen.size() * (i + 1) / parts_.size();
    std::size_t end = features();
    if (i + 1 < parts_.size()) {
      const std::size_t border = place < seen.size() ? seen[place] : begin;
      end = std::clamp((border + kBlock / 2) / kBlock * kBlock, begin, features());
    }
    parts_[i].begin = begin;
    parts_[i].end = end;
    begin = end;
  }
}

std::size_t BatchGradient::collect() {
  team_.run([&](std::size_t own) {
    Part& part = parts_[own];
    for (std::size_t i = 0; i < part.firsts; ++i) {
      const std::size_t index = part.first[i];
      touched_[index / kBits] |= std::uint64_t{1} << index % kBits;
      words_[index / kBlock] |= std::uint64_t{1} << index / kBits % kBits;
    }
    part.firsts = 0;
    part.entries = 0;
    for (std::size_t block = words_for(words_for(part.begin)); block < words_for(words_for(part.end)); ++block) {
      for_each_bit(words_[block], block * kBits, [&](std::size_t word) {
        part.entries += static_cast<std::size_t>(std::popcount(touched_[word]));
      });
    }
  });
  std::size_t count = 0;
  for (const Part& part : parts_) count += part.entries;
  return count;
}

void BatchGradient::take(std::span<std::uint32_t> indices, std::span<float> values) {
  std::size_t collected = 0;
  for (const Part& part : parts_) collected += part.entries;
  TELEGRAD_CHECK(collected == indices.size() && collected == values.size());
  team_.run([&](std::size_t own) {
    std::size_t begin = 0;
    for (std::size_t i = 0; i < own; ++i) begin += parts_[i].entries;
    std::size_t count = begin;
    const Part& part = parts_[own];
    for (std::size_t block = words_for(words_for(part.begin)); block < words_for(words_for(part.end)); ++block) {
      for_each_bit(words_[block], block * kBits, [&](std::size_t word) {
        for_each_bit(touched_[word], word * kBits,
                     [&](std::size_t index) { indices[count++] = static_cast<std::uint32_t>(index); });
        touched_[word] = 0;
      });
      words_[block] = 0;
    }
    TELEGRAD_CHECK(count == begin + part.entries);
    // apart from the bits, so that many sums are fetched at once
    for (std::size_t i = begin; i < count; ++i) {
      values[i] = sums_[indices[i]];
      sums_[indices[i]] = 0;
    }
  });
  for (Part& part : parts_) part.entries = 0;
  divided_ = false;
}

}  // namespace telegrad::linear
