// A test file includes this header once and is then a program of its own:
//
//   #include "testing.hpp"
//   TEST("a ring of one rank returns its input") { EXPECT_EQ(sum(x), 3); }
//
// `program` runs every test of the file, `program ring` those whose name contains "ring", `program --list` names them.
// EXPECT* report and go on, on any thread; REQUIRE, on the test's own thread only, ends the test, as an exception does.
// It must not know anything of telegrad.
#pragma once

#include <atomic>
#include <cmath>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace testing {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

// Thrown by REQUIRE, caught by main.
struct Abandoned {};

inline std::atomic<int> failures{0};

inline void fail(const char* file, int line, const std::string& text) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  ++failures;
  std::cerr << file << ':' << line << ": " << text << std::endl;
}

template <typename T>
concept Printable = requires(std::ostream& out, const T& value) { out << value; };

template <typename T>
concept Iterable = requires(const T& value) {
  value.begin();
  value.end();
};

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_same_v<T, char> || std::is_same_v<T, signed char> || std::is_same_v<T, unsigned char>) {
    out << static_cast<int>(value);
  } else if constexpr (std::is_enum_v<T>) {
    out << "enum " << show(static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) {
    out << "nullptr";
  } else if constexpr (Printable<T>) {
    out << value;
  } else if constexpr (Iterable<T>) {
    constexpr int kShown = 16;
    int index = 0;
    out << '[';
    for (const auto& item : value) {
      if (index == kShown) out << ", …";
      if (index < kShown) out << (index ? ", " : "") << show(item);
      ++index;
    }
    out << "] of " << index;
  } else {
    out << '<' << sizeof(T) << " bytes>";
  }
  return out.str();
}

template <typename T>
concept PlainInteger = std::integral<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (PlainInteger<A> && PlainInteger<B>) {
    return std::cmp_equal(a, b);  // a test may write EXPECT_EQ(v.size(), 3)
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void expect_equal(const A& a, const B& b, const char* a_text, const char* b_text, const char* file, int line) {
  if (equal(a, b)) return;
  fail(file, line, std::string(a_text) + " == " + b_text + "\n    " + show(a) + "\n    " + show(b));
}

// NaN is near nothing; equal infinities are near each other.
inline void expect_near(double a, double b, double tolerance, const char* a_text, const char* file, int line) {
  if (a == b || std::abs(a - b) <= tolerance) return;
  fail(file, line, std::string(a_text) + " is " + show(a) + ", expected " + show(b) + " ± " + show(tolerance));
}

// Runs `body` and demands an E whose message contains `part`. Any other exception ends the test.
template <typename E, typename Body>
void expect_throws(Body&& body, std::string_view part, const char* text, const char* file, int line) {
  try {
    std::forward<Body>(body)();
  } catch (const E& error) {
    const std::string message = error.what();
    if (message.find(part) == std::string::npos) {
      fail(file, line, std::string(text) + " threw \"" + message + "\", expected \"" + std::string(part) + '"');
    }
    return;
  }
  fail(file, line, std::string(text) + " did not throw");
}

inline void run(const Case& test) {
  try {
    test.body();
  } catch (const Abandoned&) {
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("uncaught exception: ") + error.what());
  } catch (...) {
    fail(test.name, 0, "uncaught exception of unknown type");
  }
}

inline int main(int argc, char** argv) {
  const std::string_view filter = argc > 1 ? argv[1] : "";
  if (filter == "--list") {
    for (const Case& test : cases()) std::cout << test.name << '\n';
    return EXIT_SUCCESS;
  }
  int ran = 0;
  int failed = 0;
  for (const Case& test : cases()) {
    if (std::string_view(test.name).find(filter) == std::string_view::npos) continue;
    ++ran;
    std::cout << "[ run  ] " << test.name << std::endl;  // flushed: a hang must show which test it is
    const int before = failures;
    run(test);
    if (failures == before) continue;
    ++failed;
    std::cout << "[ FAIL ] " << test.name << std::endl;
  }
  std::cout << ran - failed << " passed, " << failed << " failed" << std::endl;
  if (ran == 0) std::cerr << "no test" << (filter.empty() ? "" : " matches ") << filter << std::endl;
  return ran > 0 && failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace testing

#define TESTING_JOIN_(a, b) a##b
#define TESTING_JOIN(a, b) TESTING_JOIN_(a, b)
#define TESTING_TEST(name, id)                                                                      \
  static void TESTING_JOIN(testing_body_, id)();                                                    \
  static const ::testing::Registration TESTING_JOIN(testing_registration_, id)(                     \
      name, &TESTING_JOIN(testing_body_, id));                                                      \
  static void TESTING_JOIN(testing_body_, id)()

#define TEST(name) TESTING_TEST(name, __COUNTER__)

// Variadic, so that a condition may contain commas: EXPECT(std::pair{1, 2} == p).
#define EXPECT(...) \
  ((__VA_ARGS__) ? void() : ::testing::fail(__FILE__, __LINE__, "expected " #__VA_ARGS__))
#define REQUIRE(...)     \
  ((__VA_ARGS__) ? void() \
                 : (::testing::fail(__FILE__, __LINE__, "required " #__VA_ARGS__), throw ::testing::Abandoned{}))
#define EXPECT_EQ(a, b) ::testing::expect_equal((a), (b), #a, #b, __FILE__, __LINE__)
#define EXPECT_NEAR(a, b, tolerance) ::testing::expect_near((a), (b), (tolerance), #a, __FILE__, __LINE__)
// EXPECT_THROWS(std::invalid_argument, "negative", make(-1)): the type, a part of its message, the expression.
#define EXPECT_THROWS(type, part, ...) \
  ::testing::expect_throws<type>([&] { static_cast<void>(__VA_ARGS__); }, (part), #__VA_ARGS__, __FILE__, __LINE__)

int main(int argc, char** argv) { return ::testing::main(argc, argv); }
