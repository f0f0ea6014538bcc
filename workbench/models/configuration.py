"""Facts about a model from its name and its configuration, before any weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.core.errors import ConfigError, WriteError
from workbench.core.once import once
from workbench.models.facts_cache import cached_facts
from workbench.models.families import FAMILIES, family_of, generating_families, require_carried
from workbench.models.hub import (
    has_weights,
    in_one_line,
    known_models,
    loaded,
    locate,
    refused,
    require_layers,
    require_settings,
    shape_settings,
    suggestion,
)
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.stack import LayerStack
from workbench.models.stored_tensors import StoredTensor, stored_tensors
from workbench.models.tokenizer import (
    read_settings,
    tiny_tokenizer,
)

_TINY = re.compile(r"tiny-([a-z0-9_]+?)(?:-(\d+))?")


_TINY_LAYERS = 6


@cache
def import_family(name: str) -> None:
    """Import the libraries for loading the model, so that a memory budget that begins later counts only the model."""
    model_on_meta(name)


def require_known(name: str) -> None:
    """Check a model's name without loading.  Raises ConfigError if it is invalid, MissingDataError if an embedded model
    was not fetched.
    """
    if is_tiny(name):
        _tiny_parts(name)
    elif not has_weights(name):
        shape_settings(name)
    else:
        locate(name)


@once
def model_facts(name: str) -> ModelFacts:
    """Return a model's shape without loading its weights.  Raises as load_stack does."""
    return _tiny_facts(name) if is_tiny(name) else cached_facts(name, ModelFacts, lambda: _find_facts(name))


def _find_facts(name: str) -> ModelFacts:
    config = model_config(name)
    with torch.device("meta"), parameters_on_meta():
        return facts_of(name, model_from_config(config, name))


_tiny_facts = cache(_find_facts)
"""A tiny model's facts depend on its name alone."""


def require_generating(name: str, request: str) -> None:
    """Raise ConfigError for a model that predicts no words, before its weights are read.  request: the request in a
    sentence.
    """
    require_known(name)
    if not family_of(model_config(name).model_type).generates:
        raise ConfigError(
            request,
            "It predicts no words: it reads whole texts or pictures.",
            f"Give a run's folder, or choose a model that generates ({generating_families()}).",
        )


def model_config(name: str) -> Any:
    """Return a model's Hugging Face configuration.  Raises as load_stack does."""
    from transformers import AutoConfig, PretrainedConfig

    if is_tiny(name):
        return AutoConfig.for_model(_tiny_parts(name)[0], **_tiny_settings(*_tiny_parts(name)))
    is_shape = not has_weights(name)
    place = "" if is_shape else locate(name)
    if is_shape:
        settings = shape_settings(name)
    elif isinstance(place, Path):
        settings = read_settings(place / "config.json")
    else:
        settings = loaded(
            name, lambda local_only: PretrainedConfig.get_config_dict(place, local_files_only=local_only)[0]
        )
    config = config_of(settings, name)
    require_layers(name, config, stored_weights(name) or {})
    return config


def config_of(settings: Mapping[str, Any], name: str) -> Any:
    """Return the Hugging Face configuration that settings make.  Raises MissingDataError for those that make none.

    name: the model's name in the error.
    """
    from transformers import CONFIG_MAPPING

    # The family decides before anything is made of the settings: a folder's own code is never run, and no size
    # builds a huge list.
    if "model_type" not in settings:
        raise refused(
            name,
            "Its config.json is not a JSON object that names a model_type.",
            "Save the model's configuration again.",
        )
    family_of(settings["model_type"])
    config_class = CONFIG_MAPPING[settings["model_type"]]
    require_settings(name, settings, config_class.attribute_map)
    try:
        config = config_class.from_dict(settings)
    except Exception as error:  # libraries raise many kinds of errors for a user's files
        raise refused(name, f"Its config.json does not load: {in_one_line(error)}.", "Fix its config.json.") from error
    require_carried(config)
    return config


def model_on_meta(name: str) -> Any:
    """Return a model's base model without memory for its weights.  Raises as load_stack does."""
    config = model_config(name)
    with parameters_on_meta():
        return model_from_config(config, name)


def model_from_config(config: Any, name: str = "") -> Any:
    """Return the base model of a configuration, with random weights.  The caller decides whether its parameters get
    memory.

    name: the model's name in the error message; by default the configuration's name.  Raises MissingDataError for an
    unusable configuration, WriteError if torch cannot make its cache folder.
    """
    try:
        import transformers

        return transformers.AutoModel.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
    except OSError as error:  # torch makes a folder for compiled code while it is imported
        raise WriteError(
            f"The model '{name or config.model_type}' was asked for.",
            f"A folder cannot be used: {error}.",
            "Set WORKBENCH_CACHE to a folder that you may write to.",
        ) from error
    except Exception as error:  # libraries raise many kinds of errors for a user's configuration
        name = name or getattr(config, "_name_or_path", "") or config.model_type
        raise refused(
            name, f"Its configuration makes no model: {in_one_line(error)}.", "Fix its config.json."
        ) from error


