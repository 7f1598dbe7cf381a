// LIBSVM text against a slow parser of one line at a time, at every border, and what is said of damaged lines.
#include "linear/libsvm.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "linear/decimal.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad::linear;

struct Row {
  float label = 0;
  std::vector<std::pair<std::uint32_t, float>> entries;
  std::uint64_t start = 0;
  float weight = 1;

  friend bool operator==(const Row&, const Row&) = default;
};

struct Parsed {
  std::vector<Row> rows;
  ParsedRows found;
};

Parsed parse(std::string_view text, const LibsvmFormat& format = {}) {
  const RowBounds bounds = bounds_of(text);
  std::vector<std::uint64_t> offsets(bounds.rows + 1), starts(bounds.rows);
  std::vector<std::uint32_t> indices(bounds.entries);
  std::vector<float> values(bounds.entries), labels(bounds.rows), weights(bounds.rows);
  Parsed parsed{{}, parse_libsvm(text, format, {offsets, indices, values, labels, starts, weights})};
  for (std::size_t row = 0; row < parsed.found.rows; ++row) {
    Row one{labels[row], {}, starts[row], weights[row]};
    for (std::uint64_t i = offsets[row]; i < offsets[row + 1]; ++i) one.entries.emplace_back(indices[i], values[i]);
    parsed.rows.push_back(std::move(one));
  }
  return parsed;
}

