#include "drivers/ucx/ucx_worker.hpp"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "transport/failure.hpp"

namespace telegrad {

void check_ucx(ucs_status_t status, Rank rank, const std::string& call) {
  if (status == UCS_OK) return;
  throw TransportError({.kind = FailureKind::transport,
                        .rank = rank,
                        .operation = "join",
                        .reason = "UCX's " + call + " failed: " + ucs_status_string(status)});
}

int open_worker(ucp_context_h context, Rank rank, ucp_worker_h& worker, unsigned id, ucp_am_recv_callback_t callback,
                void* argument) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check_ucx(ucp_worker_create(context, &params, &worker), rank, "ucp_worker_create");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                       UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = callback;
  handler.arg = argument;
  check_ucx(ucp_worker_set_am_recv_handler(worker, &handler), rank, "ucp_worker_set_am_recv_handler");
  int descriptor = -1;
  check_ucx(ucp_worker_get_efd(worker, &descriptor), rank, "ucp_worker_get_efd");
  return descriptor;
}

void append_address(ucp_worker_h worker, Rank rank, std::vector<std::byte>& bytes) {
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check_ucx(ucp_worker_get_address(worker, &address, &length), rank, "ucp_worker_get_address");
  append_prefixed({reinterpret_cast<const std::byte*>(address), length}, bytes);
  ucp_worker_release_address(worker, address);
}

void append_prefixed(ConstBytes part, std::vector<std::byte>& bytes) {
  const auto prefix = std::bit_cast<std::array<std::byte, sizeof(std::uint32_t)>>(static_cast<std::uint32_t>(part.size()));
  bytes.insert(bytes.end(), prefix.begin(), prefix.end());
  bytes.insert(bytes.end(), part.begin(), part.end());
}

ConstBytes take_prefixed(ConstBytes& bytes) {
  std::uint32_t length = 0;
  if (bytes.size() < sizeof length) return {};
  std::memcpy(&length, bytes.data(), sizeof length);
  bytes = bytes.subspan(sizeof length);
  if (length > bytes.size()) return {};
  const ConstBytes address = bytes.first(length);
  bytes = bytes.subspan(length);
  return address;
}

unsigned progressed(ucp_worker_h worker) {
  constexpr unsigned kTurnMost = 32;
  unsigned events = 0;
  while (events < kTurnMost && ucp_worker_progress(worker) != 0) ++events;
  return events;
}

}  // namespace telegrad
