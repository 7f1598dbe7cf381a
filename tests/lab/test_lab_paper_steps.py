"""What the papers say of their figures of training steps, of ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab import paper_steps
from lab.common.architectures import architecture
from lab.common.experiments import app
from lab.common.literature import PAPER_NETWORKS
from lab.paper_steps import (
    FIGURES,
    FREE_NUMBERS,
    FUSION_BYTES,
    FUSION_S,
    HALF_SPEED,
    HOST,
    HOST_FIXED_S,
    MG_WFBP_COMPUTE_S,
    PIZ_DAINT,
    RADIX_SELECT_TIMES,
    SEARCH_BYTES,
    SIERRA,
    SIERRA_FIXED_S,
    SIERRA_SAMPLE_S,
    TABLES,
    Row,
    bert_with_heads,
    phases_of,
    rows_of,
    sierra_cost,
    speech_lstm,
    tied_lstm,
    without_classifier,
)
from telegrad.cost.network import Costs
from telegrad.tools.advise.workload import EXACT_BYTES
from telegrad.tools.cli.simulate import varying_of


@cache
def figure(name: str) -> tuple[Row, ...]:
    return tuple(rows_of(name))


@pytest.fixture(autouse=True)
def _figures_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the other tests look at, which are computed once: all of them take 2 s."""
    monkeypatch.setattr(paper_steps, "rows_of", lambda name: [dict(row) for row in figure(name)])


def only(name: str, **wanted: Any) -> Row:
    (found,) = (row for row in figure(name) if all(row[key] == value for key, value in wanted.items()))
    return found


def by(name: str, key: str, **wanted: Any) -> dict[Any, Row]:
    return {row[key]: row for row in figure(name) if all(row[one] == value for one, value in wanted.items())}


def test_a_figure_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="figure='mg-wfbp-7' is not known: use one of sparcml-4, "):
        rows_of("mg-wfbp-7")


@pytest.mark.parametrize("name", FIGURES)
def test_all_rows_are_of_steps(name: str) -> None:
    rows = figure(name)
    assert len(rows) >= 8
    for row in rows:
        assert row["figure"] == name
        assert row["step_s"] >= row["compute_s"] * (1 - 1e-12)
        alone_s = 4e-3 + 256 * 2.4e-3 if row.get("scaling") == "strong" else row["ranks"] * row["compute_s"]
        assert row["speedup"] == pytest.approx(alone_s / row["step_s"])
        assert row["exposed_s"] == pytest.approx(row["step_s"] - row["compute_s"])


def test_every_free_number_says_where_it_comes_from() -> None:
    for one in FREE_NUMBERS:
        assert one.source.startswith(("paper", "fitted", "assumed"))
    assert {one.figures.split("-")[0] for one in FREE_NUMBERS} == {name.split("-")[0] for name in FIGURES}


# MG-WFBP, §6.4.


@pytest.mark.parametrize(
    ("model", "over_wfbp", "over_single"),
    [("resnet50", 1.75, 1.45), ("googlenet", 1.78, 1.35)],
    ids=["resnet", "google"],
)
def test_merging_with_rings(model: str, over_wfbp: float, over_single: float) -> None:
    steps = {plan: row["step_s"] for plan, row in by("mg-wfbp-10", "plan", model=model, ranks=64).items()}
    assert steps["wfbp"] / steps["greedy"] == pytest.approx(over_wfbp, rel=0.1)
    assert steps["single"] / steps["greedy"] == pytest.approx(over_single, rel=0.1)
    for ranks in (4, 8, 16):  # the curves of WFBP and of one message cross
        few = by("mg-wfbp-10", "plan", model=model, ranks=ranks)
        assert few["wfbp"]["step_s"] < few["single"]["step_s"]
    assert steps["single"] < steps["wfbp"]
    groups = [by("mg-wfbp-10", "plan", model=model, ranks=2**power)["greedy"]["groups"] for power in range(2, 12)]
    assert groups == sorted(groups, reverse=True)
    assert groups[-2:] == [1, 1]


@pytest.mark.parametrize(
    ("model", "tensors", "parameters", "macs"),
    [
        ("resnet50", 161, 25.5e6, 3.9e9),
        ("resnet152", 467, 60.1e6, 11.61e9),
        ("densenet161", 484, 28.6e6, 7.85e9),
        ("densenet201", 604, 20e6, 4.39e9),
        ("inception-v4", 449, 42.6e6, 6.16e9),
    ],
)
def test_networks_are_those_of_the_paper_s_table_4(model: str, tensors: int, parameters: float, macs: float) -> None:
    shape = architecture(model)
    assert len(shape.parameters) == tensors
    assert shape.elements == pytest.approx(parameters, rel=0.003)
    assert shape.macs == pytest.approx(macs, rel=0.05)


