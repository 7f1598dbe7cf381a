"""The command of a benchmark that tells a row at a time: each is printed, and in a file as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from limited import ROOT

sys.path.insert(0, str(ROOT))

from lab.common.growing_result import GrowingResult

Tell = Callable[[dict[str, Any]], None]


def run(
    doc: str,
    name: str,
    measure: Callable[[Tell], None],
    arguments: Sequence[str] | None,
    *,
    unsaid: Sequence[str] = (),
) -> int:
    """The status. ``doc``: the program's; ``unsaid``: what of a row is in the file alone."""
    parser = argparse.ArgumentParser(description=" ".join(doc.partition("\n\n")[0].split()))
    parser.add_argument("--json", type=Path, default=Path(f"gpu-{name}.json"), help="where rows go")
    asked = parser.parse_args(arguments)
    from telegrad.tools.bench.device import describe_gpu, gpu_name

    gpu = gpu_name()
    if gpu is None:
        print("no GPU: torch sees none here, and nothing was measured")
        return 1
    result = GrowingResult(asked.json, {"machine": describe_gpu(gpu)})

    def tell(row: dict[str, Any]) -> None:
        print(json.dumps({key: value for key, value in row.items() if key not in unsaid}), flush=True)
        result.add(row)

    measure(tell)
    return 0
