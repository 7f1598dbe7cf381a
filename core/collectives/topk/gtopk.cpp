// gTopk: sums go up a binomial tree to rank 0, cut to k entries wherever two meet, and the result comes down again. Shi et
// al., "A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth networks", ICDCS 2019,
// Algorithms 2 and 3. 2⌈log2 P⌉·(α + 2k·β) on the way from the farthest leaf to the root and back.
//
// As published, gradient is lost: what a merge drops is a sum of several ranks' entries, and where its index gets into the
// result by another subtree each of these ranks takes its own entry for delivered. Here who drops such a sum keeps it.
#include "collectives/topk/gtopk.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/random.hpp"
#include "codec/entry_sets.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/any_size.hpp"
#include "collectives/topk/largest.hpp"

namespace telegrad {
namespace {

template <class V>
class GTopk {
 public:
  GTopk(Transport& net, SparseVector<V> mine, const GTopkSettings& settings, Reduction reduction, WireFormat wire)
      : net_(net),
        mine_(std::move(mine)),
        k_(static_cast<std::size_t>(std::min(settings.k, mine_.dimension()))),
        reduction_(reduction),
        wire_(wire),
        most_bytes_(sizeof(VectorHeader) + k_ * (sizeof(std::uint32_t) + sizeof(V)) + 16) {
    TELEGRAD_CHECK(!SizeOnly::active());  // what is sent depends on values
    TELEGRAD_CHECK(!mine_.is_dense() && settings.k > 0 && wire.values == ValueEncoding::native);
    TELEGRAD_CHECK(reduction == Reduction::sum || reduction == Reduction::avg);
  }

  Task<GTopkSum<V>> run() {
    co_await keep_largest(mine_.view());
    report_.local_most = mine_.nnz();
    report_.overflow = mine_.nnz() - sum_.values.size();
    const Rank parent_distance = co_await merge_children();
    if (net_.rank() == 0) {
      if (reduction_ == Reduction::avg) co_await divide_by_ranks(net_, sum_);
    } else {
      co_await send_up(net_.rank() - parent_distance);
    }
    co_await broadcast_result(parent_distance);
    report_.selected = sum_.values.size();
    SparseVector<V> left;
    co_await decide(net_, bytes_of(sum_.view()) + bytes_of(mine_.view()) + bytes_of(dropped_.view()), [&] {
      const OwnedSlice<V> own = entries_without(mine_.view(), sum_.indices.span());
      const OwnedSlice<V> kept_back = entries_within(dropped_.view(), sum_.indices.span());
      left = vector_of(sum_of_entries(own.view(), kept_back.view()));
    });
    co_return GTopkSum<V>{vector_of(std::move(sum_)), std::move(left), {}, report_};
  }

 private:
  IndexRange whole() const { return {0, mine_.dimension()}; }
  SparseVector<V> vector_of(OwnedSlice<V> slice) const {
    return sparse_vector(mine_.dimension(), std::move(slice), reduction_);
  }

  Task<void> keep_largest(SparseView<V> entries) {
    co_await decide(net_, bytes_of(entries), [&] {
      PartedEntries<V> parted = take_largest(entries, k_);
      sum_ = std::move(parted.taken);
      if (dropped_.values.empty()) dropped_ = std::move(parted.rest);
      else if (!parted.rest.values.empty()) dropped_ = sum_of_entries(dropped_.view(), parted.rest.view());
    });
  }

  // Rank r hears from r + 2^i for all 2^i below its lowest set bit, the nearest first. Returns that bit; of rank 0 the first
  // power of two that no rank is away.
  Task<Rank> merge_children() {
    Rank distance = 1;
    for (; distance < net_.size() && (net_.rank() & distance) == 0; distance *= 2) {
      const Rank child = net_.rank() + distance;
      if (child >= net_.size()) continue;
      const Buffer message = co_await receive_any_size(net_, child, 0, most_bytes_);
      const Decoded<V> theirs = co_await checked(message.bytes(), child);
      report_.traffic.entries_received += theirs.view().nnz();
      OwnedSlice<V> sum;
      co_await decide(net_, bytes_of(sum_.view()) + bytes_of(theirs.view()),
                      [&] { sum = sum_of_entries(sum_.view(), theirs.view()); });
      co_await keep_largest(sum.view());
    }
    co_return distance;
  }