def v100(model: str, network: str, precision: str) -> dict[str, float]:
    found = by("mg-wfbp-9", "plan", model=model, collective=network, scheme=precision)
    return {plan: row["step_s"] for plan, row in found.items()}


def test_on_v100s_neither_is_always_ahead_and_merging_is() -> None:
    orders = set()
    for row in figure("mg-wfbp-9"):
        steps = v100(row["model"], row["collective"], row["scheme"])
        assert steps["optimal"] <= steps["greedy"] <= min(steps["wfbp"], steps["single"]) * (1 + 1e-9)
        orders.add(steps["wfbp"] < steps["single"])
    assert orders == {True, False}
    slow = v100("resnet152", "v100-10gbe", "float32")
    assert 1.05 < slow["single"] / slow["wfbp"] < 1.2  # the paper: about 10 %
    for model, least in (("densenet161", 1.2), ("inception-v4", 1.0)):  # the paper: 20 % for DenseNet-161
        slow = v100(model, "v100-10gbe", "float32")
        assert least < slow["wfbp"] / slow["single"] < 1.45


def test_half_precision_halves_messages_and_not_what_starts_them() -> None:
    for model in ("densenet161", "densenet201"):
        whole, half = (v100(model, "v100-10gbe", precision) for precision in ("float32", "float16"))
        assert whole["single"] / half["single"] > 1.9
        assert whole["wfbp"] / half["wfbp"] < 1.3


@pytest.mark.parametrize("model", ["resnet50", "googlenet"])
def test_greedy_is_ahead_of_both_and_the_optimum_of_greedy(model: str) -> None:
    for ranks in (2**power for power in range(2, 12)):
        steps = {plan: row["step_s"] for plan, row in by("mg-wfbp-10", "plan", model=model, ranks=ranks).items()}
        assert steps["optimal"] <= steps["greedy"] <= min(steps["wfbp"], steps["single"]) * (1 + 1e-9)


def test_the_efficiency_of_resnet_at_64() -> None:
    found = by("mg-wfbp-10", "plan", model="resnet50", ranks=64)
    assert found["greedy"]["efficiency"] > 0.95  # "almost linear"
    assert found["wfbp"]["efficiency"] == pytest.approx(0.55, abs=0.05)
    assert 0.6 < found["single"]["efficiency"] < 0.8  # the paper: around 0.55, but 1/1.45 of almost linear


@pytest.mark.parametrize("model", ["resnet50", "googlenet"])
@pytest.mark.parametrize("collective", ["double-binary-trees", "double-binary-trees-published"])
def test_with_trees_one_message_is_behind(model: str, collective: str) -> None:
    for ranks in (128, 256, 512, 1024, 2048):
        steps = {
            plan: row["step_s"]
            for plan, row in by("mg-wfbp-11", "plan", model=model, ranks=ranks, collective=collective).items()
        }
        assert steps["optimal"] <= steps["greedy"] <= steps["wfbp"] * (1 + 1e-9)
        assert 1.1 * steps["wfbp"] < steps["single"]


def test_a_parameter_server_s_port_is_the_bottleneck() -> None:
    for model in ("resnet50", "googlenet"):
        ahead = []
        for ranks in (4, 16, 64):
            found = by("mg-wfbp-server", "collective", model=model, ranks=ranks, plan="optimal")
            ahead.append(found["parameter-server"]["step_s"] / found["ring"]["step_s"])
        assert 1 < ahead[0] < ahead[1] < ahead[2]


# Aluminum, §II-C and §VI.


def test_aluminum_s_buffers() -> None:
    model = without_classifier()
    assert len(model.parameters) == 53 + 106
    assert sum(4 * one.elements <= 8 << 10 for one in model.parameters) > len(model.parameters) / 2


def test_histograms_of_buffers() -> None:
    sizes = {model: [one for one in figure("aluminum-1") if one["model"] == model] for model in ("alexnet", "resnet50")}
    assert {model: sum(one["buffers"] for one in found) for model, found in sizes.items()} == {
        "alexnet": 16,  # the paper's last layer has no bias
        "resnet50": 161,
    }
    small = sum(one["buffers"] for one in sizes["resnet50"] if one["bytes_most"] <= 8 << 10)
    assert small > 161 / 2  # "a majority of the buffers are 8 KiB or less"
    assert min(one["bytes_most"] for one in sizes["resnet50"]) == 256


