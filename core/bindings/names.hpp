#pragma once
// Names as Python gives them. Literals of a program are interned strings, found by their addresses; others, such as those
// that were read from a file, are compared.

#include <array>
#include <cstddef>
#include <utility>

#include "bindings/binding.hpp"
#include "transport/envelope.hpp"

namespace telegrad::bindings {

/// A Python string, one object for all that are equal; never given back.
inline PyObject* interned(const char* name) {
  PyObject* const string = PyUnicode_InternFromString(name);
  if (string == nullptr) throw nb::python_error();
  return string;
}

inline constexpr std::array kReductions{Reduction::sum, Reduction::avg, Reduction::prod,
                                        Reduction::min, Reduction::max, Reduction::max_abs,
                                        Reduction::band, Reduction::bor, Reduction::bxor,
                                        Reduction::land, Reduction::lor, Reduction::lxor};

template <class Value, std::size_t kNumber>
class Names {
 public:
  explicit Names(const std::array<std::pair<const char*, Value>, kNumber>& named) {
    for (std::size_t i = 0; i < kNumber; ++i) entries_[i] = {interned(named[i].first), named[i].second};
  }

  /// Null: it is none of them, or no string.
  const Value* find(nb::handle name) const {
    for (const auto& [interned, value] : entries_) {
      if (interned == name.ptr()) return &value;
    }
    if (!PyUnicode_Check(name.ptr())) return nullptr;
    for (const auto& [interned, value] : entries_) {
      if (PyUnicode_Compare(interned, name.ptr()) == 0) return &value;
    }
    return nullptr;
  }

 private:
  std::array<std::pair<PyObject*, Value>, kNumber> entries_{};
};

inline const auto& reduction_names() {
  static const Names names([] {
    std::array<std::pair<const char*, Reduction>, kReductions.size()> named{};
    for (std::size_t i = 0; i < kReductions.size(); ++i) named[i] = {name_of(kReductions[i]), kReductions[i]};
    return named;
  }());
  return names;
}

inline const auto& dense_algorithm_names() {
  static const Names names(std::array{std::pair{"auto", Algorithm::automatic}, std::pair{"ring", Algorithm::ring},
                                              std::pair{"recursive_doubling", Algorithm::recursive_doubling},
                                              std::pair{"rabenseifner", Algorithm::rabenseifner},
                                              std::pair{"two_level", Algorithm::two_level}});
  return names;
}

}  // namespace telegrad::bindings
