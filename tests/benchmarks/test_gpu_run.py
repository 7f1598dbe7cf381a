"""``make gpu``: benchmarks/gpu/run.py, which runs its parts one after the other, whatever becomes of each."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

_TESTS = """
import os
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="no such device")
def test_left_out(): pass
def test_breaks(): os._exit(3)
def test_after(): pass
@pytest.fixture
def broken(): raise RuntimeError("no set-up")
def test_without_set_up(broken): pass
"""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    sys.modules.pop("run", None)
    import run

    return run


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_part_that_fails_or_hangs_takes_no_other_along(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_INTERRUPTED_S", 1.0)
    monkeypatch.setattr(runner, "_LEAST_S", 0.1)
    ignoring = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
    )
    writing = "import sys; open(sys.argv[1], 'w').write('{}')"
    parts = {
        "good": runner.Part(30, lambda stem: [*_python(writing), f"{stem}.json"], needs=()),
        "bad": runner.Part(30, lambda _: _python("raise SystemExit('it broke')"), needs=()),
        "hanging": runner.Part(2, lambda _: _python(ignoring), needs=()),
        "wanting": runner.Part(30, lambda _: _python("pass"), needs=("no_such_package", "no.such.package")),
        "last": runner.Part(30, lambda _: _python("pass"), needs=()),
    }
    archive = tmp_path / "all.tgz"
    out = tmp_path / "results"
    out.mkdir()
    (out / "2026-01-01-gpu-good.json").write_text("of another day")
    run = runner.Run(parts, 60.0, out, archive, {"gpu": "A Fast GPU"})
    assert run.all() is False
    run.say()
    said = capsys.readouterr().out
    assert "it broke" in said
    (path,) = out.glob("*-gpu-summary.json")
    summary = json.loads(path.read_text())
    assert summary["machine"] == {"gpu": "A Fast GPU"}
    found = {name: (one["status"], one["why"]) for name, one in summary["parts"].items()}
    assert found == {
        "good": ("passed", ""),
        "bad": ("failed", "status 1"),
        "hanging": ("timed out", "after 2 s"),
        "wanting": ("skipped", "not installed: no_such_package, no.such.package"),
        "last": ("passed", ""),
    }
    with tarfile.open(archive) as file:
        names = {name.split("-gpu-")[1] for name in file.getnames()}
        assert all(not name.startswith("2026-01-01") for name in file.getnames())
    assert names == {"good.json", "good.log", "bad.log", "hanging.log", "last.log", "summary.json"}


def test_what_has_no_time_left_is_skipped(runner: ModuleType, tmp_path: Path) -> None:
    part = runner.Part(30, lambda _: _python("pass"), needs=())
    run = runner.Run({"late": part}, 30.0, tmp_path, None, {})
    assert run.all() is False
    assert (run.outcomes["late"].status, run.outcomes["late"].why) == ("skipped", "no time left")


def test_tests_go_on_behind_one_that_ends_the_process(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_planted.py"
    tests.write_text(_TESTS)
    part = runner.Part(
        90, lambda _: [str(tests), "-c", "/dev/null", "-p", "no:cacheprovider"], are_tests=True, needs=()
    )
    run = runner.Run({"tests": part}, 120.0, tmp_path, None, {})
    begin = time.monotonic()
    assert run.all() is False
    assert time.monotonic() - begin < 100
    run.say()
    said = capsys.readouterr().out
    found = run.outcomes["tests"]
    assert found.status == "failed"
    names = {kind: [name.split("::")[1] for name in found.tests[kind]] for kind in found.tests}
    assert names == {
        "passed": ["test_good", "test_after"],
        "failed": ["test_bad", "test_without_set_up"],
        "broken": ["test_breaks"],
        "skipped": ["test_left_out"],
    }
    assert "2 passed, 2 failed, 1 broken, 1 skipped" in said
    assert "test_left_out: Skipped: no such device" in said


def test_a_test_of_a_group_is_known_by_its_name(runner: ModuleType, tmp_path: Path) -> None:
    """Workers of pytest-xdist call it by another one, by which pytest would not pass it over."""
    tests = tmp_path / "test_planted.py"
    tests.write_text(
        "import os\nimport pytest\n\n"
        "@pytest.mark.xdist_group('one')\n@pytest.mark.parametrize('x', ['a@b', 'c'])\ndef test_good(x): pass\n\n"
        "@pytest.mark.xdist_group('one')\ndef test_bad(): assert False\n\n"
        "@pytest.mark.parametrize('x', ['a@b'])\ndef test_apart(x): pass\n"
    )
    options = ["-n", "1", "--dist", "loadgroup", "-c", "/dev/null", "-p", "no:cacheprovider"]
    part = runner.Part(90, lambda _: [str(tests), *options], are_tests=True, needs=())
    run = runner.Run({"tests": part}, 120.0, tmp_path, None, {})
    assert run.all() is False
    found = run.outcomes["tests"].tests
    names = {kind: sorted(name.split("::")[1] for name in found[kind]) for kind in ("passed", "failed")}
    assert names == {"passed": ["test_apart[a@b]", "test_good[a@b]", "test_good[c]"], "failed": ["test_bad"]}


def test_nothing_is_begun_where_what_it_stands_on_has_failed(runner: ModuleType, tmp_path: Path) -> None:
    parts = {
        "smoke": runner.Part(30, lambda _: _python("raise SystemExit(1)"), needs=(), stands_on=()),
        "probe": runner.Part(30, lambda _: _python("pass"), needs=(), stands_on=()),
        "demo": runner.Part(30, lambda _: _python("pass"), needs=()),
    }
    run = runner.Run(parts, 60.0, tmp_path, None, {})
    assert run.all() is False
    found = {name: (one.status, one.why) for name, one in run.outcomes.items()}
    assert found == {
        "smoke": ("failed", "status 1"),
        "probe": ("passed", ""),
        "demo": ("skipped", "smoke did not pass"),
    }
    assert {name for name, part in runner.PARTS.items() if not part.stands_on} == {
        *("smoke", "probe", "kernels", "select", "blocks")
    }
    alone = runner.Run({"demo": parts["demo"]}, 60.0, tmp_path, None, {})
    assert alone.all() is True  # whoever asks for one part only gets it


@pytest.mark.parametrize("are_tests", [False, True])
def test_parts_have_an_environment_of_their_own(runner: ModuleType, tmp_path: Path, are_tests: bool) -> None:
    program = "import os; open({!r}, 'w').write(str(os.environ.get('CUDA_MODULE_LOADING')))"
    parts = {}
    for name, environment in (("plain", {}), ("eager", {"CUDA_MODULE_LOADING": "EAGER"})):
        one = tmp_path / f"test_{name}.py"
        one.write_text(f"def test_it():\n    {program.format(str(tmp_path / name))}\n")
        command = (
            [str(one), "-c", "/dev/null", "-p", "no:cacheprovider"]
            if are_tests
            else _python(one.read_text() + "test_it()")
        )
        parts[name] = runner.Part(
            60, lambda _, command=command: command, are_tests=are_tests, needs=(), environment=environment
        )
    assert runner.Run(parts, 120.0, tmp_path, None, {}).all()
    assert [(tmp_path / name).read_text() for name in parts] == [os.environ.get("CUDA_MODULE_LOADING", "None"), "EAGER"]


def test_all_loaded_at_once_is_where_ranks_share_a_process(runner: ModuleType) -> None:
    from telegrad.tools.bench.device import ENVIRONMENT

    for parts in (runner.PARTS, runner.BRIEF):
        eager = [name for name, part in parts.items() if "CUDA_MODULE_LOADING" in part.environment]
        assert eager == ["tests"]
        for name in ("smoke", "tests", "training", "transfers", "overlap"):
            assert ENVIRONMENT.items() <= parts[name].environment.items()


def test_the_brief_parts_leave_a_lease_time_for_a_second_try(runner: ModuleType, tmp_path: Path) -> None:
    """Of 900 s the start takes up to 120, twice, and no machine is started with less than 240 left."""
    assert set(runner.BRIEF) <= set(runner.PARTS)
    assert next(iter(runner.BRIEF)) == "smoke"
    assert sum(part.limit_s for part in runner.BRIEF.values()) + runner._INTERRUPTED_S <= runner._BRIEF_BUDGET_S
    assert runner._BRIEF_BUDGET_S + 120 + 240 <= 900
    for name in ("transfers", "overlap"):
        command = runner.BRIEF[name].command(tmp_path / name)
        assert float(command[command.index("--timeout") + 1]) < runner.BRIEF[name].limit_s


def test_parts_are_run_where_what_they_stand_on_was_not(runner: ModuleType, tmp_path: Path) -> None:
    parts = {
        "smoke": runner.Part(30, lambda _: _python("pass"), needs=("no_such_package",), stands_on=()),
        "demo": runner.Part(30, lambda _: _python("pass"), needs=()),
    }
    run = runner.Run(parts, 60.0, tmp_path, None, {})
    assert run.all() is False
    assert {name: one.status for name, one in run.outcomes.items()} == {"smoke": "skipped", "demo": "passed"}


def test_tests_that_all_skip_are_a_failure(runner: ModuleType, tmp_path: Path) -> None:
    tests = tmp_path / "test_planted.py"
    tests.write_text("import pytest\n\n@pytest.mark.skip(reason='none')\ndef test_left_out(): pass\n")
    part = runner.Part(
        60, lambda _: [str(tests), "-c", "/dev/null", "-p", "no:cacheprovider"], are_tests=True, needs=()
    )
    run = runner.Run({"tests": part}, 90.0, tmp_path, None, {})
    assert run.all() is False
    assert (run.outcomes["tests"].status, run.outcomes["tests"].why) == ("failed", "no test was run")


def test_without_a_gpu_nothing_is_run(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: None)
    assert runner.main(["--out", str(tmp_path / "results")]) == 0
    assert "no GPU: torch sees none here, nothing was run" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    with pytest.raises(SystemExit):
        runner.main(["--parts", "tests,dreams"])
    assert "dreams do not exist: use smoke, probe, tests, training, kernels" in capsys.readouterr().err


@pytest.mark.parametrize("carried", ["0123456789ab", None])
def test_the_commit_is_the_one_that_setup_has_put_beside_the_packages(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried: str | None
) -> None:
    monkeypatch.setenv("TELEGRAD_COMMIT", "")  # which is then as before
    monkeypatch.delenv("TELEGRAD_COMMIT")
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: "planted")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    told = tmp_path / "told"
    command = _python(f"import os; open({str(told)!r}, 'w').write(str(os.environ.get('TELEGRAD_COMMIT')))")
    monkeypatch.setattr(runner, "PARTS", {"asking": runner.Part(60, lambda _: command, needs=())})
    if carried is not None:
        (tmp_path / "commit").write_text(carried + "\n")
    assert runner.main(["--out", str(tmp_path / "results")]) == 0
    assert told.read_text() == str(carried)


def test_all_tests_of_a_gpu_are_in_a_part_as_long_as_their_longest_job(runner: ModuleType, tmp_path: Path) -> None:
    commands = {name: runner.PARTS[name].command(tmp_path / name) for name in ("tests", "training")}
    files = {name: [Path(one) for one in command if one.endswith(".py")] for name, command in commands.items()}
    ours = set((ROOT / "tests" / "python" / "gpu").glob("test_gpu_*.py"))
    assert {ROOT / path for paths in files.values() for path in paths} == ours
    assert files["tests"][0].name == "test_gpu_transfers.py"
    (longest,) = re.findall(r"timeout_s=(\d+)", (ROOT / files["training"][-1]).read_text())
    assert runner.PARTS["training"].limit_s >= int(longest) + 60


def test_a_number_of_ranks_that_hangs_takes_no_other_along(runner: ModuleType, tmp_path: Path) -> None:
    from lab import transfers

    part = runner.PARTS["transfers"]
    command = part.command(tmp_path / "transfers")
    assert "--ranks" not in command
    numbers = inspect.signature(transfers.command).parameters["ranks"].default.split(",")
    assert part.limit_s >= len(numbers) * float(command[command.index("--timeout") + 1])


@pytest.mark.parametrize(("gib", "longest"), [(0, "64Mi"), (40, "64Mi"), (80, "1Gi")])
def test_the_longest_selections_are_where_there_is_memory(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, longest: str
) -> None:
    from lab.common.commands import counts_of
    from lab.select import _MOST

    monkeypatch.setattr(runner, "_gpu_bytes", lambda: gib << 30)
    command = runner.PARTS["select"].command(tmp_path / "select")
    elements = command[command.index("--elements") + 1]
    assert elements.split(",")[-1] == longest
    assert max(counts_of(elements, 1, _MOST, "--elements")) == (1 << 30 if longest == "1Gi" else 64 << 20)


def test_the_commands_of_all_parts_are_what_the_command_line_takes(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each benchmark gets as far as to look for a GPU; each folder or file of tests is there."""
    typer_testing = pytest.importorskip("typer.testing")
    from lab.common.experiments import app
    from telegrad.tools.cli import make_app

    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: None)
    programs = {"smoke", "probe", "hook", "blocks"}
    for name, part in [*runner.PARTS.items(), *runner.BRIEF.items()]:
        command = part.command(tmp_path / name)
        if name in programs:
            assert Path(command[1]) == ROOT / "benchmarks" / "gpu" / f"{name}.py"
            assert command[2:] == ["--json", f"{tmp_path / name}.json"]
        elif part.are_tests:
            places = [argument for argument in command if argument.startswith("tests/")]
            assert places
            assert all((ROOT / place).exists() for place in places), name
        else:
            done = typer_testing.CliRunner().invoke(app() if command[2] == "lab" else make_app(), command[3:])
            assert (done.exit_code, "no GPU: torch sees none here" in done.output) == (1, True), (name, done.output)
