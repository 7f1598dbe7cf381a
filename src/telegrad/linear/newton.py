"""Newton's method for smooth losses, and the proximal dual method for the hinge, among ranks that hold rows.

The core takes the steps (``core/linear/newton.hpp``). A step sums some vectors over the ranks: a gradient, and products
with the Hessian. Each rank has the weights of the features of its own rows. A feature of several ranks has an owner, to
which these send their terms and which sends back the sum: no other feature travels. Where that would save little, all
ranks have the weights of all features that occur, and sum dense vectors. These sums do not round, so that any number of
ranks finds the same bits. With ``optimizer="dual"`` one rank alone first descends by the coordinates of the dual
(``core/linear/dual_descent.hpp``).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from telegrad import _core
from telegrad.linear.losses import F32, F64
from telegrad.linear.model import LinearModel, Pass, State
from telegrad.linear.problem import Problem


class Newton:
    """An epoch is a step: one linear system, solved by conjugate gradients or directly, and a line search."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._comm_s, self._sent = problem, 0.0, 0
        self._solved, self._shared = problem.solved, problem.shared
        self._kept: tuple[F32, F64] | None = None  # weights and biases of all features, if vectors are split
        self._places: dict[tuple[int, int], Any] = {}
        trained, targets, weights = self._solved
        rank, ranks = (0, 1) if problem.pooled else (problem.rank, problem.world_size)
        self._newton = _core.Newton(
            problem.view,
            trained.ctypes.data,
            trained.size,
            targets.ctypes.data,
            0 if weights is None else weights.ctypes.data,
            problem.share.trained_total,
            problem.features,
            problem.classes,
            problem.loss,
            problem.settings.l2,
            problem.settings.l1,
            problem.settings.bias,
            problem.settings.tol,
            problem.settings.method == "dual" and ranks == 1,
            problem.settings.seed,
            problem.occurring,
            0 if self._shared is None else self._shared.counted.ctypes.data,
            rank,
            ranks,
            problem.team,
            self._reduce,
        )
        self._duals: F64 | None = None
        if self._shared is not None:
            self._kept = np.zeros((problem.all_features, problem.classes), np.float32), np.zeros(problem.classes)

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """One step."""
        began_s, self._comm_s, self._sent = time.perf_counter(), 0.0, 0
        if self._problem.pooled and self._problem.comm is not None:
            self._problem.comm.barrier()  # a lost rank is noticed
        step = self._newton.step()
        if self._shared is not None:
            self._kept = self._every() if self._problem.keeps_models else None
        compute_s = time.perf_counter() - began_s - self._comm_s
        on_step(1, 1)
        ended = step.converged or step.stuck
        return Pass(step.sums, step.loss, compute_s, self._comm_s, self._sent, step.objective, step.gap, ended)

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
        self._kept = None if self._shared is None else self._every()
        if not self._newton.dual_count:
            return
        duals = np.empty(self._newton.dual_count)
        self._newton.write_duals(duals.ctypes.data)
        every, comm = duals[:-1], self._problem.comm
        if comm is not None and not self._problem.pooled:
            counts = comm.all_gather(np.array([every.size], np.int64))[:, 0].tolist()
            every = comm.all_gather(np.ascontiguousarray(every), counts=counts)
        self._duals = np.append(every, duals[-1])

    def state(self) -> State:
        return State(self.model(), duals=self._duals)

    def restore(self, state: State) -> None:
        weights, duals = self._problem.of_own(state.model.weights), np.empty(0)
        if state.duals is not None:
            first = 0 if self._problem.pooled else self._problem.share.trained_first
            duals = np.append(state.duals[first : first + self._solved[0].size], state.duals[-1])
        self._newton.restore(weights.ctypes.data, weights.size, state.model.bias, duals.ctypes.data, duals.size)
        if self._shared is not None:
            self._kept = state.model.weights[:, None], np.array([state.model.bias])

    def _reduce(self, address: int, count: int, of_feature: int, largest: bool) -> None:
        """Sums, or finds the largest numbers, in place over the ranks. One rank's steps call this, too, so that Ctrl-C
        ends them."""
        comm = self._problem.comm
        if comm is None:
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
