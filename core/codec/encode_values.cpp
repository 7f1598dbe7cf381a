#include "codec/encode_values.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "base/check.hpp"
#include "kernels/narrow.hpp"

namespace telegrad::kernels {
namespace {

// Null for those that are not quantised.
const Quantisation* quantisation_of(ValueEncoding encoding) {
  switch (encoding) {
    case ValueEncoding::native:
    case ValueEncoding::bf16:
    case ValueEncoding::f16:
    case ValueEncoding::mean: return nullptr;
    case ValueEncoding::int8: return &kInt8;
    case ValueEncoding::qsgd8: return &kQsgd8;
    case ValueEncoding::qsgd4: return &kQsgd4;
    case ValueEncoding::qsgd2: return &kQsgd2;
    case ValueEncoding::e3m0: return &kE3m0;
    case ValueEncoding::codebook2: return &kCodebook2;
  }
  return nullptr;
}
static_assert(kEncodingUnit % kInt8.bucket == 0 && kEncodingUnit % kQsgd8.bucket == 0 &&
              kEncodingUnit % kQsgd4.bucket == 0 && kEncodingUnit % kQsgd2.bucket == 0 &&
              kEncodingUnit % kE3m0.bucket == 0 && kEncodingUnit % kCodebook2.bucket == 0);

DType dtype_of(ValueEncoding encoding) { return encoding == ValueEncoding::bf16 ? DType::bf16 : DType::f16; }

}  // namespace

bool encodes(ValueEncoding encoding, std::span<const float> values) {
  std::array<std::byte, kMeanBytes> mean;
  return encoding != ValueEncoding::mean || mean_of_one_sign(values, mean);
}

std::size_t encoded_bytes(ValueEncoding encoding, std::size_t count) {
  if (const Quantisation* const how = quantisation_of(encoding)) return how->encoded_bytes(count);
  if (encoding == ValueEncoding::mean) return kMeanBytes;
  return count * (encoding == ValueEncoding::native ? sizeof(float) : sizeof(bf16));
}

void encode_values(ValueEncoding encoding, const QuantisationKey& key, std::uint64_t first,
                   std::span<const float> values, Bytes out, std::span<float> error) {
  if (const Quantisation* const how = quantisation_of(encoding)) return quantise(*how, key, first, values, out, error);
  if (encoding == ValueEncoding::mean) {
    TELEGRAD_CHECK(mean_of_one_sign(values, out, error));
    return;
  }
  if (encoding != ValueEncoding::native) return narrow(dtype_of(encoding), values, out, error);
  TELEGRAD_CHECK(out.size() == values.size_bytes() && (error.empty() || error.size() == values.size()));
  if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
  std::ranges::fill(error, 0.0F);
}

bool decode_values(ValueEncoding encoding, ConstBytes encoded, std::span<float> values) {
  if (const Quantisation* const how = quantisation_of(encoding)) return dequantise(*how, encoded, values);
  if (encoding == ValueEncoding::mean) return fill_mean(encoded, values);
  if (encoded.size() != encoded_bytes(encoding, values.size())) return false;
  if (encoding != ValueEncoding::native) {
    widen(dtype_of(encoding), encoded, values);
  } else if (!values.empty()) {
    std::memcpy(values.data(), encoded.data(), encoded.size());
  }
  return true;
}

}  // namespace telegrad::kernels
