"""Bugs planted into the sums of sparse vectors, and into messages of any size."""

from __future__ import annotations

from mutant import mutant

SPARSE = "collectives/sparse/split.cpp"
SPARSE_DOUBLING = "collectives/sparse/doubling.cpp"
SPARSE_AS_DENSE = "collectives/sparse/as_dense.cpp"
SPARSE_OUTPUT = "collectives/sparse/output.cpp"
SUM_OBSERVATION = "collectives/sparse/observation.cpp"
SPARSE_RING = "collectives/sparse/ring.cpp"
ALLGATHER_SPARSE = "collectives/sparse/allgather.cpp"
ALLGATHER_SHORT = "collectives/support/allgather_short.cpp"
REDUCE_SCATTER_SPARSE = "collectives/sparse/reduce_scatter.cpp"
BALANCED = "collectives/sparse/balanced_slices.cpp"
ANY_SIZE = "collectives/support/any_size.cpp"
SLICES = "codec/slices.cpp"
SLICE_REDUCTION = "codec/slice_reduction.cpp"
WIRE = "codec/wire.cpp"
COUNTS = "collectives/support/counts.cpp"
EXCHANGED_SUMS = "collectives/sparse/exchanged_sums.cpp"
KNOWN_VALUES = "codec/known_values.cpp"
LEFT_OUT = "codec/left_out.cpp"
REDUCE_SORTED = "kernels/reduce_sorted.cpp"
ASSEMBLY = "codec/assembly.cpp"
STAGED = "session/staged.cpp"
PACKED_VALUES = "codec/pack_values.cpp"

