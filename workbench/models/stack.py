"""See a Hugging Face model as a stack of layers that can be cut into pipeline stages anywhere (PAC+, section V-A)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.families import FAMILIES, Family, LayerContext


class LayerStack(nn.Module):
    """A frozen backbone: embedding, layers, final norm.  forward and stages give the same numbers as the whole model.

    family: of FAMILIES.  separator_id: the token after which a second text begins (for families with token types).
    b_0 is the embedding's output, b_i the output of layer i - 1; b_L is taken after the final norm if the family has one.
    """

    def __init__(self, model: Any, *, separator_id: int | None = None) -> None:
        super().__init__()
        self.config = model.config
        self.family_name: str = model.config.model_type
        self.family = family_of(self.family_name)
        self.separator_id = separator_id
        self.embedding = nn.ModuleDict({path: model.get_submodule(path) for path in self.family.embedding})
        layers = model.get_submodule(self.family.layers)
        assert isinstance(layers, nn.ModuleList)
        self.layers = layers
        self.final = model.get_submodule(self.family.final) if self.family.final else None
        self.rotary = model.get_submodule(self.family.rotary) if self.family.rotary else None
        self.requires_grad_(False)
        self.eval()

    @property
    def num_layers(self) -> int:
        """Return L."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Return d."""
        return self.config.hidden_size

    @property
    def is_causal(self) -> bool:
        """Return whether a token sees only those before it."""
        return self.family.is_causal

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return b_0 (n, t, d) of token ids (n, t); attention_mask: (n, t), 1 for real tokens, padding on the right."""
        return embed(self.family, self.embedding, input_ids, attention_mask, self.separator_id)

    def context(self, attention_mask: Tensor, hidden: Tensor) -> LayerContext:
        """Return the mask and rotary tables that every layer of this batch shares."""
        return layer_context(self.family, self.rotary, attention_mask, hidden)

    def stage(self, start: int, stop: int) -> BackboneStage:
        """Return layers [start, stop) as a module that owns only them; the weights are shared with this stack."""
        if not 0 <= start < stop <= self.num_layers:
            raise ConfigError(
                f"A stage of layers [{start}, {stop}) was asked for.", f"The model has {self.num_layers}.", "Change the stage."
            )
        return BackboneStage(self, start, stop)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return b_L (n, t, d) and the taps [b_0, ..., b_L]."""
        return self.stage(0, self.num_layers)(input_ids, attention_mask)


class BackboneStage(nn.Module):
    """Layers [start, stop) of a stack, with the embedding if they begin it and the final norm if they end it.

    Parameters are frozen: no autograd graph comes into being.  Call under torch.no_grad() when the taps go into training
    (inference tensors cannot be saved for a backward pass); torch.inference_mode() will do for prediction.
    """

    def __init__(self, stack: LayerStack, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop, self.num_layers = start, stop, stack.num_layers
        self.family, self.separator_id, self.hidden_size = stack.family, stack.separator_id, stack.hidden_size
        self.embedding = stack.embedding if start == 0 else None
        self.layers = nn.ModuleDict({str(index): stack.layers[index] for index in range(start, stop)})
        self.final = stack.final if stop == stack.num_layers else None
        self.rotary = stack.rotary

    @property
    def num_taps(self) -> int:
        """Return how many taps forward gives: one for each layer, and b_0 in the first stage."""
        return self.stop - self.start + (self.start == 0)

    def forward(self, hidden_or_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the stage.

        hidden_or_ids: (n, t) token ids in the first stage, else (n, t, d).  attention_mask: (n, t), 1 for real tokens.
        Returns the output (n, t, d) and the taps, (n, t, d) each: the layers' outputs, preceded by b_0 in the first stage.
        """
        taps = []
        hidden = hidden_or_ids
        if self.embedding is not None:
            hidden = embed(self.family, self.embedding, hidden_or_ids, attention_mask, self.separator_id)
            taps.append(hidden)
        context = layer_context(self.family, self.rotary, attention_mask, hidden)
        for layer in self.layers.values():
            hidden = self.family.call(layer, hidden, context)
            taps.append(hidden)
        if self.final is not None:
            hidden = taps[-1] = self.final(hidden)
        return hidden, taps


def family_of(model_type: str) -> Family:
    """Return the table entry of a Hugging Face model type.  Raises ConfigError if there is none."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"A model of the family '{model_type}' was asked for.",
            f"Known families are {', '.join(FAMILIES)}.",
            "Choose another model, or add an entry to workbench/models/families.py.",
        )
    return FAMILIES[model_type]


def embed(family: Family, modules: Any, input_ids: Tensor, attention_mask: Tensor, separator_id: int | None) -> Tensor:
    """Return b_0 (n, t, d); token types are worked out from the separators, so that a batch need not carry them."""
    token_types = None
    if family.has_token_types and separator_id is not None:
        is_separator = input_ids == separator_id
        # 1 after the first separator, on real tokens: what a tokenizer gives for a pair, and 0 everywhere for one text.
        token_types = ((is_separator.cumsum(dim=1) - is_separator.long()).clamp(max=1) * attention_mask).long()
    named: Mapping[str, nn.Module] = dict(modules.items())
    return family.embed(named, input_ids, token_types)


def layer_context(family: Family, rotary: nn.Module | None, attention_mask: Tensor, hidden: Tensor) -> LayerContext:
    """Return the mask and rotary tables for a batch.

    attention_mask: (n, t), 1 for real tokens, padding on the right.  hidden: (n, t, d), for its dtype and device.
    Without padding the mask is None, which lets the attention kernels take their faster path.
    """
    count, length = attention_mask.shape
    tables = None
    if rotary is not None:
        tables = rotary(hidden, position_ids=torch.arange(length, device=hidden.device)[None])
    if bool(attention_mask.all()):
        return LayerContext(mask=None, rotary=tables)
    mask = attention_mask.bool()[:, None, None, :].expand(count, 1, length, length)
    if family.is_causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return LayerContext(mask=mask, rotary=tables)
