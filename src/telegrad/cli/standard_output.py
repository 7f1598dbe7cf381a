"""Standard output, where it takes less than a terminal does: a full disk, a terminal that is gone, another encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Within it, characters that the encoding of standard output has not are replaced. If it cannot be written, the
    process ends with status 1 and one line that says why; without a line where its reader has seen enough."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")
    if sys.stdout is None:  # nobody would read it, and the next file that is opened would take its number
        raise SystemExit("standard output is closed: leave it open, or send it to /dev/null")
    if not isinstance(sys.stdout, io.TextIOWrapper):  # a test's
        yield
        return
    before, file = sys.stdout, _File(sys.stdout.fileno())
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(file), before.encoding, "replace", line_buffering=before.line_buffering
    )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BaseException as error:
        if file.failure is None:
            raise
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # what is not written yet cannot be
            os.dup2(nothing.fileno(), file.fileno())
        if not isinstance(file.failure, BrokenPipeError):
            with contextlib.suppress(OSError):  # it may be the same terminal
                sys.stderr.write(f"standard output cannot be written: {file.failure.strerror}\n")
        raise SystemExit(1) from error


class _File(io.FileIO):
    """``failure``: why it could not be written. Whoever caught the error may have taken it for another file's."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise
