// The library's own headers first: once telegrad.hpp is read, its names stand beside theirs.
#include "drivers/ucx/ucx_driver.hpp"
#include "joining/join.hpp"
#include "telegrad/joined.hpp"

#include "telegrad/ucx.hpp"

namespace telegrad::ucx {

api::Communicator join(Rank rank, Rank size, const Exchange& exchange, const api::Options& options,
                       const std::string& interface) {
  api::detail::check(options);
  api::detail::check_rank("rank", rank, size);
  return api::detail::translated([&] {
    auto joined = std::make_shared<api::detail::Joined>();
    joined->options = options;
    joined->connect = [interface](Rank own, Rank all, CommunicatorOptions how, const telegrad::Exchange& swap) {
      auto driver = std::make_unique<UcxDriver>(own, all, UcxOptions{.interface = interface});
      return telegrad::join(std::move(driver), std::move(how), swap);
    };
    joined->core = joined->connect(rank, size, api::detail::own_options(options), [&](ConstBytes mine) {
      return exchange(std::vector<std::byte>(mine.begin(), mine.end()));
    });
    return api::Communicator(std::move(joined));
  });
}

}  // namespace telegrad::ucx
