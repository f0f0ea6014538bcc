"""Random weights of a published shape: written once, shard by shard, the same every time, and read in slices."""

import shutil
import weakref
from collections import namedtuple

import pytest
import torch

from workbench.assets.fetch import asset_path
from workbench.core.errors import ConfigError, MissingDataError
from workbench.models import hub, random_weights
from workbench.models.configuration import model_config, stored_weights
from workbench.models.loading import load_model, load_stack, load_stage, load_tokenizer
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.random_weights import drawn, write_random

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
    assert "weights" in lines[0] and "GB are free" in lines[0]
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


def test_what_cannot_be_written_or_read_is_refused_before_it_is_drawn(small, monkeypatch):
    small("llama")
    with pytest.raises(MissingDataError, match="workbench fetch random:small"):
        load_model(NAME)
    with pytest.raises(ConfigError, match=r"Known are random:small\."):
        write_random("random:smal", print)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10, 0, 10))
    monkeypatch.setattr(random_weights, "drawn", lambda *place: pytest.fail("drawn"))
    with pytest.raises(MissingDataError, match=r"weights, 0\.0 GB in bfloat16\. .* WORKBENCH_CACHE"):
        write_random(NAME, print)
