"""A model's file: what is read again, what is no model, and that an old one stays until a new one is whole."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from telegrad.linear import LinearModel
from telegrad.linear.model import write_whole

ARRAYS: dict[str, Any] = {
    "indices": np.array([1, 4], np.uint32),
    "values": np.array([2, -1], np.float32),
    "n_features": np.uint64(6),
    "bias": np.float64(0.5),
    "loss": np.str_("hinge"),
    "index_base": np.uint8(1),
}


@pytest.mark.parametrize("base", [None, 0, 1])
def test_a_model_s_file(tmp_path: Path, base: int | None) -> None:
    model = LinearModel(np.array([0, 2, 0, 0, -1, 0], np.float32), 0.5, "hinge", base)
    model.save(tmp_path / "model.npz")
    again = LinearModel.load(tmp_path / "model.npz")
    assert (again.bias, again.loss, again.index_base) == (0.5, "hinge", base)
    assert again.weights.dtype == np.float32
    assert again.weights.tolist() == model.weights.tolist()
    LinearModel(np.zeros(0, np.float32), 0.0, "logistic").save(tmp_path / "model.npz")
    assert LinearModel.load(tmp_path / "model.npz").weights.size == 0


def test_a_file_that_does_not_say_its_base_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, **{name: array for name, array in ARRAYS.items() if name != "index_base"})
    found = LinearModel.load(path)
    assert (found.weights.tolist(), found.bias, found.loss) == ([0, 2, 0, 0, -1, 0], 0.5, "hinge")
    assert found.index_base is None


def refused(path: Path, found: str) -> None:
    said = f"model.npz is no model of telegrad linear train, but {found}: name a file that its --model, or "
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        LinearModel.load(path)
    assert "pickle" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("n_features", np.uint64(4)),
        ("n_features", np.uint64(2**45)),
        ("n_features", np.int64(-1)),
        ("n_features", np.float64(6)),
        ("n_features", np.array([6], np.uint64)),
        ("indices", np.array([-1, 4])),
        ("indices", np.array([4, 1])),
        ("indices", np.array([4, 4])),
        ("indices", np.array([1.0, 4.0])),
        ("indices", np.array([[1, 4]])),
        ("indices", np.array([False, True])),
        ("indices", np.array([4])),
        ("indices", np.array([{}, {}], object)),
        ("values", np.array([2, np.nan], np.float32)),
        ("values", np.array([2, 1e300])),
        ("values", np.array([2, 1])),
        ("values", np.array(["2", "1"])),
        ("bias", np.array([0.5, 0.5])),
        ("bias", np.array([0.5])),
        ("bias", np.float64("inf")),
        ("bias", np.complex128(1j)),
        ("loss", np.str_("log")),
        ("loss", np.array(["hinge"])),
        ("index_base", np.uint8(7)),
        ("index_base", np.float64(0.5)),
        ("index_base", np.array([1])),
        ("base_is_guessed", np.uint8(1)),
        ("base_is_guessed", np.array([True])),
    ],
)
def test_arrays_that_are_not_a_model_s(tmp_path: Path, name: str, array: Any) -> None:
    np.savez(tmp_path / "model.npz", **{**ARRAYS, name: array})
    refused(tmp_path / "model.npz", "an npz file whose arrays are damaged or not a model's")


def test_other_files_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_text("no")
    refused(path, "no npz file")
    np.savez(path, x=np.ones(2))
    refused(path, "an npz file without some of a model's arrays")


def test_damaged_bytes_are_a_value_error_whatever_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, **ARRAYS)
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # some bytes are of times and systems, which matter to no one
            LinearModel.load(path)


def test_a_model_that_is_not_there_is_the_system_s_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LinearModel.load(tmp_path / "model.npz")


def broken_off(file: IO[Any]) -> None:
    file.write(b"ne")
    raise KeyboardInterrupt


def test_what_is_broken_off_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.npz"
    LinearModel(np.ones(3, np.float32), 0.0, "hinge").save(path)
    monkeypatch.setattr(np, "savez", lambda file, **_: broken_off(file))
    with pytest.raises(KeyboardInterrupt):
        LinearModel(np.zeros(3, np.float32), 0.0, "hinge").save(path)
    assert LinearModel.load(path).weights.tolist() == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [path]


def writes(text: bytes) -> Callable[[IO[Any]], None]:
    def write(file: IO[Any]) -> None:
        file.write(text)

    return write


def test_a_replaced_file_keeps_its_mode_and_links_to_it(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, writes(b"old"))
    target.chmod(0o640)
    with target.open("rb") as reader:
        write_whole(link, writes(b"new"))
        assert reader.read() == b"old"
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    write_whole(tmp_path / "other", writes(b""))
    (tmp_path / "plain").touch()  # as the process's umask has it
    assert (tmp_path / "other").stat().st_mode == (tmp_path / "plain").stat().st_mode


@contextlib.contextmanager
def no_root() -> Iterator[None]:
    """Root may write what is protected."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_is_write_protected_stays() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are for their owner alone
        folder = Path(name)
        path = folder / "model"
        path.write_bytes(b"old")
        path.chmod(0o444)
        folder.chmod(0o777)
        with no_root(), pytest.raises(PermissionError, match="model"):
            write_whole(path, writes(b"new"))
        assert path.read_bytes() == b"old"
        assert list(folder.iterdir()) == [path]


def test_the_longest_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    for text in (b"old", b"new"):
        write_whole(path, writes(text))
        assert path.read_bytes() == text
    assert list(tmp_path.iterdir()) == [path]


def test_where_no_file_can_be_made_beside_it_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"old")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "replace", refuse)
    write_whole(path, writes(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, writes(b"model"))
    assert os.read(reader, 9) == b"model"
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, writes(b""))


def test_a_descriptor_s_path_is_written_in_place(tmp_path: Path) -> None:
    model = LinearModel(np.ones(3, np.float32), 0.0, "hinge")
    reader, writer = os.pipe()
    model.save(f"/dev/fd/{writer}")
    os.close(writer)
    with open(reader, "rb") as file:
        (tmp_path / "piped").write_bytes(file.read())
    assert LinearModel.load(tmp_path / "piped").weights.tolist() == [1, 1, 1]
    (tmp_path / "piped").unlink()
    with tempfile.TemporaryFile(dir=tmp_path) as nameless:
        model.save(f"/dev/fd/{nameless.fileno()}")
        assert LinearModel.load(f"/dev/fd/{nameless.fileno()}").weights.tolist() == [1, 1, 1]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (LinearModel(np.array([1, np.nan], np.float32), 0.0, "hinge"), "values or bias have NaN or Inf"),
        (LinearModel(np.ones(2, np.float32), math.inf, "hinge"), "values or bias have NaN or Inf"),
        (LinearModel(np.ones(2, np.float32), 0.0, "log"), "loss='log' does not exist"),
    ],
    ids=["weights", "bias", "loss"],
)
def test_a_model_that_could_not_be_loaded_is_not_saved(tmp_path: Path, model: LinearModel, said: str) -> None:
    with pytest.raises(ValueError, match=f"^the model cannot be saved: {said}"):
        model.save(tmp_path / "model.npz")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model.npz"
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{path}'$"):
        LinearModel(np.ones(2, np.float32), 0.0, "hinge").save(path)
