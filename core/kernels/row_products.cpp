#include "kernels/row_products.hpp"

#include <algorithm>

#include "kernels/dispatch.hpp"

namespace telegrad::kernels {
namespace {

constexpr double kDense = 0.25;  // of the entries: rows are multiplied with their zeros

// Rows one by one: with few entries.
[[gnu::always_inline]] inline void add_sparse_products(const RowProducts& part) {
  const std::uint32_t* const indices = part.indices.data();
  const float* const values = part.values.data();
  for (std::size_t i = 0; i < part.chosen.size(); ++i) {
    if (part.curvatures[i] == 0) continue;
    const double curvature = part.curvatures[i] / part.largest_curvature;
    const std::uint64_t row = part.chosen[i], begin = part.offsets[row], end = part.offsets[row + 1];
    for (std::uint64_t e = begin; e < end; ++e) {
      const std::size_t feature = indices[e];
      if (feature < part.first || feature >= part.end) continue;
      double* const out = part.hessian + feature * part.width;
      const double factor = curvature * (static_cast<double>(values[e]) * part.inverses[feature]);
      if (part.bias_line != nullptr) part.bias_line[feature] += rounded(factor, part.rounding);
      for (std::uint64_t k = begin; k <= e; ++k) {
        out[indices[k]] += rounded(factor * static_cast<double>(values[k]), part.magics[indices[k]]);
      }
    }
  }
}

// Some rows at once, with zeros for the entries that they lack: these change no bit.
[[gnu::always_inline]] inline void add_dense_products(const RowProducts& part) {
  constexpr std::size_t kTogether = 4;
  double lines[kTogether][kMostColumns], factors[kTogether][kMostColumns];
  for (std::size_t i = 0; i < part.chosen.size();) {
    std::size_t count = 0;
    for (; i < part.chosen.size() && count < kTogether; ++i) {
      if (part.curvatures[i] == 0) continue;
      const double curvature = part.curvatures[i] / part.largest_curvature;
      std::fill_n(lines[count], part.width, 0.0);
      std::fill_n(factors[count], part.width, 0.0);
      for (std::uint64_t row = part.chosen[i], e = part.offsets[row]; e < part.offsets[row + 1]; ++e) {
        const std::size_t feature = part.indices[e];
        lines[count][feature] = static_cast<double>(part.values[e]);
        factors[count][feature] = curvature * (lines[count][feature] * part.inverses[feature]);
      }
      ++count;
    }
    for (; count < kTogether; ++count) {
      std::fill_n(lines[count], part.width, 0.0);
      std::fill_n(factors[count], part.width, 0.0);
    }
    for (std::size_t feature = part.first; feature < part.end; ++feature) {
      const double f[kTogether] = {factors[0][feature], factors[1][feature], factors[2][feature], factors[3][feature]};
      if (f[0] == 0 && f[1] == 0 && f[2] == 0 && f[3] == 0) continue;
      if (part.bias_line != nullptr) {
        for (const double factor : f) part.bias_line[feature] += rounded(factor, part.rounding);
      }
      double* __restrict const out = part.hessian + feature * part.width;
      for (std::size_t k = 0; k <= feature; ++k) {
        const double magic = part.magics[k];
        out[k] += (rounded(f[0] * lines[0][k], magic) + rounded(f[1] * lines[1][k], magic)) +
                  (rounded(f[2] * lines[2][k], magic) + rounded(f[3] * lines[3][k], magic));
      }
    }
  }
}

[[gnu::always_inline]] inline void add_products(const RowProducts& part) {
  const auto rows = static_cast<double>(part.offsets.size() - 1);
  if (static_cast<double>(part.indices.size()) > kDense * rows * static_cast<double>(part.width)) {
    add_dense_products(part);
  } else {
    add_sparse_products(part);
  }
}

void add_products_portable(const RowProducts& part) { add_products(part); }

#ifdef TELEGRAD_KERNELS_X86
// Without fused multiplications, whose bits would be others.
TELEGRAD_AVX2 void add_products_avx2(const RowProducts& part) { add_products(part); }
#endif

constexpr Variants<void(const RowProducts&)> kAddProducts{
    .portable = add_products_portable,
#ifdef TELEGRAD_KERNELS_X86
    .avx2 = add_products_avx2,
#endif
};

}  // namespace

void add_row_products(const RowProducts& part) { kAddProducts.at(simd_level())(part); }

}  // namespace telegrad::kernels
