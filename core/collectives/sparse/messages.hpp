#pragma once
// What the sparse collectives have in common: who owns which slice of the index range, how long a message can be, when a
// slice goes dense, and how messages are read. Which messages there are, this must not know.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/counted.hpp"
#include "codec/slices.hpp"
#include "codec/sparse_vector.hpp"
#include "codec/wire.hpp"
#include "collectives/sparse/choice.hpp"
#include "collectives/sparse/observation.hpp"
#include "collectives/support/nodes.hpp"
#include "collectives/support/partition.hpp"
#include "kernels/scatter.hpp"
#include "transport/envelope.hpp"
#include "transport/transport.hpp"

namespace telegrad {

inline IndexRange slice_of(const Partition& slices, Rank owner) {
  const Range slice = slices[owner];
  return {slice.begin, slice.end};
}

/// No encoding of this range is longer: at worst every element is an entry with an index of 4 bytes. Two sections are
/// padded to 8 bytes.
template <class V>
std::size_t most_bytes(IndexRange range) {
  return sizeof(VectorHeader) + static_cast<std::size_t>(range.size()) * (4 + sizeof(V)) + 16;
}
/// The same for any of these slices: what all ranks agree on.
template <class V>
std::size_t most_bytes(const Partition& slices) {
  return most_bytes<V>(IndexRange{0, slices.longest()});
}

/// More entries than this are better sent densely: on the wire an index of a slice that is nearly dense has 2 bytes.
template <class V>
double wire_delta(IndexRange range, double switch_factor) {
  return switch_entries(range.size(), sizeof(V), 2, switch_factor);
}
/// The same for what stays in memory, where an index has 4.
template <class V>
double memory_delta(std::uint64_t dimension, double switch_factor) {
  return switch_entries(dimension, sizeof(V), 4, switch_factor);
}

/// Of the index range, which ranks own.
enum class Slices : std::uint8_t {
  equal,     // of equal lengths
  balanced,  // with about as many entries of all ranks' vectors: see balanced_slices()
};

/// How a sparse reduction is to be done; the same on all ranks.
struct SparseReduction {
  Reduction reduction = Reduction::sum;
  double switch_factor = 1.0;  // scales δ, see switch_entries()
  Algorithm algorithm = Algorithm::split_allgather;
  WireFormat wire{};
  /// False: where the wire rounds values, it rounds sums alone, and no rank's own entries (SparCML, §6).
  bool rounds_shares = true;
  /// Unless empty, of one element per index: what rounding on the wire loses on this rank is added to it.
  std::span<float> residual{};
  Slices slices = Slices::equal;  // of algorithms that have slices
  /// For Algorithm::automatic: of the communicator, or null for a sum that is its first.
  std::shared_ptr<SparseChoice> choice{};
  /// For Algorithm::automatic, under way; null: nothing is learnt from other sums.
  std::shared_ptr<SumObservation> observation{};
  bool sums_of_nodes = false;  // what is summed are sums that nodes have made of a slice
  /// For Algorithm::two_level, and for Algorithm::automatic that may come to it; null: nothing is known of them.
  std::shared_ptr<const Nodes> nodes{};
  bool is_unsigned = false;  // of integers: V stands for the unsigned one of its width

