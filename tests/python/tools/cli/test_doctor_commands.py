"""``telegrad doctor``, ``env`` and ``test`` as commands: exit status, JSON, and what they need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import telegrad.tools.cli
from telegrad import _core
from telegrad.tools.cli import doctor as doctor_command
from telegrad.tools.cli import make_app
from telegrad.tools.cli import selftest as selftest_command
from telegrad.tools.doctor.installation import Check, Finding
from telegrad.tools.doctor.selftest import CheckOutcome, SelfTest

_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")


def _telegrad(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), arguments, env={"COLUMNS": "160"})
    return done.exit_code, done.stdout


def _python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "COLUMNS": "160"},
    )


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "telegrad", "--help"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr
    assert "python -m telegrad" in done.stdout
    assert all(command.name in done.stdout for command in telegrad.tools.cli.COMMANDS)


def _raise() -> list[Finding]:
    raise RuntimeError("broken")


_FINE = Check("fine", lambda: [Finding("fine", "ok", "as it should be")])
_ABSENT = Check("toy", lambda: [Finding("toy", "missing", "not here", "pip install toy")])
_BROKEN = Check("broken", _raise)
_FATAL = Check("core", lambda: [Finding("core", "error", "does not load", "install it")])


@pytest.mark.parametrize(
    ("checks", "status", "said"),
    [
        ([_FINE, _ABSENT], 0, ["OK", "missing toy", "→ pip install toy", "telegrad can be used here"]),
        ([_FINE, _BROKEN], 0, ["failed", "RuntimeError: broken", "not all could be looked at: broken"]),
        ([_FINE, _FATAL], 1, ["ERROR   core", "→ install it", "mend the 1 ERROR above first"]),
    ],
)
def test_doctor_says_a_line_each_and_its_status_counts_errors(
    monkeypatch: pytest.MonkeyPatch, checks: list[Check], status: int, said: list[str]
) -> None:
    monkeypatch.setattr(doctor_command, "CHECKS", checks)
    code, output = _telegrad("doctor")
    assert code == status, output
    for part in said:
        assert part in output
    code, output = _telegrad("doctor", "--json")
    assert code == status
    found = json.loads(output)
    assert (found["kind"], found["usable"], len(found["findings"])) == ("telegrad doctor", status == 0, 2)
    assert found["findings"][0] == {"check": "fine", "status": "ok", "text": "as it should be", "mend": ""}


def test_env_as_text_and_as_json() -> None:
    code, text = _telegrad("env")
    assert code == 0
    assert text.startswith("telegrad:")
    code, output = _telegrad("env", "--json")
    assert code == 0
    assert json.loads(output)["kind"] == "telegrad environment"


def test_a_self_test_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        CheckOutcome("tcp", "barrier", "", 0.1),
        CheckOutcome("tcp", "sparse", "[3] is 1.0 instead of 2.0", 0.1),
    ]

    def run(test: SelfTest, *, on_outcome: Callable[[CheckOutcome], None]) -> list[CheckOutcome]:
        for outcome in outcomes:
            on_outcome(outcome)
        return outcomes

    monkeypatch.setattr(selftest_command, "run", run)
    code, output = _telegrad("test")
    assert code == 1
    assert "[3] is 1.0 instead of 2.0" in output
    assert "1 of 2 are wrong: telegrad doctor may know why" in output
    code, output = _telegrad("test", "--json")
    assert (code, json.loads(output)["passed"]) == (1, False)


def test_bad_options_of_the_self_test() -> None:
    done = CliRunner().invoke(make_app(), ["test", "--interface", "nowhere7"], env={"COLUMNS": "160"})
    assert done.exit_code == 2
    assert "does not exist on this machine" in done.output
    assert CliRunner().invoke(make_app(), ["test", "-n", "1"]).exit_code == 2


_WITHOUT = """
import sys
absent = sys.argv[1].split(",")
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in absent or name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
sys.argv[:] = ["telegrad", *sys.argv[2:]]
from telegrad.tools.cli import main
main()
"""


@pytest.mark.parametrize(("absent", "named"), [("typer", "typer"), ("rich", "rich")])
def test_without_typer_or_rich_the_right_extra_is_named(absent: str, named: str) -> None:
    done = _python(_WITHOUT, absent, "doctor")
    assert done.returncode == 1
    assert done.stderr.strip() == f"telegrad's commands need {named}: pip install 'telegrad[cli]'"


@_needs_ucx
def test_doctor_finds_this_machine_usable_without_torch_and_matplotlib() -> None:
    done = _python(_WITHOUT, "torch,matplotlib,mpi4py", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = {finding["check"]: finding["status"] for finding in json.loads(done.stdout)["findings"]}
    assert found["core"] == found["ucx"] == found["ranks"] == "ok"
    assert found["torch"] == found["extra cli"] == "missing"
    assert "failed" not in found.values(), done.stdout


@_needs_ucx
def test_the_self_test_passes_without_torch_and_matplotlib() -> None:
    arguments = ["test", "-n", "2", "--interface", "lo", "--timeout", "60", "--json"]
    done = _python(_WITHOUT, "torch,matplotlib", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["version"], found["passed"], found["ranks"]) == ("telegrad self-test", 1, True, 2)
    assert {check["network"] for check in found["checks"]} == {"shared memory", "tcp"}
    assert all(check["fault"] == "" for check in found["checks"])


def test_bench_and_demo_say_at_once_what_they_lack() -> None:
    bench = _python(_WITHOUT, "matplotlib", "bench", "allreduce", "--plot", "/tmp/plot.png")
    assert bench.returncode == 1
    assert "telegrad bench needs matplotlib: pip install 'telegrad[cli]'" in bench.stderr
    demo = _python(_WITHOUT, "matplotlib", "demo")
    assert demo.returncode == 1
    assert "telegrad demo needs matplotlib: pip install 'telegrad[demo]'" in demo.stderr
    described = _python(_WITHOUT, "torch,matplotlib", "bench", "allreduce", "--help")
    assert described.returncode == 0
    assert "--ranks" in described.stdout  # it is there, not only said to be missing


# As if telegrad/__init__.py let the doctor pass where the core is missing.
_WITHOUT_CORE = """
import sys, types
import importlib.util
package = types.ModuleType("telegrad")
package.__path__ = [sys.argv[1]]
sys.modules["telegrad"] = package
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name == "telegrad._core":
            raise ModuleNotFoundError("No module named 'telegrad._core'", name=name)