// Undamaged text only.
std::vector<Row> parsed_slowly(const std::string& text, std::uint32_t index_base = 1) {
  std::vector<Row> rows;
  std::istringstream in(text);
  std::string line;
  for (std::uint64_t start = 0; std::getline(in, line); start += line.size() + 1) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string word;
    if (!(words >> word)) continue;
    Row row{std::strtof(word.c_str(), nullptr), {}, start};
    while (words >> word) {
      const std::size_t colon = word.find(':');
      row.entries.emplace_back(static_cast<std::uint32_t>(std::stoul(word.substr(0, colon))) - index_base,
                               std::strtof(word.c_str() + colon + 1, nullptr));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

const std::string kSmall =
    "+1 1:0.5 3:-2 4294967295:1e-3\n"
    "\n"
    "-1\r\n"
    "# a comment\n"
    "0 2:.5 7:5. # and 8:9 another\r\n"
    "   \t\n"
    "\t1.5e0  10:+3\t11:0 \n"
    "-1 2:1";

TEST("every kind of line as the slow parser reads it") {
  const Parsed parsed = parse(kSmall);
  EXPECT(parsed.rows == parsed_slowly(kSmall));
  EXPECT_EQ(parsed.rows.size(), 5);
  EXPECT_EQ(parsed.found.lines, 8);
  EXPECT_EQ(parsed.found.features, 4294967295U);
  EXPECT_EQ(parsed.found.damaged, 0);
  EXPECT(parsed.found.complete);
  EXPECT(parse("1 0:2", {.index_base = 0}).rows == parsed_slowly("1 0:2", 0));
}

TEST("ranges that divide a text divide its lines, at every two borders") {
  const std::vector<Row> whole = parsed_slowly(kSmall);
  for (std::size_t a = 0; a <= kSmall.size(); ++a) {
    for (std::size_t b = a; b <= kSmall.size(); ++b) {
      std::vector<Row> joined;
      std::size_t end_before = 0;
      for (const auto& [from, to] : {std::pair{std::size_t{0}, a}, std::pair{a, b}, std::pair{b, kSmall.size()}}) {
        const TextRange range = whole_lines(kSmall, from, to);
        EXPECT_EQ(range.begin, end_before);
        EXPECT(range.begin == 0 || range.begin == kSmall.size() || kSmall[range.begin - 1] == '\n');
        end_before = range.end;
        for (Row& row : parse(std::string_view(kSmall).substr(range.begin, range.end - range.begin)).rows) {
          row.start += range.begin;
          EXPECT(row.start >= from);
          EXPECT(row.start < to);
          joined.push_back(std::move(row));
        }
      }
      EXPECT_EQ(end_before, kSmall.size());
      EXPECT(joined == whole);
    }
  }
}

TEST("nothing is in empty ranges and empty texts") {
  EXPECT(whole_lines("", 0, 0) == TextRange{});
  EXPECT(whole_lines("1\n1\n", 2, 2) == (TextRange{2, 2}));
  EXPECT(whole_lines("1 1:1\n1\n", 1, 2) == (TextRange{6, 6}));  // inside a line of another's
  EXPECT(whole_lines("1\n", 9, 99) == (TextRange{2, 2}));
  EXPECT(parse("").rows.empty());
  EXPECT_EQ(parse("").found.lines, 0);
  EXPECT(parse("\n\n").rows.empty());
}

TEST("random texts as the slow parser reads them") {
  std::mt19937 random(41);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (std::size_t line = random() % 20; line > 0; --line) {
      text += std::to_string(static_cast<int>(random() % 3) - 1);
      std::uint64_t index = 0;
      for (std::size_t entry = random() % 20; entry > 0; --entry) {
        index += 1 + random() % (1U << random() % 24);
        char value[64];
        std::snprintf(value, sizeof value, "%.*g", static_cast<int>(1 + random() % 18),
                      std::ldexp(static_cast<double>(random()) - 2e9, static_cast<int>(random() % 60) - 60));
        text += ' ' + std::to_string(index) + ':' + value;
      }
      text += '\n';
    }
    EXPECT(parse(text).rows == parsed_slowly(text));
  }
}

TEST("weights of labels, and queries that are passed over") {
  const Parsed parsed = parse("1:0.5 3:2\n-1 qid:7 1:1 # of query 7\n0:2e1\tqid:12\n1:0 qid:1\t2:4\n");
  EXPECT(parsed.found.complete && parsed.found.weighted);
  EXPECT(parsed.rows == (std::vector<Row>{{1, {{2, 2.0F}}, 0, 0.5F},
                                          {-1, {{0, 1.0F}}, 10, 1},
                                          {0, {}, 36, 20},
                                          {1, {{1, 4.0F}}, 49, 0}}));
  EXPECT(!parse("1 1:1\n1:x\n", {.strict = false}).found.weighted);
}

struct Refused {
  std::string_view line;
  Damage damage;
  std::string_view token;
};

TEST("damaged lines: which, why and what, strictly or left out") {
  constexpr LibsvmFormat kFormat{.features = 100};
  const Refused all[] = {{"x 1:1", Damage::bad_label, "x"},
                         {"1:x 2:1", Damage::bad_weight, "1:x"},
                         {"1:-1 2:1", Damage::bad_weight, "1:-1"},
                         {"1: 2:1", Damage::bad_weight, "1:"},
                         {"1:1e99 2:1", Damage::not_finite, "1:1e99"},
                         {"1:2:3 2:1", Damage::bad_weight, "1:2:3"},
                         {"1,2 2:1", Damage::bad_label, "1,2"},
                         {"nan 2:1", Damage::bad_label, "nan"},
                         {"1e99 2:1", Damage::not_finite, "1e99"},
                         {"1 2", Damage::bad_index, "2"},
                         {"1 a:2", Damage::bad_index, "a:2"},
                         {"1 -2:2", Damage::bad_index, "-2:2"},
                         {"1 2 :2", Damage::bad_index, "2"},
                         {"1 1:2 qid:3", Damage::query_id, "qid:3"},
                         {"1 qid:x 1:2", Damage::query_id, "qid:x"},
                         {"1 qid: 1:2", Damage::query_id, "qid:"},
                         {"1 qid:1 qid:2 1:2", Damage::query_id, "qid:2"},
                         {"1 2:", Damage::bad_value, "2:"},
                         {"1 2:x", Damage::bad_value, "2:x"},
                         {"1 2:1.2.3", Damage::bad_value, "2:1.2.3"},
                         {"1 2:1e", Damage::bad_value, "2:1e"},
                         {"1 2:inf", Damage::bad_value, "2:inf"},
                         {"1 2:0x1p3", Damage::bad_value, "2:0x1p3"},
                         {"1 2:1e39", Damage::not_finite, "2:1e39"},
                         {"1 1:2 0:2", Damage::below_base, "0:2"},
                         {"1 3:1 3:2", Damage::not_rising, "3:2"},
                         {"1 3:1 2:2", Damage::not_rising, "2:2"},
                         {"1 4294967296:1", Damage::beyond_32_bits, "4294967296:1"},
                         {"1 99999999999999999999999:1", Damage::beyond_32_bits, "99999999999999999999999:1"},
                         {"1 101:1", Damage::beyond_features, "101:1"}};
  for (const Refused& refused : all) {
    const std::string text = "1 1:1\n\n" + std::string(refused.line) + "\n1 2:2\n";
    const Parsed strict = parse(text, kFormat);
    EXPECT(!strict.found.complete);
    EXPECT_EQ(strict.rows.size(), 1);
    REQUIRE(strict.found.first_damaged.size() == 1);
    EXPECT_EQ(strict.found.first_damaged[0].line, 2);
    EXPECT_EQ(strict.found.first_damaged[0].damage, refused.damage);
    EXPECT_EQ(strict.found.first_damaged[0].token, refused.token);

    const Parsed lenient = parse(text, {.features = 100, .strict = false});
    const bool fatal = refused.damage == Damage::beyond_features;
    EXPECT_EQ(lenient.found.complete, !fatal);
    EXPECT_EQ(lenient.found.damaged, 1);
    EXPECT_EQ(lenient.rows.size(), fatal ? 1 : 2);
    if (!fatal) EXPECT(lenient.rows[1] == (Row{1, {{1, 2.0F}}, text.size() - 6}));
  }
  const Parsed last = parse("1 1:1\n1 2", {.strict = false});  // without an end
  EXPECT_EQ(last.rows.size(), 1);
  EXPECT_EQ(last.found.first_damaged[0].line, 1);
}

TEST("of many damaged lines the first are kept and all counted; one that ends the parsing is named") {
  std::string text;
  for (int i = 0; i < 20; ++i) text += "x\n";
  const Parsed parsed = parse(text, {.strict = false});
  EXPECT_EQ(parsed.found.damaged, 20);
  EXPECT_EQ(parsed.found.first_damaged.size(), ParsedRows::kMostKept);
  const Parsed ended = parse(text + "1 5:1\n", {.features = 2, .strict = false});
  REQUIRE(ended.found.first_damaged.size() == 1);
  EXPECT_EQ(ended.found.first_damaged[0].line, 20);
}

void expect_like_strtof(const std::string& text) {
  const std::string padded = text + '\n';
  const char* at = padded.data();
  float value = 0;
  const Decimal read = read_decimal(at, value);
  const float expected = std::strtof(text.c_str(), nullptr);
  if (std::isinf(expected)) {
    EXPECT(read == Decimal::too_large);
    return;
  }
  EXPECT(read == Decimal::read);
  EXPECT_EQ(at - padded.data(), text.size());
  if (std::memcmp(&value, &expected, sizeof value) != 0) testing::fail(__FILE__, __LINE__, text + " is misread");
}

TEST("decimals are rounded to f32 once") {
  for (const char* text : {"0", "-0", "1", "-1.5", ".5", "5.", "+7", "16777217", "16777219", "33554434.000001", "1e-45",
                           "7e-46", "7.1e-46", "1e-400", "-1e-400", "1e39", "1e400", "-1e400", "3.4028235e38",
                           "3.4028236e38", "340282356779733661637539395458142568447",
                           "340282356779733661637539395458142568448", "1.17549435e-38", "9007199254740993",
                           "0.000000000000000000000000000000000000000000000000000000000000001e70",
                           "0.000000000000000000000000000000000000000000000000000000000000001e20", "1e99999999999",
                           "0e99999999999", "1e-99999999999", "1.00000017881393432617187499",
                           "1.00000017881393432617187500", "1.00000017881393432617187501"}) {
    expect_like_strtof(text);
  }
  expect_like_strtof(std::string(500, '9'));
  expect_like_strtof('0' + std::string(500, '0') + "1e3");
  expect_like_strtof("0." + std::string(500, '0') + "1e3");
  std::mt19937 random(42);
  for (int round = 0; round < 200'000; ++round) {
    char text[64];
    const auto bits = static_cast<std::uint32_t>(random());
    float a = 0;
    std::memcpy(&a, &bits, sizeof a);
    if (!std::isfinite(a)) continue;
    if (round % 2 == 0) {  // between two f32, or a little beside
      const double middle = (static_cast<double>(a) + std::nextafter(a, 2 * a)) / 2;
      std::snprintf(text, sizeof text, "%.*g", static_cast<int>(6 + random() % 25), middle);
    } else {
      std::snprintf(text, sizeof text, "%.*f", static_cast<int>(random() % 12), std::fmod(static_cast<double>(a), 1e6));
    }
    expect_like_strtof(text);
  }
}

}  // namespace
