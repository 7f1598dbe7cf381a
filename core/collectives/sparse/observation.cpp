#include "collectives/sparse/observation.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kDistanceMost = 16;  // more sums of one kind in flight wait for each other

// Of a sum from the one that it learns from: the first ones learn at once, and few in flight wait after that.
std::size_t distance_after(std::uint64_t calls) {
  return static_cast<std::size_t>(std::clamp<std::uint64_t>(calls / 2, 1, kDistanceMost));
}

}  // namespace

SumObservation::~SumObservation() {
  sum_->over.store(true, std::memory_order_release);
  sum_->basis.reset();  // frees no chain: a basis held by nobody else has lost its own with its observation
}

SumObservation::Beginning SumObservation::begin(ReadyQueue& ready) { return {*this, ready}; }

void SumObservation::take_basis() {
  if (sum_->basis) sum_->overlaps = sum_->basis->overlaps;
  sum_->basis.reset();  // no sum keeps all before it
  seen_ = sum_->overlaps;
}

void SumObservation::end() {
  TELEGRAD_CHECK(!sum_->basis);
  sum_->overlaps = seen_;
  sum_->over.store(true, std::memory_order_release);
  for (Beginning* const beginning : std::exchange(sum_->waiting, {})) {
    beginning->ready_.push(std::exchange(beginning->waiter_, {}));
  }
}

SumObservation::Beginning::~Beginning() {
  const auto& basis = observation_.sum_->basis;
  if (waiter_ && basis) std::erase(basis->waiting, this);
}

bool SumObservation::Beginning::await_ready() const noexcept {
  const auto& basis = observation_.sum_->basis;
  return basis == nullptr || basis->over.load(std::memory_order_acquire);
}

void SumObservation::Beginning::await_suspend(std::coroutine_handle<> waiter) {
  waiter_ = waiter;
  observation_.sum_->basis->waiting.push_back(this);
}

std::shared_ptr<SumObservation> ObservedSums::next() {
  auto observation = std::make_shared<SumObservation>(first_);
  if (called_ > 0) observation->sum_->basis = *(latest_.end() - static_cast<std::ptrdiff_t>(distance_after(called_)));
  latest_.push_back(observation->sum_);
  if (latest_.size() > kDistanceMost) latest_.pop_front();
  ++called_;
  return observation;
}

}  // namespace telegrad
