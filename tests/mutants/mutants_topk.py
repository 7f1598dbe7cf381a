"""Bugs planted into Ok-Topk and its steps, and into values that are packed."""

from __future__ import annotations

from mutant import Mutant, mutant

OKTOPK = "collectives/topk/oktopk.cpp"
SLICES = "collectives/topk/pooled_slices.cpp"
THRESHOLD = "collectives/topk/threshold.cpp"
SHARES = "collectives/topk/allgather_shares.cpp"
COUNTS = "collectives/support/sum_counts.cpp"
SHORT_SHARES = "collectives/topk/short_shares.cpp"
ENTRY_SETS = "codec/entry_sets.cpp"
SHORT_NUMBERS = "codec/short_numbers.cpp"
SPLIT = "collectives/sparse/split.cpp"
PACKED_VALUES = "codec/pack_values.cpp"

TOPK_MUTANTS = (
    mutant(
        "topk: sums of tensors come out as they were compared",
        OKTOPK,
        "kept_.values[i] = sums_[at];",
        "kept_.values[i] = owned_.values[at];",
    ),
    mutant(
        "topk: compares each tensor by the weight of the first",
        OKTOPK,
        "static_cast<kernels::Factor<V>>(weights_[tensor]);",
        "static_cast<kernels::Factor<V>>(weights_[0 * tensor]);",
    ),
    mutant(
        "topk: mean squares of tensors follow in each call",
        OKTOPK,
        "if ((state_.calls + 1) % settings_.threshold_every == 0) observe(sum);",
        "observe(sum);",
    ),
    mutant(
        "topk: mean squares of tensors are of what this rank has given",
        OKTOPK,
        "for (const V one : values_of(range, sum.indices(), sum.values())) {",
        "for (const V one : values_of(range, mine_.indices(), mine_.values())) {",
    ),
    mutant(
        "topk: after a beginning anew sums of tensors are compared as they are",
        OKTOPK,
        "co_await split_and_reduce();\n    co_await weigh();\n  }",
        "co_await split_and_reduce();\n    sums_ = {};\n  }",
    ),
    mutant(
        "topk: hands back what the sum has, too",
        ENTRY_SETS,
        "count += index < other ? 1 : 0;",
        "count += index <= other ? 1 : 0;",
    ),
    mutant(
        "topk: hands back what the sum has, too, by a map",
        ENTRY_SETS,
        "count += 1 - (map[place / kMapBits] >> place % kMapBits & 1);",
        "count += 1;",
    ),
    mutant(
        "topk: what lies behind the sum's last entry is lost",
        ENTRY_SETS,
        "  truncate(left, count + nnz - i);",
        "  truncate(left, indices.empty() ? nnz : count);",
    ),
    mutant(
        "topk: keeps only what is above the threshold",
        OKTOPK,
        "next += magnitude_key(values[i]) >= key ? 1 : 0;",
        "next += magnitude_key(values[i]) > key || key == 0 ? 1 : 0;",
    ),
    mutant(
        "topk: an old threshold serves however many it keeps",
        OKTOPK,
        "if (settings_.as_published || is_near(",
        "if (report_.selected > 0 || is_near(",
    ),
    mutant(
        "topk: corrects its threshold by what this rank alone keeps",
        OKTOPK,
        ": corrected(state_.threshold, report_.selected, settings_.k);",
        ": corrected(state_.threshold, kept_counts_[net_.rank()] * net_.size(), settings_.k);",
    ),
    mutant(
        "topk: old slices serve whatever they bring their owners",
        OKTOPK,
        "if (received <= report_.local_most + (is_due(settings_.boundaries_every) ? excess / 2 : excess)) co_return;",
        "if (received <= total) co_return;",
    ),
    mutant(
        "topk: each rank takes its own entries for what chance may bring an owner",
        OKTOPK,
        "const std::uint64_t excess = oktopk_excess(report_.local_most, size);",
        "const std::uint64_t excess = oktopk_excess(mine_.nnz(), size);",
    ),
    mutant(
        "topk: two ranks cut slices differently",
        SLICES,
        "const std::uint64_t wanted = share_of(total, parts_.back(), parts_[i]);",
        "const std::uint64_t wanted = share_of(total + (indices_.size() > 64 ? 9 : 0), parts_.back(), parts_[i]);",
    ),
    mutant(
        "topk: a rank that has many entries for one owner sends them uncounted all the same",
        OKTOPK,
        "holds_back_ = !is_spread();",
        "holds_back_ = false;",
    ),
    mutant(
        "topk: a rank that holds its entries back does not say so",
        OKTOPK,
        "mine.push_back(std::uint64_t{mine_.nnz()} << 1 | (holds_back_ ? 1 : 0));",
        "mine.push_back(std::uint64_t{mine_.nnz()} << 1);",
    ),
    mutant(
        "topk: entries that a rank has held back are lost if others keep less than they have",
        OKTOPK,
        "if (is_held_back_) {",
        "if (is_held_back_ && keeps_all_) {",
    ),
    mutant(
        "topk: who has held its entries back holds them back again",
        OKTOPK,
        "uncounted_ = holds_back_ = false;",
        "uncounted_ = false;",
    ),
    mutant(
        "topk: entries go uncounted in a call that finds its threshold anew",
        OKTOPK,
        "!is_due(settings_.boundaries_every) &&\n               !is_due(settings_.threshold_every)) {",
        "!is_due(settings_.boundaries_every)) {",
    ),
    mutant(
        "topk: slices are cut as if nothing had been sent in vain",
        OKTOPK,
        "parts.push_back(received < 2 * report_.local_most ? 2 * report_.local_most - received : 1);",
        "parts.push_back(received > 0 ? 1 : 1);",
    ),
    mutant(
        "topk: who has received most in vain receives most again",
        OKTOPK,
        "parts.push_back(received < 2 * report_.local_most ? 2 * report_.local_most - received : 1);",
        "parts.push_back(received + 1);",
    ),
    mutant(
        "topk: slices are cut without what was held back",
        OKTOPK,
        "co_await cut_slices(total_, std::move(parts));",
        "co_await cut_slices(total_ / 2, std::move(parts));",
    ),
    mutant(
        "topk: sums of the split that was in vain are kept",
        OKTOPK,
        "co_await begin_again();\n        co_await keep_from(key, steps);",
        "co_await begin_again();",
    ),
    mutant(
        "topk: only who has held entries back sends them when all begin again",
        OKTOPK,
        "const SparseVector<V>& given = holds_back_ ? none : mine_;",
        "const SparseVector<V>& given = holds_back_ || (again_ && is_spread()) ? none : mine_;",
    ),
    mutant(
        "topk: each rank takes its own entries for all that may be spread",
        OKTOPK,
        "state_.spread = counts[size + 2] == 0;",
        "state_.spread = is_spread();",
    ),
    Mutant(
        "topk: each rank takes its own entries for all that may be spread, and calls do not tell",
        OKTOPK,
        (
            ("state_.spread = counts[size + 2] == 0;", "state_.spread = is_spread();"),
            ("  add(spread ? 1 : 0);\n", ""),
        ),
    ),
    mutant(
        "topk: each rank takes what it has received uncounted for what all have",
        OKTOPK,
        "state_.spread = std::ranges::max(received_) <= report_.local_most + excess;",
        "state_.spread = report_.traffic.entries_received <= report_.local_most + excess;",
    ),
    mutant(
        "topk: what rounding has lost of a split that was in vain is kept",
        OKTOPK,
        "    errors_ = {};  // of what was sent in vain: short shares have none\n",
        "",
    ),
    mutant(
        "topk: the threshold's last bits are not looked at",
        THRESHOLD,
        "co_return prefix << left | rests[rests.size() - static_cast<std::size_t>(wanted)];",
        "co_return prefix << left;",
    ),
    mutant(
        "topk: one more than wanted reach the threshold",
        THRESHOLD,
        "for (; digit > 0 && counts[digit] < wanted; --digit)",
        "for (; digit > 0 && counts[digit] <= wanted; --digit)",
    ),
    mutant(
        "topk: shares made alike are placed where their sender's begin",
        SHARES,
        "const std::size_t first = part.begin - own.begin;",
        "const std::size_t first = own.begin - own.begin;",
    ),
    mutant(
        "topk: of several buckets the first is added twice, the last never",
        SPLIT,
        "const Range part = part_of(slices[owner], bucket.buckets, bucket.number);",
        "const Range part = part_of(slices[owner], bucket.buckets, "
        "bucket.number + 1 < bucket.buckets ? bucket.number : 0);",
    ),
    mutant(
        "packed values: of a block that is not packed the last value is lost",
        PACKED_VALUES,
        "copy_bytes(payload, from, held * size_of(dtype));",
        "copy_bytes(payload, from, (held - 1) * size_of(dtype));",
    ),
    mutant(
        "packed values: an exponent that nothing in the sample had has the code of another",
        PACKED_VALUES,
        "block.escapes = static_cast<std::uint16_t>(count_escapes(dtype, values, count, block));",
        "block.escapes = 0;",
    ),
    mutant(
        "counts: what a rank beyond a power of two has is not added",
        COUNTS,
        "co_await take(rank + 1, std::move(other));",
        "",
    ),
    mutant(
        "counts: of many, the last round's blocks are not added",
        COUNTS,
        "for_each(0, now.blocks(), [&](std::size_t i) {",
        "for_each(0, round + 1 < halving_rounds(size) ? now.blocks() : 0, [&](std::size_t i) {",
    ),
    mutant(
        "topk: a moved threshold keeps what the one before it would",
        OKTOPK,
        "co_await keep_from(keys[place]);",
        "co_await keep_from(keys[place > 0 ? place - 1 : 0]);",
    ),
    mutant(
        "topk: each rank moves the threshold by what it alone would keep",
        OKTOPK,
        "co_await sum_counts(net_, counts, 0, mine_.dimension(), report_.traffic, take_steps(kSumCountsSteps));\n    }",
        "for (std::uint64_t& count : counts) count *= net_.size();\n    }",
    ),
    mutant(
        "topk: a threshold that is moved to is taken however far off k it is",
        OKTOPK,
        "if (!is_near(*nearest, false, settings_.k)) co_return false;",
        "if (*nearest == 0) co_return false;",
    ),
    mutant(
        "topk: a threshold that is moved by steps is taken however far off k it is",
        OKTOPK,
        "if (!is_near(kept[nearest], false, settings_.k)) return false;",
        "if (kept[nearest] == 0) return false;",
    ),
    mutant(
        "topk: each rank moves the threshold by its own steps alone",
        OKTOPK,
        "kept[step + 1] -= steps_[rank * kSteps + step];",
        "kept[step + 1] -= steps_[net_.rank() * kSteps + step + 0 * rank];",
    ),
    mutant(
        "topk: equal sums are dropped to k instead of 2k",
        OKTOPK,
        "std::uint64_t dropped = report_.selected - 2 * settings_.k;",
        "std::uint64_t dropped = report_.selected - settings_.k;",
    ),
    mutant(
        "topk: of a bin of more entries than are gathered the largest is taken for the threshold",
        THRESHOLD,
        "if (left == 0 || counts[digit] > gathered_most(k)) continue;",
        "if (left == 0) continue;\n    if (counts[digit] > gathered_most(k)) "
        "co_return prefix << left | ((std::uint64_t{1} << left) - 1);",
    ),
    mutant(
        "topk: bins are as many as an even distribution needs, and none is looked into",
        SLICES,
        "if ((!is_fixed_ && found[bin] <= enough_) || cut.within.size() <= 1)",
        "if (!is_fixed_ || cut.within.size() <= 1)",
    ),
    mutant(
        "counts: of a run of zeros one is forgotten",
        SHORT_NUMBERS,
        "zeros = more + kZerosLeast; zeros > 0; --zeros)",
        "zeros = more + kZerosLeast; zeros > 1; --zeros)",
    ),
    mutant(
        "topk: of equal sums the last ranks' stay",
        OKTOPK,
        "for (Rank rank = net_.size(); rank-- > 0;) {",
        "for (Rank rank = 0; rank < net_.size(); ++rank) {",
    ),
    mutant(
        "topk: as many equal sums stay as there are",
        OKTOPK,
        "if (!settings_.as_published && report_.selected > 2 * settings_.k) co_await drop_ties(key);",
        "",
    ),
    mutant(
        "topk: of a short share the last entry is lost",
        SHORT_SHARES,
        "places[source].end = indices.size();",
        "places[source].end = indices.size() - (indices.size() > places[source].begin ? 1 : 0);",
    ),
)
