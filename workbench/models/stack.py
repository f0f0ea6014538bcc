"""View a Hugging Face model as a stack of layers that can be split into pipeline stages anywhere (PAC+, section V-A).

An encoder-decoder is also one stack: its encoder's layers, then its decoder's.  After an encoder layer the hidden state
is (n, t, d).
After a decoder layer it is (n, t + s, d): the encoder's output followed by the s decoder states.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.families import family_of, generating_families, require_carried
from workbench.models.family import Part, layer_paths, module_at, modules_at, patterns_of
from workbench.models.layer_inputs import (
    Contexts,
    PositionBias,
    call_layer,
    decoder_contexts,
    embed,
    embed_words,
    layer_contexts,
)
from workbench.models.matmul import Head


class LayerStack(nn.Module):
    """A frozen backbone: embedding, layers, final norm.  forward and stages give the same results as the whole model.

    family: an entry of FAMILIES.
    b_0 is the embedding's output, b_i the output of layer i - 1; b_L is taken after the final norm if the family has
    one.
    num_encoder_layers: number of an encoder-decoder's encoder layers, whose last output is also taken after the
    encoder's norm; None for a single stack.
    decoder_start_id: the first token of every target.  language_model_head: the head of an encoder-decoder; for other
    models only if it was requested.
    """

    def __init__(self, model: Any, *, language_model_head: Head | None = None) -> None:
        super().__init__()
        self.config = model.config
        self.family_name: str = model.config.model_type
        self.family = family_of(self.family_name)
        require_carried(self.config)
        if getattr(self.config, "is_decoder", False) and self.family.decoder is None and not self.family.is_causal:
            raise ConfigError(
                f"A decoder made of a '{self.family_name}' model was asked for.",
                "Only its use as an encoder is known.",
                f"Set is_decoder to false, or choose one of {generating_families()}.",
            )
        self.embedding = modules_at(model, self.family.embedding)
        self.layers = nn.ModuleList(model.get_submodule(self.family.layers))
        self.final = module_at(model, self.family.final)
        self.rotary = module_at(model, self.family.rotary)
        self.position_bias = _position_bias(model, self.family.position_bias, is_causal=False)
        self.num_encoder_layers: int | None = None
        self.decoder_start_id: int | None = None
        self.encoder_final = self.decoder_embedding = self.decoder_position_bias = None
        self.language_model_head = language_model_head
        decoder = self.family.decoder
        if decoder is not None:
            self.num_encoder_layers = len(self.layers)
            self.decoder_start_id = model.config.decoder_start_token_id
            self.encoder_final, self.final = self.final, module_at(model, decoder.final)
            self.decoder_embedding = modules_at(model, decoder.embedding)
            self.decoder_position_bias = _position_bias(model, decoder.position_bias, is_causal=True)
            self.layers.extend(model.get_submodule(decoder.layers))
        self.patterns = patterns_of(self.config, len(self.layers))
        self.requires_grad_(False)
        self.eval()

    @property
    def shares_words(self) -> bool:
        """Return whether an encoder-decoder's two stacks share one word embedding."""
        return self.decoder_embedding is not None and _weight(self.embedding["words"]) is _weight(
            self.decoder_embedding["words"]
        )

    @property
    def num_layers(self) -> int:
        """Return L, of both stacks together in an encoder-decoder."""
        return len(self.layers)

    @property
    def num_taps(self) -> int:
        """Return the number of taps that forward returns: b_0, one per layer, and a decoder's embedding."""
        return self.num_layers + 1 + (self.num_encoder_layers is not None)

    @property
    def hidden_size(self) -> int:
        """Return d."""
        return self.config.hidden_size

    @property
    def is_causal(self) -> bool:
        """Return whether a token attends only to earlier tokens."""
        return self.family.is_causal

    def layer_paths(self, index: int) -> Mapping[str, str]:
        """Return the paths of layer `index`'s projections by role (see Family.weights)."""
        return layer_paths(part_of(self, index), self.layers[index])

    def stage(self, start: int, stop: int) -> BackboneStage:
        """Return layers [start, stop) as a module that owns only those layers.  The weights are shared with
        this stack.
        """
        if not 0 <= start < stop <= self.num_layers:
            raise ConfigError(
                f"A stage of layers [{start}, {stop}) was asked for.",
                f"The model has {self.num_layers}.",
                "Change the stage.",
            )
        return BackboneStage(self, start, stop)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return b_L, (n, t, d) or the decoder's (n, s, d), and all taps; arguments as in BackboneStage.forward."""
        _, taps = self.stage(0, self.num_layers)(input_ids, attention_mask, decoder_ids)
        return taps[-1], taps


