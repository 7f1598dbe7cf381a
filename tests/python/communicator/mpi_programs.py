"""What the ranks of test_from_mpi.py do under mpiexec: ``mpi_programs.py NAME …``; they raise if something is wrong."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from typing import Any

import numpy as np
import pytest


def raises(kind: type[Exception], part: str, call: Any) -> None:
    with pytest.raises(kind, match=re.escape(part)):
        call()


def sums(first: str) -> None:
    """Both drivers, whichever of the two packages is imported first; groups; and the program's own MPI beside them."""
    importlib.import_module(first)
    from mpi4py import MPI

    import telegrad

    world = MPI.COMM_WORLD
    size = world.size
    for driver in ("mpi", "ucx"):
        with telegrad.Communicator.from_mpi(world, driver=driver) as comm:
            assert (comm.driver, comm.rank, comm.world_size) == (driver, world.rank, size)
            for count in (10, 300_000):  # within and beyond what travels with its announcement
                x = np.full(count, comm.rank + 1, np.float32)
                work = comm.all_reduce(x, async_op=True)
                assert world.allreduce(1) == size
                assert work is not None
                work.wait()
                assert (x == size * (size + 1) / 2).all()
            stream = telegrad.SparseVector(np.array([comm.rank, 100], np.uint32), np.ones(2, np.float32), 1000)
            total = comm.all_reduce(stream).to_dense()
            assert total[100] == size
            assert (total[:size] == 1).all()
            group = comm.split(comm.rank % 2, key=-comm.rank)
            again = telegrad.Communicator.from_mpi(world, driver=driver)
            assert group is not None
            assert group.driver == driver
            one = np.array([comm.rank], np.int64)
            of_group, of_again = group.all_gather(one)[:, 0].tolist(), again.all_gather(one)[:, 0].tolist()
            assert of_group == sorted((r for r in range(size) if r % 2 == comm.rank % 2), reverse=True)
            assert of_again == list(range(size))
            group.close()
            again.close()
    print("right" if world.reduce(1) == size else "", end="")


