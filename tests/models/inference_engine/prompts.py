"""A small program's settings, and prompts for it."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from workbench.methods.p_rge.inference_engine import EngineConfig

needs_executorch = pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")
CONFIG = EngineConfig(queries=2, batch_size=3, sequence_length=12, num_targets=2)


def batch(seed: int, count: int = 3, length: int = 12) -> SimpleNamespace:
    """Return prompts of several lengths, with one or two targets."""
    generator = torch.Generator().manual_seed(seed)
    lengths = length - torch.arange(count) % 4
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    chosen = torch.tensor([[True, row % 2 == 0] for row in range(count)])
    return SimpleNamespace(
        input_ids=torch.randint(4, 200, (count, length), generator=generator) * mask,
        attention_mask=mask,
        targets=torch.randint(4, 200, (count, 2), generator=generator),
        positions=torch.stack([lengths - 2, lengths - 1], dim=1),
        target_mask=chosen,
        choices=None,
    )
