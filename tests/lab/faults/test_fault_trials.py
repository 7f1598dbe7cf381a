"""A sample of ``python -m lab faults``: whatever goes wrong at whatever moment, nobody hangs, gets a wrong sum or
blames the wrong rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lab.faults import runs
from lab.faults.command import failed
from lab.faults.judge import Seen, Verdict
from lab.faults.runs import run_trials
from lab.faults.trials import DECK_SIZE, KINDS, Options
from telegrad import _core

pytestmark = [
    pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX"),
    pytest.mark.timeout(1500),  # hangs are told one by one before that
]

_FEW = Options(ranks=(2, 4), liveness_timeout_s=1.5)
_EXECUTED = (1, 3, 6, 9)  # two without a fault, a frozen rank and a killed one
_MANY = Options(ranks=(5, 8), kinds=tuple(kind for kind in KINDS if kind != "freeze"))


# Most trials have few ranks: more of them take long to start on few cores. Processes that a trial leaves are found by
# their environment, which forked ranks have not of their own: a few trials execute theirs.
@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        pytest.param(_FEW, _EXECUTED, id="2-4 ranks, executed", marks=pytest.mark.ranks("exec")),
        pytest.param(_FEW, [seed for seed in range(DECK_SIZE - 8) if seed not in _EXECUTED], id="2-4 ranks"),
        pytest.param(_MANY, range(5), id="5-8 ranks"),
    ],
)
def test_nobody_hangs_or_lies_or_blames_the_wrong_rank(
    options: Options, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "TRIAL_LIMIT_S", 200.0)  # on a busy machine ranks take that long to start
    faults: list[str] = []

    late: list[int] = []
    patient = replace(options, liveness_timeout_s=8.0)

    def look(verdict: Verdict, seen: Seen) -> None:
        if verdict.violations and all("has been silent" in one.text for one in verdict.violations):
            late.append(verdict.trial.seed)
        elif verdict.violations:
            faults.append(failed(verdict, seen, options))

    def look_again(verdict: Verdict, seen: Seen) -> None:
        if verdict.violations:
            faults.append(failed(verdict, seen, patient))

    verdicts = run_trials(seeds, options, jobs=2, on_verdict=look)
    if late:  # another rank was silent for so long, such as one that a busy machine did not let run
        run_trials(late, patient, jobs=1, on_verdict=look_again)
    assert not faults, "\n\n".join(faults)
    assert sum(verdict.checked for verdict in verdicts) > 5 * len(seeds)
    assert all(verdict.detected_s for verdict in verdicts if verdict.trial.kind != "none")
