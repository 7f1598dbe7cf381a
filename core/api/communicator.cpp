#include "telegrad/communicator.hpp"

#include <algorithm>
#include <random>
#include <stdexcept>

#include "api/begin.hpp"
#include "drivers/local/local_driver.hpp"
#include "progress/communicator.hpp"
#include "session/messages.hpp"
#include "session/moves.hpp"
#include "session/reductions.hpp"

namespace telegrad::api {
namespace {

using detail::check_rank;

Work begin(const std::shared_ptr<detail::Joined>& joined, RequestPtr request) {
  return Work(detail::begun(joined, std::move(request)));
}

void check_reduction(Reduction reduction, DType dtype) {
  detail::check_reduction(reduction);
  if (has_reduction(dtype, reduction)) return;
  throw std::invalid_argument(std::string("reduction=") + name_of(reduction) + " of " + name_of(dtype) +
                              " does not exist: use another, or convert the elements");
}

// In bytes, of which an element has `item`.
void check_length(const char* name, std::size_t bytes, std::size_t wanted, std::size_t item, const char* why) {
  if (bytes == wanted) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes / item) + " elements, but " + why + " " +
                              std::to_string(wanted / item) + ": give it as many");
}

// `own`: the place in `b`, of a's length, that `a` may be.
void check_apart(ConstBytes a, ConstBytes b, const std::byte* own, const char* remedy = "give each its own") {
  if (detail::overlap(a, b) && a.data() != own) {
    throw std::invalid_argument(std::string("x and out share memory: ") + remedy);
  }
}

// What is reduced of x goes there.
void check_result(ConstBytes x, ConstBytes out, DType dtype) {
  check_length("out", out.size(), x.size(), size_of(dtype), "x has");
  check_apart(x, out, out.data(), "give out its own, or all of x's");
}

// In bytes. `bytes`: of each block, if they are all alike.
Partition blocks_of(const char* name, Counts counts, std::size_t bytes, std::size_t item, Rank size) {
  if (counts.empty()) return {bytes * size, size};
  detail::check_counts(name, counts, size, item);
  std::vector<std::uint64_t> lengths(counts.begin(), counts.end());
  for (std::uint64_t& length : lengths) length *= item;
  return Partition(lengths);
}

void check_tag(std::uint32_t tag) {
  if (tag >= kTagsMost) throw std::invalid_argument("tag=" + std::to_string(tag) + " must be below 2^31");
}

void check_peer(const char* name, Rank peer, Rank own, Rank size) {
  check_rank(name, peer, size);
  if (peer == own) {
    throw std::invalid_argument(std::string(name) + "=" + std::to_string(peer) + " is this rank itself: use another");
  }
}

constexpr double kJoinMost_s = 60.0;
constexpr const char* kAllBlocks = "the blocks of all ranks have";
constexpr const char* kOwnBlock = "this rank's block has";
constexpr const char* kOwnPlace = "give each its own, or the one its own block of the other";

}  // namespace

std::vector<detail::CorePtr> detail::made_local(Rank size, const Options& options,
                                                const std::shared_ptr<const Group>& group) {
  CommunicatorOptions own = own_options(options);
  own.session.liveness_timeout_s = std::nullopt;  // one engine runs all ranks: none can fall silent without the others
  own.session.epoch = std::random_device{}();
  own.session.group = group;
  const auto network = std::make_shared<LocalNetwork>(size);
  const auto engine = Engine::shared();
  std::vector<CorePtr> all;
  for (Rank rank = 0; rank < size; ++rank) {
    all.push_back(std::make_shared<telegrad::Communicator>(engine, std::make_unique<LocalDriver>(network, rank), own));
  }
  for (const CorePtr& one : all) one->join();
  for (const CorePtr& one : all) {
    const double deadline_s = Engine::now_s() + kJoinMost_s;
    while (!one->await_join(deadline_s)) {  // a signal ends it early
      if (Engine::now_s() >= deadline_s) one->give_up_join(kJoinMost_s);
    }
  }
  return all;
}

