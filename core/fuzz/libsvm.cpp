// What reads text of anybody's making: libFuzzer's entry point, which the core's tests call too.

#include "fuzz/libsvm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "base/check.hpp"
#include "linear/libsvm.hpp"

namespace telegrad::fuzz {
namespace {

using namespace telegrad::linear;

struct Rows {
  std::vector<std::uint64_t> offsets, starts;
  std::vector<std::uint32_t> indices;
  std::vector<float> values, labels, weights;
  ParsedRows parsed;
};

// From memory of just the text's size, so that a sanitizer sees every read outside.
Rows parse(std::string_view text, const LibsvmFormat& format) {
  const auto copy = std::make_unique<char[]>(text.size());
  std::copy(text.begin(), text.end(), copy.get());
  const std::string_view own(copy.get(), text.size());
  const RowBounds bounds = bounds_of(own);
  Rows rows{.offsets = std::vector<std::uint64_t>(bounds.rows + 1),
            .starts = std::vector<std::uint64_t>(bounds.rows),
            .indices = std::vector<std::uint32_t>(bounds.entries),
            .values = std::vector<float>(bounds.entries),
            .labels = std::vector<float>(bounds.rows),
            .weights = std::vector<float>(bounds.rows),
            .parsed = {}};
  rows.parsed = parse_libsvm(own, format, {rows.offsets, rows.indices, rows.values, rows.labels, rows.starts, rows.weights});
  TELEGRAD_CHECK(rows.parsed.rows <= bounds.rows && rows.parsed.entries <= bounds.entries);
  rows.offsets.resize(rows.parsed.rows + 1);
  rows.starts.resize(rows.parsed.rows);
  rows.labels.resize(rows.parsed.rows);
  rows.weights.resize(rows.parsed.rows);
  rows.indices.resize(rows.parsed.entries);
  rows.values.resize(rows.parsed.entries);
  return rows;
}

void check_sound(const Rows& rows, std::string_view text, const LibsvmFormat& format) {
  TELEGRAD_CHECK(rows.offsets.front() == 0 && rows.offsets.back() == rows.parsed.entries);
  TELEGRAD_CHECK(rows.parsed.features <= format.features);
  TELEGRAD_CHECK(rows.parsed.complete || rows.parsed.first_damaged.size() == 1);
  for (std::size_t row = 0; row < rows.parsed.rows; ++row) {
    TELEGRAD_CHECK(rows.offsets[row] <= rows.offsets[row + 1] && std::isfinite(rows.labels[row]));
    TELEGRAD_CHECK(std::isfinite(rows.weights[row]) && rows.weights[row] >= 0);
    TELEGRAD_CHECK(rows.starts[row] == 0 || text[rows.starts[row] - 1] == '\n');
    for (std::uint64_t i = rows.offsets[row]; i < rows.offsets[row + 1]; ++i) {
      TELEGRAD_CHECK(rows.indices[i] < rows.parsed.features && std::isfinite(rows.values[i]));
      TELEGRAD_CHECK(i == rows.offsets[row] || rows.indices[i - 1] < rows.indices[i]);
    }
  }
}

}  // namespace

std::size_t read_libsvm_text(ConstBytes input) {
  LibsvmRecipe recipe;
  if (input.size() < sizeof recipe) return 0;
  std::memcpy(&recipe, input.data(), sizeof recipe);
  const ConstBytes rest = input.subspan(sizeof recipe);
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), rest.size());
  const LibsvmFormat format{.index_base = recipe.index_base % 2U,
                            .features = recipe.features == 0 ? kMostFeatures : recipe.features,
                            .strict = recipe.strict % 2 == 1};
  const Rows whole = parse(text, format);
  check_sound(whole, text, format);
  if (!whole.parsed.complete) return whole.parsed.rows;

  const std::size_t cut = text.empty() ? 0 : recipe.cut % text.size();
  Rows joined;
  std::uint64_t lines = 0;
  for (const TextRange range : {whole_lines(text, 0, cut), whole_lines(text, cut, text.size())}) {
    const Rows part = parse(text.substr(range.begin, range.end - range.begin), format);
    TELEGRAD_CHECK(part.parsed.complete);
    joined.indices.insert(joined.indices.end(), part.indices.begin(), part.indices.end());
    joined.values.insert(joined.values.end(), part.values.begin(), part.values.end());
    joined.labels.insert(joined.labels.end(), part.labels.begin(), part.labels.end());
    joined.weights.insert(joined.weights.end(), part.weights.begin(), part.weights.end());
    for (const std::uint64_t start : part.starts) joined.starts.push_back(range.begin + start);
    lines += part.parsed.lines;
  }
  TELEGRAD_CHECK(lines == whole.parsed.lines && joined.starts == whole.starts && joined.indices == whole.indices);
  TELEGRAD_CHECK(joined.values == whole.values && joined.labels == whole.labels && joined.weights == whole.weights);
  return whole.parsed.rows;
}

}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::read_libsvm_text(std::as_bytes(std::span(data, size)));
  return 0;
}
