"""One run: that a killed one goes on bitwise, what its points say, and how it ends when it diverges."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.accuracy import runs as tasks
from lab.accuracy.one_process import OneProcess
from lab.accuracy.problems import WORDS, Problem, Words, masked, open_problem
from lab.accuracy.runs import METHODS, SIZES, TASKS, Run
from lab.accuracy.training import Training
from telegrad.tools.demo.job import Corpus

RANKS = 2  # any algorithm sums two vectors to the same bits


def problem_of(run: Run, places: tuple[Path, Path]) -> Problem:
    return open_problem(run.task, *places)


def first_fitting(method: str) -> str:
    return next(name for name in ("vgg", *TASKS) if METHODS[method].fits(TASKS[name]))


SAVED_LIKE_ANOTHER = {
    *("topk", "trimmed", "search", "buckets", "gaussian", "topka", "steps", "oktopk", "cold", "unmasked"),
    *("lowrank-1", "lowrank-3", "lowrank-8", "lowrank-16", "powersgd-8"),
}
"""Methods whose checkpoint holds what that of one in RESUMED holds; that each trains is for test_real_job.py."""
RESUMED = [
    *(
        Run(first_fitting(name), name, 0.02 if one.sparse else 1.0, 0, 9, 4, RANKS, 3)
        for name, one in METHODS.items()
        if name not in SAVED_LIKE_ANOTHER
        and "qsgd" not in one.options.get("values", "")  # rounds at random, by the number of calls of a communicator
    ),
    Run("gpt", "reused", 0.02, 0, 6, 2, RANKS, 3),
    Run("lstm", "topk", 0.02, 3, 6, 2, RANKS, 3),
    Run("resnet18", "momentum", 0.02, 0, 6, 8, RANKS, 3, rate=2.0),
    Run("lstm-words", "reused", 0.02, 0, 6, 4, RANKS, 3),
    Run("gpt-clipped", "dense", 1.0, 0, 6, 4, RANKS, 3),
    Run("masked", "lowrank-2", 1.0, 0, 6, 4, RANKS, 3),
]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("run", RESUMED, ids=lambda run: f"{run.task}-{run.method}")
def test_a_killed_run_goes_on_bitwise(run: Run, places: tuple[Path, Path], tmp_path: Path) -> None:
    problem = problem_of(run, places)
    with Training(run, problem, tmp_path / "whole.npz") as whole:
        whole.go_on()
        expected = whole.result()

    def kill(training: Training) -> None:
        if training.step == run.steps - 1:  # after its second checkpoint
            raise Killed

    with pytest.raises(Killed), Training(run, problem, tmp_path / "killed.npz") as killed:
        killed.go_on(kill)
    with Training(run, problem, tmp_path / "killed.npz") as second:
        assert second.step == 2 * run.steps // 3
        second.go_on()
        found = second.result()
    assert found["weights_crc32"] == expected["weights_crc32"]
    assert [point["step"] for point in found["points"]] == sorted(run.evaluation_steps())
    for point, reference in zip(found["points"], expected["points"], strict=True):
        # the automatic choice of a sparse sum's algorithm looks at earlier sums, which a new communicator has not had
        assert point.pop("sent_bytes") == pytest.approx(reference.pop("sent_bytes"), rel=0.1)
    assert found["points"] == expected["points"]


def test_points_count_what_is_sent(places: tuple[Path, Path], tmp_path: Path) -> None:
    results = {}
    for method, density in (("dense", 1.0), ("topk", 0.01)):
        run = Run("vgg", method, density, 0, 6, 8, 4, 2)
        with Training(run, problem_of(run, places), tmp_path / f"{method}.npz") as training:
            training.go_on()
            results[method] = training.result()
    dense, sparse = results["dense"], results["topk"]
    parameters = dense["parameters"]
    assert (dense["compressed_parameters"], dense["diverged"]) == (0, None)
    assert parameters == sparse["parameters"] > sparse["compressed_parameters"] > 0.9 * parameters
    steps, ring_bytes = 6, 2 * 3 / 4 * 4 * parameters  # a ring or Rabenseifner's halving: 2(P−1)/P words
    assert dense["points"][-1]["sent_bytes"] == pytest.approx(steps * ring_bytes, rel=0.01)
    assert all(point["reduced_density"] == point["selected"] == 1 for point in dense["points"])
    for point in sparse["points"]:
        assert point["selected"] == 1  # exact top-k
        assert 0.01 <= point["reduced_density"] * 1.001
        assert point["reduced_density"] <= 4 * 0.01 * 1.01
        assert 0 < point["sent_bytes"] < 0.1 * dense["points"][-1]["sent_bytes"]
        assert 0 <= point["accuracy"] <= 100
        small = parameters - sparse["compressed_parameters"]
        assert point["travelled"] == pytest.approx((small + 0.01 * sparse["compressed_parameters"]) / parameters, 0.01)
    assert {point["travelled"] for point in dense["points"]} == {1.0}


def test_it_learns(places: tuple[Path, Path], tmp_path: Path) -> None:
    for method, density in (("dense", 1.0), ("reused", 0.02)):
        run = Run("vgg", method, density, 0, 80, 16, RANKS, 2)
        with Training(run, problem_of(run, places), tmp_path / f"{method}.npz") as training:
            training.go_on()
            points = training.result()["points"]
        assert points[-1]["training_loss"] < 0.7 * np.log(10), points
        assert points[-1]["accuracy"] > 40, points


def test_ranks_share_a_batch_and_epochs_are_whole(places: tuple[Path, Path]) -> None:
    run = Run("vgg", "dense", 1.0, 5, 40, 32, 4)
    problem = problem_of(run, places)
    alone = dataclasses.replace(run, ranks=1)
    for step in (0, 9, 10):
        whole, labels = problem.batch(alone, step, 0)
        shares = [problem.batch(run, step, rank) for rank in range(4)]
        assert torch.equal(torch.cat([images for images, _ in shares]), whole)
        assert torch.equal(torch.cat([targets for _, targets in shares]), labels)
    seen = [problem.batch(alone, step, 0)[0] for step in range(10)]  # 320 images
    assert len({zlib.crc32(image.numpy().tobytes()) for image in torch.cat(seen)}) == 320
    assert not torch.equal(problem.batch(alone, 10, 0)[0], seen[0])


def test_a_batch_larger_than_an_epoch_is_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    run = Run("vgg", "dense", 1.0, 0, 2, 400, 4)
    with (
        Training(run, problem_of(run, places), tmp_path / "s.npz") as training,
        pytest.raises(ValueError, match="batch=400 is more than the 320 images"),
    ):
        training.go_on()


@pytest.mark.parametrize("at", ["gradient", "held out"])
def test_a_run_that_diverges_says_when(
    at: str, places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("vgg", "reused", 0.01, 0, 12, 4, RANKS, 6)
    problem = problem_of(run, places)
    real = type(problem).batch
    if at == "gradient":

        def batch(self: Problem, run: Run, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = real(self, run, step, rank)
            return (inputs * float("nan") if (step, rank) == (5, 1) else inputs), targets

        monkeypatch.setattr(type(problem), "batch", batch)
    else:
        monkeypatch.setattr(type(problem), "held_out", lambda *_, **__: {"loss": float("nan"), "accuracy": 10.0})
    with Training(run, problem, tmp_path / "s.npz") as training:
        training.go_on()
        result = training.result()
        assert training.over
    assert result["diverged"] == (5 if at == "gradient" else 2)
    assert [point["step"] for point in result["points"]] == ([2, 4] if at == "gradient" else [])


def test_a_checkpoint_of_another_run_is_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    run = Run("vgg", "reused", 0.01, 0, 4, 4, RANKS, 4)
    problem, saved = problem_of(run, places), tmp_path / "s.npz"
    with Training(run, problem, saved) as training:
        training.go_on()
    with pytest.raises(ValueError, match="s.npz is of another run"):
        Training(dataclasses.replace(run, seed=1), problem, saved)


def test_ranks_that_disagree_are_found(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 3)
    with OneProcess(model, RANKS, {"compress": None}) as ranks:
        for rank in range(RANKS):
            model.zero_grad()
            model(torch.ones(4)).sum().backward()
            ranks.take(rank)
        real = ranks.states[1].reduce
        monkeypatch.setattr(ranks.states[1], "reduce", lambda bucket: real(bucket).then(lambda one: one.value() + 1e-7))
        with pytest.raises(RuntimeError, match="ranks 0 and 1 hold different averages"):
            ranks.average()


def test_a_parameter_without_a_gradient_takes_no_part() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(60, 60), "unused": torch.nn.Linear(60, 60)})
    with OneProcess(model, RANKS, {}) as ranks:
        for step in range(3):
            for rank in range(RANKS):
                model.zero_grad()
                model["used"](torch.full((60,), 1.0 + step + rank)).square().sum().backward()
                ranks.take(rank)
            ranks.average()
            assert torch.count_nonzero(model["used"].weight.grad) > 0
            assert torch.count_nonzero(model["unused"].weight.grad) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_models_of_all_sizes(task: tasks.Task, size: str, places: tuple[Path, Path]) -> None:
    problem = open_problem(task.name, *places)
    with torch.device("meta"):  # shapes without memory
        model = problem.model(size, "meta")
        inputs = torch.zeros(3, 1, 28, 28) if task.data == "fashion" else torch.zeros(3, task.context, dtype=torch.long)
        logits = model(inputs)
    words = 256 if task.data == "text" else WORDS
    assert logits.shape == ((3, 10) if task.data == "fashion" else (3, task.context, words))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    least = 5_000_000 if task.name in tasks.GROWN else 2_000_000
    assert parameters < 200_000 if size == "small" else least < parameters < 26_000_000
    kinds = {type(one) for one in model.modules() if next(one.buffers(recurse=False), None) is not None}
    assert kinds == ({torch.nn.BatchNorm2d} if task.name == "resnet18" else set())


def test_running_statistics_are_those_of_rank_0(places: tuple[Path, Path], tmp_path: Path) -> None:
    run = Run("resnet18", "momentum", 0.02, 0, 3, 8, RANKS, 1)
    problem = problem_of(run, places)
    with Training(run, problem, tmp_path / "s.npz") as training:
        for step in range(run.steps):
            alone = copy.deepcopy(training.model)
            alone(problem.batch(run, step, 0)[0])
            training.train_step()
            for (name, expected), (_, found) in zip(alone.named_buffers(), training.model.named_buffers(), strict=True):
                assert torch.equal(expected, found), name


def test_held_out_figures_use_running_statistics_and_leave_them(places: tuple[Path, Path], tmp_path: Path) -> None:
    run = Run("resnet18", "dense", 1.0, 0, 2, 8, RANKS, 1)
    with Training(run, problem_of(run, places), tmp_path / "s.npz") as training:
        training.go_on()
        after = {name: int(one) for name, one in training.model.named_buffers() if name.endswith("tracked")}
        assert set(after.values()) == {run.steps}
        with torch.no_grad():
            batch = problem_of(run, places).batch(run, 0, 0)[0]
            assert training.model.training
            one, other = (training.model.eval()(batch[:count])[0] for count in (1, 4))
        assert torch.allclose(one, other, atol=1e-4)  # not by the batch


@pytest.mark.parametrize("method", ["dense", "lowrank-2", "topk"])
def test_gradients_are_clipped(method: str, places: tuple[Path, Path], tmp_path: Path) -> None:
    run = Run("lstm-words", method, 0.02 if method == "topk" else 1.0, 0, 100, 4, RANKS)
    task = dataclasses.replace(TASKS[run.task], clip=1e-3)
    problem = problem_of(run, places)
    problem.task = task
    with Training(run, problem, tmp_path / "s.npz") as training:
        before = [one.detach().clone() for one in training.model.parameters()]
        training.train_step()
        moved = torch.cat(
            [(one.detach() - old).flatten() for one, old in zip(training.model.parameters(), before, strict=True)]
        )
    most = run.learning_rate_at(0) * task.clip
    assert 0 < float(moved.norm()) <= 1.001 * most
    if method == "dense":
        assert float(moved.norm()) > 0.99 * most


def test_text_by_words_loses_nothing(places: tuple[Path, Path]) -> None:
    corpus = Corpus.open(places[1])
    words = Words(corpus.training)
    assert 256 < len(words) <= WORDS
    for text in (corpus.training, corpus.held_out, np.frombuffer("unknown_word λ\t 12".encode(), np.uint8)):
        tokens = words.tokens(text)
        assert words.text(tokens) == text.tobytes()
    assert len(words.tokens(corpus.training)) < 0.5 * len(corpus.training)


def test_masked_tokens_are_judged_and_no_others() -> None:
    tokens = np.arange(3 * 64).reshape(3, 64)
    inputs, targets = masked(tokens, np.random.default_rng(0))
    hidden = inputs == WORDS
    assert hidden.sum(1).tolist() == [10, 10, 10]
    assert np.array_equal(targets[hidden], tokens[hidden])
    assert set(targets[~hidden]) == {-100}
    assert np.array_equal(inputs[~hidden], tokens[~hidden])
    assert (hidden[0] != hidden[1]).any()


def test_the_masked_loss_is_a_mean_over_masked_tokens(places: tuple[Path, Path]) -> None:
    run = Run("masked", "dense", 1.0, 0, 1, 4, RANKS)
    problem = problem_of(run, places)
    model = problem.model("small", "cpu")
    inputs, targets = problem.batch(run, 0, 1)
    assert torch.equal(problem.batch(run, 0, 1)[0], inputs)
    assert not torch.equal(problem.batch(run, 0, 0)[1], targets)
    places_of = targets != -100
    expected = -model(inputs).log_softmax(-1)[places_of].gather(1, targets[places_of][:, None]).mean()
    assert float(problem.loss(model, inputs, targets)) == pytest.approx(float(expected), rel=1e-5)
    held_out = problem.held_out(model, final=True)
    assert held_out == problem.held_out(model, final=True)


def test_the_rate_multiplies_the_learning_rate(places: tuple[Path, Path], tmp_path: Path) -> None:
    moved = []
    for rate in (1.0, 0.5):
        run = Run("vgg", "dense", 1.0, 0, 100, 8, RANKS, rate=rate)
        with Training(run, problem_of(run, places), tmp_path / "s.npz") as training:
            before = training.model.head.weight.detach().clone()  # type: ignore[union-attr]
            training.train_step()
            moved.append(training.model.head.weight.detach() - before)  # type: ignore[union-attr]
    assert torch.allclose(moved[0], 2 * moved[1], rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_learning_rate_rises_and_falls(task: tasks.Task) -> None:
    rates = [task.learning_rate_at(step, 1000) for step in range(1000)]
    assert all(0 < rate <= task.learning_rate for rate in rates)
    assert rates[:30] == sorted(rates[:30])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[29] > 0.99 * task.learning_rate
    assert rates[-1] < 1e-4 * task.learning_rate