  /// Signed order is that of unsigned integers whose highest bits are flipped. Sums and products are the same in both.
  bool flips_signs() const { return is_unsigned && (reduction == Reduction::min || reduction == Reduction::max); }
  template <class V>
  DType dtype() const {
    return !is_unsigned ? dtype_of<V> : sizeof(V) == 4 ? DType::u32 : DType::u64;
  }
};

/// There and back, see SparseReduction::flips_signs().
template <std::signed_integral V>
void flip_signs(std::span<V> values) {
  for (V& value : values) value ^= std::numeric_limits<V>::min();
}

/// Whether a message should hold it densely: that is shorter.
template <class V>
bool goes_dense(const SparseView<V>& share, const SparseReduction& how) {
  return !share.dense && static_cast<double>(share.nnz()) > wire_delta<V>(share.range, how.switch_factor);
}

/// `weight`: how much an error of what is encoded counts.
template <class V>
Buffer encode_keeping_error(const SparseView<V>& view, const SparseReduction& how, float weight = 1.0F) {
  if constexpr (std::is_same_v<V, float>) {
    if (how.wire.values != ValueEncoding::native && !how.residual.empty()) {
      const Array<float> error(view.nnz());
      Buffer message = encode(view, how.wire, error.span());
      for (float& one : error) one *= weight;
      const auto within = how.residual.subspan(view.range.begin, view.range.size());
      if (view.dense) {
        for (std::size_t i = 0; i < error.size(); ++i) within[i] += error[i];
      } else {
        const kernels::Entries<float> lost{view.indices, error.span()};
        kernels::scatter_reduce(Reduction::sum, within, lost, view.range.begin);
      }
      return message;
    }
  }
  return encode(view, how.wire);
}

/// Whether an owner is to make its slice dense: where the choice is open, if that is shorter than the message it would be,
/// of bytes_sent(owned) bytes, and not than a usual one.
template <class V, class BytesSent>
bool sends_densely(const SparseView<V>& owned, const SparseReduction& how, const BytesSent& bytes_sent) {
  if (owned.dense) return false;
  if (how.algorithm == Algorithm::split_dense_allgather) return true;
  if (how.algorithm != Algorithm::automatic || how.wire.values != ValueEncoding::native) return false;
  const double dense_bytes = how.switch_factor * static_cast<double>(owned.range.size() * sizeof(V));
  const auto longest = static_cast<double>(owned.nnz() * (sizeof(std::uint32_t) + sizeof(V)));
  if (longest <= dense_bytes) return false;
  return static_cast<double>(bytes_sent(owned)) > dense_bytes + sizeof(VectorHeader);
}

/// How many entries a rank says that its slice has; this, if it sends it densely.
inline constexpr std::uint64_t kDenseSlice = ~std::uint64_t{0};
template <class V>
std::uint64_t announced_count(const SparseView<V>& slice) {
  return slice.dense ? kDenseSlice : slice.nnz();
}

template <class V>
Buffer encode_share(const SparseView<V>& share, const SparseReduction& how) {
  if (!goes_dense(share, how)) return encode_keeping_error(share, how);
  const OwnedSlice<V> dense = dense_slice(share, how.reduction);
  return encode_keeping_error(dense.view(), how);
}

/// Contents decide what is sent next: so this work also runs where that of other collectives is left out.
template <class Work>
Transport::Computing decide(Transport& net, std::size_t bytes, Work&& work) {
  work();
  return net.compute(bytes, [] {});
}

template <class V>
Task<void> make_dense(Transport& net, OwnedSlice<V>& slice, const SparseReduction& how) {
  const auto bytes = static_cast<std::size_t>(slice.range.size()) * sizeof(V);
  co_await decide(net, bytes, [&] { slice = dense_slice(slice.view(), how.reduction); });
}

/// The last step of an average.
template <class V>
Task<void> divide_by_ranks(Transport& net, OwnedSlice<V>& sum) {
  co_await decide(net, sum.view().nnz() * sizeof(V), [&] { scale(sum, 1.0 / net.size()); });
}

/// Ends the operation. `content`: what `source` was to send.
inline Transport::Failing fail_damaged(Transport& net, Rank source, const char* content, const std::string& error) {
  return net.fail(source, "rank " + std::to_string(source) + " sent damaged " + content + ": " + error);
}
/// Ends the operation: of this rank's entries among `dimension` elements, which its caller's arrays hold.
inline Transport::Failing fail_own_indices(Transport& net, std::uint64_t dimension) {
  return net.fail(net.rank(), "rank " + std::to_string(net.rank()) + " gave indices that are not strictly increasing below " +
                                  std::to_string(dimension) + ": leave a vector's arrays alone while a collective runs");
}
/// Never done if the message is damaged.
template <class V>
Task<void> check_decoded(Transport& net, Rank source, const Decoded<V>& decoded, const char* content = "entries") {
  if (!decoded.ok()) co_await fail_damaged(net, source, content, decoded.error());
}

}  // namespace telegrad
