// The fuzzer's entry point without a fuzzer: texts of all kinds of lines, undamaged and damaged.
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/libsvm.hpp"
#include "fuzz_input.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

std::size_t rows_of(const fuzz::LibsvmRecipe& recipe, const std::string& text) {
  const fuzz::Input input = fuzz::input_of(recipe, std::as_bytes(std::span(text)));
  EXPECT_EQ(LLVMFuzzerTestOneInput(input.data(), input.size()), 0);
  return fuzz::read_libsvm_text(std::as_bytes(std::span(input)));
}

std::string any_text(std::mt19937& random) {
  constexpr std::string_view kEnds[] = {"\n", "\r\n", " # said\n", "\t\n"};
  constexpr std::string_view kValues[] = {"1", "-0.25", "3e-7", "0.10000000149011612", "12345678901234567890", ".5"};
  std::string text;
  for (std::size_t line = 0, lines = random() % 12; line < lines; ++line) {
    if (random() % 8 == 0) {
      text += kEnds[random() % 4];
      continue;
    }
    text += random() % 2 == 0 ? "+1" : "-1";
    for (std::size_t index = 1 + random() % 9, entry = 0; entry < random() % 8; ++entry, index += 1 + random() % 99) {
      text += ' ' + std::to_string(index) + ':' + std::string(kValues[random() % 6]);
    }
    text += kEnds[random() % 4];
  }
  if (!text.empty() && random() % 4 == 0) text.pop_back();
  return text;
}

TEST("whole texts are read, damaged ones refused or read alike in one range and in two") {
  std::mt19937 random(61);
  constexpr std::string_view kDamage = "0123456789:.-+eE #\r\n\tqidnaf\0\xff";
  std::size_t rows = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string text = any_text(random);
    const fuzz::LibsvmRecipe recipe{.index_base = static_cast<std::uint8_t>(random()),
                                    .strict = static_cast<std::uint8_t>(random()),
                                    .features = static_cast<std::uint16_t>(random() % 3 == 0 ? random() % 500 : 0),
                                    .cut = static_cast<std::uint32_t>(random())};
    rows += rows_of(recipe, text);
    for (std::size_t change = random() % 4; change > 0 && !text.empty(); --change) {
      text[random() % text.size()] = kDamage[random() % kDamage.size()];
    }
    rows_of(recipe, text);
  }
  EXPECT(rows > 20'000);
}

TEST("noise is refused or sound") {
  std::mt19937 random(62);
  for (int round = 0; round < 20'000; ++round) {
    std::string text(random() % 200, '\0');
    for (char& c : text) c = static_cast<char>(random() % 4 == 0 ? random() : "1 :2\n5.e"[random() % 8]);
    rows_of({.index_base = 0, .strict = 0, .features = 0, .cut = static_cast<std::uint32_t>(random())}, text);
  }
}

}  // namespace
