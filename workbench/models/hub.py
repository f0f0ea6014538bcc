"""Find a model's files: embedded, in a local folder, or on the hub.  Refuses a folder whose files do not match its
configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workbench.assets.fetch import ASSETS, asset_path, cache_folder
from workbench.assets.hub import hub_endpoint, hub_is_reachable
from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError, MissingDataError, did_you_mean
from workbench.core.serial import listed, read_toml, shown, text_digest, user_path
from workbench.models.families import FAMILIES, family_of
from workbench.models.gguf_model import converted
from workbench.models.tokenizer import read_settings

EMBEDDED_MODELS = ("all-MiniLM-L6-v2", "SmolLM2-135M", "gemma-3-270m")
# Names of new hub repositories include the owner before a slash; these older ones of our families do not.
_HUB_NAMES_WITHOUT_OWNER = (
    "bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased", "bert-base-multilingual-cased",
    "distilbert-base-uncased", "distilbert-base-cased", "distilbert-base-multilingual-cased",
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b",
)  # fmt: skip
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def known_models() -> str:
    """Return the names of models that need no hub, for messages."""
    return ", ".join((*EMBEDDED_MODELS, *(f"tiny-{family}[-LAYERS]" for family in FAMILIES)))


def suggestion(name: str) -> str:
    """Return advice for an unknown model name."""
    names = (*EMBEDDED_MODELS, *(f"tiny-{family}" for family in FAMILIES), *_HUB_NAMES_WITHOUT_OWNER)
    return did_you_mean(name, names, "Choose one of them, a folder or a hub name.")


def brought_folder(name: str, cache: Path) -> Path:
    """Return the folder in which a real device keeps the files of a model that was sent to it, even if the name is a
    hub name or a folder elsewhere.
    """
    return cache / "brought" / text_digest(name)


SHAPE = "shape:"
"""Before the name of a published model of which only the configuration is known."""


@cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """Return the named configurations without weights, by name."""
    return read_toml(data_folder() / "shapes.toml")


def has_weights(name: str) -> bool:
    """Return whether a name is that of a model, not only of its shape: 'shape:NAME', or the path of a config.json."""
    return not (name.startswith(SHAPE) or (name.endswith(".json") and user_path(name, "The model").is_file()))


def shape_settings(name: str) -> dict[str, Any]:
    """Return the configuration of a model without weights.  Raises ConfigError for an unknown name.

    name: 'shape:NAME', a named configuration of data/shapes.toml, or the path of a config.json.
    """
    if not name.startswith(SHAPE):
        return read_settings(user_path(name, "The model"))
    return named_settings(SHAPE, name, "Choose one of them, or give the path of a config.json.")


def named_settings(prefix: str, name: str, todo: str) -> dict[str, Any]:
    """Return the settings of a named configuration of data/shapes.toml.

    name: begins with `prefix`.  todo: what to do about an unknown name, for which this raises ConfigError.
    """
    shapes, shape_name = known_shapes(), name.removeprefix(prefix).lower()
    if shape_name not in shapes:
        names = [f"{prefix}{shape}" for shape in shapes]
        todo = did_you_mean(name, names, todo)
        raise ConfigError(f"The model '{name}' was asked for.", f"Known are {', '.join(names)}.", todo)
    return dict(shapes[shape_name])


RANDOM = "random:"
"""Before the name of a published model of which only the configuration is known, and whose weights are drawn."""
RANDOM_SEED = 0
STAND_IN = "all-MiniLM-L6-v2"
"""The embedded model whose tokenizer serves named configurations."""


def random_folder(name: str) -> Path:
    """Return the folder of a model with random weights, 'random:NAME', whether or not it was written.

    Raises ConfigError for an unknown name.
    """
    settings = named_settings(RANDOM, name, "Choose one of them.")
    # Another configuration gets a new folder.
    digest = text_digest(json.dumps([settings, RANDOM_SEED], sort_keys=True), 12)
    return cache_folder() / f"random-{name.removeprefix(RANDOM).lower()}-{digest}"


def require_weights(name: str) -> None:
    """Raise ConfigError for a shape without weights."""
    if not has_weights(name):
        raise ConfigError(
            f"The weights of '{name}' were asked for.",
            "It is a shape, a configuration without weights: it is planned and simulated, and computes nothing.",
            "Choose a model with weights, or plan, simulate or advise.",
        )


def locate(name: str) -> Path | str:
    """Return the folder of an embedded or local model, or the hub name itself.  On a real device: the folder of the
    files sent to it.  Of a GGUF file: the folder to which it was converted.

    Raises ConfigError for a name that can be neither, MissingDataError for an embedded model that was not fetched.
    """
    require_weights(name)
    if (local_folder := brought_folder(name, cache_folder())).is_dir():
        return local_folder
    if name in EMBEDDED_MODELS:
        fetched = asset_path(name)
        return converted(fetched / ASSETS[name].joined) if ASSETS[name].joined else fetched
    if name.startswith(RANDOM):
        if not (folder := random_folder(name)).is_dir():
            raise MissingDataError(
                f"The model '{name}' was asked for.", f"It is not in '{folder.parent}'.", f"Run: workbench fetch {name}"
            )
        return folder
    folder = user_path(name, "The model")
    if folder.suffix == ".gguf" and folder.is_file():
        return converted(folder)
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"The model folder '{name}' was asked for.",
                "It has no config.json.",
                "Give a Hugging Face model folder.",
            )
        return folder
    if name in _HUB_NAMES_WITHOUT_OWNER or _HUB_NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"The model '{name}' was asked for.",
        f"It is not one of {known_models()}, not a folder, and not a hub name (OWNER/NAME).",
        suggestion(name),
    )


def loaded(name: str, load: Callable[[bool], Any]) -> Any:
    """Call load(local_files_only): for a hub's model first with the hub's local cache, then with the hub if it answers.

    Raises MissingDataError for unusable files and without a hub, ConfigError if the hub does not know the name.
    """
    request, todo = (
        f"The model '{name}' was asked for.",
        f"Connect to the network, give a model folder, or choose one of {known_models()}.",
    )
    if isinstance(locate(name), Path):
        try:
            return load(True)
        except Exception as error:  # libraries raise many kinds of errors for a user's files
            raise refused(name, f"Its folder does not load: {in_one_line(error)}.", "Check its files.") from error
    try:
        return load(True)
    except (OSError, ValueError):
        if not hub_is_reachable():
            raise MissingDataError(
                request, f"It is not in the local cache, and {hub_endpoint()} cannot be reached.", todo
            ) from None
    try:
        return load(False)
    except OSError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "is not a" in lines[0] or "not found" in lines[0].lower() or "404" in lines[0]:
            raise ConfigError(request, f"The hub said: {lines[0]}", todo) from error
        raise MissingDataError(request, f"The hub said: {lines[0]}", todo) from error


MOST_LAYERS, MOST_UNITS, MOST_TOKENS = 1_000, 100_000, 100_000_000
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "decoder_layers"), MOST_LAYERS),
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "num_key_value_heads", "decoder_attention_heads", "num_labels"),
        MOST_UNITS,
    ),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), MOST_TOKENS),
}
"""Largest value of each size in a configuration, by transformers' common name for it.  A larger one is invalid."""
SHOWN_MISSING = 3
"""Maximum number of missing tensors that an error names."""


