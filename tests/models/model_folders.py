"""Folders of lively models in tiny, changed configurations, and the paths that load them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.sharding.builders import Case, hybrid, model_of, run_plan
from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model
from workbench.models.configuration import model_config
from workbench.models.families import FAMILIES
from workbench.models.loading import load_stack, load_stage
from workbench.models.sharding import ModelShard, model_layout, open_weights, shard_spec
from workbench.models.tokenizer import tiny_tokenizer

LAYERS = 4
Spoil = Callable[[Path], object]


def write(folder: Path, family: str, **changes: Any) -> Path:
    """Write a lively model of a changed tiny configuration, and its tokenizer."""
    config = model_config(f"tiny-{family}-{LAYERS}")
    for field, value in changes.items():
        setattr(config, field, value)
    if family == "t5":
        config.__post_init__()
    own = FAMILIES[family]
    model_of(config, 1).save_pretrained(folder)
    if not own.reads_images:
        tiny_tokenizer(is_causal=own.is_causal).backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "pad_token": "[PAD]"}))
    return folder


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Spoil:
    """Return what rewrites the folder's weights."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return spoil


def settings(**changes: Any) -> Spoil:
    """Return what rewrites the folder's configuration."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def whole(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None) -> Tensor:
    return load_stack(name)(ids, mask, targets)[0]


def staged(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None) -> Tensor:
    hidden = ids
    for start in (0, LAYERS // 2):
        hidden, _ = load_stage(name, start, start + LAYERS // 2)(hidden, mask, targets)
    return hidden if targets is None else hidden[:, ids.shape[1] :]


def sharded(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None, what: Any = "hidden") -> Tensor:
    layout, source = model_layout(name), open_weights(name)
    case = Case(model=None, layout=layout, ids=ids, decoder_ids=targets)
    shape = layout.stacks[0]
    plan = hybrid(case, (0, shape.num_units), (shape.columns - 9, 9), (0.4, 0.6), (1, 2))
    specs = [shard_spec(plan, position, layout.stacks) for position in range(2)]
    shards = [ModelShard(layout, spec, source) for spec in specs]
    results = []
    for number, length in enumerate(mask.sum(1).tolist()):  # single-shot inference knows no padding
        one = run_plan(
            plan, shards, ids[None, number, :length], None if targets is None else targets[None, number], what=what
        )
        results.append(one if targets is not None else torch.nn.functional.pad(one, (0, 0, 0, ids.shape[1] - length)))
    return torch.cat(results)


def forward_only(name: str, ids: Tensor, mask: Tensor, targets: Tensor | None) -> Tensor:
    """The last stage's layers and head, as forward-only training loads them."""
    stack = load_stack(name)
    model = load_causal_model(name, TrainableConfig(technique="lora_fa", rank=2), span=(LAYERS // 2, LAYERS))
    assert model.head is not None
    return model.head(stack(ids, mask, targets)[0])


PATHS = {"whole": whole, "staged": staged, "sharded": sharded}


def batch_for(family: str) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    if family == "vit":
        return (
            torch.randint(256, (2, 17, 4), generator=generator, dtype=torch.uint8),
            torch.ones(2, 17, dtype=torch.int64),
            None,
        )
    ids, targets = (
        torch.randint(4, 1000, (2, 9), generator=generator),
        torch.randint(4, 1000, (2, 5), generator=generator),
    )
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return ids * mask, mask, targets if FAMILIES[family].decoder else None