std::vector<Communicator> Communicator::local(Rank size, const Options& options) {
  detail::check_local_size(size);
  detail::check(options);
  const auto ends = std::make_shared<detail::LocalEnds>();
  std::vector<Communicator> all;
  for (detail::CorePtr& core : detail::translated([&] { return detail::made_local(size, options, nullptr); })) {
    auto joined = std::make_shared<detail::Joined>();
    joined->core = std::move(core);
    joined->options = options;
    joined->ends = ends;
    all.emplace_back(std::move(joined));
  }
  return all;
}

Communicator::~Communicator() {
  if (joined_) close();
}

Communicator& Communicator::operator=(Communicator&& other) noexcept {
  if (this != &other) {
    if (joined_) close();
    joined_ = std::move(other.joined_);
  }
  return *this;
}

const std::shared_ptr<detail::Joined>& Communicator::state() const {
  if (!joined_) throw std::invalid_argument("this communicator was moved from: use the one that it was moved to");
  return joined_;
}

Rank Communicator::rank() const { return state()->core->rank(); }
Rank Communicator::size() const { return state()->core->size(); }
std::string Communicator::driver() const { return state()->core->driver_name(); }
void Communicator::close() { state()->core->close(); }
void Communicator::abort(const std::string& reason) {
  detail::check_process(*state()->core);
  state()->core->abort(reason);
}

Work Communicator::all_reduce_bytes(ConstBytes x, Bytes out, DType dtype, Reduction reduction,
                                    std::string_view algorithm) {
  check_reduction(reduction, dtype);
  check_result(x, out, dtype);
  const Dense dense{.input = x,
                    .output = out,
                    .dtype = dtype,
                    .reduction = reduction,
                    .algorithm = detail::algorithm_named(algorithm, detail::kDenseAlgorithms)};
  return begin(state(), make_all_reduce(state()->core->allreduce_table(), dense));
}

Work Communicator::reduce_bytes(ConstBytes x, Bytes out, DType dtype, Rank root, Reduction reduction) {
  check_reduction(reduction, dtype);
  check_rank("root", root, size());
  if (rank() != root) out = {};
  if (rank() == root) check_result(x, out, dtype);
  return begin(state(), make_reduce(size(), {.input = x, .output = out, .dtype = dtype, .reduction = reduction}, root));
}

Work Communicator::reduce_scatter_bytes(ConstBytes x, Bytes out, DType dtype, Reduction reduction, Counts counts) {
  check_reduction(reduction, dtype);
  // Of elements here, since these are added.
  Partition blocks = blocks_of("counts", counts, out.size() / size_of(dtype), 1, size());
  check_length("out", out.size(), blocks[rank()].size() * size_of(dtype), size_of(dtype), kOwnBlock);
  check_length("x", x.size(), blocks.count() * size_of(dtype), size_of(dtype), kAllBlocks);
  check_apart(x, out, nullptr);
  const Dense dense{.input = x, .output = out, .dtype = dtype, .reduction = reduction};
  return begin(state(), make_reduce_scatter(dense, std::move(blocks)));
}

Work Communicator::reduce_given(ConstBytes x, Bytes out, DType dtype, std::shared_ptr<const GivenReduction> how,
                                std::optional<Rank> root) {
  const Dense dense{.input = x, .output = out, .dtype = dtype, .given = std::move(how)};
  if (!root) return begin(state(), make_all_reduce(state()->core->allreduce_table(), dense));
  check_rank("root", *root, size());
  return begin(state(), make_reduce(size(), dense, *root));
}

Work Communicator::reduce_scatter_given(ConstBytes x, Bytes out, DType dtype, std::shared_ptr<const GivenReduction> how,
                                        Counts counts) {
  const std::size_t element = how->element;
  Partition blocks = blocks_of("counts", counts, out.size() / element, 1, size());
  check_length("out", out.size(), blocks[rank()].size() * element, element, kOwnBlock);
  check_length("x", x.size(), blocks.count() * element, element, kAllBlocks);
  check_apart(x, out, nullptr);
  const Dense dense{.input = x, .output = out, .dtype = dtype, .given = std::move(how)};
  return begin(state(), make_reduce_scatter(dense, std::move(blocks)));
}

Work Communicator::all_gather_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Counts counts) {
  const Partition blocks = blocks_of("counts", counts, x.size(), item, size());
  check_length("x", x.size(), blocks[rank()].size(), item, kOwnBlock);
  check_length("out", out.size(), blocks.count(), item, kAllBlocks);
  check_apart(x, out, out.data() + blocks.begin(rank()), kOwnPlace);
  return begin(state(), make_all_gather(dtype, x, out, blocks));
}