sys.meta_path.insert(0, Nothing())
sys.argv[:] = ["telegrad", *sys.argv[2:]]
from telegrad.tools.doctor import installation
def ask(program, *, timeout_s):
    raise installation.ProbeFailed("ImportError: no core")
installation.ask = ask
from telegrad.tools.cli import main
main()
"""


def test_without_the_compiled_core_the_doctor_still_comes() -> None:
    folder = str(Path(telegrad.tools.cli.__file__).parents[1])
    done = _python(_WITHOUT_CORE, folder, "doctor")
    assert done.returncode == 1, done.stderr
    assert "ERROR   core            `import telegrad` fails: ImportError: no core" in done.stdout
    assert "not tried: telegrad does not load" in done.stdout
    described = _python(_WITHOUT_CORE, folder, "env")
    assert described.returncode == 0, described.stderr
    assert "telegrad does not load: ImportError: no core" in described.stdout
    test = _python(_WITHOUT_CORE, folder, "test", "-n", "2")
    assert test.returncode == 1
    assert "telegrad test cannot start" in test.stderr
    assert "`telegrad doctor` says what is missing" in test.stderr


@_needs_ucx
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_self_test_leaves_no_rank(number: signal.Signals) -> None:
    program = "import sys; sys.argv[:] = ['telegrad', 'test', '-n', '3']; from telegrad.tools.cli import main; main()"
    command = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert command.stdout is not None
    assert command.stdout.readline().startswith("OK")  # ranks are at work
    started = _ranks_of(command.pid)
    command.send_signal(number)
    output, _ = command.communicate(timeout=30)
    assert command.returncode == 130, output
    assert "interrupted; all ranks are stopped" in output
    assert "Traceback" not in output
    for process in started:
        assert _gone(process), f"rank process {process} is still there"


def _ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


def _gone(process: int) -> bool:
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.05)
    return False
