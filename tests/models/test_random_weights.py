"""Random weights of a published shape: written once, shard by shard, the same every time, and read in slices."""

import shutil
import weakref
from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn

from workbench.assets.fetch import asset_path
from workbench.core.errors import ConfigError, MissingDataError
from workbench.models import hub, loading, random_weights
from workbench.models.configuration import model_config, stored_weights
from workbench.models.loading import load_model, load_stack, load_stage, load_tokenizer
from workbench.models.quantization import QuantizationConfig, held_bytes, quantize
from workbench.models.random_weights import drawn, write_random
from workbench.models.techniques import TechniqueConfig, TechniqueStage

NAME = "random:small"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Make 'random:small' a model of a family's tiny configuration, in a cache with the stand-in's tokenizer."""
    stand_in = asset_path(hub.STAND_IN)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    (tmp_path / stand_in.name).symlink_to(stand_in)
    monkeypatch.setattr(random_weights, "SHARD_BYTES", 1 << 16)
    return lambda family: monkeypatch.setattr(
        hub, "known_shapes", lambda: {"small": model_config(f"tiny-{family}-4").to_dict()}
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "bart", "vit"])
def test_a_written_model_loads_whole_and_in_stages(small, family):
    small(family)
    lines: list[str] = []
    folder = write_random(NAME, lines.append)
    assert "weights" in lines[0] and "B are free" in lines[0]
    assert len(list(folder.glob("*.safetensors"))) > 1 and not list(folder.parent.glob("*.part"))
    stored = stored_weights(NAME)
    assert stored is not None
    for name, tensor in stored.items():
        assert torch.equal(tensor.read(random_weights.DTYPE), drawn(name, tensor.shape))
    load_model(NAME)  # which refuses a folder that leaves a parameter at a random value
    stack, stage = load_stack(NAME), load_stage(NAME, 1, 3)
    for index in (1, 2):
        mine, theirs = stage.layers[str(index)].state_dict(), stack.layers[index].state_dict()
        assert mine and all(torch.equal(mine[key], theirs[key]) for key in theirs)
    if family != "vit":
        assert load_tokenizer(NAME).encode(["A film."], max_length=8) == load_tokenizer(hub.STAND_IN).encode(
            ["A film."], max_length=8
        )
    assert write_random(NAME, lines.append) == folder and "present" in lines[-1]


def test_a_layer_is_freed_once_it_is_stored_otherwise(small):
    small("llama")
    write_random(NAME, lambda line: None)
    alive = list[weakref.ref]()

    def store(layer):
        assert not any(weight() is not None for weight in alive)
        alive.extend(weakref.ref(weight) for weight in layer.parameters() if weight.ndim == 2)
        quantize(layer, QuantizationConfig(storage="nf4"))

    load_stage(NAME, 0, 4, after_layer=store)
    assert len(alive) == 4 * 7


@pytest.mark.parametrize("storage", ["float32", "nf4"])
def test_steps_that_are_only_timed_read_one_of_equal_layers(small, monkeypatch, storage):
    """The others have modules of their own, so a technique changes each of them, and share its memory."""
    small("llama")
    write_random(NAME, lambda line: None)
    store = partial(quantize, config=QuantizationConfig(storage=storage))
    equal = [0, 1, 1, 3].__getitem__
    own = store(load_stage(NAME, 0, 4, after_layer=store))
    assert held_bytes(store(load_stage(NAME, 0, 4, after_layer=store, stands_for=equal))) == held_bytes(own)
    monkeypatch.setattr(loading, "LARGE_LAYER", 1)
    stored = list[nn.Module]()
    stage = store(load_stage(NAME, 0, 4, after_layer=lambda layer: stored.append(store(layer)), stands_for=equal))
    assert len(stored) == 3
    assert held_bytes(stage) == held_bytes(own) - held_bytes(own.layers["2"])
    ids, mask = torch.randint(0, 50, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    assert stage(ids, mask)[0].isfinite().all()
    model = TechniqueStage(stage, TechniqueConfig(technique="full", hidden_size=32, num_layers=4))
    plain = TechniqueStage(own, TechniqueConfig(technique="full", hidden_size=32, num_layers=4))
    assert [*model.trained()] == [*plain.trained()]


def test_what_cannot_be_written_or_read_is_refused_before_it_is_drawn(small, monkeypatch):
    small("llama")
    with pytest.raises(MissingDataError, match="workbench fetch random:small"):
        load_model(NAME)
    with pytest.raises(ConfigError, match=r"Known are random:small\."):
        write_random("random:smal", print)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 0, 10))
    monkeypatch.setattr(random_weights, "drawn", lambda *place: pytest.fail("drawn"))
    with pytest.raises(
        MissingDataError, match=r"weights, [\d.]+ [kM]B in bfloat16\. .* has 10 bytes free.* WORKBENCH_CACHE"
    ):
        write_random(NAME, print)
