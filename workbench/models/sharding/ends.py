"""The ends of a model, on the first device of a plan: embedding in front, language model head behind (Galaxy+, section III-A)."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.families import embed_words, words_of
from workbench.models.language_model_head import head_scale
from workbench.models.sharding.layout import ModelLayout
from workbench.models.sharding.weights import WeightSource
from workbench.models.stack import embed

What = Literal["hidden", "last", "all"]
"""What comes out: final hidden states, logits of each sample's last token, or logits of all tokens."""


class Ends:
    """Embeddings of all stacks and the head.  separator_id: the token after which a second text begins (BERT's token types)."""

    def __init__(self, layout: ModelLayout, source: WeightSource, separator_id: int | None = None) -> None:
        self.layout, self.separator_id = layout, separator_id
        self._tensors: dict[str, nn.Parameter] = {}
        paths = [layout.family.embedding] if layout.family.decoder is None else [layout.family.embedding, layout.family.decoder.embedding]
        self.embeddings = [self._filled(modules, places, source) for modules, places in zip(layout.embeddings, paths, strict=True)]
        self.output_projection = self._read(layout.output_projection, source) if layout.output_projection else None
        self.scale = head_scale(layout.config)
        self.weight = self._head(source)
        bias = source.shape("final_logits_bias")
        self.bias = None if bias is None or self.weight is None else self._read("final_logits_bias", source).flatten()

    @property
    def nbytes(self) -> int:
        """Return the bytes held; a head tied to the word embedding counts once."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def embed(self, stack: int, ids: Tensor, offset: int = 0) -> Tensor:
        """Return the first hidden states (n, t, d) of token ids (n, t), or of a picture's patches (n, t, values).

        offset: position of the first token.
        Raises ConfigError for a picture of the wrong size, a picture for a model of text, and a text that is too long.
        """
        family = self.layout.family
        if not family.reads_images:
            self._check_text(ids, offset)
        modules: Any = self.embeddings[stack]
        if offset:
            modules = {role: _Rows(module, offset) if role in ("positions", "wpe") else module for role, module in modules.items()}
        if stack == 0:
            return embed(family, modules, ids, torch.ones(ids.shape[:2], dtype=torch.int64), self.separator_id)
        return embed_words(modules, ids)

    def head(self, hidden: Tensor, what: What = "hidden") -> Tensor:
        """Return what is asked for of the last stack's final hidden states (n, t, d).

        Raises ConfigError if logits are asked of a model without a language model head.
        """
        if what == "last":
            hidden = hidden[:, -1]
        if self.output_projection is not None:
            hidden = F.linear(hidden, self.output_projection)
        if what == "hidden":
            return hidden
        if self.weight is None:
            raise ConfigError(
                f"The next word of '{self.layout.name}' was asked for.",
                "It has no language model head.",
                "Ask for hidden states, or choose a model that generates (GPT-2, OPT, Llama, T5).",
            )
        return F.linear(hidden if self.scale == 1.0 else hidden * self.scale, self.weight, self.bias)

    def _head(self, source: WeightSource) -> Tensor | None:
        layout = self.layout
        if not layout.generates:
            return None
        if source.shape("lm_head.weight") is not None:
            return self._read("lm_head.weight", source)
        return words_of(self.embeddings[-1]).weight if layout.is_tied or source.words_stand_in else None

    def _filled(self, modules: nn.ModuleDict, paths: Any, source: WeightSource) -> dict[str, nn.Module]:
        filled: dict[str, nn.Module] = {}
        for role, meta in modules.items():
            root = copy.deepcopy(meta).eval()
            for path, module in root.named_modules():
                prefix = f"{paths[role]}.{path}".rstrip(".")
                for own in list(dict(module.named_parameters(recurse=False))):
                    module.register_parameter(own, self._read(f"{prefix}.{own}", source))
            filled[role] = root
        return filled

    def _read(self, name: str, source: WeightSource) -> nn.Parameter:
        first = self.layout.tied.get(name)
        if first is not None and source.is_same(name, first):
            return self._read(first, source)
        if name not in self._tensors:
            shape = source.shape(name)
            assert shape is not None, name
            tensor = torch.empty(shape)
            source.fill(tensor, name, (0, shape[0]))
            self._tensors[name] = nn.Parameter(tensor, requires_grad=False)
        return self._tensors[name]

    def _check_text(self, ids: Tensor, offset: int) -> None:
        asked = f"A text for '{self.layout.name}' was given."
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                asked,
                f"It is a {ids.dtype} tensor of shape {tuple(ids.shape)}, as of pictures.",
                "Give token ids (samples, tokens), and pictures to a model of pictures.",
            )
        limit = self.layout.max_length
        if limit and offset + ids.shape[1] > limit:
            raise ConfigError(asked, f"It is {offset + ids.shape[1]} tokens long; the model knows {limit} positions.", "Shorten it.")


class _Rows:
    """A table of positions that begins at a later one."""

    def __init__(self, table: Any, offset: int) -> None:
        self.weight = table.weight[offset:]
