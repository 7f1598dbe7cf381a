"""``make compatibility``: pins of its rows, counts of reports, and the table in docs/reference/compatibility.md."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "compatibility"))

import run_compatibility as compatibility  # noqa: E402
from run_compatibility import Counts, Row, counted, pins, replaced, requirements, sum_of  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BEGIN, END = compatibility.MARKERS
VERSIONS = {"Python": "3.11.7", "torch": "2.6.0", "numpy": "1.26.0", "triton": "3.2.0", "mpich": "4.3.1"}


def lower_bounds() -> dict[str, str]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = (re.match(r"([\w-]+)>=([\d.]+)", one) for group in groups for one in group)
    return {match[1].lower(): match[2] for match in found if match}


@pytest.mark.parametrize("row", compatibility.ROWS)
def test_a_row_pins_what_the_project_asks_for(row: str) -> None:
    own = pins((ROOT / "tests" / "compatibility" / f"{row}.txt").read_text())
    assert {"torch", "numpy", "triton"} <= set(own)
    bounds = lower_bounds()
    assert set(own) <= set(bounds)
    if row == "oldest":
        for name, version in own.items():
            if name != "triton":  # torch 2.6 asks for an older one
                assert version.startswith(bounds[name]), (
                    f"{name} is pinned to {version}, but the bound is {bounds[name]}"
                )


def test_other_packages_are_those_of_the_common_constraints() -> None:
    common = "# head\ntorch==2.13.0\nrich==15.0.0\nsympy==1.14.0\n"
    text = compatibility.constraints("torch==2.6.0  # why\n", common, ["torch", "rich"])
    assert pins(text) == {"torch": "2.6.0", "rich": "15.0.0"}, "sympy is what torch asks for"


def test_requirements_are_names() -> None:
    found = requirements(PROJECT)
    assert {"torch", "numpy", "pytest", "scipy", "mpich", "cmake"} <= set(found)
    assert not {"telegrad", "ruff"} & set(found)


def test_a_sum_holds_the_tests_the_wheel_and_the_pins(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    test, wheel = tmp_path / "tests" / "test_a.py", tmp_path / "a.whl"

    def whole(pinned: str = "pins") -> str:
        return sum_of([tmp_path / "tests"], wheel, pinned)

    test.write_text("one")
    sums = set()
    for year in (2025, 2026):
        with zipfile.ZipFile(wheel, "w") as members:
            members.writestr(zipfile.ZipInfo("a.py", (year, 1, 1, 0, 0, 0)), "one")
        sums.add(whole())
    assert len(sums) == 1, "dates of members are of no account"
    assert whole("others") not in sums
    test.write_text("two")
    assert whole() not in sums


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = ["", "", "<skipped/>", "<failure/>", "<error/>"]
    report.write_text(f"<testsuites>{''.join(f'<testcase>{case}</testcase>' for case in cases)}</testsuites>")
    assert counted(report) == Counts(passed=2, skipped=1, failed=2)


def test_rows_that_did_not_run_keep_their_lines() -> None:
    document = f"before\n{BEGIN}\n{END}\nafter\n"
    newest = Row("newest", "2026-11-27", VERSIONS, {compatibility.FOLDERS[0]: Counts(5, 1, 0)})
    oldest = Row("oldest", "2026-11-28", VERSIONS, {})
    both = replaced(replaced(document, [newest]), [oldest])
    assert both.startswith("before\n")
    assert both.endswith("\nafter\n")
    lines = both.splitlines()
    assert lines[4].startswith("| oldest | 2026-11-28 | 3.11.7 | 2.6.0 | 1.26.0 | 3.2.0 | 4.3.1 | not run")
    assert lines[5].startswith("| newest | 2026-11-27")
    assert "| 5 / 1 / 0 | not run" in lines[5]
    assert replaced(both, [oldest]) == both


def test_a_document_without_the_markers() -> None:
    with pytest.raises(ValueError, match="the document needs one line '<!-- begin"):
        replaced("nothing", [])
    assert replaced((ROOT / "docs" / "reference" / "compatibility.md").read_text(), []).count(BEGIN) == 1


def test_a_command_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(compatibility.SetupFailed, match=r"ended with 3: .*log says why"):
        compatibility.run(
            [sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path / "pins", tmp_path / "log"
        )
    assert "why" in (tmp_path / "log").read_text()


def test_a_run_of_tests_that_cannot_begin(tmp_path: Path) -> None:
    with pytest.raises(compatibility.SetupFailed, match=r"pytest tests/nothing ended with 4: .* says why"):
        compatibility.tested(Path(sys.executable), "tests/nothing", tmp_path, 1)


def test_a_wheel_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compatibility.main(["--wheel", "/nowhere.whl"])
    assert "--wheel=/nowhere.whl is no file: build it (make compatibility does)" in capsys.readouterr().err