SPARSE_MUTANTS = (
    mutant(
        "staged slice: indices count from the beginning of the whole",
        STAGED,
        "index -= static_cast<std::uint32_t>(own.begin);",
        "index -= static_cast<std::uint32_t>(0 * own.begin);",
    ),
    mutant(
        "staged gather: the indices of all ranks are in one place",
        STAGED,
        "all.indices.subspan(rank * room, view.nnz())",
        "all.indices.subspan(0, view.nnz())",
    ),
    mutant(
        "staged gather: a rank's values are where its neighbour's are",
        STAGED,
        "all.values.subspan(rank * room, view.nnz())",
        "all.values.subspan((rank + 1) % net.size() * room, view.nnz())",
    ),
    mutant(
        "staged gather: every rank has as many entries as this one",
        STAGED,
        "all.form[rank] = static_cast<std::int64_t>(view.nnz());",
        "all.form[rank] = *mine.count;",
    ),
    mutant(
        "staged: the values are the last that there is room for",
        STAGED,
        "co_await copy_to(net, mine.values.first(count), values);",
        "co_await copy_to(net, mine.values.last(count), values);",
    ),
    mutant(
        "sparse: who waits for an earlier sum is not told that it is over",
        SUM_OBSERVATION,
        "beginning->ready_.push(std::exchange(beginning->waiter_, {}));",
        "beginning->waiter_ = {};",
    ),
    mutant(
        "sparse: the mean is a sum",
        SPARSE,
        "if (how.reduction == Reduction::avg) co_await",
        "if (how.reduction == Reduction::none) co_await",
    ),
    mutant(
        "sparse: owns its neighbour's slice",
        SPARSE,
        "const IndexRange owned = split.slice(rank);",
        "const IndexRange owned = split.slice((rank + 1) % net.size());",
    ),
    mutant(
        "sparse: adds its neighbour's share instead of its own",
        SPARSE,
        "return Decoded<V>(split.share(rank), {});",
        "return decode<V>(incoming[(rank + 1) % net.size()], owned);",
    ),
    mutant(
        "sparse: does not look whether a message is damaged",
        SPARSE,
        "if (!decoded[source].ok()) co_await check_decoded(net, source, decoded[source]);",
        "",
    ),
    mutant(
        "sparse: a buffer is freed while it is sent",
        SPARSE,
        "co_await sends.front().sending;\n        sends.pop_front();",
        "sends.front().encoded = Buffer();\n        co_await sends.front().sending;\n        sends.pop_front();",
        "18..40",
    ),
    mutant(
        "sparse: expects shorter messages than may come",
        SPARSE,
        "std::size_t most() const { return most_bytes<V>(slices); }",
        "std::size_t most() const { return most_bytes<V>(slices) * 2 / 3; }",
    ),
    mutant(
        "sparse, doubling: the mean is a sum",
        SPARSE_DOUBLING,
        "&& how_.reduction == Reduction::avg) co_await",
        "&& how_.reduction == Reduction::none) co_await",
    ),
    mutant(
        "sparse, doubling: the last round is left out",
        SPARSE_DOUBLING,
        "for (Rank bit = 0; bit < rounds_; ++bit) {",
        "for (Rank bit = 0; bit + 1 < rounds_; ++bit) {",
    ),
    mutant(
        "sparse, doubling: who takes a folded rank's entries loses its own",
        SPARSE_DOUBLING,
        "co_await take(mine_.view(), other, rank + 1);",
        "co_await take(std::nullopt, other, rank + 1);",
    ),
    mutant(
        "sparse, open: a rank gives up by what it alone knows",
        SPARSE_DOUBLING,
        "verdict_ = decision_->after(bit, half_, static_cast<double>(sum_.view().nnz()));",
        "verdict_ = decision_->alone(static_cast<double>(mine_.nnz() * (1 + net_.rank() % 3)));",
    ),
    mutant(
        "sparse, open: who has given up is talked into a dense sum",
        SPARSE_DOUBLING,
        "leaving_.bytes(), most_);\n    verdict_ = std::max(verdict_, verdict_in(other));",
        "leaving_.bytes(), most_);\n"
        "    if (verdict_in(other) != SparseVerdict::go_on) verdict_ = SparseVerdict::dense;",
    ),
    mutant(
        "sparse, open: a folded rank is not told",
        SPARSE_DOUBLING,
        "if (folded()) tell(net_.rank() + 1, kUnfold);",
        "",
    ),
    mutant(
        "sparse, open: who splits does not listen any more",
        SPARSE_DOUBLING,
        "for (Rank bit = next_bit_; bit < rounds_; ++bit) co_await hear(partner(bit), kFirstRound + bit);",
        "",
    ),
    mutant(
        "sparse, open: a dense sum without this rank's entries",
        SPARSE_AS_DENSE,
        "      co_await write_view(net, view, output, how.reduction);\n",
        "      std::fill(output.begin(), output.end(), V{});\n",
    ),
    mutant(
        "sparse, ring: adds the share of another slice",
        SPARSE_RING,
        "{came->view(), share(slice)};",
        "{came->view(), share(IndexRange{slice.begin, slice.begin})};",
    ),
    mutant(
        "messages of any size: the last piece is not sent",
        ANY_SIZE,
        "while (!all_begun()) co_await send_more();",
        "while (rest_.size() > piece_bytes(net_)) co_await send_more();",
    ),
    mutant(
        "messages of any size: pieces after the first land one header too far",
        ANY_SIZE,
        "Bytes rest = whole.bytes().subspan(first.size() - sizeof word);",
        "Bytes rest = whole.bytes().subspan(first.size());",
    ),
    mutant(
        "messages of any size: what is left of a first piece is taken for a whole message",
        ANY_SIZE,
        "if (others_follow(first.bytes())) {",
        "if (false) {",
    ),
    mutant(
        "sparse, allgather: a vector is taken for the next rank's",
        ALLGATHER_SPARSE,
        "vectors[source]); });",
        "vectors[(source + 1) % net.size()]); });",
    ),
    mutant(
        "sparse, allgather: the vectors that are longer than others are left out",
        ALLGATHER_SPARSE,
        "if (there.size() == net.size()) co_return vectors;",
        "co_return vectors;",
    ),
    mutant(
        "sparse, allgather of short ones: a rank's stream is taken for the next rank's",
        ALLGATHER_SHORT,
        "all.by_rank[(rank + hops) % size] = known[hops];",
        "all.by_rank[(rank + hops + 1) % size] = known[hops];",
    ),
    mutant(
        "sparse, reduce_scatter: slices are alike, whatever was asked for",
        REDUCE_SCATTER_SPARSE,
        "reduce_owned_slice(net, mine, slices, how);",
        "reduce_owned_slice(net, mine, Partition(slices.count(), slices.blocks()), how);",
    ),
    mutant(
        "sparse, reduce_scatter: the indices of a slice that was dense begin at zero",
        SLICES,
        "const auto base = static_cast<std::uint32_t>(slice.range.begin);",
        "const std::uint32_t base = 0;",
    ),
    mutant(
        "sparse, balanced: a rank's own samples stand for another's too, so that ranks cut differently",
        BALANCED,
        "found.push_back(read(rank));",
        "found.push_back(read(rank == 0 ? net.rank() : rank));",
    ),
    mutant(
        "sparse, balanced: does not look whether samples are damaged",
        BALANCED,
        "if (!fault.empty()) {",
        "if (fault.empty() && fault.size() == 1) {",
    ),
    mutant(
        "sparse: a dense piece lands at the beginning",
        ASSEMBLY,
        "write_dense(view, values_.span().subspan(range.begin, range.size()), reduction_);",
        "write_dense(view, values_.span().first(range.size()), reduction_);",
    ),
    mutant(
        "sparse: the last of several parts of a sum is lost",
        SLICE_REDUCTION,
        "for (const SparseView<V>& part : parts) runs.push_back(part.entries());",
        "if (parts[0].range.end < range().end || done_ == range().begin)\n"
        "    for (const SparseView<V>& part : parts) runs.push_back(part.entries());",
    ),
    mutant(
        "sparse: the last of several parts of a sum has one rank's share only",
        SLICE_REDUCTION,
        "for (const SparseView<V>& part : parts) runs.push_back(part.entries());",
        "for (const SparseView<V>& part : parts)\n"
        "    if (runs.empty() || part.range.end < range().end || done_ == range().begin)\n"
        "      runs.push_back(part.entries());",
    ),
    mutant(
        "sparse: the result is written only as far as its first slice of work",
        SPARSE_OUTPUT,
        "write_dense(view.slice({first + begin, first + end}),",
        "if (begin == 0) write_dense(view.slice({first + begin, first + end}),",
    ),
    mutant(
        "sparse: a rank's count is taken for its neighbour's",
        COUNTS,
        "counts[from].resize(numbers);\n    std::memcpy(counts[from].data(),",
        "counts[(from + 1) % size].resize(numbers);\n    std::memcpy(counts[(from + 1) % size].data(),",
    ),
    mutant(
        "sparse: values are left out wherever the receiver has an entry",
        LEFT_OUT,
        "_mm512_mask_cmpeq_epi32_mask(lanes, values, theirs_there);",
        "_mm512_mask_cmpge_epu32_mask(lanes, theirs_there, _mm512_setzero_si512());",
    ),
    mutant(
        "sparse: values beyond the last whole word are left out wherever the receiver has an entry",
        LEFT_OUT,
        "const bool same = theirs_too && same_bits(sum.values[i], given.values[at.given]);",
        "const bool same = theirs_too;",
    ),
    mutant(
        "sparse: what was left out of a mean comes back undivided",
        KNOWN_VALUES,
        "  const Scaled<V> scaled(given);\n  Rest rest;",
        "  const Scaled<V> scaled(GivenEntries<V>{given.entries, 1.0});\n  Rest rest;",
    ),
    mutant(
        "sparse: what another rank gave is left out of a sum",
        EXCHANGED_SUMS,
        "const Rank receiver = order_.receiver(round);",
        "const Rank receiver = (order_.receiver(round) + 1) % net_.size();",
    ),
    mutant(
        "sparse: what two ranks gave is left out for each of them",
        LEFT_OUT,
        "const std::uint64_t alone = _mm512_cmpeq_epi8_mask(gave, wanted);",
        "const std::uint64_t alone = mine;",
    ),
    mutant(
        "sparse: the rank after the giver is said to have given",
        REDUCE_SORTED,
        "1U << (givers != nullptr ? input : 0)",
        "1U << (givers != nullptr ? (input + 1) % rest.size() : 0)",
    ),
    mutant(
        "sparse: all owners are taken to send as many parts as this rank",
        EXCHANGED_SUMS,
        "part_of_slice(slice_of(slices_, owner), counts_of_[owner].size(), part);",
        "part_of_slice(slice_of(slices_, owner), parts_.size(), part);",
    ),
    mutant(
        "sparse: who has one part does not wait for those of others",
        EXCHANGED_SUMS,
        "for (std::size_t part = 1; part < most_parts_; ++part)",
        "for (std::size_t part = 1; part < parts_.size(); ++part)",
    ),
    mutant(
        "sparse: a part is sent before it is summed",
        EXCHANGED_SUMS,
        "      co_await made_.until(next_part + 1);\n",
        "",
    ),
    mutant(
        "sparse: parts of a slice are placed one too early",
        EXCHANGED_SUMS,
        "co_await whole_.place(first_slice_[owner] + part, message.bytes(), given);",
        "co_await whole_.place(first_slice_[owner] + (part == 0 ? 0 : part - 1), message.bytes(), given);",
    ),
    mutant(
        "sparse: slices overlap by an entry in the whole",
        ASSEMBLY,
        "first_.push_back(total);",
        "first_.push_back(total == 0 ? 0 : total - 1);",
    ),
    mutant(
        "sparse: a block of indices beyond the first begins one too early",
        WIRE,
        "range.begin + block * kBlock);",
        "range.begin + block * kBlock - (block > 0 ? 1 : 0));",
    ),
    mutant(
        "sparse: all blocks of indices begin where the first does",
        WIRE,
        "range.begin + block * kBlock);",
        "range.begin);",
    ),
    mutant(
        "sparse: blocks are counted from the wrong place",
        WIRE,
        "view.range.begin + (block + 1) * kBlock);",
        "view.range.begin + (block + 1) * kBlock + (block > 0 ? 1 : 0));",
    ),
    mutant(
        "sparse: blocks of packed values begin one value too early",
        PACKED_VALUES,
        "std::byte* const to = values.data() + begin * size_of(dtype);",
        "std::byte* const to = values.data() + (begin - (begin > 0 ? 1 : 0)) * size_of(dtype);",
    ),
)
