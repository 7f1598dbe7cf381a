// Two-level allreduce: reduce-scatter inside every node, allreduce of each slice among its owners, one in each node,
// allgather inside. With R ranks in each of N nodes, α and β between nodes and α' and β' inside, about
// 2(R−1)/R·nβ' + 2(N−1)/N·n/R·β for each owner's link, or n in all where a node's ranks share one; a ring of all ranks
// takes 2(P−1)/P·n through every link. Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1),
// 2005, §2 (where the network is faster inside nodes); Jia et al., "Highly scalable deep learning training system with
// mixed-precision", arXiv:1807.11205, 2018, §3.4 (hierarchical all-reduce).
//
// A long vector is cut into segments, each of which goes through the three phases; the phases work side by side on
// segments that follow each other, so that what is inside hides behind what is between. A few parts of a slice are between
// nodes at once: some begin while others end.
#include "collectives/dense/allreduce_two_level.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "collectives/dense/allgather.hpp"
#include "collectives/dense/allreduce.hpp"
#include "collectives/dense/choice.hpp"
#include "collectives/dense/reduce_scatter.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/partition.hpp"
#include "transport/group_transport.hpp"
#include "transport/milestone.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kSegmentsMost = 1024;
constexpr std::size_t kLanesBetween = 3;
constexpr std::size_t kAhead = 8;            // segments that a rank has begun and not ended
constexpr Step kPhaseSteps = Step{1} << 20;  // of one phase of a segment

class TwoLevel {
 public:
  TwoLevel(Transport& net, const Nodes& nodes, DType dtype, Reduction reduction, ConstBytes input, Bytes output,
           TwoLevelTuning tuning)
      : net_(net),
        nodes_(nodes),
        dtype_(dtype),
        reduction_(reduction),
        input_(input),
        output_(output),
        node_(nodes.node_of(net.rank())),
        place_(nodes.place_of(net.rank())),
        whole_{0, input.size() / size_of(dtype)},
        segments_(two_level_segments(input.size() / nodes.slices(), tuning)) {
    for (std::size_t lane = 0; lane < kLanesBetween; ++lane) {
      reduced_.emplace_back(net.ready());
      summed_.emplace_back(net.ready());
    }
    std::size_t bytes = 0;
    for (std::size_t segment = 0; segment < segments_; ++segment) {
      slice_begins_.push_back(bytes);
      bytes += own_lengths(segment)[place_] * size_of(dtype_);
    }
    slice_begins_.push_back(bytes);
    slice_ = Buffer(bytes);
  }

  Task<void> run() {
    std::vector<Task<void>> phases;
    phases.push_back(reduce_inside());
    for (std::size_t lane = 0; lane < kLanesBetween; ++lane) phases.push_back(sum_between(lane));
    phases.push_back(gather_inside());
    co_await when_all(std::move(phases));
  }

 private:
  Range range_of(std::size_t segment) const { return part_of(whole_, segments_, segment); }
  std::vector<std::uint64_t> own_lengths(std::size_t segment) const {
    return nodes_.lengths(node_, range_of(segment).size());
  }
  Bytes own_slice(std::size_t segment) const {
    return slice_.bytes().subspan(slice_begins_[segment], slice_begins_[segment + 1] - slice_begins_[segment]);
  }
  bool owns() const { return place_ < nodes_.slices(); }
  // Sums are divided by the number of all ranks in the end; but not of f16, whose sums may be out of range.
  bool averages_nodes() const { return dtype_ == DType::f16 && reduction_ == Reduction::avg; }
  Reduction summing() const { return reduction_ == Reduction::avg && !averages_nodes() ? Reduction::sum : reduction_; }
  GroupTransport inside(std::size_t segment, Step phase) const {
    return {net_,        nodes_.members(node_), place_, nodes_.inside_shares_memory(),
            (static_cast<Step>(segment) * 2 + phase) * kPhaseSteps, kPhaseSteps};
  }

