// The mpi driver's requests: payloads that travel apart from their announcements, in pieces, and the end of all that MPI has
// been asked for.
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "drivers/mpi/mpi_transfer.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kPieceMost = std::size_t{16} << 20;  // of a payload; all that dropping one of any length takes
constexpr std::size_t kReducedMost = std::size_t{1} << 30;  // by one call: MPI counts elements in an int
constexpr double kReduced_s_per_byte = 1e-9;  // how long a reduction may well take, during which it is tested often
constexpr double kShutDownMost_s = 5.0;
constexpr double kShutDownIdle_s = 0.25;  // without a piece: a peer that has gone first never answers

template <class Function>
void for_pieces(std::size_t size, Function function) {
  for (std::size_t at = 0; at < size; at += kPieceMost) function(at, std::min(kPieceMost, size - at));
}

// Those of mpi_reduces(). Unsigned integers wrap round with the same bits, as C lets signed ones not.
MPI_Datatype datatype_of(DType dtype, Reduction reduction) {
  const bool wraps = reduction == Reduction::sum || reduction == Reduction::prod;
  switch (dtype) {
    case DType::f32: return MPI_FLOAT;
    case DType::f64: return MPI_DOUBLE;
    case DType::i8: return wraps ? MPI_UINT8_T : MPI_INT8_T;
    case DType::i16: return wraps ? MPI_UINT16_T : MPI_INT16_T;
    case DType::i32: return wraps ? MPI_UINT32_T : MPI_INT32_T;
    case DType::i64: return wraps ? MPI_UINT64_T : MPI_INT64_T;
    case DType::u8: return MPI_UINT8_T;
    case DType::u16: return MPI_UINT16_T;
    case DType::u32: return MPI_UINT32_T;
    case DType::u64: return MPI_UINT64_T;
    default: return MPI_DATATYPE_NULL;
  }
}
MPI_Op op_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum: return MPI_SUM;
    case Reduction::prod: return MPI_PROD;
    case Reduction::min: return MPI_MIN;
    case Reduction::max: return MPI_MAX;
    default: return MPI_OP_NULL;
  }
}

// Buffers that MPI has not given back when their driver ends: it may still read or write them.
void keep_for_ever(Buffer buffer) {
  static auto* const kept = new std::vector<Buffer>;
  static auto* const mutex = new std::mutex;
  const std::scoped_lock lock(*mutex);
  kept->push_back(std::move(buffer));
}

}  // namespace

void MpiDriver::send_payload(Rank to, int ticket, ConstBytes bytes, Pending& pending) {
  const auto transfer = std::make_shared<Transfer>(Transfer{
      .what = Transfer::What::sends_payload, .peer = to, .pending = &pending, .length = bytes.size(), .pieces_left = 0});
  for_pieces(bytes.size(), [&](std::size_t at, std::size_t length) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = network_->calls().run([&] {
      return MPI_Isend(bytes.data() + at, static_cast<int>(length), MPI_BYTE, peers_[to].network_rank, ticket,
                       network_->comm(), &request);
    });
    begun(transfer, code, request, length);
  });
}

// A piece of a payload. A call that was left may have begun it.
void MpiDriver::begun(const std::shared_ptr<Transfer>& transfer, int code, MPI_Request request, std::size_t length) {
  if (code != MPI_SUCCESS && code != MpiCalls::kLeft) {
    broke(*transfer, code);
    return;
  }
  ++transfer->pieces_left;
  requests_.push_back(request);
  actives_.push_back({transfer, length});
}

void MpiDriver::reduce(std::uint64_t turn, DType dtype, Reduction reduction, Buffer& values, Pending& pending) {
  const std::scoped_lock lock(network_->gate());
  waiting_.emplace(turn, Summand{dtype, reduction, &values, &pending});
  for (auto next = waiting_.find(turn_); next != waiting_.end(); next = waiting_.find(++turn_)) {
    if (open_ && !network_->ended()) begin_reduction(next->second);
    waiting_.erase(next);
  }
}

void MpiDriver::begin_reduction(const Summand& one) {
  const std::size_t size = one.values->size();
  const auto transfer = std::make_shared<Transfer>(Transfer{
      .what = Transfer::What::reduces, .peer = kNoRank, .pending = one.pending, .pieces_left = 0, .values = one.values});
  active_s_ = now_s() + kReduced_s_per_byte * static_cast<double>(size);
  for (std::size_t at = 0; at < size; at += kReducedMost) {
    const std::size_t length = std::min(kReducedMost, size - at);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = network_->calls().run([&] {
      return MPI_Iallreduce(MPI_IN_PLACE, one.values->data() + at, static_cast<int>(length / size_of(one.dtype)),
                            datatype_of(one.dtype, one.reduction), op_of(one.reduction), network_->collectives(), &request);
    });
    begun(transfer, code, request, length);
  }
}

void MpiDriver::broke(const Transfer& transfer, int code) {
  if (transfer.what == Transfer::What::reduces) {
    if (collective_error_.empty()) collective_error_s_ = now_s();
    has_collectives_ = false;  // who knows what others have done: nobody gets them again
    collective_error_ = "MPI_Iallreduce failed: " + describe_mpi(code) + "; give algorithm=auto without a table that names mpi";
  } else if (transfer.peer != kNoRank) {
    peer_broke(transfer.peer, transfer.failed(code));
  }
}

