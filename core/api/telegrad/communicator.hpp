#pragma once
// Communicator: one rank's membership in a group of ranks. All ranks call the same operations in the same order, but for
// send(), recv() and sendrecv(). Each checks its arguments before anything is sent (std::invalid_argument), begins at once,
// runs in the background, and gives a Work:
//
//   comm.all_reduce(x).wait();                       // x: a vector, array or span
//   SparseVector<float> sum = comm.all_reduce(vector).result();
//
// After a sum all ranks hold the same bits.

#include <bit>
#include <complex>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/given_reduction.hpp"
#include "base/types.hpp"
#include "telegrad/sparse_vector.hpp"
#include "telegrad/work.hpp"

namespace telegrad::api {

namespace detail {
struct Joined;  // the library's own communicator

template <class R>
using Element = std::remove_cvref_t<std::ranges::range_reference_t<R>>;

template <class T>
constexpr DType dtype() {
  // Also of long and long long, of which dtype_of knows one; a char is a byte, whose sign processors differ about.
  if constexpr (std::is_same_v<T, bool>) return DType::boolean;
  if constexpr (std::is_same_v<T, std::complex<float>>) return DType::c64;
  if constexpr (std::is_same_v<T, std::complex<double>>) return DType::c128;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, char>) {
    constexpr DType kSigned[]{DType::i8, DType::i16, DType::i32, DType::i64};
    constexpr DType kUnsigned[]{DType::u8, DType::u16, DType::u32, DType::u64};
    return (std::is_signed_v<T> ? kSigned : kUnsigned)[std::bit_width(sizeof(T)) - 1];
  }
  return dtype_of<T>;
}
}  // namespace detail

/// Elements one behind the other that outlive the call: a vector, an array, a span.
template <class R>
concept Readable = std::ranges::contiguous_range<R> && std::ranges::sized_range<R> && std::ranges::borrowed_range<R> &&
                   std::is_trivially_copyable_v<detail::Element<R>>;
template <class R>
concept Writable = Readable<R> && !std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<R>>>;
/// Of numbers: floats (float, double, f16, bf16), integers of any width, bool, std::complex of float or double.
template <class R>
concept Reducible = Readable<R> && (detail::dtype<detail::Element<R>>() != DType::u8 ||
                                    std::is_same_v<detail::Element<R>, unsigned char>);

/// By rank, how many elements; the same on all ranks. Empty: all alike.
using Counts = std::span<const std::uint64_t>;

struct Options {
  /// Bounds each operation.
  double timeout_s = 1800.0;
  /// After so long a silent process is dead, the same on all ranks; empty: never, for debuggers.
  std::optional<double> liveness_timeout_s = 8.0;
  /// After so long a wait in an operation the rank says on stderr which ranks have not called it, one rank for each host;
  /// empty: never. At least 2 s.
  std::optional<double> stall_s = 30.0;
  /// Where ranks write reports of operations that time out or stall; empty: nowhere.
  std::string report_folder{};
};

/// How messages hold entries, without loss. automatic: blocked where ranks share memory, else packed.
enum class Wire : std::uint8_t { automatic, raw, blocked, packed };

/// How a sparse operation is done; the same on all ranks, but for `wire` and `error`.
struct SparseOptions {
  /// auto, split_allgather, split_dense_allgather, recursive_doubling or ring (docs/explanation/algorithms.md).
  std::string_view algorithm = "auto";
  Wire wire = Wire::automatic;
  /// Of floats in sums and averages: how values are rounded to fewer bytes.
  ValueEncoding values = ValueEncoding::native;
  std::uint64_t seed = 0;
  /// Unless empty, of n elements: what rounding loses on this rank is added to it.
  std::span<float> error{};
  /// Scales the number of entries beyond which messages and sums go dense.
  double switch_factor = 1.0;
  /// Whether ranks sum slices of about as many entries, instead of as many indices.
  bool balanced = false;
};

class Communicator {
 public:
  /// `size` ranks inside this process: use each from its own thread, or all from one that begins before it waits.
  static std::vector<Communicator> local(Rank size, const Options& options = {});
  /// For the library's own use; other ranks are reached by telegrad/ucx.hpp.
  explicit Communicator(std::shared_ptr<detail::Joined> joined) : joined_(std::move(joined)) {}
  /// What was moved from throws std::invalid_argument whatever is called; it may be destroyed and assigned to.
  Communicator(Communicator&&) noexcept = default;
  /// Closes what was here.
  Communicator& operator=(Communicator&& other) noexcept;
  /// Closes.
  ~Communicator();

