#include "linear/rank_gradient.hpp"

#include "base/check.hpp"

namespace telegrad::linear {

RankGradient::RankGradient(const Descent& descent, const Numbering* numbering, Team& team)
    : descent_(descent),
      team_(team),
      features_(numbering == nullptr ? 0 : numbering->size()),
      places_(numbering == nullptr ? descent.features() : numbering->size()),
      gradient_(places_, team) {
  if (numbering != nullptr) numbering->write_features(features_);
}

std::size_t RankGradient::find(const RowsView& rows, std::span<const float> targets,
                               std::span<const std::uint64_t> chosen, Loss loss) {
  sums_ = gradient_.add(rows, targets, chosen, view(rows, chosen), loss);
  return gradient_.collect() + kBehind;
}

void RankGradient::take(std::span<std::uint32_t> indices, std::span<float> values) {
  TELEGRAD_CHECK(indices.size() >= kBehind && indices.size() == values.size());
  const std::size_t count = indices.size() - kBehind;
  gradient_.take(indices.first(count), values.first(count));
  if (!features_.empty()) {
    for (std::uint32_t& place : indices.first(count)) place = features_[place];
  }
  indices[count] = static_cast<std::uint32_t>(descent_.features());
  indices[count + 1] = indices[count] + 1;
  values[count] = static_cast<float>(sums_.slope);
  values[count + 1] = static_cast<float>(sums_.loss);
}

ModelView RankGradient::view(const RowsView& rows, std::span<const std::uint64_t> chosen) {
  const ModelView all = descent_.view();
  if (all.owed == nullptr) return all;
  std::uint64_t entries = 0;
  for (const std::uint64_t row : chosen) entries += rows.offsets[row + 1] - rows.offsets[row];
  if (entries < places_) return all;
  worths_.resize(places_);
  team_.run([&](std::size_t part) {
    const std::size_t end = places_ * (part + 1) / team_.size();
    for (std::size_t i = places_ * part / team_.size(); i < end; ++i) {
      worths_[i] = all.owed->settled(all.weights[i], i);
    }
  });
  return {worths_, all.scale, all.bias};
}

}  // namespace telegrad::linear