def test_host_transfer_s_table_says_what_its_curves_do() -> None:
    for one in figure("aluminum-10"):
        curve = [row for row in figure("aluminum-11") if row["ranks"] == one["ranks"]]
        assert len(curve) == 29
        assert all((row["ring_over_host"] > 1) == (row["elements"] <= one["host_up_to"]) for row in curve)
        if one["published"] is not None:
            assert one["published"] / 2 <= one["host_up_to"] <= 2 * one["published"]


def test_strong_scaling_without_overlap_is_best_at_32() -> None:
    steps = by("aluminum-2", "ranks", scaling="strong")
    assert min(steps, key=lambda ranks: steps[ranks]["step_s"]) == 32
    assert steps[32]["communicate_s"] > 0.5 * steps[32]["step_s"]
    assert all(row["samples"] * row["ranks"] == 256 for row in steps.values())


def test_overlap_gains_about_1_4_at_32_and_32_stays_the_best() -> None:
    off, on = (by(name, "ranks", scaling="strong") for name in ("aluminum-2", "aluminum-7"))
    assert off[32]["step_s"] / on[32]["step_s"] == pytest.approx(1.4, abs=0.15)
    assert min(on, key=lambda ranks: on[ranks]["step_s"]) == 32
    assert all(on[ranks]["step_s"] < off[ranks]["step_s"] for ranks in on)


def test_weak_scaling_communicates_6_and_12_times_as_long_as_it_computes() -> None:
    weak = by("aluminum-2", "ranks", scaling="weak")
    ratios = {ranks: row["communicate_s"] / row["compute_s"] for ranks, row in weak.items()}
    assert ratios[1024] == pytest.approx(6, rel=0.1)
    assert ratios[2048] == pytest.approx(12, rel=0.1)
    assert list(ratios.values()) == sorted(ratios.values())


def test_with_overlap_weak_scaling_hides_communication_up_to_some_128() -> None:
    weak = by("aluminum-7", "ranks", scaling="weak")
    assert all(weak[ranks]["efficiency"] > 0.99 for ranks in (8, 16, 32, 64))
    assert weak[128]["efficiency"] > 0.8
    assert weak[256]["efficiency"] < 0.6
    assert weak[2048]["exposed_s"] > 4 * weak[2048]["compute_s"]


def test_the_cheapest_for_every_buffer_gains_from_64_on() -> None:
    for scaling, most in (("strong", 256), ("weak", 2048)):
        ring, minimal = (
            by("aluminum-8", "ranks", scaling=scaling, collective=name, overlap=False) for name in ("ring", "minimal")
        )
        gains = {ranks: ring[ranks]["communicate_s"] / minimal[ranks]["communicate_s"] for ranks in ring}
        assert all(gains[ranks] == 1 for ranks in (8, 16, 32))
        assert 1 < gains[64] < gains[128] < gains[most]
    assert 4 < gains[2048] < 8
    ring, minimal = (
        only("aluminum-8", scaling="weak", collective=name, overlap=True, ranks=2048) for name in ("ring", "minimal")
    )
    assert ring["exposed_s"] > 5 * minimal["exposed_s"]


@pytest.mark.parametrize(("ranks", "least"), [(128, 2), (2048, 20)])
def test_short_messages_by_host_transfer(ranks: int, least: int) -> None:
    assert least < sierra_cost(ranks, "ring")(4) / sierra_cost(ranks, "host")(4) < 2 * least


@pytest.mark.parametrize(("ranks", "published"), [(64, 1 << 15), (2048, 1 << 19)])
def test_up_to_which_length_host_transfer_is_faster(ranks: int, published: int) -> None:
    ring, host = sierra_cost(ranks, "ring"), sierra_cost(ranks, "host")
    faster = [1 << power for power in range(29) if host(4 << power) < ring(4 << power)]
    assert published / 2 <= max(faster) <= 2 * published
    assert all(sierra_cost(32, "ring")(4 << power) < sierra_cost(32, "host")(4 << power) for power in range(29))


# RedSync, §3.3.

RANKS = (2, 4, 8, 16, 32, 64, 128)


