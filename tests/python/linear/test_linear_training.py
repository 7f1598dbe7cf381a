"""Training: the optimum that others find, the same steps for every number of ranks, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from telegrad import Communicator
from telegrad.linear import LOSSES, LinearModel, Rows, Trained, TrainingSettings, objective, read_libsvm, train
from telegrad.linear.losses import area_under_curve, losses_of
from telegrad.linear.problem import Share

FEATURES, COUNT, L2 = 60, 600, 0.01


def data(*, numbers: bool = False, seed: int = 1) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    matrix = sparse.random(COUNT, FEATURES, 0.1, format="csr", random_state=seed)
    scores = matrix @ random.normal(size=FEATURES) + 0.3 * random.normal(size=COUNT) + 0.2
    return matrix, scores if numbers else np.where(scores > 0, 1, -1)


def train_among(rows: Rows, world_size: int, settings: TrainingSettings) -> list[Trained]:
    comms = Communicator.local(world_size, timeout_s=60)
    borders = [len(rows) * rank // world_size for rank in range(world_size + 1)]

    def one(rank: int) -> Trained:
        with comms[rank]:
            return train(rows.part(borders[rank], borders[rank + 1]), settings, comms[rank])

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def reference(loss: str, matrix: Any, labels: Any) -> LinearModel:
    """Of scikit-learn, which calls our mean loss + λ/2·|w|² by other constants."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.svm import SVC, LinearSVC

    strength = 1 / (L2 * COUNT)
    found: Any
    match loss:
        case "logistic":
            found = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000)
        case "squared_error":
            found = Ridge(alpha=L2 * COUNT, tol=1e-10)
        case "hinge":
            found = SVC(kernel="linear", C=strength, tol=1e-8)
        case _:
            found = LinearSVC(C=strength, tol=1e-10, max_iter=100_000, dual=False, fit_intercept=False)
    found.fit(matrix.toarray(), labels)
    bias = float(np.ravel(found.intercept_)[0])
    return LinearModel(np.ravel(found.coef_).astype(np.float32), bias, loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_optimum_is_scikit_learn_s(loss: str) -> None:
    matrix, labels = data(numbers=loss == "squared_error")
    rows = Rows.from_csr(matrix, labels)
    with_bias = loss != "squared_hinge"  # whose reference regularises its bias
    settings = TrainingSettings(loss=loss, l2=L2, epochs=150, batch=50, decay=0.005, bias=with_bias, learning_rate=1)
    best = objective(reference(loss, matrix, labels), rows, L2)
    found = objective(train(rows, settings).model, rows, L2)
    assert best * (1 - 1e-6) <= found <= best * (1 + 1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_take_the_steps_of_one(loss: str) -> None:
    rows = Rows.from_csr(*data(numbers=loss == "squared_error"))
    settings = TrainingSettings(loss=loss, l2=L2, epochs=3, batch=64, decay=0.1, held_out=0.2)
    alone = train(rows, settings)
    for world_size in (1, 2, 4):
        every = train_among(rows, world_size, settings)
        for one in every:
            assert one.model.weights.tobytes() == every[0].model.weights.tobytes()
            assert one.model.bias == every[0].model.bias
            assert one.rows == COUNT
            for name in ("loss", "held_out_loss", "accuracy", "auc"):
                values = [[getattr(report, name) for report in run.epochs] for run in (one, alone)]
                assert values[0] == pytest.approx(values[1], rel=1e-4, nan_ok=True)
        assert np.abs(every[0].model.weights - alone.model.weights).max() < 1e-5
        assert every[0].model.bias == pytest.approx(alone.model.bias, abs=1e-5)


def test_ranks_without_rows_take_part() -> None:
    rows = Rows.from_csr(*data()).part(0, 2)
    settings = TrainingSettings(epochs=2, batch=1)
    found = train_among(rows, 4, settings)
    assert np.allclose(found[3].model.weights, train(rows, settings).model.weights, atol=1e-6)


def test_a_sum_that_fills_in_is_applied_like_a_sparse_one() -> None:
    matrix = sparse.csr_matrix(np.random.default_rng(3).normal(size=(64, 40)))
    rows = Rows.from_csr(matrix, np.sign(matrix[:, [0]].toarray().ravel()))
    settings = TrainingSettings(epochs=3, batch=16, l2=L2)
    assert np.allclose(train_among(rows, 4, settings)[0].model.weights, train(rows, settings).model.weights, atol=1e-5)


def test_weights_shrink_alike_however_small_their_scale() -> None:
    rows = Rows.from_csr(*data())
    settings = TrainingSettings(l2=5.0, learning_rate=1.0, epochs=2, batch=20)  # a scale of 6^-60
    weights, bias = np.zeros(FEATURES), 0.0
    matrix, targets = rows.to_csr().astype(np.float64), rows.labels.astype(np.float64)
    for epoch in range(2):
        for chosen, size in Share(0, COUNT, COUNT, held_out=0, seed=0).batches(epoch, 20):
            part, signs = matrix[chosen.astype(np.int64)], targets[chosen.astype(np.int64)]
            slopes = -signs / (1 + np.exp(signs * (part @ weights + bias)))
            weights = (weights - part.T @ slopes / size) / 6
            bias -= slopes.sum() / size
    found = train(rows, settings).model
    assert np.allclose(found.weights, weights, atol=1e-6)
    assert found.bias == pytest.approx(bias, abs=1e-5)


@pytest.mark.parametrize("labels", [(0, 1), (-1, 1)], ids=["0-1", "signs"])
def test_labels_of_two_classes(labels: tuple[int, int]) -> None:
    matrix, signs = data()
    rows = Rows.from_csr(matrix, np.where(signs > 0, labels[1], labels[0]))
    settings = TrainingSettings(epochs=20, batch=50)
    model = train(rows, settings).model
    assert np.array_equal(model.weights, train(Rows.from_csr(matrix, signs), settings).model.weights)
    assert set(model.predict(rows).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([2], "row 0 (from 0) has 2, and of 600 rows 0 have -1, 0 have 0, "),
        ([-1, 0], "of 600 rows "),
        ([-1, 0.5], "row 599 (from 0) has 0.5, and of 600 rows "),
    ],
    ids=["three", "both", "last"],
)
def test_labels_that_are_not_two_classes_are_refused_on_every_rank(others: list[float], found: str) -> None:
    matrix, labels = data()
    labels = np.where(labels > 0, 1, others[0]).astype(float)
    labels[0] = others[0]
    labels[-1] = others[-1]  # on the last rank alone
    rows = Rows.from_csr(matrix, labels)
    comms = Communicator.local(2, timeout_s=60)
    beginning = re.escape(f"labels are not two classes for loss='hinge': {found}")

    def one(rank: int) -> str:
        with comms[rank], pytest.raises(ValueError, match=beginning) as raised:
            train(rows.part(rank * 300, rank * 300 + 300), TrainingSettings(loss="hinge"), comms[rank])
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        (said,) = set(pool.map(one, range(2)))
    assert said.endswith("have 1. Make them -1 and 1 or 0 and 1, or use loss='squared_error' for numbers")


def test_nothing_to_train_on() -> None:
    rows = Rows.from_csr(*data())
    with pytest.raises(ValueError, match="of 0 rows none is left to train on: give data that have some$"):
        train(rows.part(0, 0))
    with pytest.raises(ValueError, match="of 1 rows none is left to train on: give more, or a smaller held_out$"):
        train(rows.part(0, 1), TrainingSettings(held_out=0.9))


def test_as_many_features_as_indices_but_no_room_for_the_bias() -> None:
    rows = Rows(*(np.zeros(1, np.uint64), np.empty(0, np.uint32)), *[np.empty(0, np.float32)] * 2, 2**32 - 2)
    with pytest.raises(ValueError, match="4294967294 features are more than the 4294967293 that"):
        train(rows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "squared"}, "loss='squared' does not exist: use one of logistic, hinge"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"l2": -1.0}, "l2=-1.0 must be a finite number, 0 or more"),
        ({"decay": math.inf}, "decay=inf must be a finite number"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a finite number above 0, or None"),
        ({"held_out": 1.0}, "held_out=1.0 must be from 0 to below 1"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_settings_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainingSettings(**options)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *((name, 1.5, "an int of at least 1") for name in ("epochs", "batch", "threads")),
        ("batch", True, "an int of at least 1"),
        ("epochs", "3", "an int of at least 1"),
        ("seed", 1.5, "an int, 0 or more"),
        *((name, "1", "a finite number, 0 or more") for name in ("l2", "l1", "decay")),
        ("l2", None, "a finite number, 0 or more"),
        ("l1", True, "a finite number, 0 or more"),
        ("learning_rate", "1", "a finite number above 0, or None"),
        ("held_out", "0.1", "a number from 0 to below 1"),
        ("bias", 1, "True or False"),
        ("overlap", "no", "True or False"),
    ],
)
def test_settings_of_another_type_are_refused_at_once(name: str, value: object, wanted: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name}={value!r} must be {wanted}")):
        TrainingSettings(**{name: value})  # type: ignore[arg-type]


