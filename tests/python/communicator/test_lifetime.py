"""How programs end: with everything closed or nothing, with work under way, by an exception, and in forked children."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import os, sys, threading, time
import numpy as np
import telegrad
one, two = telegrad.Communicator.local(2)
x = np.ones(4, np.float32)
"""


def _run(program: str, *, returncode: int = 0, timeout_s: float = 60) -> str:
    """Runs a program to its end and returns what it printed on both streams."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == returncode, done.stderr
    return done.stdout + done.stderr


def test_nothing_closed() -> None:
    assert _run("print('end')") == "end\n"


def test_work_under_way_and_nobody_waits() -> None:
    assert _run("one.all_reduce(x, async_op=True); print('end')") == "end\n"


def test_futures_under_way() -> None:
    program = """
        import torch
        done = one.all_reduce(torch.ones(4), async_op=True)
        late = two.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: print(f.value().tolist()))
        late.wait()
        never = one.all_reduce(torch.ones(4), async_op=True).get_future()
        chained = never.then(lambda f: print("not reached", f.value()))
        print("end")
    """
    assert _run(program) == "[2.0, 2.0, 2.0, 2.0]\nend\n"


def test_torch_imported_last() -> None:
    program = """
        work = one.all_reduce(x, async_op=True)
        two.all_reduce(x.copy())
        import torch
        print(work.get_future().wait().tolist())
    """
    assert _run(program) == "[2.0, 2.0, 2.0, 2.0]\n"


def test_a_thread_waits_at_the_end() -> None:
    program = """
        def wait():
            try:
                one.all_reduce(x)
            except telegrad.errors.TransportError as error:
                print("told:", "closed" in str(error))
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.2)
        one.close()
        thread.join()
    """
    assert _run(program) == "told: True\n"


def test_an_exception_ends_the_program() -> None:
    output = _run("work = one.all_reduce(x, async_op=True); raise KeyError('oops')", returncode=1)
    assert output.endswith("KeyError: 'oops'\n")
    assert "telegrad:" not in output


def test_exit_inside_with() -> None:
    assert _run("with one, two:\n    sys.exit(3)", returncode=3) == ""


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_forked_child_says_that_it_is_none_of_its_business(end: str) -> None:
    program = f"""
        import warnings
        warnings.simplefilter("ignore")  # Python warns of forks beside threads
        work = one.all_reduce(x, async_op=True)
        if os.fork() == 0:
            for call in (lambda: one.all_reduce(x), lambda: two.barrier(), work.wait):
                try:
                    call()
                except ValueError as error:
                    print("child:", "forked this one" in str(error), flush=True)
            one.abort("must not be heard")
            one.close()
            two.close()
            del one, two
            {end}
        assert os.wait()[1] == 0
        two.all_reduce(x.copy())
        work.wait()
        print("parent:", x.tolist())
    """
    assert _run(program) == "child: True\n" * 3 + "parent: [2.0, 2.0, 2.0, 2.0]\n"


def test_a_forked_child_ends_by_itself_with_futures_open() -> None:
    program = """
        import warnings
        warnings.simplefilter("ignore")
        import torch
        future = one.all_reduce(torch.ones(4), async_op=True).get_future()
        if os.fork() == 0:
            sys.exit(0)
        assert os.wait()[1] == 0
        two.all_reduce(torch.ones(4))
        print(future.wait().tolist())
    """
    assert _run(program) == "[2.0, 2.0, 2.0, 2.0]\n"


def test_multiprocessing_children_do_not_disturb() -> None:
    program = """
        import multiprocessing
        import warnings
        warnings.simplefilter("ignore")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(sum(pool.map(abs, range(10))))
        works = [comm.all_reduce(np.ones(4, np.float32), async_op=True) for comm in (one, two)]
        print([work.wait() for work in works])
    """
    assert _run(program) == "45\n[True, True]\n"
