#include "collectives/support/allgather_any_size.hpp"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "collectives/support/any_size.hpp"

namespace telegrad {
namespace {

class Ring {
 public:
  Ring(Transport& net, std::size_t most_bytes, Step first_step, Taking taking)
      : net_(net),
        most_bytes_(most_bytes),
        first_step_(first_step),
        steps_(any_size_steps(net, most_bytes)),
        piece_bytes_(first_piece_bytes(net, std::numeric_limits<std::size_t>::max())),
        taking_(std::move(taking)) {}

  Task<KeptMessages> run(Buffer mine) {
    keep(net_.rank(), std::move(mine));
    for (Rank t = 0; t + 1 < net_.size(); ++t) {
      if (bytes_ >= Transport::kTurnBytes && (!taking_.ready || taking_.ready())) {
        std::vector<Task<void>> both;
        both.push_back(pass_on(t));
        both.push_back(take_batch());
        co_await when_all(std::move(both));
      } else if (newest_.bytes.size() >= piece_bytes_) {
        co_await pass_on(t);
      } else {
        // Of thousands of short messages, a coroutine for each would cost more than all else.
        auto sending = net_.send(right(), step(t), newest_.bytes);
        Buffer next = co_await net_.receive_any_size(left(), step(t), std::min(most_bytes_, piece_bytes_));
        if (next.size() >= piece_bytes_ || others_follow(next.bytes())) {
          next = co_await receive_rest(net_, left(), step(t), std::move(next), most_bytes_);
        }
        co_await sending;
        keep(source_of(t), std::move(next));
      }
    }
    if (taking_.take) co_await take_batch();
    co_return std::move(all_);
  }

 private:
  void keep(Rank source, Buffer message) {
    newest_ = {source, all_.add(source, std::move(message))};
    if (!taking_.take) return;
    waiting_.push_back(newest_);
    bytes_ += newest_.bytes.size();
  }
  Rank left() const { return (net_.rank() + net_.size() - 1) % net_.size(); }
  Rank right() const { return (net_.rank() + 1) % net_.size(); }
  Step step(Rank t) const { return first_step_ + t * steps_; }
  Rank source_of(Rank t) const { return (net_.rank() + net_.size() - 1 - t) % net_.size(); }

  Task<void> pass_on(Rank t) {
    Buffer next = co_await exchange_any_size(net_, right(), left(), step(t), newest_.bytes, most_bytes_);
    keep(source_of(t), std::move(next));
  }
  Task<void> take_batch() {
    const std::vector<Arrived> batch = std::exchange(waiting_, {});
    bytes_ = 0;
    co_await taking_.take(batch);
  }

  Transport& net_;
  const std::size_t most_bytes_;
  const Step first_step_;
  const Step steps_;               // of a message
  const std::size_t piece_bytes_;  // a message that is as long has several
  const Taking taking_;
  KeptMessages all_;
  Arrived newest_;
  std::vector<Arrived> waiting_;  // not yet taken
  std::size_t bytes_ = 0;         // of these
};

}  // namespace

Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step, Taking taking) {
  Ring ring(net, most_bytes, first_step, std::move(taking));
  co_return co_await ring.run(std::move(mine));
}

}  // namespace telegrad