def test_a_number_beyond_all_floats_is_refused() -> None:
    with pytest.raises(ValueError, match="l2 is more than a float can hold: it must be a finite number, 0 or more"):
        TrainingSettings(l2=10**400)


def test_settings_take_numpy_s_numbers_for_python_s() -> None:
    given = {"epochs": np.int64(3), "batch": np.uint8(7), "threads": np.int32(2), "seed": np.uint64(5)}
    given |= {"l2": np.float64(0.5), "l1": np.float32(0.25), "learning_rate": np.int64(1), "held_out": 0}
    given |= {"bias": np.False_, "overlap": np.True_}
    plain = TrainingSettings(
        epochs=3, batch=7, threads=2, seed=5, l2=0.5, l1=0.25, learning_rate=1.0, bias=False, overlap=True
    )
    assert repr(TrainingSettings(**given)) == repr(plain)  # ranks compare these texts


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_batches_and_held_out_rows_are_the_same_for_every_number_of_ranks(world_size: int) -> None:
    total, size = 103, 10
    borders = [0, *sorted(np.random.default_rng(world_size).integers(0, total + 1, world_size - 1).tolist()), total]
    shares = [Share(first, last - first, total, held_out=0.1, seed=5) for first, last in itertools.pairwise(borders)]
    alone = Share(0, total, total, held_out=0.1, seed=5)
    held_out = [int(row) + first for share, first in zip(shares, borders, strict=False) for row in share.held_out]
    assert sorted(held_out) == alone.held_out.tolist()
    assert len(held_out) == 10
    for epoch in range(2):
        seen = []
        batches = [list(share.batches(epoch, size)) for share in shares]
        for step, (rows, count) in enumerate(alone.batches(epoch, size)):
            of_ranks = [int(row) + first for b, first in zip(batches, borders, strict=False) for row in b[step][0]]
            assert sorted(of_ranks) == sorted(rows.tolist())
            assert {b[step][1] for b in batches} == {count} == {len(of_ranks)}
            seen += of_ranks
        assert sorted(seen + held_out) == list(range(total))


