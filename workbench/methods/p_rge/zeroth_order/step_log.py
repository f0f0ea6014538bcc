"""The seeds and scalars of a step, which are enough to repeat it (P-RGE, Algorithm 1, line 11; MeZO, section 2.1).

MeZO: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from workbench.core.errors import ConfigError, DivergedError
from workbench.core.files import require_writable, sync_folder
from workbench.core.ranges import Count, Positive, Width, require_ranges
from workbench.core.sealed import Lines, SealedLog, first_line, read_lines
from workbench.core.serial import from_json
from workbench.core.units import with_capital
from workbench.methods.p_rge.estimator_table import ESTIMATORS, EstimatorRule, Results, two_point_slopes
from workbench.methods.p_rge.options import EstimatorName, Execution, Momentum
from workbench.methods.p_rge.seeds import MAX_QUERIES, query_seed, subspace_seed
from workbench.methods.p_rge.zeroth_order.directions import NORMAL, Directions

Copies = Literal["per_layer", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerothOrderConfig:
    """How a step estimates its gradient (Algorithm 1).

    queries: q, number of random directions per step.  epsilon: the perturbation's scale.  learning_rate: eta.
    estimator: the entry of the estimator table.  direction_rank, subspace_steps: r and nu of LOZO's.
    momentum: beta of 'low_rank_momentum'.
    execution: which of a step's forward passes run in parallel: none, the queries (outer), the signs (inner), or both.
    The update is the same.
    copies: whether the perturbed copies of the trainable values are made for one layer at a time from one master copy
    (section 3.2), or all before the pass.
    seed: seed of the noise.
    Raises ConfigError for an execution that the estimator does not have, and for too few directions.
    """

    queries: Annotated[int, Meta(ge=1, le=MAX_QUERIES)] = 4
    epsilon: Positive = 1e-2
    learning_rate: Positive = 1e-3
    execution: Execution = "both"
    copies: Copies = "per_layer"
    seed: int = 0
    estimator: EstimatorName = "two_point"
    direction_rank: Width = 2
    subspace_steps: Count = 50
    momentum: Momentum = 0.9

    def __post_init__(self) -> None:
        require_ranges(self, "A step of forward passes")
        rule = self.rule
        if self.execution not in rule.executions:
            raise ConfigError(
                f"The execution '{self.execution}' of the estimator '{self.estimator}' was asked for.",
                f"It has: {', '.join(rule.executions)}.",
                "Choose one of them.",
            )
        if self.queries < rule.min_directions:
            raise ConfigError(
                f"The estimator '{self.estimator}' with queries = {self.queries} was asked for.",
                f"It needs at least {rule.min_directions}: its step size is the deviation of their losses.",
                "Raise queries.",
            )

    @property
    def rule(self) -> EstimatorRule:
        """Return the entry of the estimator table."""
        return ESTIMATORS[self.estimator]

    @property
    def num_queries(self) -> int:
        """Return the queries that a step computes: one for each direction, and one without if the estimator has it."""
        return self.rule.num_queries(self.queries)

    def seeds(self, step: int, queries: Iterable[int]) -> tuple[int, ...]:
        """Return the seeds of some of a step's queries."""
        return tuple(query_seed(self.seed, step, query) for query in queries)

    def directions(self, step: int) -> Directions:
        """Return how a step's directions are drawn."""
        if self.rule.direction != "low_rank":
            return Directions(kind=self.rule.direction)
        subspace = subspace_seed(self.seed, step // self.subspace_steps)
        momentum = self.momentum if self.rule.has_momentum else None
        return Directions(kind="low_rank", rank=self.direction_rank, subspace=subspace, momentum=momentum)

    def results(self, parts: Sequence[float], queries: Iterable[int]) -> Results:
        """Return the results of some queries from their parts, in the order of the queries."""
        each = self.rule.query_parts
        return {query: tuple(parts[each * place : each * (place + 1)]) for place, query in enumerate(queries)}

    def slopes(self, results: Results) -> dict[int, float]:
        """Return the factor of each direction in the update, by query; empty if the results do not suffice."""
        slopes = self.rule.slopes(results, self.epsilon)
        if self.rule.direction != "low_rank":
            return slopes
        return {query: slope / self.direction_rank for query, slope in slopes.items()}  # LOZO's g has U V^T / r


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One step: theta <- theta - learning_rate / q * sum of gradients[i] * direction(seeds[i]), or along its momentum
    (see Trainables.apply).

    gradients: g_i, the factors of the directions (projected gradients), as float32 values.  directions: how they are
    drawn.  loss: the mean over all passes.  seconds: duration of
    the step.  Both are only for reports, and None if unknown.
    """

    step: int
    seeds: tuple[int, ...]
    gradients: tuple[float, ...]
    learning_rate: float
    directions: Directions = NORMAL
    loss: float | None = field(default=None, compare=False)
    seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.seeds) != len(self.gradients) or not self.seeds:
            raise ConfigError(
                f"Step {self.step} was to be made from {len(self.seeds)} seeds.",
                f"There are {len(self.gradients)} projected gradients.",
                "Give as many, at least one.",
            )

    @property
    def nbytes(self) -> int:
        """Return the bytes that a device receives to repeat this step: a seed and a scalar of 32 bits for
        each direction, and the seed of a subspace.
        """
        return 8 * len(self.seeds) + 4 * (self.directions.kind == "low_rank")


def gradients_of(losses: Tensor, epsilon: float) -> tuple[float, ...]:
    """Return g_i = (l_2i - l_2i+1) / (2 epsilon) for losses (2q,), as float32 values (Algorithm 1, line 10).

    Raises DivergedError if one is not finite.
    """
    pairs = losses.detach().double().view(-1, 2).tolist()
    return _float32(two_point_slopes(dict(enumerate(pairs)), epsilon).values(), losses.tolist())


def make_log(
    config: ZerothOrderConfig, step: int, parts: Sequence[float], queries: Sequence[int] | None = None
) -> StepLog:
    """Return the log of a step from the parts of some queries, in the order of the queries; None: all of them.

    Raises DivergedError if a part is not finite, ConfigError if the estimator cannot make a step from these queries.
    """
    results = config.results(parts, range(config.num_queries) if queries is None else queries)
    slopes, losses = config.slopes(results), config.rule.losses(results)
    if not slopes:
        raise ConfigError(
            f"Step {step} was to be made from the queries {list(results)}.",
            f"The estimator '{config.estimator}' needs more of them.",
            "Compute the others, too.",
        )
    return StepLog(
        step=step,
        seeds=config.seeds(step, slopes),
        gradients=_float32(slopes.values(), parts),
        learning_rate=config.learning_rate,
        directions=config.directions(step),
        # Independent of the order in which the losses arrived.
        loss=math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan,
    )


def _float32(slopes: Iterable[float], parts: Iterable[float]) -> tuple[float, ...]:
    gradients = torch.tensor(list(slopes), dtype=torch.float64).float()
    if not bool(gradients.isfinite().all()) or not all(map(math.isfinite, parts)):
        raise DivergedError(
            "The projected gradients of a step were asked for.",
            f"Its losses are {', '.join(f'{part:.4g}' for part in parts)}.",
            "Lower the learning rate, or compute in float32 or bfloat16 if float16 was chosen.",
        )
    return tuple(gradients.tolist())


class _Line(NamedTuple):
    """A step as stored in the log, an array."""

    step: int
    learning_rate: float
    seeds: tuple[int, ...]
    gradients: tuple[float, ...]
    loss: float | None
    seconds: float | None
    directions: Directions = NORMAL


class LogFile:
    """A run's steps in a sealed log (see core.sealed), each on the disk before the next step begins.

    header: settings that must match for the run to continue.  A new file starts with it; an existing file must have the
    same.  An incomplete last line, left by a crash, is removed.  steps: the steps in the file when it was opened.
    remarks: the other values in it, as JSON, in order.  damage: the fault of the removed lines, or ''.
    mends: whether to continue after the last intact line of a damaged log.
    Raises ConfigError for a file of another run, a file with other content, and, unless it mends, a damaged one.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, mends: bool = False) -> None:
        self.steps: tuple[StepLog, ...] = ()
        self.remarks: tuple[bytes, ...] = ()
        self.damage = ""
        require_writable(path)
        lines: Lines | None = None
        if path.exists():
            request = f"Keeping a run's steps in '{path}' was asked for."
            if not path.is_file():
                raise ConfigError(request, "It is not a file that can be read again.", "Name another file.")
            lines = read_lines(path)
            self.damage = lines.damage
            if lines.owner is None and not mends and not first_line(header).startswith(path.read_bytes()):
                raise ConfigError(request, "It exists and holds something else.", "Name another file.")
            if lines.owner is not None and lines.owner != (expected := msgspec.to_builtins(header)):
                stored = dict(lines.owner)
                changed = sorted(key for key in stored.keys() | expected.keys() if stored.get(key) != expected.get(key))
                raise ConfigError(
                    f"A run was to continue from '{path}'.",
                    f"That is another run's: it differs in {', '.join(changed)}.",
                    "Run with the same settings, or give another file.",
                )
            if self.damage and not mends:
                raise _damaged(path, self.damage)
            self.steps, self.remarks = _decoded(path, lines)
        self._lines = SealedLog(path, header, intact=lines, syncs=True)
        if lines is None:
            sync_folder(path.parent)

    def append(self, log: StepLog) -> None:
        """Write a step and wait until it is on disk."""
        line = _Line(log.step, log.learning_rate, log.seeds, log.gradients, log.loss, log.seconds, log.directions)
        self._lines.append(line[:-1] if log.directions == NORMAL else line)

    def remark(self, value: Any) -> None:
        """Write a value that becomes a JSON object, and wait until it is on disk."""
        self._lines.append({"remark": value})


