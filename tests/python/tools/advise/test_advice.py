"""Advice: what is recommended where, in which words, and that its line of code is today's API."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace

import pytest

from telegrad.communicator import Communicator
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise import advice
from telegrad.tools.advise.advice import RECIPES, WORTH, Advice, Scheme, advise
from telegrad.tools.advise.architectures import ARCHITECTURES
from telegrad.tools.advise.sending import NODE, Cluster, dense, inside_nodes, low_rank, ok_topk, qsgd, sparse, sum_cost
from telegrad.tools.advise.workload import DEVICES, Workload, of_model
from telegrad.tools.sim.measure import network_of

V100 = DEVICES["v100"]
SCHEMES = [one for one in advice.SCHEMES if not one.needs_gloo and one.name != "topk-node"]
PLAIN = [one.name for one in SCHEMES if not one.compresses]


def advice_of(model: str, network: str, ranks: int = 16, **options: object) -> Advice:
    cluster = Cluster(ranks, network_of(network).costs)
    return advise(of_model(model, V100), cluster, V100, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("network", ["100gbit", "200gbit", "400gbit"])
def test_resnet_on_a_fast_network_is_told_not_to_compress(network: str) -> None:
    """The literature's negative result: it gains nothing."""
    found = advice_of("resnet50", network)
    assert found.recommended.scheme.name in PLAIN
    assert found.verdict.startswith("Do not compress: it would cost you 0.")
    assert found.recommended.step.efficiency > 0.98
    for one in found.predictions:
        assert one.step.step_s > 0.97 * found.recommended.step.step_s


def test_the_cost_of_compressing_is_that_of_the_best_way_to() -> None:
    found = advice_of("resnet50", "100gbit")
    cost = float(found.verdict.split("cost you ")[1].split(" %")[0]) / 100
    name = found.verdict.split("(")[1].split(" at")[0].removesuffix(").")
    assert cost == pytest.approx(found.of(name).mean_s / found.recommended.mean_s - 1, rel=0.01)
    assert found.of(name).step.select_s > 0
    compressed = [one.mean_s for one in found.predictions if one.scheme.compresses]
    assert found.of(name).mean_s == min(compressed)


@pytest.mark.parametrize("model", ["vgg16", "bert-base", "gpt2-small"])
def test_large_models_on_a_slow_network_are_told_to_compress(model: str) -> None:
    found = advice_of(model, "1gbit")
    assert found.recommended.scheme.compresses
    assert found.verdict.startswith("Compress: ")
    best_dense_s = min(found.of(name).step.step_s for name in PLAIN)
    assert found.recommended.step.step_s < best_dense_s / 2
    assert any("Compare accuracy" in one for one in found.cautions)


def test_gradients_on_gpus_are_not_said_to_be_refused() -> None:
    said = " ".join(advice_of("vgg16", "1gbit").cautions)
    assert "For gradients on GPUs this is what to expect of the network, without copies to the host" in said
    assert "on the CPU" not in said


def test_a_small_gain_is_not_worth_it() -> None:
    found = advice_of("bert-base", "100gbit", 8)
    assert found.recommended.scheme.name in PLAIN
    assert "would gain" in found.verdict
    assert f"less than the {WORTH * 100:.0f} %" in found.verdict
    assert not any("accuracy" in one for one in found.cautions)


def test_many_ranks_fill_a_sum_in() -> None:
    found = advice_of("resnet50", "10gbit", 1024)
    assert any("100% of the entries, more than the 67%" in one and "at most 3x" in one for one in found.reasons)
    assert found.of("topk").step.step_s > 0.9 * found.of("ddp").step.step_s  # compression at 1 % gains nothing
    assert found.recommended.scheme.name == "oktopk"
    few = advice_of("resnet50", "10gbit", 4)
    assert not any("Lemma 5.2" in one for one in few.reasons)
    dense = advice_of("resnet50", "10gbit", 16, density=0.6)  # which cannot double any more
    assert any("at most 3x" in one for one in dense.reasons)