class BackboneStage(nn.Module):
    """Layers [start, stop) of a stack, with the embedding if they include the first layer and the final norm if they
    include the last.

    While all parameters are frozen no autograd graph is built; it is built once requires_grad_() is set on some of
    them.  Call under torch.no_grad() if the taps are used in training (inference tensors cannot be saved for a backward
    pass); torch.inference_mode() is enough for prediction.
    """

    def __init__(self, stack: LayerStack, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop, self.num_layers = start, stop, stack.num_layers
        self.config, self.family, self.hidden_size = stack.config, stack.family, stack.hidden_size
        self.patterns = stack.patterns
        self.num_encoder_layers, self.decoder_start_id = stack.num_encoder_layers, stack.decoder_start_id
        self.shares_words = stack.shares_words
        # In a tuple, so that it is no parameter of this module.
        has_head = (
            self.num_encoder_layers is None and stop == stack.num_layers and stack.language_model_head is not None
        )
        self._words = (stack.language_model_head,) if has_head else ()
        self.vocabulary_size: int = getattr(stack.config, "vocab_size", 0)
        # The first decoder layer; without a decoder, an index that is never reached.
        self._border = border = stack.num_layers if stack.num_encoder_layers is None else stack.num_encoder_layers
        self.embedding = stack.embedding if start == 0 else None
        self.layers = nn.ModuleDict({str(index): stack.layers[index] for index in range(start, stop)})
        self.encoder_final = stack.encoder_final if start < border <= stop else None
        self.final = stack.final if stop == stack.num_layers else None
        self.rotary = stack.rotary
        self.position_bias = stack.position_bias if start < border else None
        self.decoder_embedding = stack.decoder_embedding if start <= border < stop else None
        self.decoder_position_bias = stack.decoder_position_bias if stop > border else None

    def forward(
        self,
        hidden_or_ids: Tensor,
        attention_mask: Tensor,
        decoder_ids: Tensor | None = None,
        contexts: Contexts | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the stage.

        hidden_or_ids: (n, t) token ids in the first stage (for images (n, t, patch values)), otherwise the previous
        stage's output.
        attention_mask: (n, t), 1 for real tokens.  decoder_ids: (n, s) for the stage that owns the decoder's first
        layer, ignored by the others; None is one start token for each sample.  contexts: those of the batch if they
        are known (see `contexts`).
        Returns the output and the taps.  The output is (n, t, d) for encoder layers and (n, t + s, d) after a decoder
        layer.  The taps are the layers' outputs, (n, t, d) or (n, s, d) each.  b_0 precedes those of the first stage,
        and the decoder's embedding precedes a decoder's taps.
        """
        taps: list[Tensor] = []
        hidden = hidden_or_ids
        if self.embedding is not None:
            hidden = self.embed(hidden_or_ids, attention_mask)
            taps.append(hidden)
        if self.start < self._border:
            contexts = self.contexts(attention_mask, hidden) if contexts is None else contexts
            norm = self.final if self.num_encoder_layers is None else self.encoder_final
            hidden = self._run(self.start, min(self.stop, self._border), hidden, contexts, norm, taps)
        if self.stop <= self._border:
            return hidden, taps
        length = attention_mask.shape[1]
        memory, states = hidden[:, :length], hidden[:, length:]
        if self.decoder_embedding is not None:
            if decoder_ids is None:
                decoder_ids = torch.full(
                    (len(hidden), 1), self.decoder_start_id or 0, dtype=torch.int64, device=hidden.device
                )
            states = embed_words(self.decoder_embedding, decoder_ids)
            taps.append(states)
        contexts = decoder_contexts(attention_mask, states, memory, self.decoder_position_bias)
        states = self._run(max(self.start, self._border), self.stop, states, contexts, self.final, taps)
        return torch.cat([memory, states], dim=1), taps

    def contexts(self, attention_mask: Tensor, hidden: Tensor) -> Contexts:
        """Return the masks and position tables of a batch for this stage's single or encoder layers, by pattern of
        attention (see layer_contexts).
        """
        return layer_contexts(self.family, self.config, self.rotary, attention_mask, hidden, self.position_bias)

    @property
    def language_model_head(self) -> Head | None:
        """Return the head of a decoder-only model that was loaded with it.  It is not part of this module."""
        return next(iter(self._words), None)

    def part(self, start: int, stop: int) -> BackboneStage:
        """Return layers [start, stop) of this stage, with a hidden state as input.  Modules and hooks are shared with
        this stage.
        """
        part = copy.copy(self)
        part._modules, part.start, part.stop = dict(self._modules), start, stop
        part.embedding = None
        part.layers = nn.ModuleDict({str(index): self.layers[str(index)] for index in range(start, stop)})
        part.encoder_final = self.encoder_final if start < self._border <= stop else None
        part.final = self.final if stop == self.num_layers else None
        part.decoder_embedding = self.decoder_embedding if start <= self._border < stop else None
        return part

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return b_0 (n, t, d), which is also an input of forward (see `part`).  Only the first stage has
        an embedding.
        """
        assert self.embedding is not None, f"stage [{self.start}, {self.stop}) has no embedding"
        length, most = input_ids.shape[1], self.max_positions
        embedded_ids = input_ids if most is None else input_ids[:, :most]
        hidden = embed(self.family, self.config, self.embedding, embedded_ids)
        if most is None or length <= most:
            return hidden
        # Batches are padded to a multiple of 8 tokens, which may be more than a learned table has positions.
        if bool(attention_mask[:, most:].any()):
            raise ConfigError(
                f"A text of {int(attention_mask.sum(dim=1).max())} tokens was given to the model.",
                f"It has {most} positions.",
                "Lower max_length.",
            )
        return functional.pad(hidden, (0, 0, 0, length - most))

    @property
    def max_positions(self) -> int | None:
        """Return the number of positions in the learned table; None for a family that needs no table or
        reads pictures.
        """
        family = self.family
        has_table = not (family.rotary or family.position_bias or family.reads_images)
        return family.max_positions(self.config) if has_table else None

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that other stages may also have, by a name that is the same in all of them.

        These are the word embeddings of an encoder-decoder and T5's position tables.  While frozen they are copies.  To
        train them, add up their gradients over the stages.
        """
        parameters: dict[str, nn.Parameter] = {}
        if self.shares_words:
            words = self.embedding or self.decoder_embedding
            if words is not None:
                parameters["words"] = _weight(words["words"])
        for name, bias in (
            ("position bias", self.position_bias),
            ("decoder position bias", self.decoder_position_bias),
        ):
            if bias is not None:
                parameters[name] = _weight(bias.table)
        return parameters

    def make_inputs(self, count: int, length: int, target_length: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return placeholder arguments of forward for measurements: `count` samples of `length` tokens."""
        mask = torch.ones(count, length, dtype=torch.int64)
        targets = (
            torch.randint(self.vocabulary_size, (count, target_length)) if self.decoder_embedding is not None else None
        )
        if self.embedding is None:
            dtype = next(self.parameters()).dtype
            return (
                torch.randn(count, length + target_length * (self.start > self._border), self.hidden_size).to(dtype),
                mask,
                targets,
            )
        if self.family.reads_images:
            projection: Any = self.embedding["embeddings"].get_submodule("patch_embeddings.projection")
            return torch.randint(256, (count, length, projection.weight[0].numel()), dtype=torch.uint8), mask, targets
        return torch.randint(self.vocabulary_size, (count, length)), mask, targets

    def _run(
        self, start: int, stop: int, hidden: Tensor, contexts: Contexts, norm: nn.Module | None, taps: list[Tensor]
    ) -> Tensor:
        for index in range(start, stop):
            hidden = call_layer(self.layers[str(index)], hidden, contexts[self.patterns[index]])
            taps.append(hidden)
        if norm is not None:
            hidden = taps[-1] = norm(hidden)
        return hidden


def part_of(stack: LayerStack | BackboneStage, index: int) -> Part:
    """Return the description of the stack that layer `index` belongs to."""
    decoder = stack.family.decoder
    return stack.family if decoder is None or index < (stack.num_encoder_layers or 0) else decoder


def _position_bias(model: Any, path: str, *, is_causal: bool) -> PositionBias | None:
    table = module_at(model, path)
    if not isinstance(table, nn.Embedding):
        return None
    return PositionBias(table, is_causal=is_causal, max_distance=model.config.relative_attention_max_distance)


def _weight(module: Any) -> nn.Parameter:
    return module.weight