  Rank rank() const;
  Rank size() const;
  /// Of its network: local, ucx or mpi.
  std::string driver() const;
  /// Waits a few seconds for the others to close too. Operations that are not over end with an error.
  void close();
  /// Ends all operations on all ranks with an error that says `reason`. Those that this rank has finished, the others
  /// finish too, if within 5 s.
  void abort(const std::string& reason);

  /// A communicator of the ranks that give the same `color`, below 2^63; empty: this rank joins none, and gets none. Every
  /// rank of this one calls it, on a thread of its own, and it waits. Ranks are numbered in the order of `key`, and of their
  /// ranks here where keys are equal. The new one has this one's options and failures of its own: what ends one leaves
  /// the other usable, but for a process that dies. Close them in any order. Throws std::invalid_argument, and
  /// TransportError if a rank fails meanwhile.
  std::optional<Communicator> split(std::optional<std::uint64_t> color, std::int64_t key = 0);

  // Sums. Which type has which reduction: has_reduction(). `algorithm`: auto, ring, recursive_doubling or rabenseifner.

  /// Overwrites x, of as many elements on all ranks, with the sum of all ranks' x.
  template <Reducible R>
    requires Writable<R>
  Work all_reduce(R&& x, Reduction reduction = Reduction::sum, std::string_view algorithm = "auto") {
    return all_reduce_bytes(readable(x), writable(x), dtype_of_range<R>(), reduction, algorithm);
  }
  /// The same into `out`, of as many elements; it may be x, but must not overlap it otherwise.
  template <Reducible R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work all_reduce(R&& x, Out&& out, Reduction reduction = Reduction::sum, std::string_view algorithm = "auto") {
    return all_reduce_bytes(readable(x), writable(out), dtype_of_range<R>(), reduction, algorithm);
  }
  /// As all_reduce(), on `root` alone; elsewhere x stays as it is.
  template <Reducible R>
    requires Writable<R>
  Work reduce(R&& x, Rank root, Reduction reduction = Reduction::sum) {
    return reduce_bytes(readable(x), writable(x), dtype_of_range<R>(), root, reduction);
  }
  /// The same into `out`, which is not looked at elsewhere.
  template <Reducible R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work reduce(R&& x, Out&& out, Rank root, Reduction reduction = Reduction::sum) {
    return reduce_bytes(readable(x), writable(out), dtype_of_range<R>(), root, reduction);
  }
  /// Block `rank()` of the sum into `out`; x has as many elements as all blocks.
  template <Reducible R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work reduce_scatter(R&& x, Out&& out, Reduction reduction = Reduction::sum, Counts counts = {}) {
    return reduce_scatter_bytes(readable(x), writable(out), dtype_of_range<R>(), reduction, counts);
  }

  // The same by an operation of the caller's own: see CustomReduction.

  template <Writable R>
  Work all_reduce(R&& x, const CustomReduction<detail::Element<R>>& how) {
    return reduce_given(readable(x), writable(x), dtype_of_range<R>(), how.given(), {});
  }
  template <Writable R>
  Work reduce(R&& x, Rank root, const CustomReduction<detail::Element<R>>& how) {
    return reduce_given(readable(x), writable(x), dtype_of_range<R>(), how.given(), root);
  }
  template <Readable R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work reduce_scatter(R&& x, Out&& out, const CustomReduction<detail::Element<R>>& how, Counts counts = {}) {
    return reduce_scatter_given(readable(x), writable(out), dtype_of_range<R>(), how.given(), counts);
  }

  /// The sum of all ranks' vectors, which have the same n.
  template <SparseValue V>
  Result<SparseVector<V>> all_reduce(SparseVector<V> vector, Reduction reduction = Reduction::sum,
                                     const SparseOptions& options = {});
  /// The same into `out`, of n elements.
  template <SparseValue V>
  Work all_reduce_into(SparseVector<V> vector, std::type_identity_t<std::span<V>> out,
                       Reduction reduction = Reduction::sum, const SparseOptions& options = {});
  /// This rank's slice of the sum, of indices of the whole vector; `counts`: of each slice.
  template <SparseValue V>
  Result<SparseVector<V>> reduce_scatter(SparseVector<V> vector, Reduction reduction = Reduction::sum,
                                         Counts counts = {}, const SparseOptions& options = {});

  // Moves, of any trivially copyable type.

