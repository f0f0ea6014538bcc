"""LoRA on the projections in a stage's layers, using peft (Hu et al., ICLR 2022, section 4.2; PAC+, section II, Fig.
2).

GPT-2 keeps queries, keys and values in one matrix.  There LoRA is applied to the whole matrix, as peft does.

Adapters: Houlsby et al., ICML 2019, section 2.1; PAC+, section II, Fig. 2.  Each layer has two, after the last
projection of the attention and of the feed-forward network, before the residual connection.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.core.serial import write_text
from workbench.models.family import layer_paths
from workbench.models.quantization.stored import QuantizedLinear
from workbench.models.stack import BackboneStage, part_of
from workbench.models.stored_tensors import save_tensors

ADAPTER_ROLES = ("output", "down")
DEVIATION = 0.01
"""Standard deviation of the initial weights, a normal distribution truncated at twice this: each adapter starts near
the identity."""


def projections(
    stage: BackboneStage, roles: Sequence[str], *, technique: str, all_of_them: bool
) -> dict[str, dict[str, str]]:
    """Return each layer's projections for some roles: layer number -> role -> path in the layer.

    all_of_them: whether a layer needs every role, or only one of them.  Raises ConfigError for a family whose table
    does not name them.
    """
    projections_of = {}
    for index, layer in stage.layers.items():
        paths = layer_paths(part_of(stage, int(index)), layer)
        own_paths = {role: paths[role] for role in roles if role in paths}
        missing = [role for role in roles if role not in own_paths]
        if not own_paths or (all_of_them and missing):
            raise ConfigError(
                f"{technique} on layers of type {type(layer).__name__} was asked for.",
                "Their family names no projection in the role of "
                f"{(' and ' if all_of_them else ' or ').join(missing)}.",
                "Add it to the family's `weights` in workbench/models/families.py, or choose another technique.",
            )
        projections_of[index] = own_paths
    return projections_of


class Bottleneck(nn.Module):
    """hidden + W_up activation(W_down hidden)."""

    def __init__(
        self, hidden_size: int, width: int, activation: Callable[[Tensor], Tensor] = F.gelu, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.down, self.up, self.activation = (
            nn.Linear(hidden_size, width, bias),
            nn.Linear(width, hidden_size, bias),
            activation,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output, (n, t, d), for hidden (n, t, d)."""
        return hidden + self.up(self.activation(self.down(hidden)))


SerialAdapter = partial(Bottleneck, activation=F.relu, bias=False)
"""h + relu(h W_down) W_up (RingAda, Eq. 1; the activation function is MAD-X's, Pfeiffer et al., EMNLP 2020).  No
biases."""


def inject_serial_adapters(stage: BackboneStage, width: int) -> nn.ModuleDict:
    """Insert an adapter at the end of each layer and return the adapters by layer.  The stage must not have any yet."""
    adapters = nn.ModuleDict({index: SerialAdapter(stage.hidden_size, width) for index in stage.layers})

    def adapted(adapter: nn.Module, output: Any) -> Any:
        return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)

    for index, adapter in adapters.items():
        stage.layers[index].register_forward_hook(
            lambda module, inputs, output, adapter=adapter: adapted(adapter, output)
        )
    return adapters


def inject_adapters(stage: BackboneStage, width: int) -> nn.ModuleDict:
    """Insert adapters after each layer's projections and return them by layer and role.  The stage must not have any
    yet.

    The layers' norms are trained too, as Houlsby et al. do.  Raises ConfigError for a family whose table names no
    projections.
    """
    adapters = nn.ModuleDict()
    for index, paths in projections(stage, ADAPTER_ROLES, technique="Adapters", all_of_them=True).items():
        layer = stage.layers[index]
        adapters[index] = nn.ModuleDict({role: Bottleneck(stage.hidden_size, width) for role in ADAPTER_ROLES})
        for role, adapter in adapters[index].items():
            layer.get_submodule(paths[role]).register_forward_hook(
                lambda module, inputs, output, adapter=adapter: adapter(output)
            )
        for norm in norms_in(layer):
            norm.requires_grad_(True)
    return adapters


def norms_in(layer: nn.Module) -> list[nn.Module]:
    """Return the norms of a layer."""
    return [module for module in layer.modules() if "Norm" in type(module).__name__]


PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROLES = ("query", "value", "cross_query", "cross_value", "query_key_value")
ALL_ROLES = (
    *("query", "key", "value", "query_key_value", "output"),
    *("cross_query", "cross_key", "cross_value", "cross_output"),
    *("gate", "up", "gate_up", "down"),
)


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Hide bitsandbytes from peft.  peft imports it if it is installed, and it imports PyTorch's compiler: 1.6 s and
    44 MB in each process (x86-64).

    No layer here is a layer of bitsandbytes.  If the interpreter has already imported it, this has no effect.
    """
    if "bitsandbytes" in sys.modules:
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # so that its import raises ImportError
    _ask_again()
    try:
        yield
    finally:
        del sys.modules["bitsandbytes"]
        _ask_again()


def _ask_again() -> None:
    """Let peft forget whether bitsandbytes is installed."""
    if (peft := sys.modules.get("peft.import_utils")) is not None:
        peft.is_bnb_available.cache_clear()
        peft.is_bnb_4bit_available.cache_clear()


def require_peft() -> None:
    """Raise ConfigError if peft is not installed.  To import it takes a second, and planning does without."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "LoRA was asked for.",
            "The package 'peft' is not installed.",
            "Install it (pip install peft), or choose another technique.",
        )


def import_peft() -> Any:
    """Return the module peft.  Raises ConfigError if it is not installed."""
    require_peft()
    with without_bitsandbytes():
        import peft

    return peft


def inject_lora(stage: BackboneStage, *, rank: int, alpha: float, dropout: float) -> None:
    """Insert LoRA into the stage's projections, with peft's initial values.  Only its matrices are trainable
    afterwards.

    Raises ConfigError for a family whose table names no projections.
    """
    peft = import_peft()
    layers = projections(stage, ROLES, technique="LoRA", all_of_them=False)
    targets = [f"layers.{index}.{path}" for index, paths in layers.items() for path in paths.values()]
    # A quantized projection stores its outputs first in every family.
    is_quantized = any(isinstance(stage.get_submodule(path), QuantizedLinear) for path in targets)
    transposed = stage.family.stores_inputs_first and not is_quantized
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=transposed
    )
    config._register_custom_module(
        {QuantizedLinear: peft.tuners.lora.Linear}
    )  # QLoRA (Dettmers et al., NeurIPS 2023, section 3)
    with warnings.catch_warnings(), without_bitsandbytes():
        warnings.simplefilter("ignore")  # peft warns that the model is not from transformers
        peft.inject_adapter_in_model(config, stage)


def peft_names(stage: BackboneStage, names: Iterable[str], prefix: str) -> dict[str, str]:
    """Return the names that peft's files use for LoRA matrices (layers.I.PATH.lora_A.default.weight, ... in the whole
    stack's stage).

    prefix: prefix of the base model's parameters in the class given to peft (see Published).
    """
    names_in_peft = {}
    for name in names:
        _, index, rest = name.split(".", 2)
        part = part_of(stage, int(index))
        # peft's files omit the adapter's name, 'default'; Hugging Face counts a decoder's layers from 0.
        number = int(index) if part is stage.family else int(index) - (stage.num_encoder_layers or 0)
        names_in_peft[name] = f"base_model.model.{prefix}{part.layers}.{number}.{rest.replace('.default', '')}"
    return names_in_peft


PeftTask = Literal["TOKEN_CLS", "QUESTION_ANS", "CAUSAL_LM", "SEQ_2_SEQ_LM"]


class Published(NamedTuple):
    """How transformers' class for a task stores a model.

    task: peft's name of the task.  prefix: prefix of the base model's parameters in the class.  head: name of the
    class's last matrix.
    """

    task: PeftTask
    prefix: str
    head: str


def save_lora(
    folder: Path,
    state: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    stage: BackboneStage,
    base: str,
    shape: Published,
    **settings: float,
) -> None:
    """Write the files that PeftModel.from_pretrained reads over the base model: adapter_config.json and
    adapter_model.safetensors.

    state: the LoRA matrices (see peft_names).  head: weight and bias of the matrix on the last hidden states, empty for
    a model that predicts words.  base: where transformers finds the base model.  shape: its class.  settings: r,
    lora_alpha, lora_dropout.
    """
    names = peft_names(stage, state, shape.prefix)
    weights = {names[name]: tensor for name, tensor in state.items()}
    weights |= {f"base_model.model.{shape.head}.{name}": tensor for name, tensor in head.items()}
    save_tensors(folder / PEFT_WEIGHTS, weights, {"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": shape.task,
        "base_model_name_or_path": base,
        **settings,
        "target_modules": sorted({name.split(".", 2)[2].split(".lora_")[0] for name in state}),
        "modules_to_save": [shape.head] if head else None,
        "fan_in_fan_out": stage.family.stores_inputs_first,
        "bias": "none",
        "inference_mode": True,
    }
    write_peft_config(folder, described)


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Return peft's description of what a folder holds."""
    described: dict[str, Any] = json.loads((folder / PEFT_CONFIG).read_text(encoding="utf-8"))
    return described


def write_peft_config(folder: Path, described: Mapping[str, Any]) -> None:
    """Write peft's description of what a folder holds."""
    # In ASCII: peft opens it in the encoding of the reader's system.
    write_text(folder / PEFT_CONFIG, json.dumps(described, indent=1) + "\n")
