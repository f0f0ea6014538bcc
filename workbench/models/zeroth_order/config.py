"""Which values forward passes train, and how a step estimates the gradient (P-RGE, section 3, Table 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.errors import ConfigError
from workbench.core.ranges import Positive, Width, require_ranges
from workbench.core.seeds import MAX_QUERIES
from workbench.models.lora import ROLES

Execution = Literal["sequential", "outer", "inner", "both"]
Copies = Literal["per_layer", "kept"]
ZerothOrderTechnique = Literal["lora_fa", "lora", "dora", "vera", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableConfig:
    """Which values are trained.

    technique: LoRA-FA trains B next to a frozen A; LoRA both; DoRA their direction and a magnitude; VeRA two vectors next to frozen,
    shared A and B (Appendix B); full all parameters.
    rank, alpha: r and alpha, the update is alpha / r x A B (Appendix D.3).  VeRA has no alpha.
    roles: of the adapted projections, as named in the families' tables; a layer needs at least one of them.
    num_outputs: of the linear head added to models without a vocabulary (encoders, images); 0 if the model has one.
    seed: of A and of that head.
    """

    technique: ZerothOrderTechnique = "lora_fa"
    rank: Width = 16
    alpha: Positive = 32.0
    roles: tuple[str, ...] = ROLES
    num_outputs: Annotated[int, Meta(ge=0, le=10**9)] = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_ranges(self, "Training by forward passes")

    def sizes(self, inputs: int, outputs: int) -> tuple[int, ...]:
        """Return the sizes of the parameters added to a projection.  Empty for 'full'."""
        a, b = inputs * self.rank, self.rank * outputs
        known = {"lora_fa": (b,), "lora": (a, b), "dora": (a, b, outputs), "vera": (self.rank, outputs)}
        return known.get(self.technique, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerothOrderConfig:
    """How a step estimates its gradient (Algorithm 1).

    queries: q, number of random directions per step.  epsilon: the perturbation's scale.  learning_rate: eta.
    execution: which of a step's 2q forward passes run in parallel: none, the queries (outer), the two signs (inner), or
    both.  The update is the same.
    copies: whether the perturbed copies of the trainable values are made for one layer at a time from one master copy (section 3.2),
    or all before the pass.
    seed: of the noise.
    """

    queries: Annotated[int, Meta(ge=1, le=MAX_QUERIES)] = 4
    epsilon: Positive = 1e-2
    learning_rate: Positive = 1e-3
    execution: Execution = "both"
    copies: Copies = "per_layer"
    seed: int = 0

    def __post_init__(self) -> None:
        require_ranges(self, "A step of forward passes")


def check_positive(name: str, value: float, found: str) -> None:
    """Raise ConfigError unless a number is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} = {value} was asked for.", found, "Give a number above 0.")
