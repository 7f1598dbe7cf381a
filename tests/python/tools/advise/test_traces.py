"""Architectures, traces and linear costs: known sizes, and the speed-ups that MG-WFBP's paper gives."""

from __future__ import annotations

import json
import math

import pytest

from lab.common.architectures import EVERY, architecture
from lab.paper_steps import by_layer
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.architectures import architecture as known_architecture
from telegrad.tools.advise.workload import trace_of

# Parameters, tensors, and 10^9 multiplications of a forward pass: published, or torchvision's and transformers' counts.
KNOWN = {
    "resnet50": (25_557_032, 161, 4.09),
    "resnet152": (60_192_808, 467, 11.51),
    "vgg16": (138_357_544, 32, 15.47),
    "alexnet": (61_100_840, 16, 0.714),
    "googlenet": (13_378_280, 128, 1.59),
    "bert-base": (109_482_240, 199, 48.3),
    "bert-large": (335_141_888, 391, 167.5),
    "gpt2-small": (124_439_808, 149, 145.8),
    "gpt2-medium": (354_823_168, 293, 413.5),
    "gpt2-large": (774_030_080, 437, 887.3),
    "llama-1b": (1_235_814_400, 147, 6161.1),
    "llama-8b": (8_030_261_248, 291, 35_137.1),
    "qwen-1.5b": (1_543_714_304, 339, 7765.6),
    "qwen-8b": (8_190_735_360, 399, 35_946.7),
    "qwen-72b": (72_706_203_648, 963, 314_683.7),
    "vit-b16": (86_567_656, 152, 17.56),
    "vit-l16": (304_326_632, 296, 61.6),
    "sd15-unet": (859_520_964, 686, 401.6),
    "lstm": (66_034_000, 11, 1.785),
    "lstm-wiki2": (135_891_278, 11, 3.007),
    "vgg16-cifar": (14_728_266, 54, 0.3132),
    "resnet110-cifar": (1_727_962, 329, 0.2529),
    "densenet161": (28_681_000, 484, 7.728),
    "densenet201": (20_013_928, 604, 4.291),
    "inception-v4": (42_679_816, 449, 6.122),  # of images of 224 x 224
    "resnet18-4x": (180_645_096, 62, 27.603),
    "resnet34-4x": (342_286_568, 110, 57.198),
}


@pytest.mark.parametrize("name", EVERY)
def test_architectures_have_the_known_sizes(name: str) -> None:
    elements, tensors, giga_macs = KNOWN[name]
    model = architecture(name)
    assert (model.elements, len(model.parameters)) == (elements, tensors)
    assert model.macs / 1e9 == pytest.approx(giga_macs, rel=2e-3)
    assert len({one.name for one in model.parameters}) == tensors