  /// All ranks' x one behind the other; x may be this rank's own block of `out`.
  template <Readable R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work all_gather(R&& x, Out&& out, Counts counts = {}) {
    return all_gather_bytes(readable(x), writable(out), sizeof(detail::Element<R>), dtype_of_range<R>(), counts);
  }
  /// Every rank's entries, by rank. `options`: wire, values, seed and error count.
  template <SparseValue V>
  Result<std::vector<SparseVector<V>>> all_gather(SparseVector<V> vector, const SparseOptions& options = {});
  /// As all_gather(), on `root`; `out` is not looked at elsewhere.
  template <Readable R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work gather(R&& x, Out&& out, Rank root, Counts counts = {}) {
    return gather_bytes(readable(x), writable(out), sizeof(detail::Element<R>), dtype_of_range<R>(), root, counts);
  }
  /// Block r of `root`'s x to rank r's `out`; x is not looked at elsewhere.
  template <Readable R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work scatter(R&& x, Out&& out, Rank root, Counts counts = {}) {
    return scatter_bytes(readable(x), writable(out), sizeof(detail::Element<R>), dtype_of_range<R>(), root, counts);
  }
  /// Block r of x to rank r; `out` gets the blocks that all ranks have for this one. Counts, both or none, are of this
  /// rank and may differ from others'.
  template <Readable R, Writable Out>
    requires std::same_as<detail::Element<R>, detail::Element<Out>>
  Work all_to_all(R&& x, Out&& out, Counts send_counts = {}, Counts receive_counts = {}) {
    return all_to_all_bytes(readable(x), writable(out), sizeof(detail::Element<R>), dtype_of_range<R>(), send_counts,
                            receive_counts);
  }
  template <Writable R>
  Work broadcast(R&& x, Rank root) {
    return broadcast_bytes(writable(x), dtype_of_range<R>(), root);
  }
  Work barrier();

  // Between two ranks. Both give the same type and number of elements; tags are below 2^31.

  template <Readable R>
  Work send(R&& x, Rank to, std::uint32_t tag = 0) {
    return send_bytes(readable(x), dtype_of_range<R>(), to, tag);
  }
  /// `source` empty: of any rank's messages the one that came first; Work::source() tells.
  template <Writable R>
  Work recv(R&& x, std::optional<Rank> source, std::uint32_t tag = 0) {
    return recv_bytes(writable(x), dtype_of_range<R>(), source, tag);
  }
  /// Sends x to rank `to` and receives `out` from rank `source` at once; over when both are. `to` and `source` may be one
  /// rank, x and `out` of other types and lengths, but not overlap.
  template <Readable R, Writable Out>
  Work sendrecv(R&& x, Rank to, Out&& out, Rank source, std::uint32_t tag = 0) {
    return sendrecv_bytes(readable(x), dtype_of_range<R>(), to, writable(out), dtype_of_range<Out>(), source, tag);
  }

 private:
  template <class R>
  static constexpr DType dtype_of_range() {
    return detail::dtype<detail::Element<R>>();
  }
  static ConstBytes readable(const auto& x) { return std::as_bytes(std::span(std::ranges::data(x), std::ranges::size(x))); }
  static Bytes writable(auto&& x) {
    return std::as_writable_bytes(std::span(std::ranges::data(x), std::ranges::size(x)));
  }
  Work all_reduce_bytes(ConstBytes x, Bytes out, DType dtype, Reduction reduction, std::string_view algorithm);
  Work reduce_bytes(ConstBytes x, Bytes out, DType dtype, Rank root, Reduction reduction);
  Work reduce_scatter_bytes(ConstBytes x, Bytes out, DType dtype, Reduction reduction, Counts counts);
  Work reduce_given(ConstBytes x, Bytes out, DType dtype, std::shared_ptr<const GivenReduction> how,
                    std::optional<Rank> root);
  Work reduce_scatter_given(ConstBytes x, Bytes out, DType dtype, std::shared_ptr<const GivenReduction> how, Counts counts);
  Work all_gather_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Counts counts);
  Work gather_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Rank root, Counts counts);
  Work scatter_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Rank root, Counts counts);
  Work all_to_all_bytes(ConstBytes x, Bytes out, std::size_t item, DType dtype, Counts sent, Counts received);
  Work broadcast_bytes(Bytes x, DType dtype, Rank root);
  Work send_bytes(ConstBytes x, DType dtype, Rank to, std::uint32_t tag);
  Work recv_bytes(Bytes x, DType dtype, std::optional<Rank> source, std::uint32_t tag);
  Work sendrecv_bytes(ConstBytes x, DType dtype, Rank to, Bytes out, DType out_dtype, Rank source, std::uint32_t tag);

  const std::shared_ptr<detail::Joined>& state() const;

  std::shared_ptr<detail::Joined> joined_;  // null: moved from
};

}  // namespace telegrad::api
