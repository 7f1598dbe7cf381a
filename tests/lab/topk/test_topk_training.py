"""A training run with Ok-Topk as ``python -m lab topk`` shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.accuracy.problems import open_problem
from lab.accuracy.runs import Run
from lab.topk.schemes import most_words
from lab.topk.training import averages, train
from telegrad.tools.demo.job import Corpus


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    sources, texts = tmp_path / "sources", tmp_path / "texts"
    sources.mkdir()
    texts.mkdir()
    for i in range(60):
        (sources / f"module{i}.py").write_text(f"def function{i}(argument):\n    return argument + {i}\n" * 20)
    Corpus.prepare(texts, sources)
    return texts


def test_each_step_says_how_near_to_k_its_counts_are_and_what_moved(texts: Path) -> None:
    rows = train(open_problem("lstm", None, texts), ranks=2, steps=4, density=0.02, xi_every=2)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [("xi" in row) for row in rows] == [True, False, True, False]
    first = rows[0]  # thresholds are exact
    assert (first["selected"], first["selected_max"], first["local_deviation"]) == (first["k"], first["k"], 0)
    assert first["kept"] >= first["k"]
    for row in rows:
        k_of_call = max(row["selected_max"], row["kept"])
        assert 0 < row["words_max"] <= row["bound_words"] == most_words(k_of_call, 2)
        assert row["global_deviation"] == pytest.approx(abs(row["kept"] - row["k"]) / row["k"])
    found = averages(rows)
    assert found["steps"] == 4
    assert found["local_deviation"] == pytest.approx(sum(row["local_deviation"] for row in rows) / 4)
    assert found["of_bound"] == max(row["of_bound"] for row in rows) <= 1


def test_xi_is_the_distance_to_the_largest_sums_of_what_all_ranks_hold(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks with the same samples: what differs then is that each parameter's entries are selected apart."""
    problem = open_problem("lstm", None, texts)
    batch = problem.batch
    monkeypatch.setattr(problem, "batch", lambda run, step, rank: batch(run, step, 0))
    row = train(problem, ranks=2, steps=1, density=0.02, xi_every=1)[0]
    torch.manual_seed(0)
    model = problem.model("small", "cpu")
    problem.loss(model, *batch(Run("lstm", "oktopk", 0.02, 0, 1, 16, 2), 0, 0)).backward()
    gradients = [one.grad.flatten() for one in model.parameters() if one.numel() > 2048]
    whole, k = torch.cat(gradients), int(row["k"])
    taken = torch.cat([_largest(one, round(0.02 * one.numel())) for one in gradients])
    expected = (_largest(whole, k) - taken).norm() / whole.norm()
    assert row["xi"] == pytest.approx(float(expected), rel=1e-3)


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    chosen = values.abs().topk(k).indices
    return torch.zeros_like(values).index_copy_(0, chosen, values[chosen])