def read_log(path: Path) -> tuple[dict[str, Any], tuple[StepLog, ...]]:
    """Return a log's header and complete steps.  Raises ConfigError if it is missing or damaged."""
    request = f"The steps of '{path}' were asked for."
    if not path.is_file():
        raise ConfigError(request, "There is no such file.", "Check the path.")
    lines = read_lines(path)
    if lines.damage:
        raise _damaged(path, lines.damage)
    if lines.owner is None:
        raise ConfigError(request, "It ends in its first line.", "Begin the run again.")
    return lines.owner, _decoded(path, lines)[0]


def _damaged(path: Path, damage: str) -> ConfigError:
    return ConfigError(
        f"The steps of '{path}' were asked for.", f"{with_capital(damage)}.", "Take a copy, or begin again."
    )


def _decoded(path: Path, lines: Lines) -> tuple[tuple[StepLog, ...], tuple[bytes, ...]]:
    """Return a log's steps and remarks."""
    steps: list[StepLog] = []
    remarks: list[bytes] = []
    for content in lines.contents:
        if content.startswith(b"{"):
            remarks.append(bytes(msgspec.json.decode(content, type=dict[str, msgspec.Raw])["remark"]))
            continue
        line = from_json(content, _Line, source=f"'{path}'")
        steps.append(StepLog(**line._asdict()))
    return tuple(steps), tuple(remarks)
