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
from workbench.models.families import (
    Family,
    LayerContext,
    Part,
    call_layer,
    embed_image,
    embed_words,
    family_of,
    layer_paths,
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
        if getattr(self.config, "is_decoder", False) and self.family.decoder is None and not self.family.is_causal:
            raise ConfigError(
                f"A decoder made of a '{self.family_name}' model was asked for.",
                "Only its use as an encoder is known.",
                "Set is_decoder to false, or choose a GPT-2, OPT or Llama model.",
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
        self, hidden_or_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the stage.

        hidden_or_ids: (n, t) token ids in the first stage (for images (n, t, patch values)), otherwise the previous
        stage's output.
        attention_mask: (n, t), 1 for real tokens.  decoder_ids: (n, s) for the stage that owns the decoder's first
        layer, ignored by the others; None is one start token for each sample.
        Returns the output, (n, t, d) for encoder layers and (n, t + s, d) after a decoder layer, and the taps: the
        layers' outputs, (n, t, d) or (n, s, d) each, preceded by b_0 in the first stage, and a decoder's taps by its
        embedding.
        """
        taps: list[Tensor] = []
        hidden = hidden_or_ids
        if self.embedding is not None:
            hidden = self.embed(hidden_or_ids, attention_mask)
            taps.append(hidden)
        if self.start < self._border:
            context = layer_context(self.family, self.rotary, attention_mask, hidden, self.position_bias)
            norm = self.final if self.num_encoder_layers is None else self.encoder_final
            hidden = self._run(self.start, min(self.stop, self._border), hidden, context, norm, taps)
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
        context = decoder_context(attention_mask, states, memory, self.decoder_position_bias)
        states = self._run(max(self.start, self._border), self.stop, states, context, self.final, taps)
        return torch.cat([memory, states], dim=1), taps

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
        if most is None or length <= most:
            return embed(self.family, self.embedding, input_ids)
        # Batches are padded to a multiple of 8 tokens, which may be more than a learned table has positions.
        if bool(attention_mask[:, most:].any()):
            request = f"A text of {int(attention_mask.sum(dim=1).max())} tokens was given to the model."
            raise ConfigError(request, f"It has {most} positions.", "Lower max_length.")
        return functional.pad(embed(self.family, self.embedding, input_ids[:, :most]), (0, 0, 0, length - most))

    @property
    def max_positions(self) -> int | None:
        """Return the number of positions in the learned table; None for a family that needs no table or
        reads pictures.
        """
        family = self.family
        has_table = not (family.rotary or family.position_bias or family.reads_images)
        return self.config.max_position_embeddings if has_table else None

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
        self, start: int, stop: int, hidden: Tensor, context: LayerContext, norm: nn.Module | None, taps: list[Tensor]
    ) -> Tensor:
        for index in range(start, stop):
            hidden = call_layer(self.layers[str(index)], hidden, context)
            taps.append(hidden)
        if norm is not None:
            hidden = taps[-1] = norm(hidden)
        return hidden


class PositionBias(nn.Module):
    """T5's relative position bias on each head's attention scores (Raffel et al., JMLR 2020, section 2.1).

    Hugging Face keeps the table in a stack's first layer, which only the first pipeline stage has.
    """

    def __init__(self, table: nn.Embedding, *, is_causal: bool, max_distance: int) -> None:
        super().__init__()
        self.table, self.is_causal, self.max_distance = table, is_causal, max_distance

    def forward(self, length: int) -> Tensor:
        """Return the bias, (1, heads, length, length)."""
        positions = torch.arange(length, device=self.table.weight.device)
        buckets = buckets_of(
            self.table.num_embeddings, positions, length, is_causal=self.is_causal, max_distance=self.max_distance
        )
        return self.table(buckets).permute(2, 0, 1)[None]


def buckets_of(num_buckets: int, queries: Tensor, num_keys: int, *, is_causal: bool, max_distance: int) -> Tensor:
    """Return the bucket of the distance between each query and key, (queries, keys) int64.  queries: (q,) int64, their
    positions.
    """
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(num_keys, device=queries.device) - queries[:, None]
    return T5Attention._relative_position_bucket(distance, not is_causal, num_buckets, max_distance)


def part_of(stack: LayerStack | BackboneStage, index: int) -> Part:
    """Return the description of the stack that layer `index` belongs to."""
    decoder = stack.family.decoder
    return stack.family if decoder is None or index < (stack.num_encoder_layers or 0) else decoder


def embed(family: Family, modules: Any, input_ids: Tensor) -> Tensor:
    """Return b_0 (n, t, d).  input_ids: (n, t); in families with token types ~id is a token of the second text of a
    pair.
    """
    if "embeddings" not in modules:
        return embed_words(modules, input_ids)
    embeddings = modules["embeddings"]
    if family.reads_images:
        return embed_image(embeddings, input_ids)
    if not family.has_token_types:
        return embeddings(input_ids)
    is_second = input_ids < 0
    # A table with one token type does not distinguish the texts of a pair.
    types = is_second.long().clamp(max=embeddings.token_type_embeddings.num_embeddings - 1)
    return embeddings(torch.where(is_second, ~input_ids, input_ids), token_type_ids=types)


def padding_mask(attention_mask: Tensor, *, is_causal: bool) -> Tensor | None:
    """Return (n, 1, 1 or t, t) bool, True where a query may attend.  None without padding."""
    if bool(attention_mask.all()):
        return None
    mask = attention_mask.bool()[:, None, None, :]
    if is_causal:
        length = attention_mask.shape[1]
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return mask


def layer_context(
    family: Family,
    rotary: nn.Module | None,
    attention_mask: Tensor,
    hidden: Tensor,
    position_bias: nn.Module | None = None,
) -> LayerContext:
    """Return the mask and position tables for a batch.

    attention_mask: (n, t), 1 for real tokens, padding on the right.  hidden: (n, t, d), which decides dtype and device.
    Without padding the mask is None, so that the attention kernels can use their faster path.
    """
    length = attention_mask.shape[1]
    mask = padding_mask(attention_mask, is_causal=family.is_causal)
    return LayerContext(
        mask=None if mask is None else mask.expand(-1, 1, length, length),
        rotary=None
        if rotary is None
        else rotary(hidden, position_ids=torch.arange(length, device=hidden.device)[None]),
        position_bias=None if position_bias is None else position_bias(length),
    )


def decoder_context(
    attention_mask: Tensor, states: Tensor, memory: Tensor, position_bias: nn.Module | None
) -> LayerContext:
    """Return the context of a decoder's layers: the encoder's output `memory` (n, t, d), its mask, positions of the
    states (n, s, d).

    Targets are padded on the right, where causal attention hides the padding from all real tokens.  The mask therefore
    stays None.
    """
    length, mask = states.shape[1], padding_mask(attention_mask, is_causal=False)
    bias = None if position_bias is None else position_bias(length)
    return LayerContext(
        mask=None,
        position_bias=bias,
        memory=memory,
        memory_mask=None if mask is None else mask.expand(-1, 1, length, -1),
    )


def module_at(model: Any, path: str) -> nn.Module | None:
    """Return the module at a path.  None if the path is empty or the checkpoint has no such module."""
    if not path:
        return None
    parent, _, name = path.rpartition(".")
    module = getattr(model.get_submodule(parent), name, None)
    return module if isinstance(module, nn.Module) else None


def modules_at(model: Any, paths: Mapping[str, str]) -> nn.ModuleDict:
    """Return the modules by role.  Modules missing from the checkpoint are left out."""
    modules = {role: module_at(model, path) for role, path in paths.items()}
    return nn.ModuleDict({role: module for role, module in modules.items() if module is not None})


def _position_bias(model: Any, path: str, *, is_causal: bool) -> PositionBias | None:
    table = module_at(model, path)
    if not isinstance(table, nn.Embedding):
        return None
    return PositionBias(table, is_causal=is_causal, max_distance=model.config.relative_attention_max_distance)


def _weight(module: Any) -> nn.Parameter:
    return module.weight
