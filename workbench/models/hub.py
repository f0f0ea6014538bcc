"""Find a model's files: embedded, in a local folder, or on the hub; never wait minutes for a hub that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from workbench.core.errors import ConfigError, MissingDataError, did_you_mean
from workbench.fetch import ASSETS, asset_path
from workbench.models.families import FAMILIES
from workbench.network import hub_endpoint, hub_is_reachable

T = TypeVar("T")

EMBEDDED_MODELS = ("all-MiniLM-L6-v2", "SmolLM2-135M")
# New hub repositories have an owner's name before the slash; these older ones of our families have none.
_HUB_NAMES_WITHOUT_OWNER = (
    "bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased", "bert-base-multilingual-cased",
    "distilbert-base-uncased", "distilbert-base-cased", "distilbert-base-multilingual-cased",
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b",
)  # fmt: skip
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def known_models() -> str:
    """Return the names that need no hub, for messages."""
    return ", ".join((*EMBEDDED_MODELS, *(f"tiny-{family}[-LAYERS]" for family in FAMILIES)))


def suggestion(name: str) -> str:
    """Return what to do about a model name that means nothing."""
    known = (*EMBEDDED_MODELS, *(f"tiny-{family}" for family in FAMILIES), *_HUB_NAMES_WITHOUT_OWNER)
    return did_you_mean(name, known, "Choose one of them, a folder or a hub name.")


def locate(name: str) -> Path | str:
    """Return the folder of an embedded or local model, or the hub name itself.

    Raises ConfigError for a name that can be neither, MissingDataError for an embedded model that was not fetched.
    """
    if name in EMBEDDED_MODELS:
        assert name in ASSETS
        return asset_path(name)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"The model folder '{name}' was asked for.", "It has no config.json.", "Give a Hugging Face model folder.")
        return folder
    if name in _HUB_NAMES_WITHOUT_OWNER or _HUB_NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"The model '{name}' was asked for.",
        f"It is none of {known_models()}, no folder, and no hub name (OWNER/NAME).",
        suggestion(name),
    )


def from_hub(asked: str, load: Callable[[bool], T], todo: str) -> T:
    """Call load(local_files_only): first from the hub's local cache, then, if the hub answers, from the hub.

    asked, todo: sentences for the error.  Raises MissingDataError without a hub, ConfigError if the hub does not know the name.
    """
    try:
        return load(True)
    except (OSError, ValueError):
        if not hub_is_reachable():
            raise MissingDataError(asked, f"It is not in the local cache, and {hub_endpoint()} cannot be reached.", todo) from None
    try:
        return load(False)
    except OSError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "is not a" in lines[0] or "not found" in lines[0].lower() or "404" in lines[0]:
            raise ConfigError(asked, f"The hub said: {lines[0]}", todo) from error
        raise MissingDataError(asked, f"The hub said: {lines[0]}", todo) from error


def snapshot_of(name: str) -> Path | None:
    """Return the folder in the hub's local cache that has a hub model's safetensors files, None if there is none."""
    from transformers.utils.hub import try_to_load_from_cache

    found = (try_to_load_from_cache(name, file) for file in ("model.safetensors.index.json", "model.safetensors"))
    return next((Path(path).parent for path in found if isinstance(path, str)), None)
