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
    if (2 * (count_ + 1) > slots_.size()) grow();
    const Key key = key_of(source, step);
    std::size_t at = home(key);
    for (; slots_[at].key != kFree; at = next(at)) {
      if (slots_[at].key == key) return false;
    }
    slots_[at] = {key, std::move(value)};
    ++count_;
    return true;
  }

  /// Removes and returns the value.
  std::optional<Value> take(Rank source, Step step) {
    if (count_ == 0) return std::nullopt;
    const Key key = key_of(source, step);
    std::size_t at = home(key);
    while (slots_[at].key != kFree && slots_[at].key != key) at = next(at);
    if (slots_[at].key == kFree) return std::nullopt;
    std::optional<Value> value = std::move(slots_[at].value);
    remove(at);
    return value;
  }

  /// `visit(source, value)` for all, in no particular order.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.key != kFree) visit(static_cast<Rank>(slot.key >> 32), slot.value);
    }
  }

 private:
  using Key = std::uint64_t;
  static constexpr Key kFree = ~Key{0};  // no rank is kNoRank
  struct Slot {
    Key key = kFree;
    Value value{};
  };
  static Key key_of(Rank source, Step step) { return (Key{source} << 32) | step; }
  std::size_t home(Key key) const { return static_cast<std::size_t>(mix(key)) & (slots_.size() - 1); }
  std::size_t next(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }

  void grow() {
    constexpr std::size_t kLeast = 4;
    std::vector<Slot> before(slots_.empty() ? kLeast : 2 * slots_.size());
    before.swap(slots_);
    for (Slot& slot : before) {
      if (slot.key == kFree) continue;
      std::size_t at = home(slot.key);
      while (slots_[at].key != kFree) at = next(at);
      slots_[at] = std::move(slot);
    }
  }

  // Those behind it move up, as far as their home lets them, so that no search ends too early.
  void remove(std::size_t hole) {
    for (std::size_t at = next(hole); slots_[at].key != kFree; at = next(at)) {
      const std::size_t mask = slots_.size() - 1;
      const std::size_t from_home = (at - home(slots_[at].key)) & mask;
      if (from_home < ((at - hole) & mask)) continue;
      slots_[hole] = std::move(slots_[at]);
      hole = at;
    }
    slots_[hole].key = kFree;
    --count_;
  }

  std::vector<Slot> slots_;
  std::size_t count_ = 0;
};

}  // namespace telegrad