def test_the_reasons_have_the_numbers() -> None:
    found = advice_of("resnet50", "100gbit")
    first, second, *others = found.reasons
    assert "A rank computes 100 ms, of which 66.7 ms backward, and summing 102 MB among 16 ranks" in first
    assert "oktopk sends for 1.59 ms, but selection holds the backward pass up for 0.611 ms" in second
    assert "could be saved" in second
    assert any("merging by the planner instead of DDP's buckets gains 1.7 %" in one for one in others)
    slow = advice_of("vgg16", "1gbit")
    assert any("DDP's buckets gains nothing" in one for one in slow.reasons)


def test_predictions_are_of_all_schemes_and_of_all_ranks() -> None:
    found = advice_of("vgg16", "10gbit")
    assert [one.scheme for one in found.predictions] == list(SCHEMES)
    for one in found.predictions:
        assert one.samples_per_s == pytest.approx(16 * 32 / one.mean_s)
        assert 0 < one.efficiency <= 1 + 1e-12
        assert sorted(at for group in one.groups for at in group.tensors) == list(range(32))
    assert found.of("optimal").step.step_s <= min(found.of(name).step.step_s for name in PLAIN)
    with pytest.raises(KeyError):
        found.of("adam")


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_every_known_model_gets_advice(model: str) -> None:
    for network, ranks in (("1gbit", 2), ("400gbit", 1024)):
        found = advice_of(model, network, ranks)
        assert found.recommended in found.predictions
        measured = [one.mean_s for one in found.predictions if one.accuracy or not one.scheme.compresses]
        assert found.recommended.mean_s <= min(measured) * (1 + WORTH) * 1.02
        assert found.verdict.split(":")[0] in ("Compress", "Do not compress")


def test_a_slower_network_never_makes_dense_look_better() -> None:
    names = ("1gbit", "10gbit", "25gbit", "100gbit")
    gains = []
    for name in names:
        found = advice_of("vgg16", name)
        gains.append(found.of("ddp").step.step_s / found.of("oktopk").step.step_s)
    assert gains == sorted(gains, reverse=True)


def test_quantisation_is_recommended_where_it_is_fastest() -> None:
    found = advice_of(
        "vgg16", "1gbit", schemes=[one for one in SCHEMES if one.name not in ("oktopk", "allgather", "lowrank")]
    )
    assert found.recommended.scheme.name == "topk"
    strong = advice_of("vgg16", "1gbit", density=1.0, schemes=[one for one in SCHEMES if one.name != "lowrank"])
    assert strong.recommended.scheme.name == "qsgd4"
    assert "Compress: qsgd4 makes the whole job" in strong.verdict  # it has no density
    assert 'compress=telegrad.Quantised("qsgd4")' in strong.line


def test_of_several_ways_the_better_one_is_taken() -> None:
    def both(cluster: Cluster, device: object, density: float, trace: object) -> list[object]:
        return [sparse(cluster, V100, density), ok_topk(cluster, V100, density)]

    mixed = replace(SCHEMES[4], name="either", ways=both)  # type: ignore[arg-type]
    found = advice_of("resnet50", "10gbit", 256, schemes=[*SCHEMES, mixed])
    assert found.of("either").step.step_s == min(found.of(name).step.step_s for name in ("topk", "oktopk"))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks=1 must be 2 or more"):
        advice_of("resnet50", "10gbit", 1)
    for density in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"density={density} is no share"):
            advice_of("resnet50", "10gbit", density=density)
    for schemes in ([], SCHEMES[5:]):
        with pytest.raises(ValueError, match="schemes must have one that is dense"):
            advice_of("resnet50", "10gbit", schemes=schemes)


def _gpt2_small(accumulate: int = 1, **options: object) -> Advice:
    cluster = Cluster(2, network_of("1gbit").costs)
    workload = replace(of_model("gpt2-small", V100), accumulate=accumulate)
    return advise(workload, cluster, V100, optimizer="sgd", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("accumulate", "times"), [(1, 9.51), (4, 3.21), (16, 1.56)])
