#pragma once
// What an operation keeps per expected or early message: a hash table without an allocation per entry, since every
// message passes through one. Which messages these are, it must not know.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "base/types.hpp"

namespace telegrad {

template <class Value>
class MessageTable {
 public:
  bool empty() const { return count_ == 0; }

  /// False if there is a value of this source and step already.
  bool insert(Rank source, Step step, Value value) {
    if (2 * (count_ + 1) > keys_.size()) grow();
    const Key key = key_of(source, step);
    std::size_t at = home(key);
    for (; keys_[at] != kFree; at = next(at)) {
      if (keys_[at] == key) return false;
    }
    keys_[at] = key;
    values_[at] = std::move(value);
    ++count_;
    return true;
  }

  /// Removes and returns the value.
  std::optional<Value> take(Rank source, Step step) {
    if (count_ == 0) return std::nullopt;
    const Key key = key_of(source, step);
    std::size_t at = home(key);
    while (keys_[at] != kFree && keys_[at] != key) at = next(at);
    if (keys_[at] == kFree) return std::nullopt;
    std::optional<Value> value = std::move(values_[at]);
    remove(at);
    return value;
  }

  /// `visit(source, value)` for all, in no particular order.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::size_t at = 0; at < keys_.size(); ++at) {
      if (keys_[at] != kFree) visit(static_cast<Rank>(keys_[at] >> 32), values_[at]);
    }
  }

 private:
  using Key = std::uint64_t;
  static constexpr Key kFree = ~Key{0};  // no rank is kNoRank
  static Key key_of(Rank source, Step step) { return (Key{source} << 32) | step; }
  // The messages of one step lie side by side, since most operations take them from one neighbour after another.
  std::size_t home(Key key) const {
    return static_cast<std::size_t>((key >> 32) + mix(static_cast<Step>(key))) & (keys_.size() - 1);
  }
  std::size_t next(std::size_t at) const { return (at + 1) & (keys_.size() - 1); }

  void grow() {
    constexpr std::size_t kLeast = 4;
    const std::size_t size = keys_.empty() ? kLeast : 2 * keys_.size();
    std::vector<Key> keys(size, kFree);
    std::vector<Value> values(size);
    keys.swap(keys_);
    values.swap(values_);
    for (std::size_t before = 0; before < keys.size(); ++before) {
      if (keys[before] == kFree) continue;
      std::size_t at = home(keys[before]);
      while (keys_[at] != kFree) at = next(at);
      keys_[at] = keys[before];
      values_[at] = std::move(values[before]);
    }
  }

  // Those behind it move up, as far as their home lets them, so that no search ends too early.
  void remove(std::size_t hole) {
    for (std::size_t at = next(hole); keys_[at] != kFree; at = next(at)) {
      const std::size_t mask = keys_.size() - 1;
      const std::size_t from_home = (at - home(keys_[at])) & mask;
      if (from_home < ((at - hole) & mask)) continue;
      keys_[hole] = keys_[at];
      values_[hole] = std::move(values_[at]);
      hole = at;
    }
    keys_[hole] = kFree;
    --count_;
  }

  std::vector<Key> keys_;  // apart from the values, so that a search touches few lines
  std::vector<Value> values_;
  std::size_t count_ = 0;
};

}  // namespace telegrad
