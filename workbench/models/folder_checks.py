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
HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "decoder_attention_heads"), MOST_UNITS)
"""Limits of the settings that some of transformers' configurations divide by."""
SHOWN_MISSING = 3
"""Missing tensors that an error names."""


def require_sizes(name: str, config: Any, tensors: Mapping[str, object]) -> None:
    """Refuse a configuration that makes no model, and one whose layers are not those of the files, before anything of it is built.

    tensors: those of the safetensors files by name, none if there are none.
    """
    family = family_of(config.model_type)
    parts: list[tuple[Part, str]] = [(family, "num_hidden_layers")]
    if family.decoder is not None:
        encoder, decoder = ("num_layers", "num_decoder_layers") if config.model_type == "t5" else ("encoder_layers", "decoder_layers")
        parts = [(family, encoder), (family.decoder, decoder)]
    require_limits(name, config, dict.fromkeys((field for _, field in parts), MOST_LAYERS) | {"hidden_size": MOST_UNITS} | HEADS)
    if not family.reads_images:
        require_limits(name, config, dict.fromkeys(("vocab_size", "max_position_embeddings"), MOST_TOKENS))
    for part, field in parts:
        path = part.layers
        for ours, theirs in family.stored_names.items():
            path = path.replace(ours.rstrip("."), theirs.rstrip(".")) if ours.rstrip(".") == path else path
        stored = {int(match[1]) for match in (re.search(rf"(?:^|\.){re.escape(path)}\.(\d+)\.", key) for key in tensors) if match}
        count = getattr(config, field)
        if stored and count != len(stored):
            raise refused(name, f"Its files hold {len(stored)} layers, its configuration has {field} = {count}.", "Take both of one model.")


def require_limits(name: str, config: Any, limits: Mapping[str, int]) -> None:
    """Refuse a configuration in which one of some settings is not 1 to its limit; one that is missing or None may be.

    config: has the settings as attributes.
    """
    for field, most in limits.items():
        value = getattr(config, field, None)
        if value is not None and not (isinstance(value, int) and 1 <= value <= most):
            raise refused(name, f"Its configuration has {field} = {shown(value)}, which must be 1 to {most}.", "Mend its config.json.")


def require_whole(name: str, found: Mapping[str, Any]) -> None:
    """Raise MissingDataError if a checkpoint left parameters at random values.  found: transformers' loading_info."""
    for key, stored, expected in sorted(found["mismatched_keys"]):
        raise refused(
            name, f"Its {key} is {tuple(stored)}, by its configuration {tuple(expected)}.", "Take weights and configuration of one model."
        )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - SHOWN_MISSING} more" if len(missing) > SHOWN_MISSING else ""
        raise refused(
            name,
            f"Its files do not hold {', '.join(missing[:SHOWN_MISSING])}{more}.",
            "Take weights and configuration of one model; without these it would compute with random numbers.",
        )


def refused(name: str, found: str, todo: str) -> MissingDataError:
    """Return the error of a model whose files do not do."""
    return MissingDataError(f"The model '{name}' was asked for.", found, todo)


def in_one_line(error: BaseException) -> str:
    """Return what a library's error says, without its heading and line breaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    found = lines[-1] if lines[0].endswith(":") else lines[0]  # a heading says nothing by itself
    return found.partition("TypeError: ")[2] or found.rstrip(".")
