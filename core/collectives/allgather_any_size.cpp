#include "collectives/allgather_any_size.hpp"

#include <utility>
#include <vector>

#include "collectives/any_size.hpp"

namespace telegrad {
namespace {

class Ring {
 public:
  Ring(Transport& net, std::size_t most_bytes, Step first_step, std::function<Task<void>(std::span<const Arrived>)> take)
      : net_(net), most_bytes_(most_bytes), first_step_(first_step), take_(std::move(take)) {}

  Task<KeptMessages> run(Buffer mine) {
    keep(net_.rank(), std::move(mine));
    for (Rank t = 0; t + 1 < net_.size(); ++t) {
      if (bytes_ < Transport::kTurnBytes) {
        co_await pass_on(t);
        continue;
      }
      std::vector<Task<void>> both;
      both.push_back(pass_on(t));
      both.push_back(take_batch());
      co_await when_all(std::move(both));
    }
    co_await take_batch();
    co_return std::move(all_);
  }

 private:
  void keep(Rank source, Buffer message) {
    newest_ = {source, all_.add(source, std::move(message))};
    waiting_.push_back(newest_);
    bytes_ += newest_.bytes.size();
  }
  Task<void> pass_on(Rank t) {
    const Rank size = net_.size();
    const Rank left = (net_.rank() + size - 1) % size;
    const Rank right = (net_.rank() + 1) % size;
    const Step step = first_step_ + t * any_size_steps(net_, most_bytes_);
    Buffer next = co_await exchange_any_size(net_, right, left, step, newest_.bytes, most_bytes_);
    keep((net_.rank() + size - 1 - t) % size, std::move(next));
  }
  Task<void> take_batch() {
    const std::vector<Arrived> batch = std::exchange(waiting_, {});
    bytes_ = 0;
    co_await take_(batch);
  }

  Transport& net_;
  const std::size_t most_bytes_;
  const Step first_step_;
  const std::function<Task<void>(std::span<const Arrived>)> take_;
  KeptMessages all_;
  Arrived newest_;
  std::vector<Arrived> waiting_;  // not yet taken
  std::size_t bytes_ = 0;         // of these
};

}  // namespace

Task<KeptMessages> allgather_any_size(Transport& net, Buffer mine, std::size_t most_bytes, Step first_step,
                                      std::function<Task<void>(std::span<const Arrived>)> take) {
  Ring ring(net, most_bytes, first_step, std::move(take));
  co_return co_await ring.run(std::move(mine));
}

}  // namespace telegrad