def gains(model: str, scheme: str, name: str = "redsync-5") -> dict[int, float]:
    """Over the dense step."""
    dense, other = (by(name, "ranks", model=model, scheme=one) for one in ("dense", scheme))
    return {ranks: dense[ranks]["step_s"] / other[ranks]["step_s"] for ranks in dense}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("redsync-3", model) for model in ("vgg16", "alexnet")),
        *(("redsync-4", model) for model in ("lstm", "lstm-wiki2", "vgg16-cifar")),
    ],
)
def test_on_one_server_large_models_gain_and_radix_select_takes_it_all(name: str, model: str) -> None:
    assert all(gain > 1.5 for gain in gains(model, "rgc", name).values())
    pure = gains(model, "rgc-pure", name)
    assert pure[2] < pure[4] < pure[8] < 1.2  # the paper: slower than the baseline
    assert pure[2] < 0.7


def test_on_one_server_resnet_gains_next_to_nothing() -> None:
    found = gains("resnet50", "rgc", "redsync-3")
    assert found[2] < 1
    assert max(found.values()) < 1.2  # the paper: no gain


def test_the_sizes_of_models_are_those_of_redsync_s_table_1() -> None:
    for shape, megabytes in (
        (tied_lstm(), 204),
        (tied_lstm("lstm-wiki2"), 344),
        (architecture("vgg16-cifar"), 59),
        (architecture("alexnet"), 233),
    ):
        assert 4 * shape.elements == pytest.approx(megabytes * 1e6, rel=0.05)


@pytest.mark.parametrize(("model", "least"), [("vgg16", 1.5), ("alexnet", 4.0), ("lstm", 4.0)])
def test_large_models_gain(model: str, least: float) -> None:
    for scheme in ("rgc", "rgc-quantised"):
        found = gains(model, scheme)
        assert all(found[ranks] > least for ranks in RANKS[1:])


def test_resnet_gains_nothing_and_at_128_most_of_what_it_loses_is_decompression() -> None:
    for scheme in ("rgc", "rgc-quantised"):
        found = gains("resnet50", scheme)
        assert all(0.7 < found[ranks] < 1 for ranks in RANKS)
        step = only("redsync-5", model="resnet50", scheme=scheme, ranks=128)
        assert step["decompress_s"] > step["select_s"] + step["communicate_s"]
        assert step["decompress_s"] > 0.5 * step["exposed_s"]


@pytest.mark.parametrize("model", ["alexnet", "lstm"])
def test_gains_are_concave_in_the_number_of_ranks(model: str) -> None:
    for scheme in ("rgc", "rgc-quantised"):
        found = gains(model, scheme)
        assert found[2] < max(found[8], found[16], found[32]) > found[128]
    assert gains("alexnet", "rgc")[32] > gains("alexnet", "rgc")[128]


def test_what_is_sent_and_decompressed_grows_with_the_ranks_and_selection_does_not() -> None:
    for model in ("vgg16", "alexnet", "resnet50", "lstm"):
        few, many = (only("redsync-5", model=model, scheme="rgc", ranks=ranks) for ranks in (8, 128))
        assert many["decompress_s"] == pytest.approx(16 * few["decompress_s"])
        assert many["communicate_s"] > 4 * few["communicate_s"]
        assert many["select_s"] == pytest.approx(few["select_s"])


@pytest.mark.parametrize("model", ["vgg16", "alexnet", "resnet50"])
def test_quantised_cnns_are_never_slower(model: str) -> None:
    for ranks in RANKS:
        plain, mean = (only("redsync-5", model=model, scheme=name, ranks=ranks) for name in ("rgc", "rgc-quantised"))
        assert mean["step_s"] <= plain["step_s"] * (1 + 1e-9)
        assert mean["communicate_s"] < plain["communicate_s"]
        assert mean["select_s"] == plain["select_s"]


def test_the_quantised_lstm_is_slower_up_to_16_ranks_and_faster_beyond() -> None:
    plain, mean = (by("redsync-5", "ranks", model="lstm", scheme=name) for name in ("rgc", "rgc-quantised"))
    ahead = [ranks for ranks in RANKS if mean[ranks]["step_s"] < plain[ranks]["step_s"]]
    assert ahead == [32, 64, 128]
    assert mean[8]["select_s"] > 1.5 * plain[8]["select_s"]


def test_the_document_has_every_free_number() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "results" / "training-step.md").read_text()
    for one in FREE_NUMBERS:
        assert f"| {one.figures} | {one.what} | {one.value} | {one.source} |" in text
    for name in FIGURES | TABLES:
        assert f"`{name}`" in text or f"--figure {name}`" in text


