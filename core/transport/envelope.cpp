#include "transport/envelope.hpp"

namespace telegrad {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::barrier: return "barrier";
    case Operation::broadcast: return "broadcast";
    case Operation::allgather: return "allgather";
    case Operation::allreduce: return "allreduce";
    case Operation::sparse_allreduce: return "sparse allreduce";
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
  }
  return "unknown";
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::u8: return "u8";
  }
  return "unknown";
}

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::none: return "none";
    case Reduction::sum: return "sum";
    case Reduction::avg: return "avg";
  }
  return "unknown";
}

std::string describe(const Call& call) {
  std::string text = std::string(name_of(call.operation)) + "(count=" + std::to_string(call.count) +
                     ", dtype=" + name_of(call.dtype) + ", reduction=" + name_of(call.reduction) +
                     ", algorithm=" + name_of(call.algorithm);
  if (call.root != kNoRank) text += ", root=" + std::to_string(call.root);
  return text + ")";
}

}  // namespace telegrad
