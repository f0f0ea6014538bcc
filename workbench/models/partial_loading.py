"""Read only one stage's weights from a model folder, so that a small device never maps or stores other weights."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from workbench.models.families import family_of
from workbench.models.family import Family, words_of
from workbench.models.matmul import LanguageModelHead
from workbench.models.stack import BackboneStage, LayerStack
from workbench.models.stored_tensors import MISSING_WEIGHTS, StoredTensor, stored_as

HEAD = "lm_head.weight"
"""Name of a language model head that is not tied."""
_LARGE = 1 << 16
"""Minimum number of values for a tensor to count as a weight."""


class _LargeOnMeta(TorchFunctionMode):
    """Creates large uninitialised tensors (weights) without memory: loaders that free them one by one would fragment
    the heap.

    They are not initialised either, because torch computes the shapes of tensors without memory in Python and imports
    sympy for that.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        arguments = kwargs or {}
        if (
            func is torch.empty
            and arguments.get("device") is None
            and math.prod(torch.Size(_sizes(args, arguments))) >= _LARGE
        ):
            arguments = {**arguments, "device": "meta"}
        if func is nn.init.normal_ and (args or tuple(arguments.values()))[0].is_meta:
            return args[0] if args else arguments["tensor"]
        return func(*args, **arguments)


def _sizes(args: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[int, ...]:
    size = args or (arguments["size"],)
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


_CREATING = threading.RLock()
"""Held in a block of `parameters_on_meta`: two threads of a device load a stage if one loads ahead."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create modules in this block without memory for parameters.  Buffers are created as usual, and other threads are
    not affected.

    accelerate's `init_empty_weights` first creates the weights (0.10 s for SmolLM2-135M, here 0.03 s), and also in
    other threads.
    """
    with _CREATING:
        original, thread = nn.Module.register_parameter, threading.get_ident()

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
                parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            original(module, name, parameter)

        nn.Module.register_parameter = register
        try:
            with _LargeOnMeta():
                yield
        finally:
            nn.Module.register_parameter = original


def read_stage(
    model: Any,
    tensors: dict[str, StoredTensor],
    start: int,
    stop: int,
    *,
    dtype: torch.dtype,
    after_layer: Callable[[nn.Module], object] | None = None,
    head: LanguageModelHead | None = None,
    with_embedding: bool = False,
) -> BackboneStage | None:
    """Return layers [start, stop) of a model made under `parameters_on_meta`, with their weights read from the files.

    after_layer: called with each layer once it is read, before the next, for example to quantize it.
    head: the stage's language model head.  with_embedding: see load_stage.
    Returns None if a weight of the stage is in the files neither under its own name nor with the base model's prefix.
    """
    stack = LayerStack(model, language_model_head=head)
    under = stored_under(model, stack.family)
    names = {
        (id(module), parameter_name): f"{path}.{parameter_name}".lstrip(".")
        for path, module in model.named_modules()
        for parameter_name in module._parameters
    }
    stage = stack.stage(start, stop)
    if with_embedding:
        stage.embedding = stack.embedding

    def tensor_of(module: nn.Module, parameter_name: str) -> StoredTensor | None:
        return stored_as(under[names[id(module), parameter_name]], tensors)

    missing = {
        (id(module), parameter_name): (parameter, tensor_of(module, parameter_name))
        for module in stage.modules()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    }  # it holds no module: what `after_layer` replaces must be freed
    MISSING_WEIGHTS.has(*{stored.path: None for _, stored in missing.values() if stored is not None})
    # Before anything is quantized, because the quantized form of a layer may be a buffer.
    for module in stage.modules():
        cast_buffers(module, dtype)
    uses = Counter(parameter for parameter, _ in missing.values())
    shared: dict[tuple[nn.Parameter, StoredTensor], nn.Parameter] = {}  # read once, and still shared afterwards

    def read(parameter: nn.Parameter, stored: StoredTensor) -> nn.Parameter:
        if (parameter, stored) in shared:
            return shared[parameter, stored]
        weight = nn.Parameter(stored.read(dtype), requires_grad=False)
        if uses[parameter] > 1:  # no other is held here, because `after_layer` may free it
            shared[parameter, stored] = weight
        return weight

    for part in dict.fromkeys((*stage.layers.values(), stage)):  # one layer may stand for several
        inside = {id(module) for layer in stage.layers.values() for module in layer.modules()} if part is stage else ()
        for module in part.modules():
            if id(module) in inside:  # `after_layer` may have taken its weights away
                continue
            for parameter_name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.is_meta:
                    continue
                stored = tensor_of(module, parameter_name)
                if stored is None or tuple(parameter.shape) != stored.shape:
                    return None
                module.register_parameter(parameter_name, read(parameter, stored))
        if after_layer is not None and part is not stage:
            after_layer(part)
    return stage.eval()


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's own buffers, except rotary frequencies, which lose too much precision in 16 bits."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_floating_point() and "inv_freq" not in name:
            module.register_buffer(name, buffer.to(dtype), persistent=name not in module._non_persistent_buffers_set)


def stored_under(model: Any, family: Family) -> dict[str, tuple[str, ...]]:
    """Return the names under which checkpoint files may store each parameter of a base model, most likely first.

    A tied weight may be stored under any of its names; a weight stored under its own name is not tied, as in
    transformers.  Files of a model with a head use the base model's prefix.
    """
    groups: dict[int, list[str]] = defaultdict(list)
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        groups[id(parameter)].append(name)
    names_of: dict[str, tuple[str, ...]] = {}
    for name, parameter in named:
        ordered: dict[str, None] = {}
        for stored_name in (name, *groups[id(parameter)]):
            other = _spelled(family, stored_name)
            ordered |= dict.fromkeys(
                f"{prefix}{candidate}"
                for candidate in (stored_name, other)
                for prefix in ("", f"{model.base_model_prefix}.")
            )
        names_of[name] = tuple(ordered)
    return names_of


def _spelled(family: Family, name: str) -> str:
    """Return a parameter's name as checkpoint files of a family may spell it."""
    for ours, theirs in family.stored_names.items():
        name = name.replace(ours, theirs)
    return name


def head_names(family: Family) -> tuple[str, ...]:
    """Return the names under which checkpoint files may store a head that is not tied, most likely first."""
    return tuple(dict.fromkeys((HEAD, _spelled(family, HEAD))))


def read_head(config: Any, tensors: dict[str, StoredTensor], dtype: torch.dtype) -> LanguageModelHead | None:
    """Return a language model head, read from the files.  None if its weights are not there under known names.

    A separate head in the files is used even if the configuration ties it, as in transformers.
    """
    family = family_of(config.model_type)
    parts = (family,) if family.decoder is None else (family.decoder, family)
    tied = [*(["shared.weight"] if family.decoder else []), *(f"{words_of(part.embedding)}.weight" for part in parts)]
    names = [*head_names(family)]
    if family.decoder is not None or config.tie_word_embeddings:
        names += [name for end in tied for name in tensors if f".{name}".endswith(f".{end}")]
    stored = stored_as(names, tensors)
    if stored is None or stored.shape != (config.vocab_size, config.hidden_size):
        return None
    bias = tensors[family.head_bias].read(dtype).flatten() if family.head_bias in tensors else None
    return LanguageModelHead(stored.read(dtype), bias=bias, scale=family.head_scale(config))
