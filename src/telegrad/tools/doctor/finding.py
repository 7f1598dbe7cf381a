"""What a check says, and how checks are run so that none of them can hang or break the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "note", "missing", "failed", "error"]
"""``ok``; ``note``: works, with a limit worth knowing; ``missing``: something optional is not here; ``failed``: the
check itself broke or hung; ``error``: telegrad cannot be used."""

_LAST_WORDS_S = 5.0  # for an interrupted check to remove what it has made
_LONGEST_REASON = 300  # characters of an exception


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, how it is, and what to do about it (empty if nothing)."""

    check: str
    status: Status
    text: str
    mend: str = ""


class NotTried(Exception):  # noqa: N818 - no fault of the check's
    """Raised by a check whose first condition is not met; the message says which, and its own line what to do."""


@dataclass(frozen=True)
class Check:
    """A function that returns its findings. Without an ``essential`` one telegrad cannot be used.

    ``timeout_s``: seconds after which it is given up. ``mend``: what to do if it hangs or raises.
    """

    name: str
    run: Callable[[], Sequence[Finding]]
    timeout_s: float = 10.0
    essential: bool = False
    mend: str = ""


def run_checks(
    checks: Sequence[Check],
    *,
    on_begin: Callable[[str], None] = lambda _: None,
    on_finding: Callable[[Finding], None] = lambda _: None,
) -> list[Finding]:
    """Runs ``checks`` one after another; ``on_finding`` sees each finding as it comes.

    A check that raises, or is not done in time, gives a finding that says so; the others run all the same. Ctrl-C
    waits for a moment until the running check has cleaned up.
    """
    findings: list[Finding] = []
    for check in checks:
        on_begin(check.name)
        for finding in _run(check):
            findings.append(finding)
            on_finding(finding)
    return findings


def is_usable(findings: Sequence[Finding]) -> bool:
    """False if one of them says that telegrad cannot be used."""
    return all(finding.status != "error" for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """What ``telegrad doctor --json`` prints."""
    return {
        "kind": "telegrad doctor",
        "version": 1,
        "usable": is_usable(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def reason_of(error: BaseException) -> str:
    """An exception in one line: its kind, and what it says."""
    said = " ".join(str(error).split())
    if len(said) > _LONGEST_REASON:
        said = said[:_LONGEST_REASON] + " …"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _run(check: Check) -> Sequence[Finding]:
    found: list[Finding] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            found.extend(check.run())
        except BaseException as error:  # SystemExit too: nothing that a check does may end the doctor
            raised.append(error)

    # A daemon: if it hangs, it must not keep the process from ending.
    thread = threading.Thread(target=work, name=f"check {check.name}", daemon=True)
    thread.start()
    try:
        thread.join(check.timeout_s)
    except KeyboardInterrupt:
        thread.join(_LAST_WORDS_S)
        raise
    status: Status = "error" if check.essential else "failed"
    if thread.is_alive():
        return [Finding(check.name, status, f"the check hangs: not done within {check.timeout_s:g} s", check.mend)]
    if raised and isinstance(raised[0], NotTried):
        return [Finding(check.name, "error" if check.essential else "note", f"not tried: {raised[0]}")]
    if raised:
        return [Finding(check.name, status, f"the check failed: {reason_of(raised[0])}", check.mend)]
    if not found:
        return [Finding(check.name, status, "the check failed: it said nothing", check.mend)]
    return found
