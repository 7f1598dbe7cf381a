"""``telegrad report run.jsonl``: a training's telemetry, written by the hook and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import Result

from telegrad.compress import Observation
from telegrad.ddp import JsonLines, StepRecord
from telegrad.tools.report.telemetry import read, summaries

Run = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return _written(tmp_path / "run.jsonl")


def _written(path: Path, *, words: bool = False) -> Path:
    """Twenty steps: k = 100 of 10,000, of which 90, 110, 90, … are sent; a smaller tensor has no figures at first.
    ``words``: as of Ok-Topk."""
    with JsonLines(path, every=2) as telemetry:
        for number in range(20):
            sent = 90 if number % 2 == 0 else 110
            tensors = [Observation("large", 10_000, 100, sent, 2.0, 1.0 + number, 0.5)]
            if number >= 2:
                tensors.append(Observation("small.weight", 3000, 30, 0, 0.0, 0.0, None))
            record = StepRecord(2 * number, 1, 4, tensors, 14_000, 1000, 4, bytes_sent=5000 + 3000 * number)
            if words:
                record.kept, record.words_sent, record.words_received = 260 * number, 800 * number, 1040 * number
            record.close(dropped=number == 7)
            telemetry.write(record)
    return path


def test_words_are_shown_beside_what_is_needed_and_what_the_paper_promises(run: Run, tmp_path: Path) -> None:
    result = run(_written(tmp_path / "words.jsonl", words=True), "--json")
    said, _ = json.JSONDecoder().raw_decode(result.stdout)
    wanted = (2 * 100 + 18 * 130) / 20
    assert said["words_per_step"] == 520
    assert said["least_words_per_step"] == pytest.approx(1.5 * wanted)
    assert said["paper_words_per_step"] == pytest.approx(4.5 * wanted)
    assert said["kept_to_k"] == pytest.approx(130 / wanted)
    shown = " ".join(run(tmp_path / "words.jsonl").output.split())
    assert "4.09 k words moved per step (2k(P-1)/P is 1.50 k, 6k(P-1)/P 4.50 k), 1.02 k entries kept" in shown


def test_nothing_is_said_of_words_where_nothing_counts_them(run: Run, file: Path) -> None:
    assert read(file).words_per_step is None
    assert "words moved" not in run(file).output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[1:]:
        del line["kept"], line["words_sent"], line["words_received"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))  # of an earlier version
    assert read(file).words_per_step is None


def test_what_is_read_is_what_was_written(file: Path) -> None:
    run = read(file)
    assert (run.rank, run.world_sizes, len(run.steps)) == (1, [4], 20)
    assert run.names == ["large", "small.weight"]
    assert run.bytes_per_step == 1500
    assert run.ring_bytes_per_step == 1.5 * 14_000 * 4
    large, small = summaries(run)
    assert (large.k, large.selected_to_k, large.selected_to_k_least, large.selected_to_k_most) == (100, 1.0, 0.9, 1.1)
    assert large.compression == 100
    assert (large.late_residual_to_gradient, large.late_threshold) == (19.5 / 2, 0.5)
    assert (small.compression, small.late_residual_to_gradient, small.late_threshold) == (None, None, None)


def test_a_run_in_which_nothing_was_compressed_says_so(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "dense.jsonl"
    with JsonLines(path) as telemetry:
        for number in range(3):
            telemetry.write(StepRecord(number, 0, 2, [], 1000, 1000, 4, bytes_sent=4000 * number))
    result = run(path)
    assert result.exit_code == 0
    assert "rank 0 of 2 · 3 steps observed" in result.output
    assert "no tensor was compressed in these steps" in result.output
    assert not path.with_suffix(".png").exists()
    assert run(path, "--plot", str(tmp_path / "asked.png")).exit_code == 2


def test_the_bytes_of_compressed_steps_are_told_from_those_of_dense_ones(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "warm-up.jsonl"
    sent = [0, 12_000, 24_000, 24_500, 25_000]
    with JsonLines(path) as telemetry:
        for number, bytes_sent in enumerate(sent):
            tensors = [Observation("large", 2_000, 100, 100, 2.0, 1.0, 0.5)] if number >= 2 else []
            telemetry.write(StepRecord(number, 0, 4, tensors, 2_000, 0, 4, bytes_sent=bytes_sent))
    assert (read(path).bytes_per_step, read(path).compressed_bytes_per_step) == (6_250, 500)
    assert "0.0005 MB (1/24.0) without the dense steps" in " ".join(run(path).output.split())


def test_what_a_run_that_went_on_did_again_counts_once_and_a_cut_line_not_at_all(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    again = json.loads(lines[4])
    again["dropped"] = True
    file.write_text("".join([*lines, lines[0], json.dumps(again) + "\n", lines[5], lines[6][:30]]))
    run = read(file)
    assert [step.step for step in run.steps] == [0, 2, 4, 6, 8]
    assert [step.step for step in run.steps if step.dropped] == [6]


def test_a_run_that_went_on_with_fewer_ranks(run: Run, file: Path) -> None:
    with JsonLines(file) as telemetry:
        for number in (15, 16, 17, 18):
            tensors = [Observation("large", 10_000, 100, 90, 2.0, 1.0, 0.5)]
            telemetry.write(StepRecord(2 * number, 1, 3, tensors, 14_000, 1000, 4, bytes_sent=70_000 * number))
    went_on = read(file)
    assert [step.world_size for step in went_on.steps] == [4] * 15 + [3] * 4
    assert went_on.ring_bytes_per_step == pytest.approx((15 * 1.5 + 4 * 4 / 3) / 19 * 14_000 * 4)
    assert "rank 1 of 4, then 3 · 19 steps observed" in run(file).output
    said, _ = json.JSONDecoder().raw_decode(run(file, "--json").stdout)
    assert said["world_sizes"] == [4, 3]
    assert said["bytes_sent_per_step"] == (14 * 3000 + 3 * 70_000) / 34  # from one job to the next nothing is counted


def test_the_table(run: Run, file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0
    assert "rank 1 of 4 · 20 steps observed, to step 38 · 1 dropped · 0.0015 MB sent per step" in result.output
    (row,) = [line for line in result.output.splitlines() if "large" in line]
    for figure in ("10,000", "100", "1.00", "0.90 … 1.10", "100x", "9.75", "0.5"):
        assert figure in row
    assert "small.weight" in result.output


def test_the_picture_lies_beside_the_file(run: Run, file: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "run.png") in run(file).output
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "other.png"
    assert str(other) in run(file, "--plot", other).output
    assert other.read_bytes() == (tmp_path / "run.png").read_bytes()


def test_json(run: Run, file: Path) -> None:
    said, _ = json.JSONDecoder().raw_decode(run(file, "--json").stdout)
    assert (said["steps"], said["dropped"], said["bytes_sent_per_step"]) == (20, 1, 1500)
    assert said["tensors"][0]["name"] == "large"
    assert said["tensors"][1]["compression"] is None


def test_many_tensors_are_drawn(run: Run, tmp_path: Path) -> None:
    with JsonLines(tmp_path / "many.jsonl") as telemetry:
        for step in range(3):
            tensors = [Observation(f"layer {i}", 10 + i, 1, 1 + i % 2, 1.0, 0.0, i / 10) for i in range(30)]
            telemetry.write(StepRecord(step, 0, 2, tensors, 1000, 0, 2))
    assert run(tmp_path / "many.jsonl").exit_code == 0
    assert (tmp_path / "many.png").stat().st_size > 10_000


def test_matrices_of_low_rank_have_no_columns_and_panels_of_selections(run: Run, tmp_path: Path) -> None:
    written, heights = tmp_path / "fixed.jsonl", list[int]()
    for threshold in (None, 0.5):
        with JsonLines(written) as telemetry:
            for step in range(3):
                tensors = [Observation("matrix", 10_000, 400, 400, 2.0, 1.0, threshold)]
                telemetry.write(StepRecord(step, 0, 2, tensors, 10_000, 0, 4))
        (header,) = [line for line in run(written).output.splitlines() if "elements" in line]
        assert ("selected/k" in header) == ("threshold" in header) == (threshold is not None)
        assert ("values sent" in header) == (threshold is None)
        heights.append(height_of(tmp_path / "fixed.png"))
        written.unlink()
    assert 2 * heights[0] < heights[1]


def height_of(picture: Path) -> int:
    """In pixels, of a PNG."""
    return int.from_bytes(picture.read_bytes()[20:24], "big")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no step: it must be a file of telegrad.ddp.JsonLines"),
        ("hello\n", r"line 1: .*it must be a file of telegrad.ddp.JsonLines"),
        ('{"kind": "run", "format": "other", "version": 1}\n', "line 1: format 'other', version 1"),
        ('{"kind": "step"}\n', "line 1: no run"),
        ("[]\n", "line 1: no record with a kind"),
        ('{"a": 1}\n', "line 1: no record with a kind"),
        ('{"kind": "run"}\n', "line 1: 'format' is missing"),
    ],
)
def test_what_is_no_telemetry(run: Run, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)
    result = run(path)
    assert result.exit_code == 2
    assert "JsonLines" in result.output
    assert not (tmp_path / "run.png").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["large",10000,100', '["large",10000,0', "line 3: k '0'"),
        ('["large",10000,100', '["large",10000,-10', "line 3: k '-10'"),
        ('["large",10000', '["large","10000"', "line 3: elements '10000'"),
        ('["large",10000', '["large",1' + "0" * 400, "line 3: elements '10000"),
        ('["large"', "[5", "line 3: name 5"),
        (",2.0,", ',"2",', "line 3: figure '2'"),
        (",2.0,", ",1" + "0" * 400 + ",", "line 3: int too large"),
        ('"bytes_sent":', '"bytes_sent":-', "line 3: bytes_sent '-8000'"),
        ('"tensors":[', '"tensors":[[],', "line 3: not enough values to unpack"),
        ('{"kind"', "[" * 100_000 + '{"kind"', "line 3: .*recursion"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damaged_figures(run: Run, file: Path, old: str, new: str, message: str) -> None:
    lines = file.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace(old, new, 1)
    file.write_text("".join(lines))
    with pytest.raises(ValueError, match=message):
        read(file)
    assert run(file).exit_code == 2


def test_other_columns(file: Path) -> None:
    file.write_text(file.read_text().replace('"selected"', '"chosen"'))
    with pytest.raises(ValueError, match="line 2: columns .*'chosen'"):
        read(file)


def test_names_are_shown_as_they_are(run: Run, file: Path) -> None:
    file.write_text(file.read_text().replace('"large"', json.dumps("[red]\x1b[31m[/x]")))
    result = run(file)
    assert result.exit_code == 0
    assert r"[red]\x1b[31m[/x]" in result.output


def test_the_picture_does_not_replace_the_telemetry(run: Run, file: Path) -> None:
    image = file.rename(file.with_suffix(".png"))
    before = image.read_text()
    for arguments in ([image], [image, "--plot", image]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "give the picture another path, by --plot" in result.output
    assert image.read_text() == before


def test_files_of_two_ranks_are_not_mixed(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[0].replace('"rank":1', '"rank":2')]))
    with pytest.raises(ValueError, match="line 22: rank 2 in the file of rank 1"):
        read(file)


def test_a_dropped_pass_counts_where_its_step_was_run_again(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as telemetry:
        for step, dropped in ((0, False), (1, True), (1, True), (1, False), (2, True)):
            telemetry.write(StepRecord(step, 0, 2, dropped=dropped))
    assert "3 steps observed, to step 2 · 3 dropped" in run(path).output
    assert json.JSONDecoder().raw_decode(run(path, "--json").stdout)[0]["dropped"] == 3
    with JsonLines(path) as telemetry:  # goes on from step 1: what came after is no part of it
        telemetry.write(StepRecord(1, 0, 2))
    assert (read(path).dropped, len(read(path).steps)) == (0, 2)


def test_shards_whose_replicas_count_alike_are_not_mixed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as one, JsonLines(path) as other:
        for step in range(3):
            for telemetry in (one, other):
                telemetry.write(StepRecord(step, 0, 2, dropped=step == 1))
    result = run(path)
    assert result.exit_code == 2
    assert "line 8: step 2 after step 2: several have written this file" in " ".join(result.output.split())


def test_bad_arguments(run: Run, file: Path, tmp_path: Path) -> None:
    assert "a file of telemetry goes alone" in run(file, tmp_path).output
    assert "--plot" in run(file, "--plot", tmp_path / "nowhere" / "run.png").output