def require_settings(name: str, settings: Mapping[str, Any], common_names: Mapping[str, str]) -> None:
    """Reject the settings of a config.json that no model can have, before transformers makes a configuration of them.

    Missing settings and None are allowed.  common_names: a family's own name of each setting that has a common one
    (`n_embd` of `hidden_size`).  Raises MissingDataError.
    """
    for common, most in _LIMITS.items():
        for setting in {common, common_names.get(common, common)}:
            value = settings.get(setting)
            if value is not None and not (type(value) is int and 1 <= value <= most):
                raise refused(
                    name,
                    f"Its configuration has {setting} = {shown(repr(value))}, which must be 1 to {most}.",
                    "Fix its config.json.",
                )
    if quantization := settings.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise refused(
            name,
            f"Its weights are already quantized, by {shown(method)}.",
            "Give the model with its full weights. Methods with the option backbone_dtype quantize them.",
        )


def require_layers(name: str, config: Any, tensors: Mapping[str, object]) -> None:
    """Reject a configuration whose layers differ from those in the files, before building anything.

    tensors: the tensors of the safetensors files by name, empty if there are no such files.  Raises MissingDataError.
    """
    family = family_of(config.model_type)
    for part in (family, family.decoder):
        if part is None:
            continue
        field, path = part.num_layers, part.layers
        for ours, theirs in family.stored_names.items():
            path = path.replace(ours.rstrip("."), theirs.rstrip(".")) if ours.rstrip(".") == path else path
        stored = {
            int(match[1])
            for match in (re.search(rf"(?:^|\.){re.escape(path)}\.(\d+)\.", key) for key in tensors)
            if match
        }
        count = getattr(config, field)
        if stored and count != len(stored):
            raise refused(
                name,
                f"Its files hold {len(stored)} layers, its configuration has {field} = {count}.",
                "Take both of one model.",
            )


def require_whole(name: str, loading_info: Mapping[str, Any]) -> None:
    """Raise MissingDataError if a checkpoint left parameters at random values.  loading_info: from transformers."""
    for key, stored, expected in sorted(loading_info["mismatched_keys"]):
        raise refused(
            name,
            f"Its {key} is {tuple(stored)}, by its configuration {tuple(expected)}.",
            "Take weights and configuration of one model.",
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise refused(
            name,
            f"Its files do not hold {listed(missing, SHOWN_MISSING)}.",
            "Take weights and configuration of one model; without these it would compute with random numbers.",
        )


def refused(name: str, problem: str, todo: str) -> MissingDataError:
    """Return the error for a model with unusable files."""
    return MissingDataError(f"The model '{name}' was asked for.", problem, todo)


def in_one_line(error: BaseException) -> str:
    """Return a library's error message without heading and line breaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    message = lines[-1] if lines[0].endswith(":") else lines[0]  # a heading alone is not informative
    return message.partition("TypeError: ")[2] or message.rstrip(".")