  Task<void> reduce_inside() {
    for (std::size_t segment = 0; segment < segments_; ++segment) {
      if (segment >= kAhead) co_await gathered_.until(segment + 1 - kAhead);
      GroupTransport group = inside(segment, 0);
      const auto lengths = own_lengths(segment);
      Partition partition{std::span(lengths)};
      co_await reduce_scatter(group, dtype_, summing(), elements(input_, dtype_, range_of(segment)),
                              std::move(partition), own_slice(segment));
      reduced_[segment % kLanesBetween].reach(segment / kLanesBetween + 1);
    }
  }

  Task<void> sum_between(std::size_t lane) {
    for (std::size_t segment = lane, done = 1; segment < segments_; segment += kLanesBetween, ++done) {
      co_await reduced_[lane].until(done);
      if (owns()) {
        GroupTransport group(net_, nodes_.owners(place_), node_, false, static_cast<Step>(segment) * 2 * kPhaseSteps,
                             kPhaseSteps);
        const Bytes slice = own_slice(segment);
        if (averages_nodes() && !nodes_.alike()) {
          co_await sum_shares(group, slice);
        } else {
          co_await allreduce(group, choose_between(group.size(), slice.size()), dtype_, summing(), slice, slice);
          if (!averages_nodes()) co_await finish_reduction(net_, dtype_, reduction_, slice);
        }
      }
      summed_[lane].reach(done);
    }
  }

  // The average of nodes' averages counts every rank alike only where nodes do. Others go between nodes in f32, each as its
  // share of the whole, so that it is rounded once.
  Task<void> sum_shares(GroupTransport& group, Bytes averages) {
    const Buffer shares(2 * averages.size());
    const Partial mine{averages};
    co_await widen(net_, dtype_, reduction_, mine, shares.bytes());
    const double share = static_cast<double>(nodes_.members(node_).size()) / static_cast<double>(net_.size());
    co_await scale(net_, DType::f32, shares.bytes(), share);
    co_await allreduce(group, choose_between(group.size(), shares.size()), DType::f32, Reduction::sum, shares.bytes(),
                       shares.bytes());
    co_await narrow(net_, dtype_, reduction_, shares.bytes(), averages, 0);
  }

  Task<void> gather_inside() {
    for (std::size_t segment = 0; segment < segments_; ++segment) {
      co_await summed_[segment % kLanesBetween].until(segment / kLanesBetween + 1);
      GroupTransport group = inside(segment, 1);
      auto lengths = own_lengths(segment);
      for (std::uint64_t& length : lengths) length *= size_of(dtype_);
      Partition blocks{std::span<const std::uint64_t>(lengths)};
      co_await allgather(group, own_slice(segment), elements(output_, dtype_, range_of(segment)), std::move(blocks));
      gathered_.reach(segment + 1);
    }
  }

  Transport& net_;
  const Nodes& nodes_;
  const DType dtype_;
  const Reduction reduction_;
  const ConstBytes input_;
  const Bytes output_;
  const Rank node_;
  const Rank place_;
  const Range whole_;
  const std::size_t segments_;
  std::vector<std::size_t> slice_begins_;  // of each segment's part of the own slice, in bytes
  Buffer slice_;
  // Each counts segments; those of lanes their lane's.
  std::deque<Milestone> reduced_;
  std::deque<Milestone> summed_;
  Milestone gathered_{net_.ready()};
};

}  // namespace

std::size_t two_level_segments(std::size_t slice_bytes, TwoLevelTuning tuning) {
  const std::size_t part = std::max<std::size_t>(1, tuning.part_bytes);
  return std::clamp<std::size_t>((slice_bytes + part - 1) / part, 1, kSegmentsMost);
}

Task<void> allreduce_two_level(Transport& net, const Nodes& nodes, DType dtype, Reduction reduction, ConstBytes input,
                               Bytes output, TwoLevelTuning tuning) {
  TELEGRAD_CHECK(nodes.ranks() == net.size() && nodes.two_level());
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  TwoLevel two_level(net, nodes, dtype, reduction, input, output, tuning);
  co_await two_level.run();
}

}  // namespace telegrad
