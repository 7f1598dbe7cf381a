#include "session/messages.hpp"

#include <memory>

#include "base/check.hpp"

namespace telegrad {
namespace {

Call call_of(Operation operation, DType dtype, std::size_t bytes, Rank other, Step tag) {
  TELEGRAD_CHECK(tag < kTagsMost);
  return {.operation = operation, .dtype = dtype, .root = other, .count = bytes / size_of(dtype), .layout = tag};
}

Task<void> send(Transport& net, Rank to, Step tag, ConstBytes data) { co_await net.send(to, tag, data); }

Task<void> receive(Transport& net, Rank source, Step tag, Bytes into) { co_await net.receive(source, tag, into); }

}  // namespace

RequestPtr make_send(DType dtype, ConstBytes data, Rank to, Step tag) {
  return std::make_shared<Request>(call_of(Operation::send, dtype, data.size(), to, tag),
                                   [=](Transport& net) { return send(net, to, tag, data); });
}

RequestPtr make_receive(DType dtype, Bytes into, Rank source, Step tag) {
  return std::make_shared<Request>(call_of(Operation::receive, dtype, into.size(), source, tag),
                                   [=](Transport& net) { return receive(net, source, tag, into); });
}

}  // namespace telegrad
