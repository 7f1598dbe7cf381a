#include "codec/value_groups.hpp"

#include "codec/value_groups_portable.hpp"
#include "kernels/dispatch.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include "codec/value_groups_avx2.hpp"
#include "codec/value_groups_avx512.hpp"
#endif

namespace telegrad::kernels {
namespace {

using WriteFunction = void(const std::byte* values, std::size_t count, ValueBlock block, ValuePlanes<std::byte> planes);
using ReadFunction = bool(ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values, std::size_t count);
using CountFunction = std::size_t(const std::byte* values, std::size_t count, ValueBlock block);

#ifdef TELEGRAD_KERNELS_X86

template <class W>
constexpr Variants<CountFunction> kCount{count_portable<W>, count_avx2<W>, count_avx512<W>};
template <class W>
constexpr Variants<WriteFunction> kWrite{write_portable<W>, write_avx2<W>, write_avx512<W>};
template <class W>
constexpr Variants<ReadFunction> kRead{read_portable<W>, read_avx2<W>, read_avx512<W>};

#else

template <class W>
constexpr Variants<CountFunction> kCount{count_portable<W>};
template <class W>
constexpr Variants<WriteFunction> kWrite{write_portable<W>};
template <class W>
constexpr Variants<ReadFunction> kRead{read_portable<W>};

#endif

}  // namespace

std::size_t count_escapes(DType dtype, const std::byte* values, std::size_t count, ValueBlock block) {
  if (dtype == DType::f32) return kCount<std::uint32_t>(values, count, block);
  return kCount<std::uint16_t>(values, count, block);
}

void write_groups(DType dtype, const std::byte* values, std::size_t count, ValueBlock block,
                  ValuePlanes<std::byte> planes) {
  if (dtype == DType::f32) return kWrite<std::uint32_t>(values, count, block, planes);
  return kWrite<std::uint16_t>(values, count, block, planes);
}

bool read_groups(DType dtype, ValuePlanes<const std::byte> planes, ValueBlock block, std::byte* values,
                 std::size_t count) {
  if (dtype == DType::f32) return kRead<std::uint32_t>(planes, block, values, count);
  return kRead<std::uint16_t>(planes, block, values, count);
}

}  // namespace telegrad::kernels
