"""What a program of the inference engine is made from: settings and models that it refuses, and its files."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.inference_engine import EngineTrainer, require_executorch
from workbench.methods.p_rge.inference_engine.config import EnginePrompts
from workbench.methods.p_rge.inference_engine.modules import exportable
from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model

from .prompts import CONFIG, batch, needs_executorch


def test_an_estimator_that_the_engine_cannot_make_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"compute no derivatives. Choose two_point, one_sided, low_rank"):
        replace(CONFIG, estimator="jvp")
    with pytest.raises(ConfigError, match=r"keeps no momentum between steps. Choose low_rank"):
        replace(CONFIG, estimator="low_rank_momentum")
    with pytest.raises(ConfigError, match=r"has normal directions. Use noise = input"):
        replace(CONFIG, estimator="low_rank", noise="drawn")


@pytest.mark.parametrize(
    ("name", "config", "found"),
    [
        ("tiny-bert-2", TrainableConfig(num_outputs=2), "decoder-only"),
        ("tiny-t5-2", TrainableConfig(), "decoder-only"),
        ("tiny-llama-2", TrainableConfig(technique="full"), "technique 'full'"),
    ],
)
def test_models_that_are_not_exported(name: str, config: TrainableConfig, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        exportable(load_causal_model(name, config))


def test_a_model_in_another_dtype_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="float32"):
        exportable(load_causal_model("tiny-llama-2", TrainableConfig(), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"queries": 0}, "queries = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"backend": "vulkan"}, "xnnpack, portable"),
        ({"noise": "none"}, "input, drawn"),
        ({"choices": (7,)}, "at least two, all different"),
        ({"choices": (7, 7)}, "at least two, all different"),
        ({"choices": (-1, 7)}, "none below 0"),
    ],
)
def test_settings_that_cannot_be_meant(changes, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("machine", "todo"),
    [("x86_64", r"Install the extra: pip install '\.\[executorch\]'"), ("aarch64", "Use an x86-64 machine")],
)
def test_without_the_package_the_error_says_what_to_do(machine: str, todo: str, monkeypatch) -> None:
    config = "workbench.methods.p_rge.inference_engine.config"
    monkeypatch.setattr(f"{config}.find_spec", lambda name: None)
    monkeypatch.setattr(f"{config}.sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(f"{config}.platform", SimpleNamespace(machine=lambda: machine))
    with pytest.raises(ConfigError, match=todo):
        require_executorch()


def test_prompts_cross_to_a_device_in_one_file(tmp_path) -> None:
    given = batch(0)
    fields = {name: getattr(given, name).numpy() for name in ("input_ids", "targets", "positions", "target_mask")}
    EnginePrompts(**fields).write(tmp_path / "prompts.npz")
    read = EnginePrompts.read(tmp_path / "prompts.npz").rows([2, 0])
    assert len(read) == 2
    np.testing.assert_array_equal(read.input_ids, fields["input_ids"][[2, 0]])
    (tmp_path / "broken.npz").write_bytes(b"PK broken")
    with pytest.raises(ConfigError, match="do not load"):
        EnginePrompts.read(tmp_path / "broken.npz")


@needs_executorch
def test_files_that_hold_no_program(tmp_path) -> None:
    (tmp_path / "text.pte").write_text("no program")
    for name, found in (("text.pte", "not one of our programs"), ("none.pte", "no such file")):
        with pytest.raises(ConfigError, match=found):
            EngineTrainer(tmp_path / name)
