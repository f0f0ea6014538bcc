"""P-RGE measures encoder-decoders, and layers whose activations have 16 bits while their trained values have 32."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.core import Job
from workbench.methods.p_rge.measure import measure_layers
from workbench.methods.p_rge.prepare import prepare


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-t5-2", {}),
        ("tiny-bart-2", {}),
        ("tiny-llama-2", {"precision": "bfloat16"}),
        ("tiny-bert-2", {"precision": "bfloat16"}),
        ("tiny-distilbert-2", {"precision": "float16"}),
        ("tiny-llama-2", {"precision": "nf4", "compute_dtype": "bfloat16"}),
    ],
)
def test_each_layer_has_a_time(model: str, options: dict[str, Any]) -> None:
    sizes = {"train_samples": 16, "validation_samples": 4, "test_samples": 4, "batch_size": 4, "max_length": 32}
    prepared = prepare(Job(method="p_rge", model=model, options=options, **sizes))
    layers = measure_layers(prepared, max_length=prepared.profiled_length, budget_s=0.05)
    assert len(layers) == prepared.facts.num_layers
    assert all(layer.seconds("F", 4, 16) > 0 for layer in layers)