def test_free_numbers_are_those_that_are_used() -> None:
    stated = {one.what: one.value for one in FREE_NUMBERS}
    assert stated["step of one K80: ResNet-50, GoogleNet"] == "{resnet50} s, {googlenet} s".format(**MG_WFBP_COMPUTE_S)
    assert stated["step of a V100, b samples"] == f"{SIERRA_FIXED_S * 1e3:g} ms + b · {SIERRA_SAMPLE_S * 1e3:g} ms"
    assert stated["ring: α, β"] == said(SIERRA)
    host = stated["host transfer: fixed, α, β a round of recursive doubling"]
    assert host == f"{HOST_FIXED_S * 1e6:g} µs, {said(HOST)}"
    assert stated["α, β of Piz Daint through Horovod"] == said(PIZ_DAINT)
    k80, slow, fast = (PAPER_NETWORKS[name] for name in ("k80-10gbe", "v100-10gbe", "v100-56gbib"))
    assert stated["α, β of K80/10GbE"] == rounded(k80)
    assert stated["α, β of V100/10GbE and V100/56GbIB"] == f"{rounded(slow)}; {rounded(fast)}"
    assert stated["half precision: computation, gradients"] == f"{HALF_SPEED:g}x as fast, 2 bytes"
    assert stated["selection by radixSelect"].startswith(f"{RADIX_SELECT_TIMES}x")
    assert stated["Horovod's fusion"] == f"{FUSION_S * 1e3:g} ms, {FUSION_BYTES >> 20} MiB"
    assert stated["traffic of trimmed top-k"].startswith(f"{EXACT_BYTES} bytes")
    assert stated["traffic of a threshold search"].startswith(f"{SEARCH_BYTES} bytes")


def rounded(costs: Costs) -> str:
    return f"{costs.alpha_s * 1e6:.3g} µs, {costs.beta_s_per_byte * 1e9:.3g} ns/B"


def said(costs: Costs) -> str:
    return f"{costs.alpha_s * 1e6:g} µs, {costs.beta_s_per_byte * 1e9:g} ns/B"


# Ok-Topk, §5.4.3.


def seconds_of(scheme: str, ranks: int) -> float:
    return float(only("oktopk-12", scheme=scheme, ranks=ranks)["step_s"])


def test_models_have_the_parameters_of_the_paper() -> None:
    assert bert_with_heads().elements == 133_547_324
    assert architecture("vgg16-cifar").elements == 14_728_266
    assert speech_lstm().elements == 27_569_568


@pytest.mark.parametrize(
    ("name", "ranks", "fastest", "slowest"), [("oktopk-8", 32, 1.51, 8.83), ("oktopk-10", 64, 1.34, 7.71)]
)
def test_what_was_fitted_to_bert_says_of_smaller_models(name: str, ranks: int, fastest: float, slowest: float) -> None:
    steps = {one["scheme"]: one["step_s"] for one in figure(name) if one["ranks"] == ranks}
    ahead = sorted(steps[scheme] / steps["oktopk"] for scheme in steps if scheme != "oktopk")
    assert fastest / 2 < ahead[0] < 2 * fastest
    assert slowest / 3 < ahead[-1] < 3 * slowest
    assert min(steps, key=lambda scheme: steps[scheme]) == "oktopk"


# SparCML, §8.3 and §8.4.


@pytest.mark.parametrize(
    ("name", "model", "ranks", "published"),
    [
        ("sparcml-4", "resnet110-cifar", 8, 1.12),
        ("sparcml-4", "lstm-atis", 8, 5.99),
        ("sparcml-5", "resnet18-4x", 64, 2.0),
        ("sparcml-5", "resnet34-4x", 64, 1.85),
    ],
)
def test_sparse_steps_gain_as_published_within_a_factor(name: str, model: str, ranks: int, published: float) -> None:
    found = gains(model, "sparse", name)[ranks]
    assert published / 1.5 < found < 2.5 * published


def test_of_wide_resnets_the_shallower_gains_more() -> None:
    assert gains("resnet18-4x", "sparse", "sparcml-5")[64] > gains("resnet34-4x", "sparse", "sparcml-5")[64]
    assert architecture("resnet18-4x").parameters[-2].elements > 2_000_000  # the last layer's weights


