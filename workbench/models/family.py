"""The declaration of a model family, and its consequences for one configuration.

families.py has the entries.  Everything else reads a family's structure from its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

FULL, SLIDING = "full_attention", "sliding_attention"
"""Transformers' names of the patterns of attention: to all tokens, or to those within a window."""
POSITION_OFFSET = 2
"""The first rows of the position tables of the role 'positions' do not belong to any position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stack of layers.

    layers, final, position_bias: paths in the base model ('' if the family has none; a checkpoint may lack the final
    norm).
    embedding: modules by role, as paths; modules missing from a checkpoint are left out.
    weights: a layer's projections by role (query, key, value or all three in query_key_value, output, up, down, gate or
    the last and up in gate_up), as paths.
    gated_weights: the same for checkpoints whose layers have a module at the path `gate`.
    norms: paths of a layer's norms, in the order of its blocks (attention, cross-attention, feed-forward); '' for none.
    output_norms: paths of norms on what a block adds to the residual stream, in the same order.
    head_norms: paths of the norms of queries and keys, for each head or over all heads.
    num_layers: the setting with the number of layers.
    """

    layers: str
    embedding: Mapping[str, str]
    norms: tuple[str, ...]
    output_norms: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()
    final: str = ""
    position_bias: str = ""
    weights: Mapping[str, str]
    gated_weights: Mapping[str, str] = field(default_factory=dict)
    num_layers: str = "num_hidden_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """How a family is written as a GGUF file, as llama.cpp's own converter does it.

    architecture: its name there.  interleaves_rotary: whether the rows of queries and keys are interleaved by halves of
    the rotary dimensions.
    activation: that of the feed-forward network, which the file does not say.
    has_output_bias: whether the attention's output may have a bias.
    window_pattern: the last of every so many layers attends to all tokens, which the file does not say; 0: all layers
    do.
    """

    architecture: str
    interleaves_rotary: bool = False
    activation: str = "silu"
    has_output_bias: bool = False
    window_pattern: int = 0


def _is_one(config: Any) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Part):
    """The structure of one Hugging Face architecture: its only stack or its encoder, and properties of the whole model.

    title: its usual name.  examples: published models, for the documentation.
    rotary: path of the module that makes the tables of rotary positions, '' if there is none.  rotary_layers: the
    setting that says for each layer whether it uses them, '' if all do.
    is_pre_norm: whether a block's norm comes before it or after the residual addition; the name of a setting if this
    varies.
    parallel: whether attention and feed-forward network read the same residual stream; the name of a setting if this
    varies.
    norm_adds_one: whether a norm multiplies by 1 + weight.
    interleaves_heads: whether query_key_value stores each head's queries, keys and values together, not all queries
    first.
    stores_inputs_first: whether projections store their weights as (in, out), as transformers' Conv1D does.
    activation: the setting that names the feed-forward network's activation function.
    score_scale: (configuration, head size, layer) -> factor of the attention scores.
    residual_scale, embedding_scale, head_scale: configuration -> factor of what a block adds, of the embedding, and of
    the hidden state before the language model head.
    head_projection: path of a matrix between the last hidden state and the head.
    head_bias: path of the language model head's bias, '' without one.
    has_pooler: whether transformers' base model has a pooler unless told to leave it out.
    prunes_by_trace: whether Torch-Pruning's trace finds which channels depend on each other.
    positions_behind_padding: whether the learned positions start behind the row of the padding token.
    reads_images: whether input_ids are an image's patches.
    stored_names: substrings of parameter names that checkpoint files spell differently, replaced in this order.
    refused: settings that are not carried if they are set, with the reason.
    gguf: how it is written as a GGUF file, None if it is not.
    tiny: settings of the tiny random model that differ from the common ones.
    """

    title: str
    examples: str
    rotary: str = ""
    rotary_layers: str = ""
    is_causal: bool = False
    is_pre_norm: bool | str = False
    parallel: bool | str = False
    norm_adds_one: bool = False
    interleaves_heads: bool = False
    stores_inputs_first: bool = False
    activation: str = "activation_function"
    score_scale: Callable[[Any, int, int], float] = lambda config, head_size, layer: head_size**-0.5
    residual_scale: Callable[[Any], float] = _is_one
    embedding_scale: Callable[[Any], float] = _is_one
    head_scale: Callable[[Any], float] = _is_one
    head_projection: str = ""
    head_bias: str = ""
    has_token_types: bool = False
    has_pooler: bool = False
    prunes_by_trace: bool = False
    positions_behind_padding: bool = False
    reads_images: bool = False
    stored_names: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    gguf: Gguf | None = None
    decoder: Part | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Return whether the family predicts words."""
        return self.is_causal or self.decoder is not None

    @property
    def is_plain_encoder(self) -> bool:
        """Return whether it is an encoder of texts with norms after the blocks, no gates, and no rotary positions."""
        return not (self.generates or self.reads_images or self.is_pre_norm or self.rotary)

    def is_parallel(self, config: Any) -> bool:
        """Return whether attention and feed-forward network of a layer read the same residual stream."""
        parallel = self.parallel
        return bool(getattr(config, parallel)) if isinstance(parallel, str) else parallel

    def norms_before(self, config: Any) -> bool:
        """Return whether a block's norm comes before it."""
        place = self.is_pre_norm
        return bool(getattr(config, place)) if isinstance(place, str) else place

    def uses_rotary(self, config: Any, layer: int) -> bool:
        """Return whether a layer turns its queries and keys."""
        return bool(self.rotary) and (not self.rotary_layers or bool(getattr(config, self.rotary_layers)[layer]))

    def max_positions(self, config: Any) -> int | None:
        """Return the number of tokens for which a model has positions.  None for a family without such a setting."""
        rows: int | None = getattr(config, "max_position_embeddings", None)
        if rows is None or not self.positions_behind_padding:
            return rows
        return rows - config.pad_token_id - 1


def patterns_of(config: Any, num_layers: int) -> list[str]:
    """Return the pattern of attention of each layer: FULL, or SLIDING for a window."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return list(layer_types)
    return [SLIDING if getattr(config, "sliding_window", None) else FULL] * num_layers


def window_of(config: Any, pattern: str) -> int:
    """Return the window of a pattern, 0 for none.

    A token of a causal model attends to itself and to window - 1 tokens before it; of an encoder to `window` tokens on
    either side.
    """
    return int(config.sliding_window or 0) if pattern == SLIDING else 0


def layer_paths(part: Part, layer: nn.Module) -> Mapping[str, str]:
    """Return the paths of a layer's projections by role, for this checkpoint's variant (gated or not)."""
    names = {name for name, _ in layer.named_modules()}
    return part.gated_weights if part.gated_weights and part.gated_weights["gate"] in names else part.weights


def words_of(modules: Any) -> Any:
    """Return the word embedding from a mapping of embedding modules or paths by role."""
    return next(module for role, module in modules.items() if role in ("words", "embed_tokens", "wte"))


def epsilon_of(norm: Any) -> float:
    """Return the eps of a LayerNorm, or of any family's RMS norm."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


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