def test_only_the_last_of_accumulated_passes_is_exchanged(accumulate: int, times: float) -> None:
    found = _gpt2_small(accumulate)
    compute_s = found.workload.trace.compute_s
    for one in found.predictions:
        assert one.step_s == pytest.approx((accumulate - 1) * compute_s + one.step.step_s)
        assert one.mean_s == one.step_s  # SGD has no dense steps
        assert one.samples_per_s == pytest.approx(2 * 4 * accumulate / one.mean_s)
        assert one.efficiency == pytest.approx(accumulate * compute_s / one.mean_s)
    assert found.speedup == pytest.approx(times, abs=0.005)
    assert f"topk at 0.01 makes the whole job {times:.2f} times as fast" in found.verdict
    assert any(f"has {accumulate} passes of 446 ms" in one for one in found.reasons) == (accumulate > 1)


def test_the_optimizer_s_time_is_once_in_a_step() -> None:
    workload = of_model("gpt2-small", V100)
    slow = replace(workload, accumulate=3, trace=replace(workload.trace, rest_s=0.25))
    cluster = Cluster(2, network_of("1gbit").costs)
    for one, before in zip(*(advise(w, cluster, V100).predictions for w in (slow, workload)), strict=True):
        assert one.mean_s == pytest.approx(before.mean_s + 2 * workload.trace.compute_s + 0.25)


@pytest.mark.parametrize(
    ("optimizer", "steps", "share", "of_low_rank"),
    [
        ("adamw", None, 0.1, 0.0),
        ("adamw", 19, 1 / 19, 1 / 19),
        ("adam", 999, 99 / 999, 99 / 999),
        ("adamw", 1000, 0.1, 0.0),
        ("sgd", 9, 0.0, 0.0),
        ("sgd-momentum", 20, 0.1, 0.0),
    ],
)
def test_the_whole_job_has_the_recipe_s_dense_steps(
    optimizer: str, steps: int | None, share: float, of_low_rank: float
) -> None:
    found = advice_of("gpt2-small", "1gbit", 2, optimizer=optimizer, steps=steps)
    dense_s = found.of("ddp").step_s
    for one in found.predictions:
        of_it = share if one.scheme.selects else of_low_rank if one.scheme.name == "lowrank" else 0.0
        assert one.dense_share == of_it
        assert ("warmup=" in found.line_of(one)) == (of_it > 0)
        assert one.mean_s == pytest.approx(of_it * dense_s + (1 - of_it) * one.step_s)
    assert found.speedup == pytest.approx(found.plain.mean_s / found.recommended.mean_s)
    assert f"makes the whole job {found.speedup:.2f} times as fast" in found.verdict
    said = [one for one in found.reasons if "of the steps must be dense" in one]
    assert len(said) == (found.recommended.dense_share > 0)


def test_a_tenth_of_dense_steps_bounds_the_job() -> None:
    for density in (0.01, 0.001, 1e-5):
        topk = [one for one in SCHEMES if one.name != "lowrank"]
        found = advice_of("vgg16", "1gbit", 16, density=density, schemes=topk)
        assert found.of("topk").mean_s > 0.1 * found.of("ddp").mean_s
        assert found.speedup < 10


def test_the_headline_has_the_accuracy_of_the_study_beside_it() -> None:
    found = advice_of("gpt2-small", "1gbit", 2)
    assert found.recommended.scheme.name == "lowrank"
    said = "Expected accuracy beside dense training: loss +0.6 % (demo, AdamW, rank 16, 3 seeds, 220 steps)."
    assert found.reasons[0].startswith(said)
    topk = advice_of("gpt2-small", "1gbit", 2, schemes=[one for one in SCHEMES if one.name not in ("qsgd4", "lowrank")])
    assert topk.recommended.scheme.name == "topk"
    said = "Expected accuracy beside dense training: loss +1.4 % (gpt, AdamW, density 0.01, 3 seeds, 3,000 steps)."
    assert topk.reasons[0].startswith(said)
    quantised = [one for one in SCHEMES if not one.selects and one.name != "lowrank"]
    unknown = advice_of("gpt2-small", "1gbit", 2, schemes=quantised)
    assert unknown.recommended.scheme.name == "qsgd4"
    assert unknown.reasons[0].startswith("Expected accuracy: unknown. The study has no run of qsgd4 with AdamW")


