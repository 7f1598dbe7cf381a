"""Newton's method for smooth losses, and the proximal dual method for the hinge, among ranks that hold rows.

The core takes the steps (``core/linear/newton.hpp``). All ranks hold the weights of the features that occur in any
rank's rows, in a numbering of these alone. A step sums some vectors of these over the ranks: a gradient, and products
with the Hessian. Each rank sends its own rows' features as a sparse vector, or all of them if ranks have most. These
sums do not round, so that any number of ranks finds the same bits. With ``optimizer="dual"`` one rank alone first
descends by the coordinates of the dual (``core/linear/dual_descent.hpp``).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from telegrad import SparseVector, _core
from telegrad.linear.losses import F32, F64
from telegrad.linear.model import LinearModel, Pass, State
from telegrad.linear.problem import Problem
from telegrad.linear.rows import U32

_DENSE = 0.5  # of all features in the mean rank's rows: sparse entries would be as many bytes, in one direction alone


class Newton:
    """An epoch is a step: one linear system, solved by conjugate gradients or directly, and a line search."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._comm_s, self._sent = problem, 0.0, 0
        self._trained = problem.share.trained
        self._own: U32 | None = None
        if problem.own is not None and problem.comm is not None:
            occurring = np.array([problem.own.size], np.int64)
            problem.comm.all_reduce(occurring)
            if occurring[0] < _DENSE * problem.world_size * problem.features:
                self._own = problem.own
        weights = problem.rows.weights
        self._newton = _core.Newton(
            problem.view,
            self._trained.ctypes.data,
            self._trained.size,
            problem.targets.ctypes.data,
            0 if weights is None else weights.ctypes.data,
            problem.share.trained_total,
            problem.features,
            problem.classes,
            problem.loss,
            problem.settings.l2,
            problem.settings.bias,
            problem.settings.tol,
            problem.settings.method == "dual" and problem.world_size == 1,
            problem.settings.seed,
            problem.team,
            self._reduce,
        )
        self._duals: F64 | None = None

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """One step."""
        began_s, self._comm_s, self._sent = time.perf_counter(), 0.0, 0
        step = self._newton.step()
        compute_s = time.perf_counter() - began_s - self._comm_s
        on_step(1, 1)
        ended = step.converged or step.stuck
        return Pass(step.sums, step.loss, compute_s, self._comm_s, self._sent, step.objective, step.gap, ended)

    def model(self) -> LinearModel:
        weights = np.empty(self._problem.features, np.float32)
        self._newton.write_weights(weights.ctypes.data, weights.size)
        return self._problem.model(weights, self._newton.bias)

    def softmax(self) -> tuple[F32, F64]:
        """Weights, (classes, features), and biases, whose mean is 0, of several classes."""
        weights = np.empty((self._problem.features, self._problem.classes), np.float32)
        biases = np.empty(self._problem.classes)
        self._newton.write_weights(weights.ctypes.data, weights.size)
        self._newton.write_biases(biases.ctypes.data, biases.size)
        every = [self._problem.of_all(np.ascontiguousarray(one)) for one in weights.T]
        return np.stack(every), biases - biases.mean()

    def settle(self) -> None:
        self._newton.settle()
        if not self._newton.dual_count:
            return
        duals = np.empty(self._newton.dual_count)
        self._newton.write_duals(duals.ctypes.data)
        every, comm = duals[:-1], self._problem.comm
        if comm is not None:
            counts = comm.all_gather(np.array([every.size], np.int64))[:, 0].tolist()
            every = comm.all_gather(np.ascontiguousarray(every), counts=counts)
        self._duals = np.append(every, duals[-1])

    def state(self) -> State:
        return State(self.model(), duals=self._duals)

    def restore(self, state: State) -> None:
        weights, duals = self._problem.of_own(state.model.weights), np.empty(0)
        if state.duals is not None:
            first = self._problem.share.trained_first
            duals = np.append(state.duals[first : first + self._trained.size], state.duals[-1])
        self._newton.restore(weights.ctypes.data, weights.size, state.model.bias, duals.ctypes.data, duals.size)

    def _reduce(self, address: int, count: int, by_feature: int, largest: bool) -> None:
        """Sums, or finds the largest numbers, in place over the ranks. One rank's steps call this, too, so that Ctrl-C
        ends them."""
        comm = self._problem.comm
        if comm is None:
            return
        began_s, op = time.perf_counter(), "max" if largest else "sum"
        sums: F64 = np.ctypeslib.as_array((ctypes.c_double * count).from_address(address))
        if by_feature and self._own is not None:
            each = np.arange(by_feature // self._problem.features, dtype=np.uint32)
            own = (self._own[:, None] * np.uint32(each.size) + each).reshape(-1)
            sent = np.append(own, np.arange(by_feature, count, dtype=np.uint32))
            total: Any = comm.all_reduce(SparseVector.trusted(sent, sums[sent], count), op)
            indices, values = total.memory(0.0)
            if indices is None:
                sums[:] = values
            else:
                sums[:] = 0
                sums[indices] = values
            self._sent += sent.size
        else:
            comm.all_reduce(sums, op)
            self._sent += count
        self._comm_s += time.perf_counter() - began_s
