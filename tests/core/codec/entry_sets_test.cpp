// What is left of entries without some indices, by a map of bits where entries are dense enough, by merging where they are
// rare; against a search for each entry.
#include "codec/entry_sets.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "testing.hpp"

namespace {

using namespace telegrad;

TEST("what is left has the entries at other indices, by a map and by merging") {
  for (const std::size_t stride : {1, 2, 63, 64, 5000}) {
    for (const std::size_t begin : {std::size_t{0}, std::size_t{100}}) {
      std::vector<std::uint32_t> own;
      std::vector<std::uint32_t> others;
      const std::size_t end = begin + 200 * stride;
      for (std::size_t i = 0; i < 200; ++i) {
        if (i % 3 != 1) own.push_back(static_cast<std::uint32_t>(begin + i * stride));
        if (i % 5 != 2 && i < 190) others.push_back(static_cast<std::uint32_t>(begin + i * stride));
      }
      if (begin > 0) others.insert(others.begin(), 7);  // outside of the range
      others.push_back(static_cast<std::uint32_t>(end + 3));
      std::vector<float> values(own.begin(), own.end());
      const SparseView<float> entries{{begin, end}, false, own, values};
      const OwnedSlice<float> left = entries_without(entries, others);
      std::vector<std::uint32_t> expected;
      for (const std::uint32_t index : own) {
        if (!std::ranges::binary_search(others, index)) expected.push_back(index);
      }
      EXPECT(std::ranges::equal(left.indices.span(), expected));
      EXPECT(std::ranges::equal(left.values.span(), std::vector<float>(expected.begin(), expected.end())));
      const OwnedSlice<float> all = entries_without(entries, {});
      EXPECT(std::ranges::equal(all.indices.span(), own));
    }
  }
}

}  // namespace
