#include "session/report.hpp"

#include <cmath>
#include <cstdio>

namespace telegrad {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (code < 0x20 || code >= 0x7f) {  // bytes of a peer's text need not be UTF-8
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  std::snprintf(text, sizeof text, "%.6f", value);
  return text;
}

std::string number(std::uint64_t value) { return std::to_string(value); }
std::string text_or_null(const std::string& text) { return text.empty() ? "null" : quoted(text); }
std::string rank_or_null(Rank rank) { return rank == kNoRank ? "null" : number(std::uint64_t{rank}); }

std::string list(const std::vector<Rank>& ranks) {
  std::string out = "[";
  for (const Rank rank : ranks) out += (out.size() == 1 ? "" : ", ") + std::to_string(rank);
  return out + "]";
}

const char* name_of(OperationState state) {
  switch (state) {
    case OperationState::running: return "running";
    case OperationState::completed: return "completed";
    case OperationState::failed: return "failed";
  }
  return "unknown";
}

std::string peer_json(const SessionReport::Peer& peer) {
  return "{\"rank\": " + std::to_string(peer.rank) + ", \"host\": " + text_or_null(peer.host) +
         ", \"pid\": " + (peer.pid == 0 ? "null" : std::to_string(peer.pid)) + ", \"state\": " + quoted(peer.state) +
         ", \"called\": " + (peer.called ? std::to_string(*peer.called) : "null") +
         ", \"heard_s_ago\": " + number(peer.heard_s_ago) + "}";
}

std::string operation_json(const SessionReport::OperationReport& operation, double now_s) {
  const History::Entry& entry = operation.entry;
  const Call& call = entry.call;
  const bool running = entry.state == OperationState::running;
  return "{\"tag\": " + std::to_string(entry.sequence) + ", \"call\": " + quoted(describe(call)) +
         ", \"operation\": " + quoted(name_of(call.operation)) + ", \"count\": " + std::to_string(call.count) +
         ", \"dtype\": " + quoted(name_of(call.dtype)) + ", \"reduction\": " + quoted(name_of(call.reduction)) +
         ", \"algorithm\": " + quoted(name_of(call.algorithm)) + ", \"root\": " + rank_or_null(call.root) +
         ", \"state\": " + quoted(name_of(entry.state)) + ", \"called_s_ago\": " + number(now_s - entry.called_s) +
         ", \"took_s\": " + (running ? "null" : number(entry.ended_s - entry.called_s)) +
         ", \"waits_for\": " + list(operation.waits_for) + ", \"sends_to\": " + list(operation.sends_to) + "}";
}

std::string message_json(const SessionReport::Message& message, double now_s) {
  const Call& call = message.call;
  return "{\"call\": " + quoted(describe(call)) + ", \"operation\": " + quoted(name_of(call.operation)) +
         ", \"peer\": " + rank_or_null(call.root) + ", \"message_tag\": " + std::to_string(call.layout) +
         ", \"before\": " + std::to_string(message.before) + ", \"state\": " + quoted(name_of(message.state)) +
         ", \"called_s_ago\": " + number(now_s - message.called_s) + "}";
}

std::string group_json(const Group* group) {
  if (group == nullptr) return "null";
  std::string ranks;
  for (const Rank rank : group->parent_ranks) {
    if (!ranks.empty()) ranks += ", ";
    ranks += std::to_string(rank);
  }
  return "{\"name\": " + quoted(group->name) + ", \"parent_ranks\": [" + ranks + "]}";
}

}  // namespace

const char* error_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::transport: return "TransportError";
    case FailureKind::peer_failed: return "PeerFailed";
    case FailureKind::timeout: return "TimeoutExpired";
    case FailureKind::mismatched_call: return "MismatchedCall";
  }
  return "TransportError";
}

std::string to_json(const SessionReport& report, const ReportOrigin& origin) {
  char communicator[16];
  std::snprintf(communicator, sizeof communicator, "%08x", report.epoch);
  std::string out = "{\"kind\": \"telegrad report\", \"version\": 1, \"why\": " + quoted(origin.why) +
                    ", \"communicator\": " + quoted(communicator) + ", \"driver\": " + quoted(origin.driver) +
                    ",\n \"rank\": " + std::to_string(report.rank) + ", \"world_size\": " +
                    std::to_string(report.size) + ", \"host\": " + text_or_null(origin.host) +
                    ", \"pid\": " + std::to_string(origin.pid) + ", \"written_unix_s\": " + number(origin.unix_s) +
                    ", \"timeout_s\": " + number(report.timeout_s) + ", \"liveness_timeout_s\": " +
                    (report.liveness_timeout_s ? number(*report.liveness_timeout_s) : "null") +
                    ", \"group\": " + group_json(report.group.get()) +
                    ",\n \"called\": " + std::to_string(report.called) +
                    ", \"completed\": " + std::to_string(report.completed) + ",\n \"failure\": ";
  if (report.failure) {
    out += std::string("{\"error\": ") + quoted(error_name(report.failure->kind)) +
           ", \"peer\": " + rank_or_null(report.failure->peer) + ", \"message\": " + quoted(report.failure->message()) +
           "}";
  } else {
    out += "null";
  }
  out += ",\n \"peers\": [";
  for (std::size_t i = 0; i < report.peers.size(); ++i) out += (i ? ",\n  " : "\n  ") + peer_json(report.peers[i]);
  out += "],\n \"operations\": [";
  for (std::size_t i = 0; i < report.operations.size(); ++i) {
    out += (i ? ",\n  " : "\n  ") + operation_json(report.operations[i], report.now_s);
  }
  out += "],\n \"messages\": [";
  for (std::size_t i = 0; i < report.messages.size(); ++i) {
    out += (i ? ",\n  " : "\n  ") + message_json(report.messages[i], report.now_s);
  }
  return out + "]}\n";
}

}  // namespace telegrad
