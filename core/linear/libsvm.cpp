#include "linear/libsvm.hpp"

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "linear/decimal.hpp"

namespace telegrad::linear {
namespace {

constexpr bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
constexpr bool ends_line(char c) { return c == '\n' || c == '#'; }
constexpr bool ends_token(char c) { return is_blank(c) || ends_line(c); }

const char* after_newline(const char* at, const char* end) {
  const void* found = at == end ? nullptr : std::memchr(at, '\n', static_cast<std::size_t>(end - at));
  return found == nullptr ? end : static_cast<const char*>(found) + 1;
}

std::string token_at(const char* at) {
  constexpr std::size_t kLongest = 32;
  std::string token;
  while (!ends_token(*at) && token.size() < kLongest) token.push_back(*at++);
  return token;
}

// Reads lines that each end with a newline, so that no loop over digits needs to look for the end of the text.
class Parser {
 public:
  Parser(const LibsvmFormat& format, const RowsOut& out) : format_(format), out_(out) { out_.offsets[0] = 0; }

  // `start`: where `at` lies in the whole text. False once a damaged line has ended the parsing.
  bool parse(const char* at, const char* end, std::uint64_t start) {
    const char* const begin = at;
    for (; at != end; ++found_.lines) {
      const char* const line = at;
      const std::size_t entries_before = found_.entries;
      const char* token = at;
      Damage damage = Damage::none;
      const bool has_row = read_line(at, token, damage);
      if (damage != Damage::none) {
        found_.entries = entries_before;
        if (!note(damage, token)) return false;
        at = token;
      } else if (has_row) {
        out_.starts[found_.rows] = start + static_cast<std::uint64_t>(line - begin);
        out_.offsets[++found_.rows] = found_.entries;
        if (found_.entries != entries_before) {
          found_.features = std::max<std::uint64_t>(found_.features, out_.indices[found_.entries - 1] + 1ULL);
        }
      }
      at = *at == '\n' ? at + 1 : after_newline(at, end);
    }
    return true;
  }

  ParsedRows take() { return std::move(found_); }

 private:
  bool read_line(const char*& at, const char*& token, Damage& damage) {
    const bool is_indented = is_blank(*at);
    while (is_blank(*at)) ++at;
    if (ends_line(*at)) return false;
    token = at;
    float label = 0;
    float weight = 1;
    damage = read_label(at, label, weight, is_indented);
    if (damage != Damage::none) return false;
    out_.labels[found_.rows] = label;
    out_.weights[found_.rows] = weight;
    while (is_blank(*at)) ++at;
    if (names_query(at)) {
      token = at;
      damage = pass_query(at);
      if (damage != Damage::none) return false;
    }
    // Local copies: the compiler cannot know that stores of entries leave the members alone.
    std::uint32_t* const indices = out_.indices.data();
    float* const values = out_.values.data();
    std::size_t entries = found_.entries;
    std::uint64_t lowest = 0;  // what the next index must reach
    while (true) {
      while (is_blank(*at)) ++at;
      if (ends_line(*at)) break;
      token = at;
      std::uint64_t index = 0;
      damage = read_index(at, index);
      if (damage == Damage::none && index < lowest) damage = Damage::not_rising;
      if (damage != Damage::none) return false;
      float value = 0;
      damage = read_number(at, value, Damage::bad_value);
      if (damage != Damage::none) return false;
      indices[entries] = static_cast<std::uint32_t>(index);
      values[entries] = value;
      ++entries;
      lowest = index + 1;
    }
    found_.entries = entries;
    return true;
  }

  // A label, or a label and a weight with a colon between. Behind blanks the latter is no label, but the first entry of
  // a row without one, as scikit-learn writes rows of several labels.
  Damage read_label(const char*& at, float& label, float& weight, bool is_indented) {
    const Decimal read = read_decimal(at, label);
    if (read == Decimal::malformed || !(ends_token(*at) || *at == ':')) return Damage::bad_label;
    if (read == Decimal::too_large) return Damage::not_finite;
    if (*at != ':') return Damage::none;
    if (is_indented) return Damage::bad_label;
    ++at;
    const Damage damage = read_number(at, weight, Damage::bad_weight);
    if (damage == Damage::none && weight < 0) return Damage::bad_weight;
    found_.weighted = found_.weighted || damage == Damage::none;
    return damage;
  }

  static bool names_query(const char* at) { return *at == 'q' && at[1] == 'i' && at[2] == 'd' && at[3] == ':'; }

  static Damage pass_query(const char*& at) {
    at += 4;
    const char* const first = at;
    while (detail::digit_of(*at) <= 9) ++at;
    return at == first || !ends_token(*at) ? Damage::query_id : Damage::none;
  }

  Damage read_index(const char*& at, std::uint64_t& index) const {
    const char* const first = at;
    unsigned digit = detail::digit_of(*at);
    if (digit > 9) return names_query(at) ? Damage::query_id : Damage::bad_index;
    std::uint64_t named = 0;
    for (; digit <= 9; digit = detail::digit_of(*++at)) named = named * 10 + digit;
    if (*at != ':') return Damage::bad_index;
    constexpr auto kMostDigits = 10;  // of 32 bits; more may not fit into 64 either
    if (at++ - first > kMostDigits) return Damage::beyond_32_bits;
    if (named < format_.index_base) return Damage::below_base;
    index = named - format_.index_base;
    if (index >= kMostFeatures) return Damage::beyond_32_bits;
    return index < format_.features ? Damage::none : Damage::beyond_features;
  }

  static Damage read_number(const char*& at, float& value, Damage malformed) {
    const Decimal read = read_decimal(at, value);
    if (read == Decimal::malformed || !ends_token(*at)) return malformed;
    return read == Decimal::too_large ? Damage::not_finite : Damage::none;
  }

  bool note(Damage damage, const char* token) {
    ++found_.damaged;
    found_.complete = !format_.strict && damage != Damage::beyond_features;
    if (!found_.complete) found_.first_damaged.clear();  // the one that matters
    if (found_.first_damaged.size() < ParsedRows::kMostKept) {
      found_.first_damaged.push_back({found_.lines, damage, token_at(token)});
    }
    return found_.complete;
  }

  LibsvmFormat format_;
  RowsOut out_;
  ParsedRows found_;
};

}  // namespace

TextRange whole_lines(std::string_view text, std::size_t begin, std::size_t end) {
  const auto next_line = [&](std::size_t at) -> std::size_t {
    if (at == 0 || at >= text.size()) return std::min(at, text.size());
    const char* const found = after_newline(text.data() + at - 1, text.data() + text.size());
    return static_cast<std::size_t>(found - text.data());
  };
  const std::size_t first = next_line(begin);
  return {first, std::max(first, next_line(end))};
}

RowBounds bounds_of(std::string_view text) {
  const auto count = [&](char c) { return static_cast<std::size_t>(std::count(text.begin(), text.end(), c)); };
  return {count('\n') + (text.empty() || text.back() == '\n' ? 0 : 1), count(':')};
}

ParsedRows parse_libsvm(std::string_view text, const LibsvmFormat& format, const RowsOut& out) {
  TELEGRAD_CHECK(!out.offsets.empty());
  const std::size_t last_newline = text.rfind('\n');
  const std::size_t terminated = last_newline == std::string_view::npos ? 0 : last_newline + 1;
  Parser parser(format, out);
  if (parser.parse(text.data(), text.data() + terminated, 0) && terminated < text.size()) {
    const std::string last = std::string(text.substr(terminated)) + '\n';
    parser.parse(last.data(), last.data() + last.size(), terminated);
  }
  return parser.take();
}

}  // namespace telegrad::linear