def collectives() -> None:
    """``algorithm="mpi"``: sums as numpy has them, equal bits for NaN, order among many under way, and refusals."""
    from mpi4py import MPI

    from telegrad import Communicator, TransportError, _core

    world = MPI.COMM_WORLD
    size = world.size
    comm = Communicator.from_mpi(world, timeout_s=60.0)
    numbers = np.random.default_rng(world.rank)

    def same_bits(x: Any) -> bool:  # by telegrad: MPI's own waits never sleep
        every = comm.all_gather(x.view(np.uint8))
        return bool((every == every[0]).all())

    for dtype in ("f4", "f8", "i4", "i1", "i2", "i8", "u1", "u2", "u4", "u8"):
        whole = dtype[0] != "f"
        for op, reduced in (("sum", np.sum), ("prod", np.prod), ("min", np.min), ("max", np.max), ("avg", np.mean)):
            if op in (("avg",) if whole else ("min", "max")):
                continue
            for count in (0, 1, 7, 3000, 400_000) if dtype in ("f4", "i4") else (7, 3000):
                x = numbers.integers(1, 9, count).astype(dtype)  # also a product of few is exact
                parts = comm.all_gather(x)
                out = np.empty_like(x)
                comm.all_reduce(x, op=op, out=out, algorithm="mpi")
                assert (x == parts[world.rank]).all()
                comm.all_reduce(x, op=op, algorithm="mpi")
                assert (x == out).all()
                assert same_bits(x)
                right = reduced(parts, axis=0, **({"dtype": dtype} if op in ("sum", "prod") else {}))
                np.testing.assert_allclose(x, right.astype(dtype), rtol=1e-6)
    big = np.full(3, 2**31 - 1, np.int32)
    comm.all_reduce(big, algorithm="mpi")
    assert (big == np.full(3, 2**31 - 1, np.int64).astype(np.int32) * np.int32(size)).all()
    for count in (1, 5000):  # NaN with bits of each rank's own
        nan = np.full(count, 0x7FC00000 + (world.rank << 31) + world.rank, np.uint64).astype(np.uint32).view(np.float32)
        comm.all_reduce(nan, algorithm="mpi")
        assert size == 1 or (nan.view(np.uint32) == 0x7FC00000).all()  # telegrad's own
        assert same_bits(nan)
    many = [np.full(50 * (number + 1), float(comm.rank + number), np.float32) for number in range(20)]
    works = [comm.all_reduce(x, algorithm="mpi" if n % 3 else "auto", async_op=True) for n, x in enumerate(many)]
    for number, work in reversed(list(enumerate(works))):
        assert work is not None
        work.wait()
        assert (many[number] == size * number + size * (size - 1) / 2).all()

    x = np.ones(4, np.float32)
    raises(ValueError, "algorithm=mpi has no min of f32", lambda: comm.all_reduce(x, op="min", algorithm="mpi"))
    half = np.ones(4, np.float16)
    raises(ValueError, "algorithm=mpi has no sum of f16", lambda: comm.all_reduce(half, algorithm="mpi"))
    with Communicator.from_mpi(world) as second:
        raises(ValueError, "one communicator at a time", lambda: second.all_reduce(x, algorithm="mpi"))
    part = comm.split(0)
    assert part is not None
    raises(ValueError, "no part of a split", lambda: part.all_reduce(x, algorithm="mpi"))
    part.close()
    with Communicator.from_mpi(world, driver="ucx") as other:
        raises(ValueError, "join by driver=mpi", lambda: other.all_reduce(x, algorithm="mpi"))
    # A table that names it: for what MPI lacks something else stands.
    everything = [(0, _core.Algorithm.mpi)]
    comm._usable().use_allreduce_table(everything, None)
    assert comm._usable().choose_allreduce(4) == _core.Algorithm.mpi
    for value in (x.copy(), half):
        comm.all_reduce(value)
        assert (value == size).all()
        least = np.array([comm.rank + 1], value.dtype)
        comm.all_reduce(least, op="min")
        assert least[0] == 1
    comm.close()
    with Communicator.from_mpi(world) as again:  # which has them now
        again.all_reduce(x, algorithm="mpi")
        assert (x == size).all()
        if size > 1:
            odd = np.ones(4 + (again.rank == 1))
            raises(TransportError, "called different things", lambda: again.all_reduce(odd, algorithm="mpi"))
    with Communicator.from_mpi(world) as last:  # nothing of MPI's had begun
        last.all_reduce(x, algorithm="mpi")
    calibrated = telegrad_calibrates(world) if size > 1 else 0
    print(f"right {calibrated}" if world.rank == 0 else "", end="")


def telegrad_calibrates(world: Any) -> int:
    """How many sizes a calibration has measured MPI's own sums at."""
    from telegrad import Communicator
    from telegrad.tuning.calibration import measure

    with Communicator.from_mpi(world) as comm:
        found = measure(comm, seconds=1.0)
        comm.use(found.tuning)
        x = np.ones(1000, np.float32)
        comm.all_reduce(x)
        assert (x == world.size).all()
    return sum("mpi" in times for times in found.samples.values())


def refusals() -> None:
    """What is no intracommunicator of all who call, on two ranks."""
    from mpi4py import MPI

    from telegrad import Communicator, errors

    world = MPI.COMM_WORLD
    raises(TypeError, "comm=3 is no communicator of mpi4py", lambda: Communicator.from_mpi(3))
    raises(ValueError, "COMM_NULL", lambda: Communicator.from_mpi(MPI.COMM_NULL))
    own = world.Split(world.rank)
    inter = own.Create_intercomm(0, world, 1 - world.rank)
    raises(ValueError, "inter-communicator", lambda: Communicator.from_mpi(inter))
    raises(ValueError, "driver='tcp'", lambda: Communicator.from_mpi(world, driver="tcp"))
    raises(ValueError, "is for driver='ucx'", lambda: Communicator.from_mpi(world, interface="lo"))
    raises(ValueError, "join_timeout_s", lambda: Communicator.from_mpi(world, join_timeout_s=0))
    with Communicator.from_mpi(own) as alone:
        alone.barrier()
    for driver, error in (("mpi", errors.TimeoutExpired), ("ucx", errors.RendezvousError)):
        duplicate = world.Dup()
        if world.rank == 0:
            raises(
                error,
                "came within 0.5 s",
                lambda duplicate=duplicate, driver=driver: Communicator.from_mpi(
                    duplicate, driver=driver, join_timeout_s=0.5
                ),
            )
        world.Barrier()
    print("right" if world.rank == 0 else "", end="", flush=True)
    world.Barrier()
    MPI.COMM_WORLD.Abort(0)  # collectives of which one rank has given up are under way


