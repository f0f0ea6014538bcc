"""A profile reads the layers that it measures and no others, and finds the bytes of the whole model."""

import re
from dataclasses import fields, replace

import pytest

from tests.clusters import cluster_of
from tests.plans import staged_plan
from workbench import experiment
from workbench.core import Job
from workbench.core.errors import ConfigError, PlanError
from workbench.methods import load_method
from workbench.methods.base import ignore
from workbench.methods.common import measured_stack as module
from workbench.methods.common import room
from workbench.methods.common.measured_stack import measured_stack
from workbench.methods.common.scaling import describe_facts
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
from workbench.profiler.analytic import layer_costs

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


def costs_of(model):
    return layer_costs(describe_facts(model_facts(model)), "full", batch=1, sequence_length=1)


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
        stack = measured_stack(NAME, model_facts(NAME), costs_of(NAME), STORED[storage])
    numbers = {int(match[1]) for name in read if (match := re.search(r"\.(\d+)\.", name))}
    assert numbers == ({0, 1, 5} if stack.num_encoder_layers else {0, 1, 11})
    assert max(map(read.count, read)) <= 2  # a word embedding that is the head, too
    reference = load_stack(NAME) if storage == "float32" else quantize(load_stack(NAME), STORED[storage])
    ours, theirs = measured(stack, technique), measured(reference, technique)
    names = [field.name for field in fields(ours[0]) if "bytes" in field.name]
    assert [[getattr(layer, name) for name in names] for layer in ours] == [
        [getattr(layer, name) for name in names] for layer in theirs
    ]
    assert [set(layer.times) for layer in ours] == [set(layer.times) for layer in theirs]


SMALL = cluster_of("ab", name="small", memory_bytes=10_000, host_share=0.5, bytes_per_s=1e8)


@pytest.mark.parametrize(
    ("method", "options"),
    [("fine_tuning", {"technique": "full"}), ("confidant", {"technique": "full"}), ("pac_plus", {}), ("ringada", {})],
)
def test_what_the_devices_cannot_hold_is_refused_before_anything_is_read(monkeypatch, method, options):
    monkeypatch.setattr(module, "load_sample", lambda *place, **settings: pytest.fail("read"))
    job = Job(method=method, model="tiny-llama", task="sentiment", options=options, max_length=16)
    with pytest.raises(PlanError, match=rf"A plan of {method} .* on cluster 'small' .* 2 devices have 20\.0 kB\."):
        experiment.plan(job, SMALL)


def test_what_this_machine_cannot_hold_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(module, "load_sample", lambda *place, **settings: pytest.fail("read"))
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: type("memory", (), {"available": 1000}))
    costs = costs_of("tiny-llama")
    with pytest.raises(ConfigError, match=r"The 3 that stand for all take .*; 1\.0 kB are free\. Close other programs"):
        measured_stack("tiny-llama", model_facts("tiny-llama"), costs)
    plan = staged_plan((6, {0: 1, 1: 1}), method="fine_tuning")
    weights = sum(cost.trainable_bytes for cost in costs)
    with pytest.raises(
        ConfigError, match=rf"weights take {2 * weights / 1e3:.0f} kB, .* together {3 * weights / 1e6:.1f} MB"
    ):
        room.require_running_room("tiny-llama", costs, plan, SMALL)


def test_a_frozen_model_needs_room_on_the_laptop_for_all_layers_only_where_a_run_holds_them_at_once(monkeypatch):
    """By the sizes of 22 layers of 44 million frozen weights: 3.9 GB, of which 1 GB, a layer and both ends are held."""
    costs = [replace(costs_of("tiny-llama")[0], frozen_params=44_000_000, frozen_bytes=0, trainable_params=0)] * 22
    plan = staged_plan((22, {0: 1}), method="pac_plus")
    monkeypatch.setattr(room.psutil, "virtual_memory", lambda: type("memory", (), {"available": 2 * 10**9}))
    room.require_running_room("large", costs, plan, SMALL)
    with pytest.raises(ConfigError, match=r"scoring the model on this machine takes 3\.9 GB"):
        room.require_running_room("large", costs, plan, SMALL, is_whole=True)
    for method, options, is_whole in (
        ("p_rge", {"precision": "float32"}, True),
        ("p_rge", {"precision": "int8"}, False),
        ("pac_plus", {"initialization": "distilled"}, True),
        ("pac_plus", {}, False),
        ("ringada", {}, False),
    ):
        sizes = {"max_length": 16, "train_samples": 32, "validation_samples": 8, "test_samples": 8}
        job = Job(method=method, model="tiny-llama", task="sentiment", options=options, **sizes)
        chosen = load_method(method)
        assert chosen.holds_whole_model(chosen.prepare(job, ignore)) == is_whole, (method, options)
