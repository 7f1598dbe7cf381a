#pragma once
// Messages of which each rank alone knows how long its own is, but that few are long.

#include <cstddef>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What is longer is not sent along, unless the caller says otherwise. For some α/γ of 30 KB saving messages is worth
/// copying everything once more.
inline constexpr std::size_t kShortMessageBytes = std::size_t{32} << 10;

/// All ranks' messages, by rank; an empty one is longer than `most`, and not there. They lie in `received`, at
/// multiples of 8, the own one where the caller has it.
struct ShortMessages {
  std::vector<ConstBytes> by_rank;
  std::vector<Buffer> received;
};

/// By Bruck's algorithm. `mine`: a multiple of 8 bytes, at least 8 (CHECKed). Uses short_message_steps() steps from
/// `first_step` on. What is damaged on its way ends the operation; `content`: what was to be sent. All ranks pass the same
/// `most`.
Task<ShortMessages> allgather_short(Transport& net, ConstBytes mine, const char* content, Step first_step = 0,
                                    std::size_t most = kShortMessageBytes);
Step short_message_steps(const Transport& net, std::size_t most = kShortMessageBytes);

}  // namespace telegrad
