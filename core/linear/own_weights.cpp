#include "linear/own_weights.hpp"

namespace telegrad::linear {

OwnWeights::OwnWeights(const Descent& descent, const Numbering& numbering, Team& team)
    : descent_(descent),
      numbering_(numbering),
      team_(team),
      features_(numbering.size()),
      rewrites_(descent.rewrites()),
      weights_(numbering.size()) {
  numbering.write_features(features_);
  if (descent.owes()) {
    last_.resize(features_.size());
    if (descent.rule() == Rule::adagrad) paces_.resize(features_.size());
  }
  copy_all();
}

void OwnWeights::follow(std::span<const std::uint32_t> indices) {
  if (indices.empty() || indices.size() >= features_.size() || rewrites_ != descent_.rewrites()) {
    rewrites_ = descent_.rewrites();
    copy_all();
    return;
  }
  const ModelView all = descent_.view();
  team_.run([&](std::size_t part) {
    const std::size_t end = indices.size() * (part + 1) / team_.size();
    for (std::size_t i = indices.size() * part / team_.size(); i < end; ++i) {
      const std::uint32_t feature = indices[i];
      if (!numbering_.contains(feature)) continue;
      const std::uint32_t place = numbering_.place_of(feature);
      weights_[place] = all.weights[feature];
      if (!last_.empty()) last_[place] = all.owed->last[feature];
      if (!paces_.empty()) paces_[place] = all.owed->paces[feature];
    }
  });
}

void OwnWeights::copy_all() {
  const ModelView all = descent_.view();
  team_.run([&](std::size_t part) {
    const std::size_t begin = features_.size() * part / team_.size();
    const std::size_t end = features_.size() * (part + 1) / team_.size();
    for (std::size_t i = begin; i < end; ++i) weights_[i] = all.weights[features_[i]];
    if (all.owed == nullptr || all.owed->last.empty()) return;  // nothing is owed before the first step
    for (std::size_t i = begin; i < end; ++i) last_[i] = all.owed->last[features_[i]];
    if (paces_.empty()) return;
    for (std::size_t i = begin; i < end; ++i) paces_[i] = all.owed->paces[features_[i]];
  });
}

ModelView OwnWeights::view(const RowsView& rows, std::span<const std::uint64_t> chosen) {
  const ModelView all = descent_.view();
  if (all.owed == nullptr) return {weights_, all.scale, all.bias};
  owed_ = *all.owed;
  owed_.last = last_;
  owed_.paces = paces_;
  std::uint64_t entries = 0;
  for (const std::uint64_t row : chosen) entries += rows.offsets[row + 1] - rows.offsets[row];
  if (entries < weights_.size()) return {weights_, all.scale, all.bias, &owed_};
  find_worths();
  return {worths_, all.scale, all.bias};
}

void OwnWeights::find_worths() {
  worths_.resize(weights_.size());
  team_.run([&](std::size_t part) {
    const std::size_t end = worths_.size() * (part + 1) / team_.size();
    for (std::size_t i = worths_.size() * part / team_.size(); i < end; ++i) {
      worths_[i] = owed_.settled(weights_[i], i);
    }
  });
}

void OwnWeights::to_features(std::span<std::uint32_t> places) const {
  for (std::uint32_t& place : places) place = features_[place];
}

}  // namespace telegrad::linear
