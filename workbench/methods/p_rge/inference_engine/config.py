"""Configuration of a program for the inference engine, its description, the tokenized prompts, and access to
ExecuTorch.
"""

from __future__ import annotations

import logging
import platform
import sys
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from workbench.core.errors import ConfigError, installation
from workbench.core.files import whole_file
from workbench.core.ranges import Count, Positive, Width, require_ranges
from workbench.methods.p_rge.estimator_table import ESTIMATORS, EstimatorRule
from workbench.methods.p_rge.options import EstimatorName
from workbench.methods.p_rge.zeroth_order.step_log import ZerothOrderConfig
from workbench.methods.p_rge.zeroth_order.trainables import Slot, TrainableConfig

EngineBackend = Literal["xnnpack", "portable"]
EngineNoise = Literal["input", "drawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The shapes and constants of an exported program.

    queries: q.  batch_size: E, number of samples per step.  sequence_length: t, to which prompts are padded on the
    right.
    num_targets: k, number of label tokens per sample.  epsilon: the perturbation's scale.
    backend: the kernels for matmuls: XNNPACK's, or ExecuTorch's portable ones (correct on any processor, slow).
    noise: whether the host passes the noise in, so that a step can be repeated, or the program draws it from a
    generator without a seed.
    estimator, direction_rank, subspace_steps: as in PRGEOptions; the engine computes no derivatives ('jvp'), keeps no
    momentum, and draws normal noise only.
    choices: the tokens over which the loss is computed, such as the label words' (see PromptBatch); empty: the whole
    vocabulary.
    """

    queries: Count = 4
    batch_size: Count = 4
    sequence_length: Count = 64
    num_targets: Count = 1
    epsilon: Positive = 1e-2
    backend: EngineBackend = "xnnpack"
    noise: EngineNoise = "input"
    estimator: EstimatorName = "two_point"
    direction_rank: Width = 2
    subspace_steps: Count = 50
    choices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_ranges(self, "A program of the inference engine")
        request = f"A program with the estimator '{self.estimator}' was asked for."
        if self.rule.tangent:
            able = [name for name, rule in ESTIMATORS.items() if not (rule.tangent or rule.has_momentum)]
            problem = "The engine's kernels compute no derivatives."
            raise ConfigError(request, problem, f"Choose {', '.join(able)}.")
        if self.rule.has_momentum:
            raise ConfigError(request, "A program keeps no momentum between steps.", "Choose low_rank.")
        if self.noise == "drawn" and self.estimator != "two_point":
            raise ConfigError(
                request, "A program that draws its own noise has normal directions.", "Use noise = input."
            )
        self.estimate(0, 1.0)
        if self.choices and (
            len(set(self.choices)) != len(self.choices) or len(self.choices) < 2 or min(self.choices) < 0
        ):
            raise ConfigError(
                f"A program whose loss is among the tokens {', '.join(map(str, self.choices))} was asked for.",
                "There must be at least two, all different, none below 0.",
                "Give the label words' tokens, or none for the whole vocabulary.",
            )

    @property
    def rule(self) -> EstimatorRule:
        """Return the entry of the estimator table."""
        return ESTIMATORS[self.estimator]

    @property
    def num_copies(self) -> int:
        """Return P, the number of copies of theta, one for each loss."""
        return self.rule.num_passes(self.queries)

    def estimate(self, seed: int, learning_rate: float) -> ZerothOrderConfig:
        """Return how a step of the program estimates its gradient."""
        return ZerothOrderConfig(
            queries=self.queries,
            epsilon=self.epsilon,
            learning_rate=learning_rate,
            seed=seed,
            estimator=self.estimator,
            direction_rank=self.direction_rank,
            subspace_steps=self.subspace_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """A program's description of itself, as JSON, returned by its method `description`.

    model: name of the model.  trainable: the trainable configuration.  slots: the slots of theta (D,), in stack order.
    """

    model: str
    config: EngineConfig
    trainable: TrainableConfig
    slots: tuple[Slot, ...]
    vocabulary_size: int
    executorch: str

    @property
    def num_values(self) -> int:
        """Return D, the number of trainable values."""
        return sum(slot.size for slot in self.slots)


_TOOLKIT = ("torchao", "torchao.quantization", "torchao.quantization.pt2e", "torchao.quantization.pt2e.utils")
_AFFINE = "quant_affine_configs"
"""XNNPACK patterns that need the toolkit just to be listed.  They match only quantized activations."""


def require_executorch() -> None:
    """Raise ConfigError if ExecuTorch is not installed."""
    if find_spec("executorch") is None:
        todo = f"Install the extra: {installation('executorch')}, then pip install --no-deps executorch==1.5.1."
        if (sys.platform, platform.machine()) == ("linux", "aarch64"):
            todo = "Use an x86-64 machine: the release for the torch of aarch64 Linux lacks what such a program needs."
        raise ConfigError(
            "A program of the inference engine was asked for.", "The package executorch is not installed.", todo
        )


def xnnpack_partitioner() -> Any:
    """Return the partitioner that selects the parts of a program for XNNPACK."""
    with quiet(), _toolkit():
        from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    return XnnpackPartitioner(
        configs=[config for config in ALL_PARTITIONER_CONFIGS if not config.__module__.endswith(_AFFINE)]
    )


def bindings() -> Any:
    """Return the Python bindings of the runtime.  Raises ConfigError as require_executorch does.

    This is the module below `executorch.runtime`, which would also import the exporter: seconds and 100 MB that a
    device cannot afford.
    """
    require_executorch()
    with quiet():
        from executorch.extension.pybindings import _C
    return _C


@contextmanager
def quiet() -> Iterator[None]:
    """Hide ExecuTorch's many warnings about experimental interfaces and deprecated decorators."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _toolkit() -> Iterator[None]:
    """Provide a stand-in for `torchao` where it is not installed, because XNNPACK's patterns import two predicates of
    convolutions from it.

    A permanent `torchao` would change how peft and transformers load, so the stand-ins are removed afterwards.
    """
    if find_spec("torchao") is not None:
        yield
        return
    for name in _TOOLKIT:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []  # marks it as a package
    predicates: Any = sys.modules[_TOOLKIT[-1]]
    aten = torch.ops.aten
    predicates._is_conv_node = _calls(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
    predicates._is_conv_transpose_node = _calls(
        aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input
    )
    try:
        yield
    finally:
        for name in _TOOLKIT:
            del sys.modules[name]


def _calls(*targets: Any) -> Any:
    return lambda node: node.op == "call_function" and node.target in targets


_FIELDS = ("input_ids", "targets", "positions", "target_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompts:
    """Prompts as arrays.  input_ids: (n, t) int64, padded on the right.  targets, positions, target_mask: (n, k) as in
    PromptBatch.
    """

    input_ids: Any
    targets: Any
    positions: Any
    target_mask: Any

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, indices: Any) -> EnginePrompts:
        """Return the prompts at these indices as a batch."""
        return EnginePrompts(**{name: getattr(self, name)[list(indices)] for name in _FIELDS})

    def write(self, path: Path) -> None:
        """Write the prompts as NumPy's .npz."""
        with whole_file(path) as part, part.open("wb") as file:
            np.savez_compressed(file, **{name: np.asarray(getattr(self, name)) for name in _FIELDS})

    @classmethod
    def read(cls, path: Path) -> EnginePrompts:
        """Read prompts from a file.  Raises ConfigError if the file holds none."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**{name: arrays[name] for name in _FIELDS})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"The prompts in '{path}' were asked for.",
                f"They do not load: {error}.",
                "Export them: workbench export --prompts FILE.",
            ) from error
