"""The catalogue's costs of number formats: bytes as models have them; time and plan follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.clusters import cluster_of
from workbench import experiment
from workbench.core import Cluster, Job
from workbench.core.errors import PlanError
from workbench.core.profile import LayerProfile
from workbench.methods import load_method
from workbench.methods.base import ignore
from workbench.methods.common.scaling import describe_facts, number_format
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.quantization.stored import held_bytes, store
from workbench.profiler.analytic import layer_costs

SIZES = {
    "train_samples": 16,
    "validation_samples": 8,
    "test_samples": 8,
    "max_length": 16,
    "batch_size": 8,
    "micro_batches": 2,
}
STORED = ("float16", "bfloat16", "int8", "int4", "nf4")


def two_of_a_kind(memory_bytes: int = 10**9) -> Cluster:
    """Return devices that are not emulated, so that the catalogue's figures count."""
    return cluster_of(("alpha", "beta"), memory_bytes=memory_bytes, bytes_per_s=1e6, model="some")


def layers_of(method: str, **options: Any) -> tuple[tuple[LayerProfile, ...], tuple[str, ...]]:
    """Return a device's layers by the catalogue, and the profile's notes."""
    job = Job(method=method, model="tiny-gpt2" if method == "p_rge" else "tiny-bert", options=options, **SIZES)
    chosen = load_method(method)
    profile = chosen.profile(chosen.prepare(job, ignore), two_of_a_kind(), ignore, emulated=False)
    assert profile.source == "analytic"
    return profile.layers[0], profile.notes


@pytest.mark.parametrize("storage", ["float32", *STORED])
@pytest.mark.parametrize("model", ["tiny-bert", "tiny-gpt2"])
def test_bytes_are_those_of_a_quantized_model(model: str, storage: Any) -> None:
    """Of an inner layer, norms and biases included."""
    config, facts = QuantizationConfig(storage=storage, embeddings="int8"), model_facts(model)
    numbers = number_format(facts, "float32", config)
    costs = layer_costs(describe_facts(facts), "parallel_adapters", batch=1, sequence_length=8, numbers=numbers)
    stack = quantize(load_stack(model), config)
    assert costs[1].frozen_bytes == pytest.approx(held_bytes(stack.stage(1, 2)), rel=0.01)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("storage", ["int8", "int4", "nf4"])
def test_bytes_of_a_weight_with_its_constants(storage: Any, block: int, double: bool) -> None:
    config = QuantizationConfig(storage=storage, block_size=block, double_quantization=double)
    weight = store(torch.randn(512, 512), storage, config)
    assert config.bytes_of(storage) * 512**2 == pytest.approx(held_bytes(weight), rel=1e-3)


FORMATS: list[tuple[str, dict[str, Any]]] = [
    *((method, {"backbone_dtype": storage}) for method in ("pac_plus", "fine_tuning") for storage in STORED),
    *(("confidant", {"technique": "lora", "backbone_dtype": storage}) for storage in ("int8", "nf4")),
    *(("p_rge", {"precision": precision}) for precision in ("bfloat16", "float16", "int8", "nf4")),
]


@pytest.mark.parametrize(("method", "options"), FORMATS)
def test_stored_formats_change_bytes_and_time(method: str, options: dict[str, Any]) -> None:
    kept = {name: value for name, value in options.items() if name == "technique"}
    (plain, nothing), (other, notes) = layers_of(method, **kept), layers_of(method, **options)
    assert sum(one.frozen_bytes for one in other) < sum(one.frozen_bytes for one in plain)
    seconds = [layers[1].seconds("F", 4, 8) for layers in (plain, other)]
    storage = options.get("backbone_dtype") or options.get("precision", "")
    if storage and not (method == "p_rge" and storage.endswith("16")):  # P-RGE then computes in it, and unpacks nothing
        assert seconds[1] > seconds[0]
        assert f"Unpacking a weight from {storage}" in " ".join(notes)
    if method == "fine_tuning":  # the pass back unpacks again
        assert other[1].seconds("B", 4, 8) > plain[1].seconds("B", 4, 8)
    assert not nothing


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pac_plus", {"compute_dtype": "bfloat16"}),
        ("pac_plus", {"compute_dtype": "float16"}),
        ("p_rge", {"compute_dtype": "bfloat16"}),
    ],
)
def test_computing_in_16_bits_halves_what_is_sent(method: str, options: dict[str, Any]) -> None:
    (plain, _), (other, notes) = layers_of(method), layers_of(method, **options)
    side = plain[1].gradient_bytes(1, 1)  # of PAC+'s side network, in float32
    assert 2 * (other[1].output_bytes(1, 1) - side) == plain[1].output_bytes(1, 1) - side
    assert other[1].workspace_bytes(1, 8) < plain[1].workspace_bytes(1, 8)
    assert "only in float32" in " ".join(notes)


@pytest.mark.parametrize(("cache", "in_memory", "on_disk"), [("float32", 4, 4), ("bfloat16", 2, 2), ("int8", 2, 1.125)])
def test_the_cache_s_format_changes_taps_and_reading(cache: str, in_memory: float, on_disk: float) -> None:
    layers, _ = layers_of("pac_plus", cache_dtype=cache)
    width = model_facts("tiny-bert").hidden_size
    assert layers[1].tap_bytes(1, 1) == in_memory * width
    assert layers[1].seconds("LOAD", 1, 8) == pytest.approx(8 * on_disk * width / 90e6)


def test_a_plan_follows_the_format() -> None:
    """A model that is too large for a device in float32 fits in nf4."""
    options = {"paradigm": "standalone", "technique": "serial", "bottleneck": 2, "activations": "memory"}
    job = Job(
        method="fine_tuning",
        model="tiny-bert",
        epochs=1,
        options=options,
        **SIZES | {"batch_size": 1, "micro_batches": 1},
    )
    cluster = two_of_a_kind(560_000)
    with pytest.raises(PlanError, match="alpha"):
        experiment.plan(job, cluster)
    planned = experiment.plan(replace(job, options=options | {"backbone_dtype": "nf4"}), cluster)
    assert "Unpacking" in " ".join(planned.notes)