  Task<Decoded<V>> checked(ConstBytes message, Rank from) {
    Decoded<V> decoded{std::string()};
    co_await decide(net_, message.size(), [&] { decoded = decode<V>(message, whole()); });
    co_await check_decoded(net_, from, decoded, "sums");
    const SparseView<V>& view = decoded.view();
    if (view.dense || view.nnz() > k_) {
      co_await fail_damaged(net_, from, "sums",
                            "it has " + std::to_string(view.nnz()) + " entries, and k is " + std::to_string(k_));
    }
    co_return decoded;
  }

  Task<void> send_up(Rank parent) {
    Buffer encoded;
    co_await decide(net_, bytes_of(sum_.view()), [&] { encoded = encode(sum_.view(), wire_); });
    co_await send_any_size(net_, parent, 0, encoded.bytes());
    report_.traffic.entries_sent += sum_.values.size();
  }

  // The same bytes to all, the way up backwards. They are passed on before they are looked at: so everybody finds out if they
  // are damaged.
  Task<void> broadcast_result(Rank parent_distance) {
    const Step step = any_size_steps(net_, most_bytes_);
    const bool is_root = net_.rank() == 0;
    Buffer message;
    if (is_root) {
      co_await decide(net_, bytes_of(sum_.view()), [&] { message = encode(sum_.view(), wire_); });
    } else {
      message = co_await receive_any_size(net_, net_.rank() - parent_distance, step, most_bytes_);
    }
    Rank children = 0;
    for (Rank distance = parent_distance / 2; distance > 0; distance /= 2) {
      if (net_.rank() + distance >= net_.size()) continue;
      co_await send_any_size(net_, net_.rank() + distance, step, message.bytes());
      ++children;
    }
    if (!is_root) {
      const Decoded<V> result = co_await checked(message.bytes(), net_.rank() - parent_distance);
      co_await decide(net_, bytes_of(result.view()), [&] {
        const SparseView<V>& view = result.view();
        sum_ = {whole(), false, Array<std::uint32_t>(view.nnz()), Array<V>(view.nnz())};
        std::ranges::copy(view.indices, sum_.indices.begin());
        std::ranges::copy(view.values, sum_.values.begin());
      });
      report_.traffic.entries_received += sum_.values.size();
    }
    report_.traffic.entries_sent += children * sum_.values.size();
  }

  Transport& net_;
  const SparseVector<V> mine_;
  const std::size_t k_;
  const Reduction reduction_;
  const WireFormat wire_;
  const std::size_t most_bytes_;
  OwnedSlice<V> sum_;      // of this rank's subtree, then the result
  OwnedSlice<V> dropped_;  // here, in merges
  TopkReport report_;
};

}  // namespace

std::uint64_t GTopkState::digest(const GTopkSettings& settings) const { return mix(settings.k + 1) | 1; }

template <class V>
Task<GTopkSum<V>> allreduce_gtopk(Transport& net, SparseVector<V> mine, GTopkSettings settings, GTopkState,
                                  Reduction reduction, WireFormat wire) {
  GTopk<V> gtopk(net, std::move(mine), settings, reduction, wire);
  co_return co_await gtopk.run();
}

#define TELEGRAD_INSTANTIATE(V)                                                                                  \
  template Task<GTopkSum<V>> allreduce_gtopk(Transport&, SparseVector<V>, GTopkSettings, GTopkState, Reduction, \
                                             WireFormat);
TELEGRAD_FOR_FLOAT_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
