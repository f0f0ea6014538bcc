"""The dual-forwarding model as an exported program keeps it: 2q copies of theta in one buffer (P-RGE, section 3.3, Algorithm 2).

Each call recovers the last noise from the copies, makes the last step with its scalars, perturbs anew and computes all 2q losses.  The
copies lie sign by sign, [+1 ... +q, -1 ... -q], so that the buffer is cut once, and so do the losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.families import LayerContext, call_layer
from workbench.models.inference_engine.config import EngineConfig
from workbench.models.inference_engine.rewriting import MASKED
from workbench.models.stack import embed
from workbench.models.zeroth_order.causal_model import CausalModel

STATE = "copies"
"""The buffer's name: the same in all methods, which share it by this name.

No argument may have it in its name: what is so called begins with the values it is exported with, and takes no others.
"""


class TrainStep(nn.Module):
    """One step.  model: written for export.  copies: (2q, D) float32."""

    copies: Tensor
    shares: Tensor
    mask: Tensor
    rotary: tuple[Tensor, Tensor] | None

    def __init__(self, model: CausalModel, config: EngineConfig, copies: Tensor) -> None:
        super().__init__()
        self.model, self.config = model, config
        head: Any = model.head
        self.head = head.of_tokens(config.choices) if config.choices else head
        self.register_buffer(STATE, copies)
        length = config.sequence_length
        self.register_buffer("shares", torch.full((1, 1, len(copies)), 1 / len(copies)), persistent=False)
        self.register_buffer("mask", torch.full((length, length), MASKED).triu(1), persistent=False)
        rotary = model.backbone.rotary
        self.rotary = None
        if rotary is not None:
            cosines, sines = rotary(torch.zeros(1, length, 1), position_ids=torch.arange(length)[None])
            self.register_buffer("cosines", cosines, persistent=False)
            self.register_buffer("sines", sines, persistent=False)
            self.rotary = (cosines, sines)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        positions: Tensor,
        target_weights: Tensor,
        gradients: Tensor,
        learning_rate: Tensor,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return the losses (2q,) float32 behind the last step, each of its own copy.

        input_ids: (E, t) int64.  targets, positions: (E, k) int64; a target is a token, or its place among the choices where there are
        some.  target_weights: (E k, 1) float32, minus a target's share of the loss.
        gradients: (q,) g_i of the last step.  learning_rate: (1,), the last step's.  noise: (q, D), None to draw it here.
        """
        config, queries = self.config, self.config.queries
        plus, minus = self.copies[:queries], self.copies[queries:]
        perturbation = (plus - minus) * 0.5
        scale = (gradients * learning_rate * (1 / (config.epsilon * queries))).view(1, 1, queries)
        # The mean over all copies, so that rounding cannot lead their centres apart.
        theta = torch.bmm(self.shares, self.copies[None]) - torch.bmm(scale, perturbation[None])
        theta = theta.view(1, -1)
        if noise is None:
            noise = torch.randn((queries, perturbation.shape[1]))
        fresh = noise * config.epsilon
        copies = torch.cat([theta + fresh, theta - fresh])
        self.copies.copy_(copies)
        return self.losses(copies, input_ids, targets, positions, target_weights)

    def losses(self, copies: Tensor, input_ids: Tensor, targets: Tensor, positions: Tensor, target_weights: Tensor) -> Tensor:
        """Return the loss (P,) of each of P copies (P, D) of theta."""
        stage, parts = self.model.backbone, copies.shape[0]
        self.model.trainables.bind(copies)
        assert stage.embedding is not None
        hidden = embed(stage.family, stage.embedding, input_ids, input_ids, None).repeat(parts, 1, 1)
        context = LayerContext(mask=self.mask, rotary=self.rotary)
        for layer in stage.layers.values():
            hidden = call_layer(layer, hidden, context)
        places = positions.repeat(parts, 1)[:, :, None].expand(-1, -1, hidden.shape[-1])
        hidden = hidden.gather(1, places)
        logits = self.head(hidden if stage.final is None else stage.final(hidden))
        found = F.log_softmax(logits, dim=-1).gather(2, targets.repeat(parts, 1)[:, :, None])
        return torch.mm(found.view(parts, -1), target_weights).view(parts)


class _State(nn.Module):
    copies: Tensor

    def __init__(self, copies: Tensor) -> None:
        super().__init__()
        self.register_buffer(STATE, copies)


class ReadState(_State):
    """Give the copies out."""

    def forward(self) -> Tensor:
        """Return (2q, D)."""
        return self.copies.clone()


class WriteState(_State):
    """Take copies in."""

    def forward(self, values: Tensor) -> Tensor:
        """Set the buffer to (2q, D); return its first value, since a method must return something."""
        self.copies.copy_(values)
        return values[0, :1].clone()
