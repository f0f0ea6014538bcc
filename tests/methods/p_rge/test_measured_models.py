"""P-RGE measures encoder-decoders, and layers whose activations have 16 bits while their trained values have 32."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.core import Job
from workbench.methods.p_rge.measure import measure_layers, trained_values
from workbench.methods.p_rge.prepare import prepare
from workbench.methods.p_rge.worker import load_model

SIZES: dict[str, Any] = {
    "train_samples": 16,
    "validation_samples": 4,
    "test_samples": 4,
    "batch_size": 4,
    "max_length": 32,
}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-t5-2", {}),
        ("tiny-bart-2", {}),
        ("tiny-llama-2", {"precision": "bfloat16"}),
        ("tiny-bert-2", {"precision": "bfloat16"}),
        ("tiny-distilbert-2", {"precision": "float16"}),
        ("tiny-llama-2", {"precision": "nf4", "compute_dtype": "bfloat16"}),
        ("tiny-llama-2", {"projections": "all"}),
    ],
)
def test_each_layer_has_a_time(model: str, options: dict[str, Any]) -> None:
    prepared = prepare(Job(method="p_rge", model=model, options=options, **SIZES))
    layers = measure_layers(prepared, max_length=prepared.profiled_length, budget_s=0.05)
    assert len(layers) == prepared.facts.num_layers
    assert all(layer.seconds("F", 4, 16) > 0 for layer in layers)


@pytest.mark.parametrize("technique", ["lora_fa", "lora"])
@pytest.mark.parametrize("projections", ["query_value", "all"])
@pytest.mark.parametrize("model", ["tiny-llama-2", "tiny-opt-2"])
def test_trained_values_are_counted_from_sizes_as_the_model_has_them(
    model: str, projections: str, technique: str
) -> None:
    options = {"projections": projections, "technique": technique}
    prepared = prepare(Job(method="p_rge", model=model, options=options, **SIZES))
    assert trained_values(prepared) * prepared.facts.num_layers == load_model(prepared).trainables.num_values
