#pragma once
// What a SimNetwork writes down while time passes: the history's hash always; its text, the ports' timeline and the
// links' counts where somebody wants them. It must not know how time passes.

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/types.hpp"

namespace telegrad {

/// What has passed one rank's ports. Control messages count apart and have no bytes.
struct SimCounts {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t control_messages_sent = 0;
};

/// Data messages from one rank to another.
struct SimLinkCounts {
  Rank from = 0;
  Rank to = 0;
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
};

/// Something that kept a port or a processor busy.
struct SimActivity {
  enum class Kind : std::uint8_t {
    send = 0,     // a message in its sender's port out; `peer` receives it
    receive = 1,  // a message in its receiver's port in; `peer` sent it
    compute = 2,  // work; `peer` is kNoRank, sequence and step are 0
  };
  Kind kind = Kind::send;
  Rank rank = 0;
  Rank peer = kNoRank;
  std::uint32_t sequence = 0;
  Step step = 0;
  std::uint64_t bytes = 0;
  double start_s = 0.0;
  double end_s = 0.0;
};

class SimRecord {
 public:
  /// One event of the history. `words` tell it from all others of its time.
  void event(double time_s, std::uint64_t first_word, std::uint64_t second_word);
  std::uint64_t hash() const { return hash_; }

  void keep_text() { keeps_text_ = true; }
  bool keeps_text() const { return keeps_text_; }
  void line(const std::string& text) { text_ += text + '\n'; }
  const std::string& text() const { return text_; }

  void keep_timeline() { keeps_timeline_ = true; }
  void activity(const SimActivity& activity) {
    if (keeps_timeline_) timeline_.push_back(activity);
  }
  const std::vector<SimActivity>& timeline() const { return timeline_; }

  void keep_links() { keeps_links_ = true; }
  void message(Rank from, Rank to, std::uint64_t bytes);
  /// Those that carried something, by sender and receiver.
  std::vector<SimLinkCounts> links() const;

 private:
  std::uint64_t hash_ = 0;
  bool keeps_text_ = false;
  bool keeps_timeline_ = false;
  bool keeps_links_ = false;
  std::string text_;
  std::vector<SimActivity> timeline_;
  std::unordered_map<std::uint64_t, SimLinkCounts> links_;
};

}  // namespace telegrad
