"""What a program of the inference engine is made for, and what its file says of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from workbench.core.errors import ConfigError
from workbench.models.zeroth_order.config import TrainableConfig, check_positive

EngineBackend = Literal["xnnpack", "portable"]
EngineNoise = Literal["input", "drawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The shapes and constants that an exported program keeps.

    queries: q.  batch_size: E, samples a step.  sequence_length: t, to which prompts are padded on the right.  num_targets: k, label
    tokens a sample.  epsilon: the perturbation's scale.
    backend: whose kernels do the matrix products: XNNPACK's, or ExecuTorch's portable ones (correct on any processor, slow).
    noise: handed in by the host, so that a step can be repeated, or drawn by the program itself from a generator that takes no seed.
    choices: the tokens among which the loss is, such as the label words' (see PromptBatch); none: the whole vocabulary.
    """

    queries: int = 4
    batch_size: int = 4
    sequence_length: int = 64
    num_targets: int = 1
    epsilon: float = 1e-2
    backend: EngineBackend = "xnnpack"
    noise: EngineNoise = "input"
    choices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = ("queries", "batch size", "sequence length", "number of targets")
        for name, count in zip(names, (self.queries, self.batch_size, self.sequence_length, self.num_targets), strict=True):
            if count < 1:
                raise ConfigError(f"A program with a {name} of {count} was asked for.", "It would compute nothing.", "Give at least 1.")
        check_positive("epsilon", self.epsilon, "Both losses would be the same.")
        if self.choices and (len(set(self.choices)) != len(self.choices) or len(self.choices) < 2 or min(self.choices) < 0):
            raise ConfigError(
                f"A program whose loss is among the tokens {', '.join(map(str, self.choices))} was asked for.",
                "There must be at least two, all different, none below 0.",
                "Give the label words' tokens, or none for the whole vocabulary.",
            )
        for name, choice, known in (("backend", self.backend, EngineBackend), ("noise", self.noise, EngineNoise)):
            if choice not in get_args(known):
                raise ConfigError(
                    f"The {name} '{choice}' was asked for.", f"There are {' and '.join(get_args(known))}.", "Name one of them."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """A trainable parameter in theta.  name: in the PyTorch model.  start: of its values.  shape: (r, out)."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a program says of itself, as JSON, by its method `description`.

    model: its name.  trainable: what is trained beside it.  slots: of theta (D,), in stack order.
    """

    model: str
    config: EngineConfig
    trainable: TrainableConfig
    slots: tuple[EngineSlot, ...]
    vocabulary_size: int
    executorch: str

    @property
    def num_values(self) -> int:
        """Return D."""
        return sum(math.prod(slot.shape) for slot in self.slots)

    def to_json(self) -> str:
        """Return the description as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> EngineDescription:
        """Read it back.  Raises msgspec.ValidationError for a text that is no description."""
        return msgspec.json.decode(text, type=cls)
