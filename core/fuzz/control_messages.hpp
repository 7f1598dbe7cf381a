#pragma once
// A fuzzed input of what ranks tell each other beside data: control messages, greetings, and process identities; and of
// envelopes, as a session takes them.

#include <cstdint>

#include "base/types.hpp"

namespace telegrad::fuzz {

enum class ControlPart : std::uint8_t { control, greeting, identity, session };
inline constexpr unsigned kControlParts = 4;

/// The first byte says which part (modulo kControlParts), and the rest is read as it: whether it was accepted. CHECKs that
/// what is accepted is written again as the same bytes, that a greeting of another key is refused, and that a session ends
/// every operation, whatever it hears.
bool read_control_message(ConstBytes input);

}  // namespace telegrad::fuzz

/// As libFuzzer calls it; always 0.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
