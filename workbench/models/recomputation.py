"""Run a stage's layers one at a time: first to keep only their inputs, then again for the backward pass (see
schedules.recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.layer_inputs import Contexts
from workbench.models.techniques import TechniqueStage


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What a layer needs to compute its output again.

    hidden: its input, (n, t, d) without gradient; None in front of the model's first layer, which begins with ids.
    contexts: masks and position tables, shared by the stage's layers; None if they are trained or the decoder's.
    random_state: of torch's generator before the layer; None if nothing in it is drawn.
    """

    hidden: Tensor | None
    contexts: Contexts | None
    random_state: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the input."""
        return 0 if self.hidden is None else self.hidden.nbytes


class SingleLayers:
    """The layers of a stage, one at a time.  model: of a technique inside the layers."""

    def __init__(self, model: TechniqueStage) -> None:
        assert not model.config.side_width, "Parallel Adapters do not backpropagate through the layers"
        self._model = model
        backbone = model.backbone
        self._parts = {layer: backbone.part(layer, layer + 1) for layer in range(backbone.start, backbone.stop)}
        if backbone.embedding is not None:
            self._parts[backbone.start].embedding = backbone.embedding
        self._draws = model.config.technique == "lora" and model.config.lora_dropout > 0

    def first_pass(
        self, source: Tensor, attention_mask: Tensor, *, keeps_last: bool
    ) -> tuple[Tensor, Tensor, list[LayerInput]]:
        """Run the layers without a graph, except the last one if `keeps_last`.

        source: (n, t, d) float, or (n, t) int64 in the model's first stage.  Returns the output and the last layer's
        output, both as TechniqueStage.forward does, and the inputs of all layers.
        """
        backbone = self._model.backbone
        hidden = last_hidden = source
        inputs: list[LayerInput] = []
        contexts: Contexts | None = None
        with torch.no_grad():
            for layer, part in self._parts.items():
                is_left = keeps_last and layer == backbone.stop - 1
                if contexts is None and part.embedding is None and self._shares_contexts:
                    contexts = backbone.contexts(attention_mask, hidden)
                inputs.append(
                    LayerInput(
                        hidden=None if part.embedding is not None else hidden,
                        contexts=contexts,
                        random_state=torch.get_rng_state() if self._draws and not is_left else None,
                    )
                )
                if not is_left:
                    hidden, taps = part(hidden, attention_mask, None, contexts)
                    last_hidden = taps[-1]
        return hidden, last_hidden, inputs

    def again(self, layer: int, kept: LayerInput, source: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's output and the last layer's, as TechniqueStage.forward does, with their graph.

        source: the input, with or without gradient: kept.hidden, or ids.
        """
        with _drawing_again(kept.random_state):
            output, taps = self._parts[layer](source, attention_mask, None, kept.contexts)
        return output, taps[-1]

    @property
    def _shares_contexts(self) -> bool:
        """Return whether the masks and tables of all layers are the same, and without a graph."""
        backbone = self._model.backbone
        return backbone.num_encoder_layers is None and backbone.position_bias is None


@contextmanager
def _drawing_again(state: Tensor | None) -> Iterator[None]:
    """Draw inside the block what was drawn from this state of torch's generator on, and continue afterwards as if
    nothing had been drawn.
    """
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield
