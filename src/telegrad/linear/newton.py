"""Newton's method for smooth losses, and dual methods for both hinges, among ranks that hold rows.

The core takes the steps (``core/linear/newton.hpp``). A step sums some vectors over the ranks: a gradient, and products
with the Hessian. Each rank has the weights of its own rows' features. A feature of several ranks has an owner, to which
these send their terms and which sends back the sum. Where that would save little, all ranks have all weights, and sum
dense vectors. These sums do not round, so that any number of ranks finds the same bits. With ``optimizer="dual"`` each
rank takes all rows, if these are few, and descends by the coordinates of the dual (``core/linear/dual_descent.hpp``).
With more rows all take Newton's steps, and for the hinge descend on some rows then (Osuna, Freund and Girosi 1997).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.linear.losses import F32, F64
from telegrad.linear.model import LinearModel, Pass, State
from telegrad.linear.problem import Problem

_NEAR = 0.1  # times the square of the part of the rows that is gathered: a gap at which these suffice
_SLOW = 200  # iterations of a step: what a descent on few rows may save, which all ranks take alike
_ROUNDS = 16  # of descents on few rows in a step: the gap need not fall in each
_STEPS = 4  # of such a descent
_NO_PART, _FAR = 0.1, 1e20  # of a mean row's part of `tol`; of distances from the margin, so that these come behind
_BINS, _OF_TWO = 2000, 8  # in which rows are ordered: so many for each power of two
_DRAWS = 4096  # parts that rows of a bin are drawn into


def _drawn(numbers: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.int64]:
    """A random part for each row, which follows from its number and the seed alone (splitmix64; Steele et al. 2014)."""
    z = (numbers + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(_DRAWS)).astype(np.int64)


class Newton:
    """An epoch is a step: one linear system, solved by conjugate gradients or directly, and a line search."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._comm_s, self._sent = problem, 0.0, 0
        self._solved, self._shared = problem.solved, problem.shared
        self._kept: tuple[F32, F64] | None = None  # weights and biases of all features, if vectors are split
        self._places: dict[tuple[int, int], Any] = {}
        trained, targets, weights = self._solved
        settings, counted = problem.settings, 0 if self._shared is None else self._shared.counted.ctypes.data
        weighed = 0 if weights is None else weights.ctypes.data
        data = (problem.view, trained.ctypes.data, trained.size, targets.ctypes.data, weighed)
        shape = (problem.share.trained_total, problem.features, problem.classes, problem.loss)
        asked = (settings.l2, settings.l1, settings.bias, settings.tol, problem.descends, settings.seed)
        place = (0, 1) if problem.pooled else (problem.rank, problem.world_size)
        split = (problem.occurring, counted, *place)
        arguments: Any = (*data, *shape, *asked, *split, problem.team, self._reduce)  # in the order of the binding
        self._newton = _core.Newton(*arguments)
        self._duals: F64 | None = None
        self._last: _core.NewtonStep | None = None
        self._settled = False  # or restored, since then
        if self._shared is not None:
            self._kept = np.zeros((problem.all_features, problem.classes), np.float32), np.zeros(problem.classes)

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """One step."""
        began_s, self._comm_s, self._sent = time.perf_counter(), 0.0, 0
        if self._problem.pooled and self._problem.comm is not None:
            self._problem.comm.barrier()  # a lost rank is noticed
        step, sums = self._next(number)
        ended = step.converged or step.stuck
        if self._shared is not None:
            self._kept = self._every() if self._problem.keeps_models else None
        compute_s = time.perf_counter() - began_s - self._comm_s
        on_step(1, 1)
        found = (step.objective, step.gap, ended, step.converged)
        return Pass(sums, step.loss, compute_s, self._comm_s, self._sent, *found)

    def _next(self, number: int) -> tuple[_core.NewtonStep, int]:
        """A step, the last part of it if it has several, and how many sums over the ranks all took."""
        if not self._newton.taken:
            step = self._newton.step(last=number + 1 == self._problem.settings.most_epochs)
        elif self._settled:
            step = self._newton.take(self._own_duals().ctypes.data, self._solved[0].size)
        else:
            assert self._last is not None
            step = self._last
        sums = 0 if step is self._last else step.sums
        self._settled = False
        is_near = step.gap <= _NEAR * self._problem.gathered**2
        if (is_near and step.iterations >= _SLOW) or self._newton.taken:
            for part in range(_ROUNDS):
                if step.converged:
                    break
                step = self._on_few_rows(number * _ROUNDS + part, step.gap)
                sums += step.sums
        self._last = step
        return step, sums

    def _on_few_rows(self, number: int, gap: float) -> _core.NewtonStep:
        """A descent on as many rows as each rank may take, the same on all: its bits do not depend on the rank."""
        problem, (trained, targets, weights) = self._problem, self._solved
        assert problem.used is not None
        settings, rows, chosen = problem.settings, problem.numbered, trained.astype(np.int64)
        lengths = np.diff(rows.offsets.astype(np.int64))[chosen]
        lacking, duals, scores = np.empty(chosen.size), np.empty(chosen.size), np.empty(chosen.size)
        self._newton.write_margins(duals.ctypes.data, lacking.ctypes.data, chosen.size)
        moves = self._nearest(lacking, duals, lengths, number)
        imbalance = self._newton.fix(moves.ctypes.data, duals.ctypes.data, scores.ctypes.data, chosen.size) / (
            settings.l2 * problem.trained_weight
        )
        own, lengths = chosen[moves], lengths[moves]
        entries = np.repeat(rows.offsets[own].astype(np.int64) - (np.cumsum(lengths) - lengths), lengths)
        entries += np.arange(entries.size)
        sizes = self._gather(np.array([own.size, entries.size], np.int64), [2] * problem.world_size)
        by_row, by_entry = sizes.reshape(-1, 2).T.tolist()
        shares = np.ones(own.size, np.float32) if weights is None else weights[own]
        labels, shares, lengths, fixed, moved = (
            self._gather(one, by_row) for one in (targets[own], shares, lengths, scores[moves], duals[moves])
        )
        numbers = self._gather(problem.used[rows.indices[entries]], by_entry)
        values = self._gather(rows.values[entries], by_entry)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.uint64)
        numbering = _core.Numbering(numbers.ctypes.data, numbers.size, problem.all_features)
        numbering.renumber(numbers.ctypes.data, numbers.ctypes.data, numbers.size)
        _core.descend_duals(
            _core.RowsView(offsets.ctypes.data, numbers.ctypes.data, values.ctypes.data, labels.size, numbers.size),
            labels.ctypes.data,
            shares.ctypes.data,
            fixed.ctypes.data,
            moved.ctypes.data,
            numbering.size,
            settings.l2,
            settings.bias,
            max(settings.tol / 10, gap / 100),
            settings.seed,
            _STEPS,
            self._newton.present_bias,
            imbalance,
            self._newton.objective,
            problem.trained_weight,
            lambda: None,
        )
        first = sum(by_row[: problem.rank])
        duals[moves] = moved[first : first + own.size]
        return self._newton.take(duals.ctypes.data, duals.size)

    def _gather(self, own: Any, counts: list[int]) -> Any:
        """Those of all ranks, in the order of ranks."""
        comm = self._problem.comm
        return own if comm is None else comm.all_gather(own, counts=counts)

    def _nearest(self, lacking: F64, duals: F64, lengths: Any, number: int) -> Any:
        """Which of this rank's rows move: those first of which most of the gap is, then the nearest to the margin. Of
        rows that are alike random ones, the same for any number of ranks."""
        problem, parts = self._problem, np.maximum(lacking, 0) - duals * lacking
        least = _NO_PART * problem.settings.tol * self._newton.objective
        far = np.where(parts > least, 1 / np.maximum(parts, least), np.abs(lacking) * _FAR + 1 / least)
        bins = np.clip(_OF_TWO * np.log2(far) + _BINS / 2, 0, _BINS - 1).astype(np.int64)
        before = self._entries(bins, lengths, _BINS)
        most = problem.gathered * before[-1]
        last = int(np.searchsorted(before[1:], most, side="right"))
        moves = bins < last
        alike = np.flatnonzero(bins == last)
        numbers = (problem.share.trained_first + alike).astype(np.uint64)
        drawn = _drawn(numbers, int(np.random.default_rng([problem.settings.seed, number]).integers(2**62)))
        room = np.searchsorted(before[last] + self._entries(drawn, lengths[alike], _DRAWS)[1:], most, side="right")
        moves[alike[drawn < room]] = True
        return moves

    def _entries(self, bins: Any, lengths: Any, count: int) -> F64:
        """How many entries the rows of all ranks have before each bin, and in all."""
        entries: F64 = np.bincount(bins, lengths, count).astype(np.float64)
        if self._problem.comm is not None:
            self._problem.comm.all_reduce(entries)
        return np.append(0, np.cumsum(entries))

    def model(self) -> LinearModel:
        """Called by all ranks, unless the problem keeps models."""
        weights, biases = self._kept or self._every()
        return self._problem.model(np.ascontiguousarray(weights[:, 0]), float(biases[0]))

    def softmax(self) -> tuple[F32, F64]:
        """Weights, (classes, features), and biases, whose mean is 0, of several classes. Called by all ranks."""
        weights, biases = self._kept or self._every()
        return np.ascontiguousarray(weights.T), biases - biases.mean()

    def _every(self) -> tuple[F32, F64]:
        """Weights of all features, also of those of other ranks, and biases."""
        problem, comm = self._problem, self._problem.comm
        own, biases = np.empty((problem.features, problem.classes), np.float32), np.empty(problem.classes)
        self._newton.write_weights(own.ctypes.data, own.size)
        self._newton.write_biases(biases.ctypes.data, biases.size)
        used = problem.used
        assert used is not None
        if self._shared is not None and comm is not None:
            counted = self._shared.counted.view(bool)
            counts = comm.all_gather(np.array([np.count_nonzero(counted)], np.int64))[:, 0]
            used = comm.all_gather(used[counted], counts=counts.tolist())
            own = comm.all_gather(own[counted].reshape(-1), counts=(counts * problem.classes).tolist())
        every = np.zeros((problem.all_features, problem.classes), np.float32)
        every[used] = own.reshape(-1, problem.classes)
        return every, biases

    def settle(self, ends: bool = False) -> None:
        self._newton.settle(ends)
        self._settled = True
        self._kept = None if self._shared is None else self._every()
        if not self._newton.dual_count:
            return
        duals = self._own_duals()
        every, comm = duals[:-1], self._problem.comm
        if comm is not None and not self._problem.pooled:
            counts = comm.all_gather(np.array([every.size], np.int64))[:, 0].tolist()
            every = comm.all_gather(np.ascontiguousarray(every), counts=counts)
        self._duals = np.append(every, duals[-1])

    def _own_duals(self) -> F64:
        """Behind them what the core keeps with them."""
        duals = np.empty(self._newton.dual_count)
        self._newton.write_duals(duals.ctypes.data)
        return duals

    def state(self) -> State:
        return State(self.model(), duals=self._duals)

    def restore(self, state: State) -> None:
        weights, duals = self._problem.of_own(state.model.weights), np.empty(0)
        if state.duals is not None:
            first = 0 if self._problem.pooled else self._problem.share.trained_first
            duals = np.append(state.duals[first : first + self._solved[0].size], state.duals[-1])
        self._settled = True
        self._newton.restore(weights.ctypes.data, weights.size, state.model.bias, duals.ctypes.data, duals.size)
        if self._shared is not None:
            self._kept = state.model.weights[:, None], np.array([state.model.bias])

    def _reduce(self, address: int, count: int, of_feature: int, largest: bool) -> None:
        """Sums, or finds the largest numbers, in place over the ranks. One rank's steps call this, too, so that Ctrl-C
        ends them."""
        comm = self._problem.comm
        if comm is None or self._problem.pooled:
            return
        began_s = time.perf_counter()
        numbers: F64 = np.ctypeslib.as_array((ctypes.c_double * count).from_address(address))
        if of_feature and self._shared is not None:
            self._exchange(comm, numbers, of_feature, largest)
        else:
            comm.all_reduce(numbers, "max" if largest else "sum")
            self._sent += count
        self._comm_s += time.perf_counter() - began_s

    def _exchange(self, comm: Any, numbers: F64, of_feature: int, largest: bool) -> None:
        """By way of owners; each gets the numbers behind those of features, too."""
        assert self._shared is not None
        more = numbers.size - self._problem.features * of_feature
        if (of_feature, more) not in self._places:
            self._places[of_feature, more] = self._shared.lists(of_feature, more)
        gathered, sent, scattered, received, size = self._places[of_feature, more]
        parts = comm.all_to_all(numbers[gathered], send_counts=sent, receive_counts=received)
        if largest:
            found = np.zeros(size)
            np.maximum.at(found, scattered, parts)
        else:
            found = np.bincount(scattered, parts, size)
        numbers[gathered] = comm.all_to_all(found[scattered], send_counts=received, receive_counts=sent)
        self._sent += gathered.size