def test_losses_as_they_are_defined() -> None:
    scores, targets = [2.0, -1.0, 0.5], [1, 1, -1]
    assert losses_of("hinge", scores, targets).tolist() == [0, 2, 1.5]
    assert losses_of("squared_hinge", scores, targets).tolist() == [0, 4, 2.25]
    assert losses_of("squared_error", scores, targets).tolist() == [0.5, 2, 1.125]
    assert losses_of("logistic", scores, targets) == pytest.approx(
        [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(0.5))]
    )


def test_the_area_under_the_curve_is_scikit_learn_s() -> None:
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(8)
    scores, targets = random.integers(0, 20, 500) / 7, np.where(random.random(500) < 0.3, 1, -1)
    assert area_under_curve(scores, targets) == pytest.approx(roc_auc_score(targets, scores))
    assert math.isnan(area_under_curve([1, 2], [1, 1]))


def test_a_model_keeps_what_its_text_calls_the_first_feature(tmp_path: Path) -> None:
    path = tmp_path / "data.svm"
    path.write_text("1 1:1 3:1\n-1 2:1\n1 1:1\n-1 2:1 4:1\n")
    made = Rows.from_csr(*data())
    for base in (0, 1):
        for cache in (False, True, True):  # the last from the cache
            rows = read_libsvm(path, zero_based=base == 0, cache=cache)
            train(rows, TrainingSettings(epochs=1)).model.save(tmp_path / "model.npz")
            assert LinearModel.load(tmp_path / "model.npz").index_base == base
        shares = [read_libsvm(path, zero_based=base == 0, cache=True, rank=rank, world_size=2) for rank in range(2)]
        assert [rows.index_base for rows in shares] == [base, base]
        assert rows.first_features(2).index_base == base
    assert train(made, TrainingSettings(epochs=1)).model.index_base is None


