"""The seeds and scalars of a step, which are enough to repeat it (P-RGE, Algorithm 1, line 11; MeZO, section 2.1).

MeZO: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta
from torch import Tensor

from workbench.core.errors import ConfigError, DivergedError
from workbench.core.files import require_writable, sync_folder
from workbench.core.ranges import Positive, require_ranges
from workbench.core.sealed import Lines, SealedLog, first_line, read_lines
from workbench.core.serial import from_json
from workbench.methods.p_rge.options import Execution
from workbench.methods.p_rge.seeds import MAX_QUERIES, query_seed

Copies = Literal["per_layer", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerothOrderConfig:
    """How a step estimates its gradient (Algorithm 1).

    queries: q, number of random directions per step.  epsilon: the perturbation's scale.  learning_rate: eta.
    execution: which of a step's 2q forward passes run in parallel: none, the queries (outer), the two signs (inner), or
    both.  The update is the same.
    copies: whether the perturbed copies of the trainable values are made for one layer at a time from one master copy
    (section 3.2), or all before the pass.
    seed: seed of the noise.
    """

    queries: Annotated[int, Meta(ge=1, le=MAX_QUERIES)] = 4
    epsilon: Positive = 1e-2
    learning_rate: Positive = 1e-3
    execution: Execution = "both"
    copies: Copies = "per_layer"
    seed: int = 0

    def __post_init__(self) -> None:
        require_ranges(self, "A step of forward passes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One step: theta <- theta - learning_rate / q * sum of gradients[i] * noise(seeds[i]).

    gradients: g_i, the projected gradients, as float32 values.  loss: the mean over all passes.  seconds: duration of
    the step.  Both are only for reports, and None if unknown.
    """

    step: int
    seeds: tuple[int, ...]
    gradients: tuple[float, ...]
    learning_rate: float
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
        each query.
        """
        return 8 * len(self.seeds)


def gradients_of(losses: Tensor, epsilon: float) -> tuple[float, ...]:
    """Return g_i = (l_2i - l_2i+1) / (2 epsilon) for losses (2q,), as float32 values (Algorithm 1, line 10).

    Raises DivergedError if one is not finite.
    """
    pairs = losses.detach().double().view(-1, 2)
    gradients = ((pairs[:, 0] - pairs[:, 1]) / (2 * epsilon)).float()
    if not bool(gradients.isfinite().all()):
        raise DivergedError(
            "The projected gradients of a step were asked for.",
            f"Its losses are {', '.join(f'{loss:.4g}' for loss in losses.tolist())}.",
            "Lower the learning rate, or compute in float32 or bfloat16 if float16 was chosen.",
        )
    return tuple(gradients.tolist())


def make_log(
    config: ZerothOrderConfig,
    step: int,
    gradients: Sequence[float],
    queries: Sequence[int] | None = None,
    *,
    loss: float | None = None,
) -> StepLog:
    """Return the log of a step from the projected gradients of some queries; None: the first ones.

    loss: see StepLog.
    """
    return StepLog(
        step=step,
        seeds=tuple(query_seed(config.seed, step, query) for query in queries or range(len(gradients))),
        gradients=tuple(gradients),
        learning_rate=config.learning_rate,
        loss=loss,
    )


class _Line(NamedTuple):
    """A step as stored in the log, an array."""

    step: int
    learning_rate: float
    seeds: tuple[int, ...]
    gradients: tuple[float, ...]
    loss: float | None
    seconds: float | None


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
        self._lines.append(_Line(log.step, log.learning_rate, log.seeds, log.gradients, log.loss, log.seconds))

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
        f"The steps of '{path}' were asked for.", f"{damage[0].upper()}{damage[1:]}.", "Take a copy, or begin again."
    )


def _decoded(path: Path, lines: Lines) -> tuple[tuple[StepLog, ...], tuple[bytes, ...]]:
    """Return a log's steps and remarks."""
    steps: list[StepLog] = []
    remarks: list[bytes] = []
    for content in lines.contents:
        if content.startswith(b"{"):
            remarks.append(bytes(msgspec.json.decode(content, type=dict[str, msgspec.Raw])["remark"]))
            continue
        steps.append(StepLog(**from_json(content, _Line, source=f"'{path}'")._asdict()))
    return tuple(steps), tuple(remarks)
