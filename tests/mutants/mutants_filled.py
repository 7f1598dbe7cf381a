"""Bugs planted into dense sums of entries that are read where they lie (marks in place of indices)."""

from __future__ import annotations

from mutant import mutant

FILLED = "collectives/sparse/filled.cpp"
SPARSE_AS_DENSE = "collectives/sparse/as_dense.cpp"
SPARSE_AUTO = "collectives/sparse/auto.cpp"
STREAM = "codec/sparse_vector.cpp"
MARKS = "kernels/marks.cpp"
RING = "collectives/support/ring.cpp"
REDUCE_MARKED = "kernels/reduce_marked.cpp"

FILLED_MUTANTS = (
    mutant(
        "filled: a block begins with the values of the one before",
        FILLED,
        "next_[owner] = begin + count.value_or(0);",
        "next_[owner] = begin;",
    ),
    mutant(
        "filled: the entries of a slice begin one too early",
        FILLED,
        "begins_.push_back(static_cast<std::size_t>(first - mine.indices.begin()));",
        "begins_.push_back(static_cast<std::size_t>(first - mine.indices.begin()) - (owner == 2 ? 1 : 0));",
    ),
    mutant(
        "filled: the mean is a sum",
        FILLED,
        "if (reduction_ == Reduction::avg) kernels::scale(",
        "if (reduction_ == Reduction::none) kernels::scale(",
    ),
    mutant(
        "filled: a chunk's values are those of the first one",
        REDUCE_MARKED,
        "  input.values = input.values.subspan(count);",
        "  input.values = input.values.subspan(input.marks.empty() ? count : 0);",
    ),
    mutant(
        "filled: what a rank lacks is 0 to all reductions",
        REDUCE_MARKED,
        "if (!next.marks.empty()) expand(expanded, next, neutral);",
        "if (!next.marks.empty()) expand(expanded, next, V{});",
    ),
    mutant(
        "filled: the last input of a sum is missing",
        REDUCE_MARKED,
        "words = kSum<V>(std::span(left), out.data(), out.size() / kWord);",
        "words = kSum<V>(std::span(left).first(left.size() - 1), out.data(), out.size() / kWord);\n"
        "    left.back().values = {};",
    ),
    mutant(
        "filled: from the fifth input on sums begin anew",
        REDUCE_MARKED,
        "      sum_some<false>(",
        "      sum_some<true>(",
    ),
    mutant(
        "filled: at the end of an input a vector's first value is the one before",
        REDUCE_MARKED,
        "const auto next = kReadsOn ? Vector::load(first) :",
        "const auto next = kReadsOn      ? Vector::load(first)\n"
        "                          : before != 0 ? Vector::load(first - 1, std::popcount(mask))\n"
        "                                        :",
    ),
    mutant(
        "filled: its own share is missing",
        FILLED,
        "co_await share_of(rank, range, own_marks, shares[rank].values);",
        "co_await share_of(rank, range, own_marks, shares[rank].values);\n    std::ranges::fill(own_marks.span(), 0U);",
    ),
    mutant(
        "filled: an owner's sums go to the rank before only",
        FILLED,
        "under_way.emplace_back(net_, ahead(distance), sum_step(number), sum);",
        "if (distance + 1 == net_.size()) under_way.emplace_back(net_, ahead(distance), sum_step(number), sum);",
    ),
    mutant(
        "filled: the last rank's share is the first one's again",
        FILLED,
        "coming_[source].emplace_back(net_, source, share_step(begun_), block(net_.rank(), begun_).size());",
        "coming_[source].emplace_back(net_, source, share_step(0), block(net_.rank(), begun_).size());",
    ),
    mutant(
        "filled, borrowed: a block begins with the values of the one before",
        SPARSE_AS_DENSE,
        "      next += *count;\n",
        "      next += begin == elements.begin ? *count : 0;\n",
    ),
    mutant(
        "filled, borrowed: what nobody has is 0 to all reductions",
        SPARSE_AS_DENSE,
        "kernels::expand_marks<V>(values_of(out, block), marks, values, kernels::absent_element<V>(reduction_));",
        "kernels::expand_marks<V>(values_of(out, block), marks, values, V{});",
    ),
    mutant(
        "filled, borrowed: round a ring all blocks of a piece are added to its first one",
        SPARSE_AS_DENSE,
        "const std::span<const V> before(reinterpret_cast<const V*>(partial.data()) + block.begin, block.size());",
        "const std::span<const V> before(reinterpret_cast<const V*>(partial.data()), block.size());",
    ),
    mutant(
        "filled, borrowed: round a ring a rank's own block lacks its share",
        RING,
        "    own.values = made;",
        "    own.values = made;\n    std::ranges::fill(made, std::byte{0});",
    ),
    mutant(
        "filled, borrowed: a copy lacks the last value",
        SPARSE_AUTO,
        "co_await copy(net_, std::as_bytes(claimed.values), std::as_writable_bytes(values.span()));",
        "co_await copy(net_, std::as_bytes(claimed.values), std::as_writable_bytes(values.span()));\n"
        "    values.span().back() = V{};",
    ),
    mutant(
        "filled, borrowed: all marks are those of the first block",
        STREAM,
        "kernels::slice_marks(view.marks, static_cast<std::size_t>(block.begin), size, marks);",
        "kernels::slice_marks(view.marks, 0, size, marks);",
    ),
    mutant(
        "filled, marks: a slice that begins within a word has the word's own marks",
        MARKS,
        "slice[i] = within == 0 ? from[i] : from[i] >> within | from[i + 1] << (kWord - within);",
        "slice[i] = from[i] >> within;",
    ),
    mutant(
        "filled, marks: the last part of a slice lacks what lies in the next word",
        MARKS,
        "if (within + rest > kWord) last |= from[words + 1] << (kWord - within);",
        "",
    ),
)