def threads() -> None:
    """Two communicators over one of MPI's are split at the same time, and each part hears its own messages only."""
    from concurrent.futures import ThreadPoolExecutor

    from mpi4py import MPI

    from telegrad import Communicator

    rounds = 12
    parents = [Communicator.from_mpi(MPI.COMM_WORLD, timeout_s=30.0) for _ in range(2)]

    def split(parent: int) -> None:
        for number in range(rounds):
            part = parents[parent].split(0)
            assert part is not None
            x = np.array([100 * parent + number], np.int64)
            part.all_reduce(x)
            assert x[0] == part.world_size * (100 * parent + number)
            part.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(split, range(2)))
    for parent in parents:
        parent.close()
    print("right" if MPI.COMM_WORLD.rank == 0 else "", end="")


def forked() -> None:
    """MPI works in the process that began it."""
    import os

    from mpi4py import MPI

    from telegrad import Communicator, errors

    child = os.fork()
    if child == 0:
        try:
            part = "was forked from one that runs MPI"
            raises(errors.RendezvousError, part, lambda: Communicator.from_mpi(MPI.COMM_WORLD))
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("right" if status == 0 else "wrong", end="")


def thread_level() -> None:
    import mpi4py

    mpi4py.rc.threads = False
    from mpi4py import MPI

    from telegrad import Communicator, errors

    part = "initialise it with MPI_THREAD_MULTIPLE"
    raises(errors.TransportError, part, lambda: Communicator.from_mpi(MPI.COMM_WORLD))
    with Communicator.from_mpi(MPI.COMM_WORLD, driver="ucx") as comm:
        comm.barrier()
    print("right" if MPI.COMM_WORLD.rank == 0 else "", end="")


def finalise() -> None:
    """MPI ends while a communicator is open: what is called then says so, and nothing crashes."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    from telegrad import Communicator, errors

    raises(errors.RendezvousError, "not initialised", lambda: Communicator.from_mpi(MPI.COMM_WORLD))
    MPI.Init_thread()
    rank = MPI.COMM_WORLD.rank
    comm = Communicator.from_mpi(MPI.COMM_WORLD)
    left_open = Communicator.from_mpi(MPI.COMM_WORLD)
    comm.barrier()
    left_open.barrier()
    MPI.Finalize()
    raises(errors.TransportError, "MPI was finalised while this communicator was open", comm.barrier)
    comm.close()
    raises(errors.RendezvousError, "finalised", lambda: Communicator.from_mpi(MPI.COMM_WORLD))
    print("right" if rank == 0 else "", end="")


def idle() -> None:
    """Prints the seconds of processor time that two seconds of waiting for nothing have cost rank 0."""
    from mpi4py import MPI

    from telegrad import Communicator

    with Communicator.from_mpi(MPI.COMM_WORLD) as comm:
        comm.barrier()
        time.sleep(0.5)
        begin = time.process_time()
        time.sleep(2)
        spent = time.process_time() - begin
        if comm.rank == 0:
            print(spent, end="")
        comm.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    wanted = os.environ.get("TELEGRAD_TEST_MODULE")  # of telegrad's two, by the ABI of mpi4py
    assert wanted is None or wanted in sys.modules, sorted(name for name in sys.modules if "telegrad._mpi" in name)