def test_packed_text_is_read_with_its_base(tmp_path: Path) -> None:
    path = tmp_path / "data.svm.gz"
    path.write_bytes(gzip.compress(b"1 1:1\n-1 2:1\n"))
    assert read_libsvm(path, zero_based=np.bool_(True), cache=True).index_base == 0  # type: ignore[arg-type]
    assert read_libsvm(path, zero_based=True, cache=True).index_base == 0
    with pytest.raises(TypeError, match="zero_based=0 must be True or False, or 'auto'"):
        read_libsvm(path, zero_based=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bases", "expected"), [((0, 0), 0), ((1, 1), 1), ((0, 1), None), ((0, None), None), ((None, None), None)]
)
def test_ranks_agree_on_the_base_of_their_rows(bases: tuple[int | None, ...], expected: int | None) -> None:
    whole = Rows.from_csr(sparse.csr_array(np.eye(4, dtype=np.float32)), np.array([1, -1, 1, -1], np.float32))
    empty = whole.part(4, 4)  # which says nothing, and is not asked
    parts = [*(replace(whole, index_base=base) for base in bases), empty]

    def run(comm: Communicator) -> int | None:
        with comm:
            return train(parts[comm.rank], TrainingSettings(epochs=1), comm).model.index_base

    communicators = Communicator.local(3, timeout_s=30.0)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, communicators)) == [expected] * 3


def test_features_that_a_model_does_not_know_have_no_weight() -> None:
    model = LinearModel(np.array([1, 2], np.float32), 0.5, "hinge")
    matrix = sparse.csr_matrix(np.array([[1.0, 1.0, 7.0], [0, 0, -3.0]]))
    assert model.scores(Rows.from_csr(matrix, [1, -1])).tolist() == [3.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"l2": 1e-3}, "l2"), ({"epochs": 3}, "epochs"), ({"loss": "hinge"}, "loss"), ({"seed": 1}, "seed")],
)
def test_settings_that_differ_among_ranks_are_refused_on_all(changes: dict[str, object], name: str) -> None:
    communicators = Communicator.local(2, timeout_s=30.0)

    def run(comm: Communicator) -> str:
        settings = TrainingSettings(**{"epochs": 2, "threads": 1 + comm.rank, **(changes if comm.rank else {})})  # type: ignore[arg-type]
        rows = Rows.from_csr(sparse.csr_array(np.eye(4, dtype=np.float32)), np.array([1, -1, 1, -1], np.float32))
        with pytest.raises(ValueError, match=f"settings.{name} of rank 1 is another than that of rank 0") as caught:
            train(rows, settings, comm)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(run, communicators))) == 2
    for communicator in communicators:
        communicator.close()


def test_arguments_of_another_type() -> None:
    rows = Rows.from_csr(sparse.csr_array(np.eye(2, dtype=np.float32)), [0, 1])
    matrix: Any = rows.to_csr()
    said = r"rows is csr_array: it must be Rows; Rows.from_csr\(matrix, labels\) makes them"
    with pytest.raises(TypeError, match=said):
        train(matrix)
    with pytest.raises(TypeError, match=said):
        LinearModel(np.ones(2, np.float32), 0.0, "hinge").predict(matrix)
    other: Any = {"loss": "hinge"}
    with pytest.raises(TypeError, match="settings is dict: it must be TrainingSettings, or None"):
        train(rows, other)
    with pytest.raises(TypeError, match="comm is dict: it must be a telegrad Communicator, or None"):
        train(rows, comm=other)
