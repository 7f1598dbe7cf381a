"""``telegrad advise``: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from telegrad.communicator.tuning_cache import store
from telegrad.cost import Costs, Place, Tuning, allreduce_table
from telegrad.cost.send_method import LinearCost
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.architectures import ARCHITECTURES
from telegrad.tools.advise.sending import Cluster
from telegrad.tools.cli import make_app
from telegrad.tools.cli.advise import about_tuning, advise, cluster_of, rate_of
from telegrad.tools.sim.measure import network_of

app = typer.Typer()
app.command()(advise)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))


def advice(*arguments: str, columns: int = 120) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": str(columns), "TERM": "dumb"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def written(*arguments: str, file: Path) -> dict[str, Any]:
    status, output = advice(*arguments, "--json", str(file))
    assert status == 0, output
    return dict(json.loads(file.read_text()))


def words(output: str) -> str:
    return re.sub(r"[\s│]+", " ", output)


def test_resnet_on_a_fast_network() -> None:
    status, output = advice("--model", "resnet50", "--nodes", "16", "--network", "100gbit", "--optimizer", "sgd")
    assert status == 0
    assert "Do not compress: it would cost you 0.76 % (oktopk at 0.01)." in words(output)
    assert "sync = telegrad.Synchronizer(model, comm)" in output
    assert "assumes RDMA, α 2 µs" in words(output)
    assert "Tesla V100: half of its peak of 15.7 Tflop/s" in words(output)
    assert "divided by multiplications" in words(output)


def test_gradients_of_float16_are_sent_densely(tmp_path: Path) -> None:
    options = ("--model", "gpt2-small", "--network", "1gbit", "--gradients", "float16")
    status, output = advice(*options)
    assert status == 0
    assert "Do not compress: no scheme takes these gradients." in words(output)
    assert "float16 gradients are sent densely: only float32 and bfloat16 are compressed." in words(output)
    half = written(*options, file=tmp_path / "half.json")
    brain = written(*options[:-1], "bfloat16", file=tmp_path / "brain.json")
    of_half, of_brain = ({one["scheme"]: one for one in found["rows"]} for found in (half, brain))
    assert {*of_half} == {"ddp", "optimal", "wfbp", "single"} < {*of_brain}
    assert all(one["step_s"] == of_brain[name]["step_s"] for name, one in of_half.items())


def test_the_line_of_code_is_one_line_however_narrow_the_terminal() -> None:
    status, output = advice("--model", "vgg16", "--network", "1gbit", columns=60)
    assert status == 0
    (line,) = (one for one in output.splitlines() if one.startswith("ddp."))
    compile(line, "line", "exec")
    assert (
        line
        == "ddp.register_comm_hook(telegrad.DDPState(comm, ddp, compress=telegrad.LowRank(rank=16)), telegrad.ddp_hook)"
    )


def test_vgg_on_a_slow_network(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "vgg.svg"
    options = ("--model", "vgg16", "--network", "1gbit", "--density", "0.001")
    status, output = advice(*options, "--plot-file", str(drawn))
    assert status == 0
    assert "Compress: " in words(output)
    assert "Compare accuracy with a dense run first" in words(output)
    assert "telegrad.DDPState(comm, ddp, compress=telegrad.LowRank(rank=16)" in words(output)
    assert "vgg16, 16 ranks, 1gbit: compress" in drawn.read_text()


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_every_known_model(model: str, tmp_path: Path) -> None:
    found = written("--model", model, "--nodes", "4", file=tmp_path / "advice.json")
    assert found["model"] == model
    assert {"ddp", "optimal", "topk", "oktopk", "qsgd8"} <= {row["scheme"] for row in found["rows"]}
    assert found["recommended"] in {row["scheme"] for row in found["rows"]}


def test_a_recorded_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(Trace(("b", "a"), (40 << 20, 80 << 20), (0.01, 0.02), 0.015, "by hand").to_json())
    found = written("--trace", str(path), "--nodes", "8", file=tmp_path / "advice.json")
    assert (found["model"], found["workload"], found["samples"]) == ("mine", "by hand", 1)
    assert found["rows"][0]["compute_s"] == pytest.approx(0.045)
    unknown = "Mind: The mini-batch is not known, so samples/s counts passes: --samples names it."
    assert unknown in words(advice("--trace", str(path), "--nodes", "8")[1])
    assert unknown not in words(advice("--trace", str(path), "--nodes", "8", "--samples", "4")[1])
    slower = written("--trace", str(path), "--nodes", "8", "--compute-ms", "90", file=tmp_path / "advice.json")
    assert slower["rows"][0]["compute_s"] == pytest.approx(0.09)


def test_a_trace_does_not_say_what_selects(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(Trace(("a",), (4 << 20,), (0.01,), 0.005).to_json())
    file = tmp_path / "advice.json"
    said = "selecting and unpacking take: they are assumed to run on a v100. --device names another."
    assert said in words(advice("--trace", str(path))[1])
    assert any(said in one for one in written("--trace", str(path), file=file)["cautions"])
    for options in (("--trace", str(path), "--device", "v100"), ("--model", "resnet50")):
        assert not any(said in one for one in written(*options, file=file)["cautions"])


def test_what_a_trace_leaves_without_effect_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(Trace(("a",), (4 << 20,), (0.0,), 0.0).to_json())
    for options, said in (
        (("--model", "resnet50"), "--model: --trace says what a step computes: leave this out"),
        (("--compute-ms", "5"), f"--compute-ms: all times of {path} are 0, and nothing says how to divide 5 ms: leave"),
    ):
        status, output = advice("--trace", str(path), *options, columns=1000)
        assert status == 2
        assert said in output


def test_what_is_assumed_of_a_node_is_said(tmp_path: Path) -> None:
    inside = "assumes α 0.5 µs, 25 GB/s, γ 0.1 ns per byte"
    file = tmp_path / "advice.json"
    output = advice("--nodes", "4", "--gpus-per-node", "2")[1]
    assert f"inside of a node: {inside}" in output
    assert "8 ranks, 4 nodes" in output
    assert "inside of a node" not in advice("--nodes", "4")[1]
    status, output = advice("--nodes", "1", "--gpus-per-node", "2", "--network", "1gbit", "--json", str(file))
    assert status == 0
    assert "2 ranks, 1 node " in output
    assert "network: none is used: all ranks share a node" in output
    assert f"inside of a node: {inside}" in output
    assert json.loads(file.read_text())["within"] == inside


def test_measured_costs_take_the_place_of_a_named_network_s(tmp_path: Path) -> None:
    costs = Costs(20e-6, 8.5e-9, gamma_s_per_byte=1e-10)
    place = Place("ucx", (("one", 1), ("two", 1)), None, ())
    tuning = Tuning(place, costs, allreduce_table(2, costs), "2026-11-26T00:00:00Z", "0.1.0", 0.1)
    kept, said = tmp_path / "kept.json", tmp_path / "calibrated.json"
    kept.write_text(tuning.to_json())
    said.write_text(json.dumps({"tuning": json.loads(tuning.to_json()), "rows": []}))
    file = tmp_path / "advice.json"
    named = written("--nodes", "4", "--network", "1gbit", "--alpha", "20e-6", "--beta", "8.5e-9", file=file)
    for path in (kept, said):
        found = written("--nodes", "4", "--tuning", str(path), file=file)
        assert (
            found["network"]
            == "measured among 2 ranks on 2 hosts (one, …), driver ucx, 1 rank to a link: α 20 µs, 0.118 GB/s, "
            "γ 0.1 ns per byte"
        )
        assert [row["step_s"] for row in found["rows"]] == [row["step_s"] for row in named["rows"]]
    shared = written("--nodes", "4", "--gpus-per-node", "2", "--tuning", str(kept), file=file)
    assert shared["within"] == "assumes α 0.5 µs, 25 GB/s, γ 0.1 ns per byte"
    within = replace(tuning, within=Costs(1e-6, 1e-10, gamma_s_per_byte=1e-10))
    kept.write_text(within.to_json())
    assert written("--nodes", "4", "--gpus-per-node", "2", "--tuning", str(kept), file=file)["within"].startswith(
        "measured: α 1 µs"
    )


def test_measured_sums_of_gloo_are_the_dense_job_to_beat_if_they_are_fast(tmp_path: Path) -> None:
    costs = Costs(20e-6, 8.5e-9, gamma_s_per_byte=1e-10)
    place = Place("ucx", (("one", 1), ("two", 1)), None, ())
    slow = Tuning(place, costs, allreduce_table(2, costs), "2026-11-26T00:00:00Z", "0.1.0", 0.1)
    path, file = tmp_path / "kept.json", tmp_path / "advice.json"

    def rows_of(tuning: Tuning, nodes: int = 2) -> dict[str, Any]:
        path.write_text(tuning.to_json())
        found = written("--nodes", str(nodes), "--tuning", str(path), file=file)
        return {**{row["scheme"]: row for row in found["rows"]}, "verdict": found["verdict"]}

    assert "gloo" not in rows_of(slow)
    fast = replace(slow, gloo=LinearCost(1e-4, 4e-9))
    found = rows_of(fast)
    assert next(iter(found)) == "gloo"
    assert found["gloo"]["line"] == "ddp = torch.nn.parallel.DistributedDataParallel(model)"
    assert found["gloo"]["communicate_s"] == pytest.approx(
        1e-4 * len(found["gloo"]["groups"]) + 4e-9 * 102.2e6, rel=0.01
    )
    assert found["gloo"]["mean_s"] < found["ddp"]["mean_s"]
    assert "the best dense scheme, gloo" in found["verdict"]
    assert "gloo" not in rows_of(fast, nodes=4)
    slower = rows_of(replace(slow, gloo=LinearCost(1e-2, 4e-8)))
    assert slower["gloo"]["mean_s"] > slower["ddp"]["mean_s"]
    times = slower["gloo"]["mean_s"] / min(row["mean_s"] for row in slower.values() if isinstance(row, dict))
    assert re.search(rf" {times:.2f} times as fast as DDP over Gloo, and [\d.]+ times .* scheme, ", slower["verdict"])


@pytest.mark.parametrize(
    ("hosts", "nodes", "to_a_link"),
    [
        ((("a", 1), ("b", 1)), (), 1.0),
        ((("a", 4), ("b", 4)), (0, 0, 0, 0, 1, 1, 1, 1), 4.0),
        ((("a", 4), ("b", 4)), (), 4.0),
        ((("a", 2), ("b", 3)), (0, 0, 1, 1, 1), 2.5),
        ((("a", 4),), (0, 0, 1, 1), 2.0),  # as in the network laboratory
        ((("a", 4),), (), 1.0),  # there, too, with a link for each
    ],
)
def test_a_link_is_shared_by_as_many_ranks_as_are_asked_for_whatever_were_measured(
    tmp_path: Path, hosts: tuple[tuple[str, int], ...], nodes: tuple[int, ...], to_a_link: float
) -> None:
    measured = network_of("1gbit").costs.with_bytes_times(to_a_link)
    place = Place("ucx", hosts, nodes=nodes)
    table = allreduce_table(place.ranks, measured)
    path, file = tmp_path / "tuning.json", tmp_path / "advice.json"
    path.write_text(Tuning(place, measured, table, "2026-11-26T00:00:00Z", "0.1.0", 0.1).to_json())
    for cluster in (("--nodes", "4", "--gpus-per-node", "4"), ("--nodes", "8", "--gpus-per-node", "1")):
        found = written(*cluster, "--tuning", str(path), file=file)
        named = written(*cluster, "--network", "1gbit", file=file)
        for row, expected in zip(found["rows"], named["rows"], strict=True):
            assert row["step_s"] == pytest.approx(expected["step_s"], rel=1e-6)
        assert f", {to_a_link:g} {'rank' if to_a_link == 1 else 'ranks'} to a link: α 20 µs, " in found["network"]


def test_a_rank_alone_may_send_less_than_the_link_carries(tmp_path: Path) -> None:
    port = network_of("10gbit").costs
    place = Place("ucx", (("a", 4), ("b", 4)), nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    shared = port.with_bytes_times(2)  # the link carries what two ranks send
    table = allreduce_table(8, shared)
    tuning = Tuning(place, shared, table, "2026-11-26T00:00:00Z", "0.1.0", 0.1, within=port, alone=port)
    for per_node, oversubscription in ((4, 2.0), (8, 4.0), (2, 1.0), (1, 1.0)):
        assert cluster_of(tuning, 4, per_node) == Cluster(4 * per_node, port, per_node, port, oversubscription)
    assert about_tuning(tuning).endswith(" ns per byte, 1.18 GB/s while one rank of a node sends alone")
    noisy = replace(tuning, alone=shared.with_bytes_times(1.5))  # no slower than all of them at once
    assert cluster_of(noisy, 4, 4) == Cluster(16, shared, 4, port, 1.0)


def test_what_is_no_tuning_or_has_costs_of_its_own_beside_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    for text, more, said in (
        ("[", (), f"--tuning: cannot read {path}: this is no tuning but damaged JSON"),
        ("{}", (), f"--tuning: cannot read {path}: this is no tuning"),
        ("{}", ("--beta", "1e-9"), "--beta: --tuning has measured costs: leave this out"),
        ("{}", ("--network", "1gbit"), "--network: --tuning has measured costs: leave this out"),
    ):
        path.write_text(text)
        status, output = advice("--tuning", str(path), *more, columns=1000)
        assert status == 2
        assert said in output


@pytest.mark.parametrize("costs", [("--beta", "1e300"), ("--alpha", "1e308")])
def test_costs_beyond_all_numbers_are_said_in_words(costs: tuple[str, str]) -> None:
    status, output = advice(*costs, columns=1000)
    assert status == 2
    assert "no step can be reckoned from these costs and times (" in output
    assert "): give smaller ones" in output


def test_brackets_in_names_of_files_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("ü [b].json").write_text(Trace(("a",), (4 << 20,), (0.01,), 0.005).to_json())
    files = ("--json", "rows [b].json", "--plot-file", "[b].png")
    status, output = advice("--trace", "ü [b].json", *files)
    assert status == 0
    assert "ü [b] with AdamW on 16 ranks" in output
    assert "predictions: rows [b].json" in output
    assert "plot: [b].png" in output


def test_gpus_share_their_node_s_link(tmp_path: Path) -> None:
    def sent_s(*options: str) -> dict[str, float]:
        found = written("--model", "vgg16", *options, file=tmp_path / "advice.json")
        assert found["ranks"] == 16
        return {row["scheme"]: row["communicate_s"] for row in found["rows"]}

    shared, apart = sent_s("--nodes", "4", "--gpus-per-node", "4"), sent_s("--nodes", "16")
    assert shared["oktopk"] > 1.5 * apart["oktopk"]
    assert shared["topk"] < apart["topk"]  # it sums inside of nodes first


def test_own_costs_and_times(tmp_path: Path) -> None:
    def dense_s(*options: str) -> float:
        return float(written(*options, file=tmp_path / "advice.json")["rows"][0]["step_s"])

    assert dense_s("--beta", "8e-9") > dense_s()
    assert dense_s("--alpha", "1e-3") > dense_s()
    assert dense_s("--compute-ms", "1000") > 1.0
    assert dense_s("--device", "k80") > dense_s("--device", "a100")
    assert dense_s("--samples", "256") > 2 * dense_s()


@pytest.mark.parametrize(("accumulate", "times"), [(1, 9.51), (4, 3.21), (16, 1.56)])
def test_accumulated_passes_are_not_exchanged(accumulate: int, times: float, tmp_path: Path) -> None:
    options = ("--model", "gpt2-small", "--nodes", "2", "--network", "1gbit", "--optimizer", "sgd")
    found = written(*options, "--accumulate", str(accumulate), file=tmp_path / "advice.json")
    assert found["speedup"] == pytest.approx(times, abs=0.005)
    assert found["accumulate"] == accumulate
    for row in found["rows"]:
        assert row["step_s"] == pytest.approx((accumulate - 1) * row["compute_s"] + row["pass_s"])
        assert row["samples_per_s"] == pytest.approx(2 * 4 * accumulate / row["mean_s"])


def test_the_headline_is_of_the_whole_job(tmp_path: Path) -> None:
    options = ("--model", "gpt2-medium", "--nodes", "16", "--network", "1gbit", "--device", "a100")
    found = written(*options, "--density", "0.001", file=tmp_path / "advice.json")
    rows = {row["scheme"]: row for row in found["rows"]}
    dense_s, step_s = rows["ddp"]["step_s"], rows["topk"]["step_s"]
    assert 1 / rows["topk"]["mean_s"] < 10 / dense_s < 1 / step_s
    assert rows["topk"]["mean_s"] == pytest.approx(0.1 * dense_s + 0.9 * step_s)
    assert (found["recommended"], found["dense_share"], rows["topk"]["dense_share"]) == ("lowrank", 0.0, 0.1)
    assert rows["topk"]["accuracy"]["loss"] == 4.5
    assert rows["topk"]["accuracy"]["source"] == "benchmarks/results/2026-11-23-accuracy.json"
    assert rows["ddp"]["accuracy"] is None
    short = written(*options, "--steps", "15", file=tmp_path / "advice.json")
    assert (short["steps"], short["dense_share"]) == (15, 1 / 15)
    assert "warmup=telegrad.Warmup(steps=1)" in {row["scheme"]: row["line"] for row in short["rows"]}["topk"]


def test_many_samples_of_a_pass_are_told_from_accumulation() -> None:
    said = "Mind: --samples 64 is taken as one pass, all of whose backward pass hides the exchange."
    options = ("--model", "gpt2-small", "--nodes", "2", "--samples")
    assert said in words(advice(*options, "64")[1])
    assert "say so: --samples 4 --accumulate N." in words(advice(*options, "64")[1])
    for other in (("64", "--accumulate", "2"), ("8",)):
        assert "is taken as one pass" not in words(advice(*options, *other)[1])


def test_rates_have_digits() -> None:
    assert [rate_of(one) for one in (0.0421, 1.5, 17.04, 99.6, 1980.7)] == ["0.0421", "1.5", "17", "100", "1,981"]
    table = advice("--model", "llama-8b", "--nodes", "2", "--network", "1gbit", "--device", "cpu")[1]
    rows = [line.split() for line in table.splitlines() if line.startswith((" ddp ", " topk ", " qsgd8 "))]
    assert len(rows) == 3
    assert all("0" not in row for row in rows)


def test_a_model_of_ones_own_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("own_model.py").write_text(
        "import torch\n"
        "def make(batch=6):\n"
        "    x = torch.randn(batch, 512)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8)), "
        "lambda model: model(x).square().mean()\n"
    )
    file = tmp_path / "advice.json"
    found = written("--model", "own_model.py:make", "--device", "h100", "--nodes", "2", file=file)
    assert (found["model"], found["samples"], found["optimizer"]) == ("own_model.py:make", 6, "adamw")
    assert found["workload"] == "own_model.py:make, counted for h100"
    assert found["rows"][0]["compute_s"] < 1e-4
    told = written("--model", "own_model.py:make", "--compute-ms", "90", "--samples", "12", "--nodes", "2", file=file)
    assert (told["samples"], told["rows"][0]["compute_s"]) == (12, pytest.approx(0.09))
    twice = written("--model", "own_model.py:make", "--device", "h100", "--samples", "12", "--nodes", "2", file=file)
    assert twice["rows"][0]["compute_s"] == pytest.approx(2 * found["rows"][0]["compute_s"])


def test_a_trace_says_how_many_passes_a_step_has_and_of_how_many_samples(tmp_path: Path) -> None:
    path, file = tmp_path / "mine.json", tmp_path / "advice.json"
    trace = Trace(("b", "a"), (40 << 20, 80 << 20), (0.01, 0.02), 0.015, "by hand", 16.0, 4, 0.005)
    path.write_text(trace.to_json())
    found = written("--trace", str(path), "--nodes", "2", file=file)
    assert (found["samples"], found["accumulate"]) == (16, 4)
    row = found["rows"][0]
    assert row["step_s"] == pytest.approx(3 * 0.045 + 0.005 + row["pass_s"])
    assert row["samples_per_s"] == pytest.approx(2 * 16 * 4 / row["mean_s"])
    assert written("--trace", str(path), "--accumulate", "1", "--nodes", "2", file=file)["accumulate"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "resnet"), "--model: 'resnet' is not known: use one of resnet50, "),
        (("--nodes", "1"), "--nodes: 1 nodes of 1 are 1 ranks: use 2 to 8,192"),
        (("--nodes", "9000"), "--nodes: 9,000 nodes of 1 are 9,000 ranks"),
        (("--nodes", "0"), "--nodes"),
        (("--gpus-per-node", "0"), "--gpus-per-node"),
        (("--network", "ether"), "--network: network 'ether' is not known: use 1gbit, "),
        (("--alpha", "-1"), "--alpha: alpha_s=-1.0 is no cost"),
        (("--beta", "inf"), "--beta: beta_s_per_byte=inf is no cost"),
        (("--density", "2"), "--density: 2 is no share: use a number above 0, up to 1"),
        (("--device", "tpu"), "--device: device 'tpu' is not known: use one of k80, p100, v100, a100, h100, h200, "),
        (
            ("--device", "tpu"),
            "; for another one name the nearest, and give the milliseconds of your own step with --c",
        ),
        (("--optimizer", "lion"), "--optimizer: 'lion' is not known: use one of adamw, adam, sgd, sgd-momentum"),
        (("--steps", "0"), "--steps"),
        (("--accumulate", "0"), "--accumulate"),
        (("--model", "nowhere:make"), "--model: there is no module 'nowhere' here"),
        (("--model", "nowhere.py:make"), "--model: there is no file nowhere.py: name one with the function"),
        (("--samples", "-4"), "--samples: -4 is no mini-batch"),
        (("--samples", "1e300"), "--samples: compute_s=inf must be above 0 and finite"),
        (("--compute-ms", "nan"), "--compute-ms: nan is no time"),
        (("--trace", "/nowhere.json"), "--trace"),
        (("--trace", __file__), f"--trace: cannot read {__file__}: this is no trace but damaged JSON"),
        (("--json", "/nowhere/advice.json"), "--json: the folder /nowhere does not exist: make it first"),
    ],
)
def test_bad_options_are_named_with_a_remedy(options: tuple[str, ...], said: str) -> None:
    status, output = advice(*options, columns=1000)
    assert status == 2
    assert said in output.replace("'--", "--").replace("Invalid value for ", "")


def test_a_picture_of_no_known_format_is_refused_before_the_work(tmp_path: Path) -> None:
    done = CliRunner().invoke(make_app(), ["advise", "--nodes", "2", "--plot-file", str(tmp_path / "x.foo")])
    assert done.exit_code == 2
    assert ".foo is no format of pictures" in " ".join(done.output.replace("│", " ").split())


def test_a_network_that_was_calibrated_is_used_unless_another_is_named() -> None:
    place = Place("ucx", (("machine-a", 1), ("machine-b", 1)))
    costs = Costs(50e-6, 8e-8, 8e-8, 1e-10)
    store(Tuning(place, costs, allreduce_table(2, costs), "2026-11-20T12:00:00+00:00", "0.1.0", 0.05))
    _, output = advice("--model", "resnet50", "--nodes", "2")
    assert "network: measured among 2 ranks on 2 hosts (machine-a, …)" in words(output)
    assert "0.0125 GB/s" in words(output)
    assert "kept by telegrad calibrate on 2026-11-20, --network names another" in words(output)
    assert "in one direction" not in words(output)
    _, named = advice("--model", "resnet50", "--nodes", "2", "--network", "10gbit")
    assert "machine-a" not in named


def test_sums_that_were_measured_as_far_too_slow_are_doubted() -> None:
    place = Place("ucx", (("machine-a", 1), ("machine-b", 1)))
    costs = Costs(50e-6, 8e-9, 24e-9, 1e-10)
    store(Tuning(place, costs, allreduce_table(2, costs), "2026-11-20T12:00:00+00:00", "0.1.0", 0.05))
    _, output = advice("--model", "resnet50", "--nodes", "2")
    assert "a byte took 3 times as long as in one direction. Was a machine busy then?" in words(output)


def test_rounds_of_an_outer_loop(tmp_path: Path) -> None:
    arguments = ("--outer", "--model", "gpt2-small", "--nodes", "4", "--network", "100mbit", "--compute-ms", "1000")
    status, output = advice(*arguments)
    assert status == 0
    assert "rounds of gpt2-small on 4 replicas whose exchanges take 5% at most" in words(output)
    assert "diloco = telegrad.DiLoCo.streaming(model, comm, optimizer, every=30, compress=telegrad.Quantised(" in output
    assert "network: 100mbit: assumes TCP" in words(output)
    found = written(*arguments, file=tmp_path / "rounds.json")
    assert (found["replicas"], found["step_s"], len(found["rounds"])) == (4, pytest.approx(1.0), 6)
    assert found["recommended"] == found["rounds"][-1]
    assert all(one["share"] <= 0.05 for one in found["rounds"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--outer", "--density", "0.1"), "--outer has no use for it: leave this out"),
        (("--outer", "--optimizer", "sgd"), "--outer has no use for it: leave this out"),
        (("--outer", "--nodes", "1", "--gpus-per-node", "8"), "1 replica exchanges nothing: give at least 2"),
    ],
)
def test_outer_loops_that_make_no_sense(arguments: tuple[str, ...], expected: str) -> None:
    status, output = advice(*arguments)
    assert status == 2
    assert expected in words(output)
