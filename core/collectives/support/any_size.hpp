#pragma once
// Messages of a length that only their sender knows. Long ones go in pieces (see pieces.hpp): the first begins with a word
// that says so, and the length of the whole, and is exactly as long as a piece may be; a shorter message is all there is.
// No message may begin with 8 bytes that read as 2^64 - 2^48 or more (CHECKed): vectors and tables of lengths do not.

#include <cstddef>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// How long a piece may be; the same on all ranks.
std::size_t longest_piece(const Transport& net);

/// Steps that a message of up to `most_bytes` uses, the same on all ranks.
Step any_size_steps(const Transport& net, std::size_t most_bytes);

/// How long the first piece of a message can be; and whether one of so many bytes is followed by others.
std::size_t first_piece_bytes(const Transport& net, std::size_t most_bytes);
bool has_several_pieces(const Transport& net, std::size_t bytes);
/// Whether a message begins as the first of several pieces does: one that is shorter has lost a part.
bool others_follow(ConstBytes first);

/// Done when `bytes` may be written again. Uses any_size_steps() steps from `first_step` on.
Task<void> send_any_size(Transport& net, Rank to, Step first_step, ConstBytes bytes);

/// The message of which the first of several pieces has come at `first_step`. More than `most_bytes` end the operation, and so
/// does a first piece that has lost a part.
Task<Buffer> receive_rest(Transport& net, Rank from, Step first_step, Buffer first, std::size_t most_bytes);
/// What `from` sends by send_any_size() or exchange_any_size().
Task<Buffer> receive_any_size(Transport& net, Rank from, Step first_step, std::size_t most_bytes);

/// Sends `bytes` to one rank while another's message comes, no faster than that one does as long as both have pieces left.
Task<Buffer> exchange_any_size(Transport& net, Rank to, Rank from, Step first_step, ConstBytes bytes,
                               std::size_t most_bytes);

}  // namespace telegrad
