#include "transport/envelope.hpp"

#include <cstdio>

#include "base/given_reduction.hpp"

namespace telegrad {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::barrier: return "barrier";
    case Operation::broadcast: return "broadcast";
    case Operation::allgather: return "allgather";
    case Operation::allreduce: return "allreduce";
    case Operation::sparse_allreduce: return "sparse allreduce";
    case Operation::reduce: return "reduce";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::gather: return "gather";
    case Operation::scatter: return "scatter";
    case Operation::all_to_all: return "all_to_all";
    case Operation::send: return "send";
    case Operation::receive: return "recv";
    case Operation::sparse_allgather: return "sparse allgather";
    case Operation::sparse_reduce_scatter: return "sparse reduce_scatter";
    case Operation::allreduce_topk: return "allreduce_topk";
  }
  return "unknown operation";
}

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic: return "auto";
    case Algorithm::ring: return "ring";
    case Algorithm::recursive_doubling: return "recursive_doubling";
    case Algorithm::split_allgather: return "split_allgather";
    case Algorithm::direct: return "direct";
    case Algorithm::rabenseifner: return "rabenseifner";
    case Algorithm::split_dense_allgather: return "split_dense_allgather";
    case Algorithm::oktopk: return "oktopk";
    case Algorithm::gtopk: return "gtopk";
    case Algorithm::bounded: return "bounded";
    case Algorithm::two_level: return "two_level";
    case Algorithm::nccl: return "nccl";
    case Algorithm::mpi: return "mpi";
  }
  return "unknown";
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::u8: return "u8";
    case DType::f64: return "f64";
    case DType::f16: return "f16";
    case DType::i8: return "i8";
    case DType::i16: return "i16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::u16: return "u16";
    case DType::u32: return "u32";
    case DType::u64: return "u64";
    case DType::boolean: return "bool";
    case DType::c64: return "c64";
    case DType::c128: return "c128";
  }
  return "unknown";
}

const char* name_of(Reduction reduction) {
  if (reduction == kCustomReduction) return "custom";
  switch (reduction) {
    case Reduction::none: return "none";
    case Reduction::sum: return "sum";
    case Reduction::avg: return "avg";
    case Reduction::prod: return "prod";
    case Reduction::min: return "min";
    case Reduction::max: return "max";
    case Reduction::max_abs: return "max_abs";
    case Reduction::band: return "band";
    case Reduction::bor: return "bor";
    case Reduction::bxor: return "bxor";
    case Reduction::land: return "land";
    case Reduction::lor: return "lor";
    case Reduction::lxor: return "lxor";
  }
  return "unknown";
}

const char* name_of(ValueEncoding encoding) {
  switch (encoding) {
    case ValueEncoding::native: return "native";
    case ValueEncoding::bf16: return "bf16";
    case ValueEncoding::f16: return "f16";
    case ValueEncoding::int8: return "int8";
    case ValueEncoding::qsgd8: return "qsgd8";
    case ValueEncoding::qsgd4: return "qsgd4";
    case ValueEncoding::qsgd2: return "qsgd2";
    case ValueEncoding::mean: return "mean";
    case ValueEncoding::e3m0: return "e3m0";
    case ValueEncoding::codebook2: return "codebook2";
  }
  return "unknown";
}

namespace {

std::string digest_text(std::uint32_t digest) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(digest));
  return text;
}

}  // namespace

std::string describe(const Call& call) {
  if (is_point_to_point(call)) {
    return std::string(name_of(call.operation)) + "(count=" + std::to_string(call.count) + ", dtype=" +
           name_of(call.dtype) + (call.operation == Operation::send ? ", to=" : ", source=") +
           (call.root == kNoRank ? "any" : std::to_string(call.root)) + ", tag=" + std::to_string(call.layout) + ")";
  }
  std::string text = std::string(name_of(call.operation)) + "(count=" + std::to_string(call.count) +
                     ", dtype=" + name_of(call.dtype) + ", reduction=" + name_of(call.reduction) +
                     ", algorithm=" + name_of(call.algorithm);
  if (call.root != kNoRank) text += ", root=" + std::to_string(call.root);
  if (call.operation == Operation::sparse_allreduce || call.operation == Operation::sparse_reduce_scatter) {
    char factor[32];
    std::snprintf(factor, sizeof factor, "%.10g", call.switch_factor);
    text += std::string(", switch_factor=") + factor;
  }
  const bool of_vectors = call.operation == Operation::sparse_allreduce;
  if (of_vectors && call.layout == kBalancedSlices) {
    text += ", slices=balanced";
  } else if (call.operation == Operation::all_to_all && call.layout == kOwnCounts) {
    text += ", counts=each rank's own";
  } else if (call.layout != 0) {
    const bool of_nodes = of_vectors || call.algorithm == Algorithm::two_level;
    const bool of_state = call.operation == Operation::allreduce_topk;
    const bool of_custom = call.reduction == kCustomReduction;
    text += of_nodes ? ", nodes=#" : of_state ? ", state=#" : of_custom ? ", custom=#" : ", counts=#";
    text += digest_text(static_cast<std::uint32_t>(call.layout ^ call.layout >> 32));  // too many to say; who differs sees it
  }
  if (call.wire != ValueEncoding::native) {
    text += std::string(", wire=") + (call.reserved[0] != 0 ? "sums-" : "") + name_of(call.wire);
  }
  if (call.purpose != 0) text += ", purpose=#" + digest_text(call.purpose);
  return text + ")";
}

}  // namespace telegrad
