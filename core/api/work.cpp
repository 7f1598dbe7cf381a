#include "telegrad/work.hpp"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "api/begin.hpp"
#include "api/joined.hpp"
#include "progress/communicator.hpp"

namespace telegrad::api {
namespace {

bool wait_until(const detail::Begun& begun, double deadline_s) {
  telegrad::Communicator& core = *begun.joined->core;
  if (!begun.request->done() || (begun.sent && !begun.sent->done())) detail::check_process(core);
  for (const RequestPtr& request : {begun.request, begun.sent}) {
    if (!request) continue;
    while (!core.wait(*request, deadline_s)) {  // a signal ends it early
      if (Engine::now_s() >= deadline_s) return false;
    }
    if (request->failure()) detail::raise(*request->failure());
  }
  return true;
}

}  // namespace

const detail::Begun& Work::begun() const {
  if (!begun_) throw std::invalid_argument("this Work was moved from: use the one that it was moved to");
  return *begun_;
}

void Work::wait() const { wait_until(begun(), std::numeric_limits<double>::infinity()); }

void Work::wait(double timeout_s) const {
  if (!(timeout_s > 0)) {
    throw std::invalid_argument("timeout_s=" + std::to_string(timeout_s) + " must be positive; without one wait() waits "
                                "as long as the communicator's own");
  }
  const detail::Begun& held = begun();
  if (wait_until(held, Engine::now_s() + timeout_s)) return;
  const telegrad::Communicator& core = *held.joined->core;
  const char* const operation = held.sent ? "sendrecv" : name_of(held.request->call().operation);
  throw TimeoutExpired("rank " + std::to_string(core.rank()) + ": " + operation + " is still running after timeout_s=" +
                           std::to_string(timeout_s) + " s: wait longer, or end it on all ranks with abort()",
                       {.rank = core.rank(), .operation = operation});
}

bool Work::is_completed() const {
  const detail::Begun& held = begun();
  return held.request->done() && (!held.sent || held.sent->done());
}

std::optional<Rank> Work::source() const {
  return is_completed() ? begun_->request->source() : std::nullopt;
}

}  // namespace telegrad::api
