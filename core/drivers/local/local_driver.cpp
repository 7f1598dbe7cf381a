#include "drivers/local/local_driver.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"

namespace telegrad {

LocalDriver::LocalDriver(std::shared_ptr<LocalNetwork> network, Rank rank) : network_(std::move(network)), rank_(rank) {
  TELEGRAD_CHECK(rank < network_->size() && network_->drivers_[rank] == nullptr);
  network_->drivers_[rank] = this;
}

LocalDriver::~LocalDriver() { shut_down(); }

void LocalDriver::send(Rank to, const Envelope& envelope, ConstBytes bytes, Pending& pending) {
  LocalDriver* const peer = network_->drivers_[to];
  if (peer == nullptr) return;  // closed: the operation waits until its session hears of that
  peer->parcels_.push_back(std::make_unique<Parcel>(Parcel{envelope, bytes, &pending, this}));
}

void LocalDriver::accept(const Arrival& arrival, Bytes into, Pending& pending) {
  auto* const parcel = static_cast<Parcel*>(arrival.handle);
  TELEGRAD_CHECK(into.size() == parcel->bytes.size());
  copy_bytes(into.data(), parcel->bytes.data(), into.size());
  pending.complete(into.size());
  discard(arrival);
}

void LocalDriver::discard(const Arrival& arrival) {
  const auto kept = std::ranges::find_if(kept_, [&](const auto& parcel) { return parcel.get() == arrival.handle; });
  TELEGRAD_CHECK(kept != kept_.end());
  if ((*kept)->sender != nullptr) (*kept)->sender->complete((*kept)->bytes.size());
  std::swap(*kept, kept_.back());
  kept_.pop_back();
}

void LocalDriver::send_control(Rank to, const Control& control) {
  if (LocalDriver* const peer = network_->drivers_[to]) peer->controls_.push_back(control);
}

void LocalDriver::compute(std::size_t bytes, Pending& pending) { pending.complete(bytes); }

bool LocalDriver::progress() {
  const bool anything = !parcels_.empty() || !controls_.empty() || !gone_.empty();
  for (auto& control : std::exchange(controls_, {})) sink_->on_control(control);
  for (auto& parcel : std::exchange(parcels_, {})) {
    const Arrival arrival{parcel->envelope, parcel.get()};
    kept_.push_back(std::move(parcel));
    sink_->on_arrival(arrival);
  }
  for (const Rank peer : std::exchange(gone_, {})) sink_->on_peer_failed(peer, "its communicator was closed");
  return anything;
}

double LocalDriver::now_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Our memory goes with us: parcels that others have not taken yet live on as copies.
void LocalDriver::shut_down() {
  if (network_->drivers_[rank_] != this) return;
  network_->drivers_[rank_] = nullptr;
  parcels_.clear();
  controls_.clear();
  kept_.clear();
  const auto orphan = [this](Parcel& parcel) {
    if (parcel.from != this || parcel.sender == nullptr) return;
    parcel.sender = nullptr;
    parcel.copy = Buffer(parcel.bytes.size());
    copy_bytes(parcel.copy.data(), parcel.bytes.data(), parcel.bytes.size());
    parcel.bytes = parcel.copy.bytes();
  };
  for (LocalDriver* const peer : network_->drivers_) {
    if (peer == nullptr) continue;
    peer->gone_.push_back(rank_);
    for (auto& parcel : peer->parcels_) orphan(*parcel);
    for (auto& parcel : peer->kept_) orphan(*parcel);
  }
}

}  // namespace telegrad
