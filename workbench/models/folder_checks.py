"""Refuse a model folder that would load as another model: sizes that none has, layers or tensors that its files lack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.core.errors import MissingDataError
from workbench.core.serial import shown
from workbench.models.families import Part, family_of

MOST_LAYERS, MOST_UNITS, MOST_TOKENS = 1_000, 100_000, 100_000_000
"""Above these a configuration's sizes are no model's."""
SHOWN_MISSING = 3
"""Missing tensors that an error names."""


def require_sizes(name: str, config: Any, tensors: Mapping[str, object]) -> None:
    """Refuse a configuration that makes no model, and one whose layers are not those of the files, before anything of it is built.

    tensors: those of the safetensors files by name, none if there are none.
    """
    asked = f"The model '{name}' was asked for."
    family = family_of(config.model_type)
    parts: list[tuple[Part, str]] = [(family, "num_hidden_layers")]
    if family.decoder is not None:
        encoder, decoder = ("num_layers", "num_decoder_layers") if config.model_type == "t5" else ("encoder_layers", "decoder_layers")
        parts = [(family, encoder), (family.decoder, decoder)]
    limits = dict.fromkeys((field for _, field in parts), MOST_LAYERS) | dict.fromkeys(("hidden_size", "num_attention_heads"), MOST_UNITS)
    limits |= dict.fromkeys(set() if family.reads_images else {"vocab_size", "max_position_embeddings"}, MOST_TOKENS)
    for field, most in limits.items():
        value = getattr(config, field, 1)
        if value is not None and not (isinstance(value, int) and 1 <= value <= most):
            raise MissingDataError(
                asked, f"Its configuration has {field} = {shown(value)}, which must be 1 to {most}.", "Mend its config.json."
            )
    for part, field in parts:
        path = part.layers
        for ours, theirs in family.stored_names.items():
            path = path.replace(ours.rstrip("."), theirs.rstrip(".")) if ours.rstrip(".") == path else path
        stored = {int(match[1]) for match in (re.search(rf"(?:^|\.){re.escape(path)}\.(\d+)\.", key) for key in tensors) if match}
        count = getattr(config, field)
        if stored and count != len(stored):
            raise MissingDataError(
                asked, f"Its files hold {len(stored)} layers, its configuration has {field} = {count}.", "Take both of one model."
            )


def require_whole(name: str, found: Mapping[str, Any]) -> None:
    """Raise MissingDataError if a checkpoint left parameters at random values.  found: transformers' loading_info."""
    asked = f"The model '{name}' was asked for."
    for key, stored, expected in sorted(found["mismatched_keys"]):
        raise MissingDataError(
            asked, f"Its {key} is {tuple(stored)}, by its configuration {tuple(expected)}.", "Take weights and configuration of one model."
        )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - SHOWN_MISSING} more" if len(missing) > SHOWN_MISSING else ""
        raise MissingDataError(
            asked,
            f"Its files do not hold {', '.join(missing[:SHOWN_MISSING])}{more}.",
            "Take weights and configuration of one model; without these it would compute with random numbers.",
        )


def in_one_line(error: BaseException) -> str:
    """Return what a library's error says, without its heading and line breaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = lines[-1] if lines[0].endswith(":") else lines[0]  # a heading says nothing by itself
    return found.partition("TypeError: ")[2] or found.rstrip(".")