void MpiDriver::receive_payload(const Incoming& incoming, Bytes into, const std::shared_ptr<Transfer>& transfer) {
  transfer->peer = incoming.source;
  transfer->length = into.size();
  transfer->pieces_left = 0;
  for_pieces(into.size(), [&](std::size_t at, std::size_t length) {
    receive_piece(transfer, into.subspan(at, length), incoming.ticket);
  });
}

void MpiDriver::receive_piece(const std::shared_ptr<Transfer>& transfer, Bytes into, int ticket) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = network_->calls().run([&] {
    return MPI_Irecv(into.data(), static_cast<int>(into.size()), MPI_BYTE, peers_[transfer->peer].network_rank, ticket,
                     network_->comm(), &request);
  });
  begun(transfer, code, request, into.size());
}

// A payload that nobody wants is received all the same, since its sender waits for that, but in one piece's memory: how
// long it is was said by somebody who may be wrong.
void MpiDriver::drop_payload(const Incoming& incoming) {
  drop_next(std::make_shared<Transfer>(Transfer{.what = Transfer::What::drops_payload,
                                                .peer = incoming.source,
                                                .length = incoming.length,
                                                .ticket = incoming.ticket,
                                                .pieces_left = 0,
                                                .buffer = Buffer(std::min(incoming.length, kPieceMost))}));
}

void MpiDriver::drop_next(const std::shared_ptr<Transfer>& transfer) {
  const std::size_t length = std::min(transfer->length, kPieceMost);
  transfer->length -= length;
  receive_piece(transfer, transfer->buffer.bytes().first(length), transfer->ticket);
}

bool MpiDriver::finish_requests() {
  if (requests_.empty()) return false;
  finished_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code = network_->calls().run([&] {
    return MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, finished_.data(), statuses_.data());
  });
  if (code == MpiCalls::kLeft || count == MPI_UNDEFINED || count <= 0) return false;
  std::vector<std::pair<Active, MPI_Status>> done;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    MPI_Status& status = statuses_[i];
    if (code != MPI_ERR_IN_STATUS) status.MPI_ERROR = code;
    done.emplace_back(std::move(actives_[static_cast<std::size_t>(finished_[i])]), status);
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (actives_[i].transfer == nullptr) continue;
    requests_[kept] = requests_[i];
    if (kept != i) actives_[kept] = std::move(actives_[i]);
    ++kept;
  }
  requests_.resize(kept);
  actives_.resize(kept);
  for (const auto& [active, status] : done) finish(active, status);
  return true;
}

void MpiDriver::finish(const Active& active, const MPI_Status& status) {
  Transfer& transfer = *active.transfer;
  if (status.MPI_ERROR != MPI_SUCCESS) {
    broke(transfer, status.MPI_ERROR);
    return;
  }
  if (transfer.receives()) {
    int received = 0;
    MPI_Get_count(&status, MPI_BYTE, &received);
    if (static_cast<std::size_t>(received) != active.expected) {
      damage("a message of " + std::to_string(received) + " bytes that was announced with " +
             std::to_string(active.expected));
      return;
    }
  }
  if (--transfer.pieces_left > 0) return;
  if (transfer.what == Transfer::What::drops_payload && transfer.length > 0) {
    if (!network_->ended()) drop_next(active.transfer);
    return;
  }
  if (transfer.what == Transfer::What::receives_message) {
    read(transfer.peer, std::move(transfer.buffer));
  } else if (transfer.pending != nullptr) {
    active_s_ = now_s();
    transfer.pending->complete(transfer.receives() ? transfer.length : 0);
  }
}

// Our peers' payloads are taken and ours given for a moment, so that their memory and ours is free of MPI.
void MpiDriver::drain() {
  for (const auto& incoming : incoming_) {
    if (incoming->live && incoming->announced) drop_payload(*incoming);
    incoming->live = false;
  }
  const double begin_s = now_s();
  double active_s = begin_s;
  while (!requests_.empty() && now_s() < std::min(active_s + kShutDownIdle_s, begin_s + kShutDownMost_s)) {
    const bool finished = finish_requests();
    if (look_for_messages() || finished) {
      active_s = now_s();
    } else {
      MpiNetwork::nap();
    }
  }
}

// MPI can neither cancel a collective nor free it: their memory leaks on purpose.
void MpiDriver::leak_reductions() {
  for (const Active& active : actives_) {
    if (active.transfer->what != Transfer::What::reduces) continue;
    keep_for_ever(std::move(*active.transfer->values));
    has_collectives_ = false;  // nobody gets them again
  }
}

// An MPI that was left in the middle of a call may write there; one that was finalised has nothing under way.
void MpiDriver::keep_buffers() {
  if (!MpiCalls::lost()) return;
  for (const Active& active : actives_) keep_for_ever(std::move(active.transfer->buffer));
}

void MpiDriver::let_go() {
  leak_reductions();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    Transfer& transfer = *actives_[i].transfer;
    int done = 0;
    if (transfer.what == Transfer::What::reduces) continue;
    MpiCalls& calls = network_->calls();
    if (transfer.receives() && calls.run([&] { return MPI_Cancel(&requests_[i]); }) == MPI_SUCCESS) {
      calls.run([&] { return MPI_Test(&requests_[i], &done, MPI_STATUS_IGNORE); });
    }
    if (done != 0) continue;
    calls.run([&] { return MPI_Request_free(&requests_[i]); });
    if (transfer.buffer.size() != 0) keep_for_ever(std::move(transfer.buffer));
  }
  requests_.clear();
  actives_.clear();
}

}  // namespace telegrad