def test_low_rank_of_adamw_in_a_short_job_is_not_promised_for_nothing() -> None:
    short = advice_of("resnet50", "1gbit", 4, optimizer="adamw", steps=120)
    assert short.recommended.scheme.name == "lowrank"
    assert "LowRank(rank=16), warmup=telegrad.Warmup(steps=12)" in short.line
    said = (
        "Expected accuracy beside dense training: loss +10.3 % (cnn, AdamW, rank 16, a tenth dense, 1 seed, 120 steps)."
    )
    assert short.reasons[0].startswith(said)
    assert "docs/results/rivals.md" in short.reasons[0]
    assert not any("less than 1,000 steps" in one for one in short.cautions)
    unknown = advice_of("resnet50", "1gbit", 4, optimizer="adamw")
    assert any(
        "In a job of less than 1,000 steps send all values in the first tenth" in one for one in unknown.cautions
    )


def test_a_scheme_without_measured_accuracy_is_only_told() -> None:
    found = advice_of("gpt2-small", "1gbit", 2, schemes=[one for one in SCHEMES if one.name != "lowrank"])
    assert found.of("qsgd4").mean_s * (1 + WORTH) < found.recommended.mean_s
    assert found.recommended.scheme.name == "topk"
    assert any("qsgd4 would be 5.75 times as fast. But no accuracy was measured" in one for one in found.reasons)


def test_a_short_job_has_no_accuracy_from_long_ones() -> None:
    """In 120 steps top-k with AdamW ends far above what 3,000 steps show."""
    short = advice_of("gpt2-small", "1gbit", 2, steps=120)
    assert short.recommended.scheme.name == "lowrank"
    assert short.of("topk").accuracy is None
    assert advice_of("gpt2-small", "1gbit", 2, steps=1000).of("topk").accuracy is not None
    topk = advice_of(
        "gpt2-small", "1gbit", 2, steps=120, schemes=[one for one in SCHEMES if one.name in ("ddp", "topk")]
    )
    assert "no run of topk with AdamW of at most three times as many steps" in topk.reasons[0]


def test_matrices_of_low_rank_need_a_trace_that_knows_them() -> None:
    trace = Trace(("a", "b"), (4 << 20, 4096), (0.01, 0.01), 0.01, rows=(1024, 1))
    cluster = Cluster(4, network_of("1gbit").costs)
    names = [one.scheme.name for one in advise(Workload("net", trace, 1.0), cluster, V100).predictions]
    assert "lowrank" in names
    unknown = replace(trace, rows=())
    names = [one.scheme.name for one in advise(Workload("net", unknown, 1.0), cluster, V100).predictions]
    assert "lowrank" not in names
    with pytest.raises(ValueError, match="trace.rows is empty: record the trace again"):
        low_rank(cluster, V100, unknown, 8)
    with pytest.raises(ValueError, match="rank=0 must be at least 1: the columns of two matrices"):
        low_rank(cluster, V100, trace, 0)


def test_a_low_rank_sends_the_share_of_both_factors() -> None:
    """A matrix of 1,024 x 1,024 as 8 times 2,048 numbers of one byte."""
    matrix = Trace(("a",), (4 << 20,), (0.01,), 0.01, rows=(1024,))
    cluster = Cluster(2, network_of("1gbit").costs)
    way = low_rank(cluster, V100, matrix, 8)
    sent_s = way.cost(4 << 20) - way.decompress(4 << 20)
    assert sent_s == pytest.approx(2 * qsgd(cluster, 8).cost(4 * 8 * 1024), rel=0.01)
    vector = replace(matrix, rows=(1,))
    assert low_rank(cluster, V100, vector, 8).cost(4 << 20) == pytest.approx(dense(cluster).cost(4 << 20))
    # half of it would travel: whole
    flat = Trace(("a",), (4 * 4096,), (0.01,), 0.01, rows=(4,))
    assert low_rank(cluster, V100, flat, 8).cost(4 * 4096) == pytest.approx(dense(cluster).cost(4 * 4096))


@pytest.mark.parametrize("ranks", [2, 4, 16, 48])
@pytest.mark.parametrize("network", ["1gbit", "10gbit", "25gbit", "100gbit"])
@pytest.mark.parametrize("model", ["resnet50", "bert-base", "vit-b16"])
def test_compression_that_is_recommended_is_worth_it(model: str, network: str, ranks: int) -> None:
    """Whichever of the schemes is chosen for its accuracy."""
    for optimizer in RECIPES:
        found = advice_of(model, network, ranks, optimizer=optimizer)
        if found.recommended.scheme.compresses:
            assert found.speedup >= 1 + WORTH
        else:
            assert found.speedup == 1


