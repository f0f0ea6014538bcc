"""Load layer stacks and tokenizers by name: embedded, tiny and random, from a folder, or from the hub."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.assets.fetch import asset_path
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.once import once
from workbench.models.configuration import (
    is_tiny,
    model_config,
    model_from_config,
    model_on_meta,
    stored_weights,
)
from workbench.models.families import FAMILIES, family_of
from workbench.models.family import Family
from workbench.models.hub import (
    SHAPE,
    STAND_IN,
    has_weights,
    loaded,
    locate,
    refused,
    require_whole,
    shape_settings,
)
from workbench.models.matmul import Head, head_of
from workbench.models.partial_loading import read_head, read_stage
from workbench.models.quiet import quiet_transformers
from workbench.models.stack import BackboneStage, LayerStack
from workbench.models.stored_tensors import HEADER, MISSING_WEIGHTS, require_finite
from workbench.models.tokenizer import (
    ImageTokenizer,
    TextTokenizer,
    image_tokenizer,
    read_settings,
    tiny_tokenizer,
    tokenizer_from_folder,
)

TOKENIZER_FILES = ("vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
"""Files from which transformers can make a fast tokenizer if there is no tokenizer.json."""


def load_stack(name: str, dtype: torch.dtype = torch.float32, *, with_head: bool = False) -> LayerStack:
    """Return the frozen stack of a model.

    name: all-MiniLM-L6-v2, SmolLM2-135M, tiny-FAMILY or tiny-FAMILY-LAYERS (random, seeded, 32 wide), a folder, or a
    hub name.
    with_head: also load the language model head of a decoder-only model.  An encoder-decoder's head is always loaded.
    Raises ConfigError for an unknown name or family, MissingDataError if the files are unavailable.
    """
    model = (
        load_model(name, dtype)
        if with_head or is_tiny(name)
        else _pretrained(name, model_config(name), dtype).to(dtype)
    )
    family = family_of(model.config.model_type)
    head = head_of(model) if family.decoder is not None or (with_head and family.is_causal) else None
    return LayerStack(model.base_model, language_model_head=head)


def load_stage(
    name: str,
    start: int,
    stop: int,
    dtype: torch.dtype = torch.float32,
    *,
    after_layer: Callable[[nn.Module], object] | None = None,
    with_head: bool = False,
    with_embedding: bool = False,
    stands_for: Callable[[int], int] | None = None,
) -> BackboneStage:
    """Return layers [start, stop) of a model.

    after_layer: called with each layer, where possible before the next one is read.

    with_head: also load the head of a decoder-only model.  with_embedding: also load the embedding if the first layer
    is not among these; it serves `embed` alone, and forward passes of their parts.
    stands_for: for steps that are only timed.  Of the layers for which it returns the same number, the first is read
    and lends the others its weights, if a layer has more than LARGE_LAYER of them.
    From a folder with safetensors only these layers are read.  Otherwise the whole model is loaded and the rest
    released.
    """
    tensors = stored_weights(name)
    if tensors is not None:
        model = model_on_meta(name)
        head = read_head(model.config, tensors, dtype) if with_head else None
        lends = {} if stands_for is None else _lenders(model, start, stop, stands_for)
        stage = read_stage(
            model,
            tensors,
            start,
            stop,
            dtype=dtype,
            after_layer=after_layer,
            head=head,
            with_embedding=with_embedding,
        )
        if stage is not None and (head is not None or not with_head):
            for index, lender in lends.items():
                stage.layers[str(index)] = _borrowing(stage.layers[str(lender)])
            return stage
    stack = load_stack(name, dtype, with_head=with_head)
    stage = stack.stage(start, stop)
    if with_embedding:
        stage.embedding = stack.embedding
    if after_layer is not None:
        for layer in stage.layers.values():
            after_layer(layer)
    return stage


def load_sample(
    name: str,
    stands_for: Callable[[int], int],
    *,
    after_layer: Callable[[nn.Module], object] | None = None,
    with_head: bool = False,
) -> LayerStack:
    """Return the frozen stack of a model in which one layer takes the place of its equals, to measure it.

    stands_for: returns the layer that takes a layer's place.  Only those layers are read from a folder with
    safetensors; other models are small or random, and are loaded whole.
    after_layer, with_head: see load_stage.
    """
    tensors = stored_weights(name)
    if tensors is not None:
        model = model_on_meta(name)
        family = family_of(model.config.model_type)
        num_layers = _take_places(model, family, stands_for)
        needs_head = family.decoder is not None or (with_head and family.is_causal)
        head = read_head(model.config, tensors, torch.float32) if needs_head else None
        stage = read_stage(model, tensors, 0, num_layers, dtype=torch.float32, after_layer=after_layer)
        if stage is not None and (head is not None or not needs_head):
            return LayerStack(model, language_model_head=head)
    stack = load_stack(name, with_head=with_head)
    if after_layer is not None:
        for layer in stack.layers:
            after_layer(layer)
    return stack


LARGE_LAYER = 1 << 23
"""Weights of a layer that no processor's cache holds: it takes as long with another layer's weights as with its own."""


def _lenders(model: Any, start: int, stop: int, stands_for: Callable[[int], int]) -> dict[int, int]:
    """Let the first of equal layers take the others' places in a stage; return its number for each of the others."""
    first: dict[int, int] = {}
    lends = {
        index: lender for index in range(start, stop) if (lender := first.setdefault(stands_for(index), index)) != index
    }
    stack = LayerStack(model)
    if any(sum(weight.numel() for weight in stack.layers[index].parameters()) < LARGE_LAYER for index in lends):
        return {}
    _take_places(model, stack.family, lambda index: lends.get(index, index))
    return lends