@pytest.mark.parametrize("name", ["gpt2-medium", "gpt2-large", "bert-large", "llama-1b", "llama-8b", "qwen-1.5b"])
def test_transformers_builds_as_many_elements_from_the_published_configuration(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    llama = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
    kind, config = {
        "gpt2-medium": ("GPT2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
        "gpt2-large": ("GPT2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
        "bert-large": (
            "Bert",
            {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        ),
        "llama-1b": (
            "Llama",
            {**llama, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
            | {"tie_word_embeddings": True},
        ),
        "llama-8b": (
            "Llama",
            {**llama, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        ),
        "qwen-1.5b": (
            "Qwen2",
            {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
            | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ),
    }[name]
    head = {"GPT2": "GPT2LMHeadModel", "Bert": "BertModel"}.get(kind, f"{kind}ForCausalLM")
    with torch.device("meta"):
        model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config))
    assert sum(one.numel() for one in model.parameters()) == architecture(name).elements


def test_tensors_of_a_layer_can_be_one() -> None:
    model = architecture("googlenet")
    layers = by_layer(model)
    assert (layers.elements, layers.macs, len(layers.parameters)) == (model.elements, model.macs, 64)
    assert layers.parameters[0].name == "conv1"


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="model='resnet' is not known: use one of resnet50, "):
        known_architecture("resnet")


def test_a_trace_of_an_architecture_is_in_backward_order_and_takes_the_time_that_is_given() -> None:
    trace = trace_of(architecture("vgg16"), 0.3)
    assert trace.names[:2] == ("fc8.bias", "fc8.weight")
    assert trace.names[-1] == "conv1.0.weight"
    assert trace.bytes == 4 * 138_357_544
    assert trace.compute_s == pytest.approx(0.3)
    assert trace.forward_s == pytest.approx(0.1)
    half = trace_of(architecture("vgg16"), 0.3, element_bytes=2)
    assert half.bytes * 2 == trace.bytes
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="compute_s="):
            trace_of(architecture("vgg16"), bad)


_LATER = ("samples", "accumulate", "rest_s")


def test_a_trace_survives_json() -> None:
    trace = Trace(("b", "a"), (8, 4), (0.1, 0.7), 0.3, "by hand", samples=8.0, accumulate=4, rest_s=0.05)
    assert Trace.from_json(trace.to_json()) == trace
    older = {name: value for name, value in json.loads(trace.to_json()).items() if name not in _LATER}
    assert Trace.from_json(json.dumps(older)) == Trace(trace.names, trace.sizes, trace.backward_times, 0.3, "by hand")
    empty = Trace((), (), (), 0.0)
    assert Trace.from_json(empty.to_json()) == empty
    assert (empty.backward_s, empty.compute_s, empty.bytes) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "no trace"),
        ({"version": 2}, "version 2: this telegrad reads 1"),
        ({"gradients": None}, "damaged"),
        ({"gradients": [["a", 1]]}, "damaged"),
        ({"gradients": [["a", "x", 1.0]]}, "damaged"),
        ({"gradients": [["a", 1.5, 1.0]]}, "damaged"),
        ({"gradients": [["a", 1, 10**400]]}, "damaged"),
        ({"gradients": [["a", 1, float("inf")]]}, "gradient 'a' has 1 bytes and inf s"),
        ({"gradients": [["a", -1, 1.0]]}, "gradient 'a' has -1 bytes"),
        ({"forward_s": -1.0}, "forward_s=-1.0 must be"),
        ({"forward_s": None}, "damaged"),
        ({"rest_s": -1.0}, "rest_s=-1.0 must be"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"accumulate": 1.5}, "damaged"),
        ({"samples": 0.0}, "samples=0.0 must be above 0"),
    ],
)
def test_what_is_no_trace_is_refused(change: dict[str, object], said: str) -> None:
    found = json.loads(Trace(("a",), (4,), (0.1,), 0.3).to_json()) | change
    with pytest.raises(ValueError, match=said):
        Trace.from_json(json.dumps({name: value for name, value in found.items() if value is not None}))


def test_a_trace_needs_one_of_each() -> None:
    with pytest.raises(ValueError, match="1 names, 2 sizes and 1 backward_times"):
        Trace(("a",), (1, 2), (0.1,), 0.3)
    with pytest.raises(ValueError, match="this is no trace"):
        Trace.from_json("3")
    for damaged in ("{", "[" * 100_000):
        with pytest.raises(ValueError, match=r"this is no trace but damaged JSON \(.*\): record it again"):
            Trace.from_json(damaged)


def test_a_trace_in_another_order() -> None:
    """A gradient that now stands behind a later one counts when that is there."""
    trace = Trace(("a", "b", "c", "d"), (1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0), 0.5, "by hand")
    other = trace.in_order(["a", "c", "b", "d"])
    assert (other.names, other.sizes) == (("a", "c", "b", "d"), (1, 3, 2, 4))
    assert other.backward_times == (1.0, 5.0, 0.0, 4.0)
    assert (other.forward_s, other.about) == (0.5, "by hand")
    assert trace.in_order(trace.names) == trace
    at_once = trace.all_at_once()
    assert at_once.backward_times == (trace.backward_s, 0.0, 0.0, 0.0)
    assert (at_once.names, at_once.sizes, at_once.forward_s) == (trace.names, trace.sizes, trace.forward_s)
    for names in (["a", "b", "c"], ["a", "b", "c", "c"]):
        with pytest.raises(ValueError, match="names must be those of the trace"):
            trace.in_order(names)