Work Communicator::gather_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Rank root, Counts counts) {
  check_rank("root", root, size());
  const Partition blocks = blocks_of("counts", counts, x.size(), item, size());
  check_length("x", x.size(), blocks[rank()].size(), item, kOwnBlock);
  if (rank() != root) return begin(state(), make_gather(dtype, x, {}, blocks, root));
  check_length("out", out.size(), blocks.count(), item, kAllBlocks);
  check_apart(x, out, out.data() + blocks.begin(root), kOwnPlace);
  return begin(state(), make_gather(dtype, x, out, blocks, root));
}

Work Communicator::scatter_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Rank root, Counts counts) {
  check_rank("root", root, size());
  const Partition blocks = blocks_of("counts", counts, out.size(), item, size());
  check_length("out", out.size(), blocks[rank()].size(), item, kOwnBlock);
  if (rank() != root) return begin(state(), make_scatter(dtype, {}, out, blocks, root));
  check_length("x", x.size(), blocks.count(), item, kAllBlocks);
  check_apart(out, x, x.data() + blocks.begin(root), kOwnPlace);
  return begin(state(), make_scatter(dtype, x, out, blocks, root));
}

Work Communicator::all_to_all_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Counts sent,
                                    Counts received) {
  if (sent.empty() != received.empty()) {
    throw std::invalid_argument(std::string(sent.empty() ? "receive_counts is given, send_counts" :
                                                           "send_counts is given, receive_counts") +
                                " is not: give both, or none of them for equal blocks");
  }
  check_apart(x, out, nullptr);
  if (sent.empty()) {
    check_length("out", out.size(), x.size(), item, "the blocks of x have");
    if (x.size() % (item * size()) != 0) {
      throw std::invalid_argument("x has " + std::to_string(x.size() / item) + " elements, which " +
                                  std::to_string(size()) + " ranks cannot share evenly: give counts");
    }
    return begin(state(), make_all_to_all(size(), dtype, x, out));
  }
  const Partition leaving = blocks_of("send_counts", sent, 0, item, size());
  const Partition coming = blocks_of("receive_counts", received, 0, item, size());
  check_length("x", x.size(), leaving.count(), item, "send_counts add up to");
  check_length("out", out.size(), coming.count(), item, "receive_counts add up to");
  if (leaving[rank()].size() != coming[rank()].size()) {
    throw std::invalid_argument("send_counts and receive_counts differ for rank " + std::to_string(rank()) +
                                " itself: what it keeps has one length");
  }
  return begin(state(), make_all_to_all_v(dtype, x, out, leaving, coming));
}

Work Communicator::broadcast_bytes(Bytes x, DType dtype, Rank root) {
  check_rank("root", root, size());
  return begin(state(), make_broadcast(size(), dtype, x, root));
}

Work Communicator::barrier() { return begin(state(), make_barrier()); }

Work Communicator::send_bytes(ConstBytes x, DType dtype, Rank to, std::uint32_t tag) {
  check_peer("to", to, rank(), size());
  check_tag(tag);
  return begin(state(), make_send(dtype, x, to, tag));
}

Work Communicator::recv_bytes(Bytes x, DType dtype, std::optional<Rank> source, std::uint32_t tag) {
  if (source) check_peer("source", *source, rank(), size());
  check_tag(tag);
  if (size() == 1) {
    throw std::invalid_argument("size=1: there is no other rank that recv could receive from, or that could send");
  }
  return begin(state(), make_receive(dtype, x, source.value_or(kNoRank), tag));
}

Work Communicator::sendrecv_bytes(ConstBytes x, DType dtype, Rank to, Bytes out, DType out_dtype, Rank source,
                                  std::uint32_t tag) {
  check_peer("to", to, rank(), size());
  check_peer("source", source, rank(), size());
  check_tag(tag);
  check_apart(x, out, nullptr);
  return Work(detail::begun(state(), make_receive(out_dtype, out, source, tag), make_send(dtype, x, to, tag)));
}

}  // namespace telegrad::api