def _take_places(model: Any, family: Family, stands_for: Callable[[int], int]) -> int:
    """Put the layers that stand for others into their places; return the number of all layers."""
    first = 0
    for part in (family, family.decoder):
        if part is not None:
            layers = model.get_submodule(part.layers)
            chosen = [layers[stands_for(first + index) - first] for index in range(len(layers))]
            for index, layer in enumerate(chosen):
                layers[index] = layer
            first += len(layers)
    return first


def _borrowing(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer's modules that shares the memory of the layer's tensors."""
    shared: dict[int, Any] = {id(buffer): buffer for buffer in layer.buffers()}
    shared |= {
        id(weight): nn.Parameter(weight.data, requires_grad=weight.requires_grad) for weight in layer.parameters()
    }
    return copy.deepcopy(layer, shared)


def load_language_model_head(name: str, dtype: torch.dtype = torch.float32) -> Head:
    """Return the frozen head of a model that predicts words.  If the folder holds safetensors, its layers are not
    loaded.
    """
    tensors = stored_weights(name)
    head: Head | None = None if tensors is None else read_head(model_config(name), tensors, dtype)
    head = head or load_stack(name, dtype, with_head=True).language_model_head
    assert head is not None, "a model without words"
    return head


@once
def load_tokenizer(name: str) -> TextTokenizer | ImageTokenizer:
    """Return a model's tokenizer.  Raises as load_stack does.  Embedded and tiny text models do not need transformers
    for it.

    A shape without a tokenizer next to its config.json counts tokens as STAND_IN does.
    """
    if is_tiny(name):
        family = family_of(model_config(name).model_type)
        if family.reads_images:
            return image_tokenizer(family.tiny)
        start_id = family.tiny.get("decoder_start_token_id")
        return tiny_tokenizer(is_causal=family.is_causal, has_token_types=family.has_token_types, start_id=start_id)
    place: Path | str
    if has_weights(name):
        place = locate(name)
        config = read_settings(place / "config.json") if isinstance(place, Path) else model_config(name).to_dict()
    else:
        config = shape_settings(name)
        folder = Path(name).expanduser().parent
        has_own = not name.startswith(SHAPE) and (folder / "tokenizer.json").is_file()
        place = folder if has_own else asset_path(STAND_IN)
    model_type = config.get("model_type")
    family = (
        FAMILIES[model_type] if model_type in FAMILIES else family_of(model_config(name).model_type)
    )  # which names the problem
    if family.reads_images:
        return image_tokenizer(config)
    kind: dict[str, Any] = {
        "joins_pairs": family.is_causal,
        "has_token_types": family.has_token_types,
        "start_id": config.get("decoder_start_token_id"),
    }
    if isinstance(place, Path):
        if (place / "tokenizer.json").is_file():
            return tokenizer_from_folder(place, config, **kind)
        if not any((place / file).is_file() for file in TOKENIZER_FILES):
            raise MissingDataError(
                f"The tokenizer of '{name}' was asked for.",
                "Its folder has no tokenizer.json.",
                "Save the model's tokenizer into it.",
            )
    from transformers import AutoTokenizer

    with quiet_transformers():
        tokenizer = loaded(
            name,
            lambda local_only: AutoTokenizer.from_pretrained(
                place, local_files_only=local_only, trust_remote_code=False
            ),
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"The tokenizer of '{name}' was asked for.",
            "It has no tokenizer.json.",
            "Choose a model with a fast tokenizer.",
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    kind |= {"chat_template": template, "special_tokens": tokenizer.special_tokens_map}
    return TextTokenizer(tokenizer.backend_tokenizer, pad_id=pad_id, end_id=tokenizer.eos_token_id, **kind)


def load_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a complete Hugging Face model, with its language model head if it has one.  Raises as load_stack does.

    A tiny model is the base model of `load_stack`, whose word embedding serves as the head.
    """
    config = model_config(name)
    if not is_tiny(name):
        return _pretrained(name, config, dtype, with_head=True).eval()
    # fork_rng: making a test model must not change the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_from_config(config, name).to(dtype).eval()


def _pretrained(name: str, config: Any, dtype: torch.dtype, *, with_head: bool = False) -> Any:
    """Return the base model of a checkpoint, but a complete encoder-decoder, whose head may differ from its word
    embedding.

    with_head: also return a complete model for a decoder-only one.
    """
    import transformers

    family = family_of(config.model_type)
    maker = transformers.AutoModel if family.decoder is None else transformers.AutoModelForSeq2SeqLM
    if with_head and family.is_causal:
        maker = transformers.AutoModelForCausalLM
    # We do not need the pooler, so the report of unused weights would only confuse.
    options: dict[str, Any] = {"trust_remote_code": False}
    if family.has_pooler:
        options["add_pooling_layer"] = False

    place = locate(name)
    if isinstance(place, Path) and any(place.glob("pytorch_model*.bin")) and stored_weights(name) is None:
        raise refused(
            name,
            "Its weights are only in pytorch_model.bin, a pickle, whose code would run when it is read.",
            "Convert a copy that you trust: AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes "
            "model.safetensors.",
        )
    headers = place.glob(f"*{HEADER}") if isinstance(place, Path) else ()
    if not MISSING_WEIGHTS.has(*(path.with_name(path.name.removesuffix(HEADER)) for path in headers)):
        return maker.from_config(config, dtype=dtype, attn_implementation="sdpa", **options).eval()

    def load(local_only: bool) -> Any:
        return maker.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=local_only,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # our own message reports them
            **options,
        )

    with quiet_transformers():
        model, loading_info = loaded(name, load)
    require_whole(name, loading_info)
    for parameter in model.parameters():
        require_finite(parameter, f"The weights of '{name}'")
    return model