def test_speech_takes_as_many_days_as_published() -> None:
    days = {(one["scheme"], one["ranks"]): one["days"] for one in figure("sparcml-6")}
    assert days["dense", 16] == pytest.approx(14, rel=0.01)
    assert 14 / 8 < days["sparse", 128] < 1.8


def test_what_oktopk_s_figure_was_fitted_to() -> None:
    iterations = 400_000
    assert seconds_of("oktopk", 32) * iterations / 3600 == pytest.approx(47, rel=0.005)
    assert seconds_of("dense-overlapped", 32) * iterations / 3600 == pytest.approx(150, rel=0.005)
    assert seconds_of("oktopk", 32) / seconds_of("oktopk", 256) == pytest.approx(0.763, abs=0.001)
    rivals = {one["scheme"]: one["step_s"] for one in figure("oktopk-12") if one["ranks"] == 256}
    assert max(rivals, key=lambda name: rivals[name]) == "gtopk"
    assert rivals["gtopk"] / rivals["oktopk"] == pytest.approx(12.95, rel=0.005)


def test_what_follows_from_it() -> None:
    assert seconds_of("gaussiank", 32) / seconds_of("oktopk", 32) == pytest.approx(1.30, abs=0.01)  # as published
    for scheme in ("topka", "gaussiank"):  # their communication is "even higher than the dense" from 256 on
        moved = {ranks: only("oktopk-12", scheme=scheme, ranks=ranks)["communicate_s"] for ranks in (128, 256)}
        dense = {ranks: only("oktopk-12", scheme="dense", ranks=ranks)["communicate_s"] for ranks in (128, 256)}
        assert moved[128] < dense[128]
        assert moved[256] > dense[256]
    fastest = min(seconds_of(name, 256) for name in ("dense", "dense-overlapped", "topka", "topkdsa", "gaussiank"))
    assert (
        2.4 < fastest / seconds_of("oktopk", 256) < 3.29
    )  # the paper's; what is missing: docs/results/training-step.md


def step(*arguments: str, columns: int = 120) -> tuple[int, str]:
    done = CliRunner().invoke(
        app(["paper-steps"]), ["paper-steps", *arguments], env={"COLUMNS": str(columns), "TERM": "dumb"}
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def written(*arguments: str, file: Path) -> dict[str, Any]:
    status, output = step(*arguments, "--json", str(file))
    assert status == 0, output
    return dict(json.loads(file.read_text()))


@pytest.mark.parametrize("name", FIGURES | TABLES)
def test_a_paper_s_figure(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, output = step("--figure", name, "--json", str(file))
    assert status == 0, output
    found = json.loads(file.read_text())
    assert found["rows"] == [*figure(name)]
    assert found["free_numbers"]
    for one in found["free_numbers"]:
        assert one["what"] in output.replace("\n", " ")


def test_all_figures_in_one_table(tmp_path: Path) -> None:
    found = written("--figure", "all", file=tmp_path / "rows.json")
    assert {row["figure"] for row in found["rows"]} == set(FIGURES | TABLES)


def test_figures_of_several_papers_in_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "several.png"
    found = written("--figure", "sparcml-4,aluminum-1,aluminum-2", "--plot", str(drawn), file=tmp_path / "rows.json")
    assert {row["figure"] for row in found["rows"]} == {"sparcml-4", "aluminum-1", "aluminum-2"}
    assert drawn.stat().st_size > 10_000


def test_phases_add_up_to_the_step() -> None:
    for name in FIGURES:
        for row in figure(name):
            phases = phases_of(row)
            assert sum(phases.values()) == pytest.approx(row["step_s"])
            assert min(phases.values()) >= 0


def test_which_columns_tell_rows_apart() -> None:
    assert varying_of([*figure("redsync-5")]) == ["scheme"]  # overlap and plan follow from model and scheme
    assert varying_of([*figure("mg-wfbp-11")]) == ["collective", "plan"]
    assert varying_of([*figure("aluminum-8")]) == ["collective", "overlap"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--figure", "redsync-7"), "--figure: 'redsync-7' does not exist: use sparcml-4, "),
        (("--figure", "aluminum-1", "--plot", "x.png"), "--plot: --figure=aluminum-1 has no steps, which are drawn"),
        (("--json", "same.png", "--plot", "same.png"), "--plot: same.png is what --json writes: name another"),
    ],
)
def test_bad_options_are_named_with_a_remedy(options: tuple[str, ...], said: str) -> None:
    status, output = step(*options, columns=1000)
    assert status == 2
    assert said in output