def test_an_unknown_optimizer_and_a_job_of_no_step_are_refused() -> None:
    with pytest.raises(ValueError, match="optimizer='lion' is not known"):
        advice_of("resnet50", "10gbit", optimizer="lion")
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        advice_of("resnet50", "10gbit", steps=0)
    with pytest.raises(ValueError, match="accumulate=0 must be at least 1"):
        _gpt2_small(0)


@pytest.mark.parametrize("steps", [None, 2000])
@pytest.mark.parametrize("optimizer", RECIPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_lines_of_code_are_valid_for_today_s_api(scheme: Scheme, optimizer: str, steps: int | None) -> None:
    torch = pytest.importorskip("torch")
    import telegrad

    advice = replace(advice_of("vgg16", "1gbit", optimizer=optimizer, density=0.01), steps=steps)
    line = advice.line_of(advice.of(scheme.name))
    (calls,) = ([one for one in ast.walk(ast.parse(line)) if isinstance(one, ast.Call)],)
    api = {
        "DDPState": telegrad.DDPState,
        "Synchronizer": telegrad.Synchronizer,
        "all_reduce": Communicator.all_reduce,
    }
    found = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in api]
    assert len(found) == 1
    function = api[found[0].func.attr]  # type: ignore[attr-defined]
    values = {one.arg: one.value for one in found[0].keywords if one.arg}
    own = [None] if inspect.isfunction(function) else []
    inspect.signature(function).bind(*own, *found[0].args, **values)

    registered: list[object] = []

    class Registered(torch.nn.Linear):
        """What the line needs of a DistributedDataParallel, which wants a process group."""

        def register_comm_hook(self, state: object, hook: object) -> None:
            assert type(state).__name__ == "DDPState"
            registered.append(state)

    model = torch.nn.Linear(4, 4)
    comm = Communicator.local(1)[0]
    try:
        ddp = Registered(4, 4)
        namespace = {"telegrad": telegrad, "model": model, "comm": comm, "ddp": ddp, "total_steps": 500}
        namespace["optimizer"] = torch.optim.SGD(ddp.parameters(), 0.1)
        exec(compile(line, "<advice>", "exec"), namespace)
        if "sync" in namespace:
            namespace["sync"].close()
        assert len(registered) == ("sync" not in namespace)
        assert ("Warmup" in line) == (scheme.selects and optimizer != "sgd")
        assert ("Momentum" in line) == (scheme.selects and optimizer == "sgd-momentum")
        assert ("total_steps" in line) == ("Warmup" in line and steps is None)
    finally:
        comm.close()


def test_nodes_that_sum_inside_are_priced() -> None:
    """Half of the gradient goes between nodes of two ranks, at the cost of dense sums inside."""
    costs = network_of("1gbit").costs
    cluster, owners = Cluster(8, costs, 2, oversubscription=2.0), Cluster(4, costs.with_bytes_times(2))
    way = inside_nodes(cluster, lambda among: sparse(among, V100, 0.01))
    alone, size = sparse(owners, V100, 0.01), 4 << 20
    assert way.cost(size) == sum_cost(Cluster(2, NODE, 2, NODE))(size) + alone.cost(size // 2)
    assert (way.delay(size), way.decompress(size)) == (alone.delay(size // 2), alone.decompress(size // 2))


@pytest.mark.parametrize("nodes", [2, 512])
def test_advice_has_nodes_where_ranks_share_them(nodes: int) -> None:
    job, costs = of_model("bert-base", V100), network_of("10gbit").costs
    found = advise(job, Cluster(8 * nodes, costs, 8, oversubscription=8.0), V100, optimizer="sgd")
    assert found.of("topk-node").mean_s < found.of("topk").mean_s
    line = found.line_of(found.of("topk-node"))
    assert 'DDPState(comm, ddp, compress=telegrad.TopK(density=0.01), node="auto")' in line
    alone = advise(job, Cluster(nodes, costs), V100)
    assert "topk-node" not in [one.scheme.name for one in alone.predictions]