def stored_weights(name: str) -> dict[str, StoredTensor] | None:
    """Return the tensors of a model's safetensors files.  None if it has none on this machine.  Raises as load_stack
    does.

    For a hub name this searches the hub's local cache.
    """
    folder = local_folder(name)
    try:
        return None if folder is None else stored_tensors(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(locate(name), str):
            return None  # an incomplete download; loading the model fetches the rest
        raise refused(name, f"Its weights do not load: {in_one_line(error)}.", "Check its files.") from error


def local_folder(name: str) -> Path | None:
    """Return the folder on this machine with a model's files, for a hub model in the hub's cache; None if there is none
    (a tiny model).
    """
    place = None if is_tiny(name) or not has_weights(name) else locate(name)
    if not isinstance(place, str):
        return place
    from transformers.utils.hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(place, file) for file in ("model.safetensors.index.json", "model.safetensors"))
    return next((Path(path).parent for path in paths if isinstance(path, str)), None)


def is_tiny(name: str) -> bool:
    """Return whether a name belongs to a random model, which is generated and not read."""
    return name.startswith("tiny-") and not Path(name).is_dir()


def _tiny_parts(name: str) -> tuple[str, int]:
    match = _TINY.fullmatch(name)
    layers = int(match[2]) if match and match[2] else _TINY_LAYERS
    if match is None or match[1] not in FAMILIES or not 1 + (FAMILIES[match[1]].decoder is not None) <= layers <= 64:
        raise ConfigError(f"The model '{name}' was asked for.", f"Known are {known_models()}.", suggestion(name))
    return match[1], layers


def _tiny_settings(family: str, layers: int) -> dict[str, Any]:
    facts = FAMILIES[family]
    # Dropout is zero, so that training mode gives the same results; token ids beyond the vocabulary would not load.
    settings: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if not facts.reads_images:
        vocabulary = tiny_tokenizer(is_causal=facts.is_causal).backend.get_vocab_size()
        settings |= {"vocab_size": vocabulary, "max_position_embeddings": 128}
    if facts.decoder is None:
        settings |= {"hidden_size": 32, "num_hidden_layers": layers}
    else:
        encoder, decoder = layers - layers // 2, layers // 2
        settings |= {"d_model": 32, "num_layers": encoder, "num_decoder_layers": decoder}
        settings |= {"encoder_layers": encoder, "decoder_layers": decoder}
    return settings | dict(facts.tiny)


UNLIMITED_LENGTH = 512
"""Length for models without a limit, such as those with relative positions.  T5 was trained on this length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's shape.

    num_layers: number of layers, in an encoder-decoder of both stacks.  num_encoder_layers: number of its encoder's
    layers, None for a single stack.
    embedding_parameters: number of parameters before the layers.  decoder_embedding_parameters: number of parameters
    between an encoder-decoder's two stacks.
    Shared word embeddings are counted once, with the first stack; T5's position tables count as embedding.
    num_key_value_heads: fewer than num_heads with grouped-query attention.  is_gated: two up projections (SwiGLU
    and its like).
    shares_words: whether an encoder-decoder's two stacks share one word embedding.
    is_parallel: whether both blocks of a layer read the same residual stream.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    feed_forward_size: int
    vocabulary_size: int
    max_length: int
    is_causal: bool
    is_gated: bool
    embedding_parameters: int
    num_encoder_layers: int | None = None
    decoder_embedding_parameters: int = 0
    shares_words: bool = False
    is_parallel: bool = False


def facts_of(name: str, model: Any) -> ModelFacts:
    """Return the facts of a Hugging Face base model, which may be on the meta device."""
    config, stack = model.config, LayerStack(model)
    paths = stack.layer_paths(0)
    # Some store (in, out), others (out, in): the side that differs from d is the feed-forward size.
    down: Any = stack.layers[0].get_submodule(paths["down"])
    images: Any = model.get_submodule("embeddings") if stack.family.reads_images else None
    longest = stack.family.max_positions(config) if images is None else images.position_embeddings.shape[1]
    return ModelFacts(
        name=name,
        family=config.model_type,
        num_layers=stack.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        feed_forward_size=down.weight.numel() // config.hidden_size,
        vocabulary_size=getattr(config, "vocab_size", 0),
        max_length=longest or UNLIMITED_LENGTH,
        is_causal=stack.is_causal,
        is_gated="gate" in paths or "gate_up" in paths,
        is_parallel=stack.family.is_parallel(config),
        embedding_parameters=_count((stack.embedding, stack.position_bias)),
        num_encoder_layers=stack.num_encoder_layers,
        decoder_embedding_parameters=_count(
            (stack.decoder_embedding, stack.decoder_position_bias), without=stack.embedding
        ),
        shares_words=stack.shares_words,
    )


def _count(modules: Iterable[nn.Module | None], *, without: nn.Module | None = None) -> int:
    left_out = set() if without is None else {id(parameter) for parameter in without.parameters()}
    sizes = {
        id(parameter): parameter.numel()
        for module in modules
        if module is not None
        for parameter in module.parameters()
    }
    return sum(count for key, count in sizes.items() if key not in left_out)
