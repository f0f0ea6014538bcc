"""A profile reads the layers that it measures and no others, and finds the bytes of the whole model."""

import re
from dataclasses import fields

import pytest

from workbench.methods.common.measured_stack import measured_stack
from workbench.methods.fine_tuning.measure import measure_layers
from workbench.methods.pac_plus.measure import measure_layers as measure_pac_layers
from workbench.methods.ringada.measure import measure_layers as measure_ring_layers
from workbench.models import hub, random_weights
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.configuration import model_config, model_facts, stored_weights
from workbench.models.loading import load_stack
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stored_tensors import StoredTensor
from workbench.models.techniques import TechniqueConfig

NAME = "random:deep"
STORED = {"float32": None, "nf4": QuantizationConfig(storage="nf4")}


def measured(stack, technique):
    sizes = {"max_length": 16, "batch_sizes": (1,), "lengths": (), "budget_s": 0.01}
    about = {"hidden_size": stack.hidden_size, "num_layers": stack.num_layers}
    if technique == "pac_plus":
        border = stack.num_encoder_layers
        decoder = {} if border is None else {"num_encoder_layers": border, "target_length": 1}
        config = ParallelAdapterConfig(**about, is_causal=stack.is_causal, **decoder)
        return measure_pac_layers(stack, config, dtype="float32", **sizes)
    measure = measure_ring_layers if technique == "serial" else measure_layers
    return measure(stack, TechniqueConfig(technique=technique, **about), **sizes)


@pytest.mark.parametrize(
    ("family", "technique", "storage"),
    [
        ("llama", "full", "float32"),
        ("llama", "lora", "nf4"),
        ("llama", "pac_plus", "nf4"),
        ("gpt2", "serial", "float32"),
        ("t5", "adapters", "float32"),
        ("bart", "pac_plus", "float32"),
    ],
)
def test_only_measured_layers_are_read(tmp_path, monkeypatch, family, technique, storage):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(random_weights, "asset_path", lambda name: tmp_path)
    monkeypatch.setattr(hub, "known_shapes", lambda: {"deep": model_config(f"tiny-{family}-12").to_dict()})
    random_weights.write_random(NAME, lambda line: None)
    places = {(tensor.path, tensor.offset): name for name, tensor in (stored_weights(NAME) or {}).items()}
    read = list[str]()
    own = StoredTensor.read

    def noted(tensor, dtype):
        read.append(places[tensor.path, tensor.offset])
        return own(tensor, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(StoredTensor, "read", noted)
        stack = measured_stack(NAME, model_facts(NAME), STORED[storage])
    numbers = {int(match[1]) for name in read if (match := re.search(r"\.(\d+)\.", name))}
    assert numbers == ({0, 1, 5} if stack.num_encoder_layers else {0, 1, 11})
    assert max(map(read.count, read)) <= 2  # a word embedding that is the head, too
    whole = load_stack(NAME) if storage == "float32" else quantize(load_stack(NAME), STORED[storage])
    ours, theirs = measured(stack, technique), measured(whole, technique)
    names = [field.name for field in fields(ours[0]) if "bytes" in field.name]
    assert [[getattr(layer, name) for name in names] for layer in ours] == [
        [getattr(layer, name) for name in names] for layer in theirs
    ]
    assert [set(layer.times) for layer in ours] == [set(layer.times) for layer in theirs]
