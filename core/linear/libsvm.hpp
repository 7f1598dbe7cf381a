#pragma once
// LIBSVM text to rows in compressed form: `label[:weight] [qid:n] index:value index:value … # comment`, one row a line.
//
// Indices rise strictly within a line. Blank lines and lines of a comment alone are no rows. Lines end with LF or CRLF; the
// last one needs no end. `qid:` of ranking data, behind the label, is passed over: linear models need not know which rows
// belong together.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace telegrad::linear {

/// One more than the largest index, from 0, that a sparse vector can hold.
inline constexpr std::uint64_t kMostFeatures = 0xffffffffU;

struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  friend bool operator==(const TextRange&, const TextRange&) = default;
};

/// The lines whose first byte lies in [begin, end) of `text`. So ranges that divide a text divide its lines.
TextRange whole_lines(std::string_view text, std::size_t begin, std::size_t end);

struct RowBounds {
  std::size_t rows = 0;
  std::size_t entries = 0;
};

/// At least what parse_libsvm() finds in `text`: its lines, and its colons.
RowBounds bounds_of(std::string_view text);

/// What is wrong with a line.
enum class Damage : std::uint8_t {
  none,
  bad_label,
  bad_index,
  bad_value,
  not_finite,
  below_base,
  not_rising,
  beyond_32_bits,
  beyond_features,  // as declared: ends the parsing in any case, since rather the declaration is wrong
  query_id,  // that is no whole number, or not behind the label
  bad_weight,
};

struct DamagedLine {
  std::uint64_t line = 0;  // from 0, in the text parsed
  Damage damage = Damage::none;
  std::string token;  // the start of what could not be read
};

struct LibsvmFormat {
  std::uint32_t index_base = 1;  // or 0: what the first feature is called in the text
  std::uint64_t features = kMostFeatures;
  bool strict = true;  // the first damaged line ends the parsing; otherwise it is left out, and counted
};

/// Where rows go: `offsets` has one element more than there are rows, `starts` each row's first byte in the text. A row
/// without a weight has 1.
struct RowsOut {
  std::span<std::uint64_t> offsets;
  std::span<std::uint32_t> indices;
  std::span<float> values;
  std::span<float> labels;
  std::span<std::uint64_t> starts;
  std::span<float> weights;
};

struct ParsedRows {
  std::size_t rows = 0;
  std::size_t entries = 0;
  std::uint64_t lines = 0;
  std::uint64_t features = 0;  // one more than the largest index found, from 0
  std::uint64_t damaged = 0;
  bool weighted = false;   // some row has a weight
  bool complete = true;  // false: the last damaged line has ended the parsing
  std::vector<DamagedLine> first_damaged;

  static constexpr std::size_t kMostKept = 8;
};

/// Parses whole lines. `out` has room for bounds_of(text).
ParsedRows parse_libsvm(std::string_view text, const LibsvmFormat& format, const RowsOut& out);

}  // namespace telegrad::linear
