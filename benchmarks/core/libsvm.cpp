// LIBSVM text parsed from memory in one thread: MB/s of the parser, of the count that says how much room rows need, and of
// a copy of the text. Rounds alternate; the fastest of each is printed.
//
//   libsvm [megabytes, 64 without]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "base/random.hpp"
#include "linear/libsvm.hpp"

namespace {

using namespace telegrad;

constexpr int kRounds = 7;

template <class Work>
double seconds(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Rows of about `entries` indices below `features`; values of so many digits in [0, 1), or 1.
std::string text_of(std::size_t bytes, std::uint64_t features, std::uint64_t entries, int digits) {
  Random random(5);
  std::string text;
  text.reserve(bytes + (1 << 16));
  char word[64];
  while (text.size() < bytes) {
    text += random.uniform() < 0.5 ? "+1" : "-1";
    std::uint64_t index = 0;
    while ((index += 1 + random.below(2 * features / entries)) < features) {
      const int head = std::snprintf(word, sizeof word, " %llu:", static_cast<unsigned long long>(index));
      text.append(word, static_cast<std::size_t>(head));
      const int tail = digits == 0 ? std::snprintf(word, sizeof word, "1")
                                   : std::snprintf(word, sizeof word, "%.*g", digits, random.uniform());
      text.append(word, static_cast<std::size_t>(tail));
    }
    text += '\n';
  }
  return text;
}

void measure(const char* name, const std::string& text) {
  const linear::RowBounds bounds = linear::bounds_of(text);
  std::vector<std::uint64_t> offsets(bounds.rows + 1), starts(bounds.rows);
  std::vector<std::uint32_t> indices(bounds.entries);
  std::vector<float> values(bounds.entries), labels(bounds.rows), weights(bounds.rows);
  std::string copy(text.size(), '\0');
  double parse_s = std::numeric_limits<double>::infinity(), count_s = parse_s, copy_s = parse_s;
  for (int round = 0; round < kRounds; ++round) {
    count_s = std::min(count_s, seconds([&] { TELEGRAD_CHECK(linear::bounds_of(text).rows == bounds.rows); }));
    parse_s = std::min(parse_s, seconds([&] {
      TELEGRAD_CHECK(linear::parse_libsvm(text, {}, {offsets, indices, values, labels, starts, weights}).complete);
    }));
    copy_s = std::min(copy_s, seconds([&] { std::copy(text.begin(), text.end(), copy.begin()); }));
  }
  const double megabytes = static_cast<double>(text.size()) / 1e6;
  std::printf("%-34s %5.1f bytes an entry   parse %6.0f MB/s   count %6.0f MB/s   both %6.0f MB/s   copy %6.0f MB/s\n",
              name, static_cast<double>(text.size()) / static_cast<double>(bounds.entries), megabytes / parse_s,
              megabytes / count_s, megabytes / (parse_s + count_s), megabytes / copy_s);
}

}  // namespace

int main(int arguments, char** argument) {
  const std::size_t megabytes = arguments > 1 ? std::strtoull(argument[1], nullptr, 10) : 64;
  if (megabytes == 0) {
    std::fprintf(stderr, "usage: %s [megabytes]\n", argument[0]);
    return 2;
  }
  const std::size_t bytes = megabytes * 1'000'000;
  measure("URL's shape, values 1", text_of(bytes, 3'231'961, 116, 0));
  measure("Webspam's shape, 6 digits", text_of(bytes, 16'609'143, 3730, 6));
  measure("Webspam's shape, 9 significant", text_of(bytes, 16'609'143, 3730, 9));
  measure("dense rows of 50, 17 significant", text_of(bytes, 100, 50, 17));
}
