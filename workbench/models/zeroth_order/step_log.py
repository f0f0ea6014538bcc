"""The seeds and scalars of a step, which are enough to repeat it (P-RGE, Algorithm 1, line 11; MeZO, section 2.1).

MeZO: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from torch import Tensor

from workbench.core.errors import ConfigError, DivergedError
from workbench.core.files import require_writable, sync_folder
from workbench.core.ranges import Positive, require_ranges
from workbench.core.seeds import MAX_QUERIES, query_seed
from workbench.planners.query_costs import Execution

Copies = Literal["per_layer", "kept"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One step: theta <- theta - learning_rate / q * sum of gradients[i] * noise(seeds[i]).

    gradients: g_i, the projected gradients, as float32 values.
    """

    step: int
    seeds: tuple[int, ...]
    gradients: tuple[float, ...]
    learning_rate: float

    def __post_init__(self) -> None:
        if len(self.seeds) != len(self.gradients) or not self.seeds:
            raise ConfigError(
                f"Step {self.step} was to be made from {len(self.seeds)} seeds.",
                f"There are {len(self.gradients)} projected gradients.",
                "Give as many, at least one.",
            )

    @property
    def nbytes(self) -> int:
        """Return the bytes that a device receives to repeat this step: a seed and a scalar of 32 bits for each query."""
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


def make_log(config: ZerothOrderConfig, step: int, gradients: Sequence[float], queries: Sequence[int] | None = None) -> StepLog:
    """Return the log of a step from the projected gradients of some queries; None: of the first ones."""
    return StepLog(
        step=step,
        seeds=tuple(query_seed(config.seed, step, query) for query in queries or range(len(gradients))),
        gradients=tuple(gradients),
        learning_rate=config.learning_rate,
    )


class LogFile(AbstractContextManager["LogFile"]):
    """A run's steps on disk: a header and one line per step, written to disk before the next step begins.

    header: settings that must match for the run to continue.  A new file starts with it; an existing file must have the same.  An
    incomplete last line, left by a crash, is removed.  steps: the steps in the file when it was opened.
    Raises ConfigError for a file of another run, a file with other content, and one that is damaged before its last line.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.steps: tuple[StepLog, ...] = ()
        require_writable(path)
        whole = 0
        if path.exists():
            asked = f"Keeping a run's steps in '{path}' was asked for."
            if not path.is_file():
                raise ConfigError(asked, "It is no file that can be read again.", "Name another file.")
            found, self.steps, whole = _read(path)
            if found is None and not _line(header).startswith(path.read_bytes()):
                raise ConfigError(asked, "It exists and holds something else.", "Name another file.")
            if found is not None and found != msgspec.to_builtins(header):
                changed = sorted(key for key in found.keys() | header.keys() if found.get(key) != msgspec.to_builtins(header).get(key))
                raise ConfigError(
                    f"A run was to go on from '{path}'.", f"That is another run's: it differs in {', '.join(changed)}.",
                    "Run with the same settings, or give another file.",
                )  # fmt: skip
        self._file = open(path, "ab")  # noqa: SIM115  # it stays open for the whole run
        self._file.truncate(whole)
        if whole == 0:
            self._append(header)
            sync_folder(path.parent)

    def append(self, log: StepLog) -> None:
        """Write a step and wait until it is on disk."""
        self._append([log.step, log.learning_rate, log.seeds, log.gradients])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, line: Any) -> None:
        self._file.write(_line(line))
        self._file.flush()
        os.fsync(self._file.fileno())


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def read_log(path: Path) -> tuple[dict[str, Any], tuple[StepLog, ...]]:
    """Return a log's header and complete steps.  Raises ConfigError if it is missing, or damaged before its last line."""
    if not path.is_file():
        raise ConfigError(f"The steps of '{path}' were asked for.", "There is no such file.", "Check the path.")
    header, steps, _ = _read(path)
    if header is None:
        raise ConfigError(f"The steps of '{path}' were asked for.", "It ends in its first line.", "Begin the run again.")
    return header, steps


def _read(path: Path) -> tuple[dict[str, Any] | None, tuple[StepLog, ...], int]:
    """Return header, steps, and the length of the complete lines in bytes."""
    header: dict[str, Any] | None = None
    steps: list[StepLog] = []
    whole = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("a line without an end")
            value = msgspec.json.decode(line)
            if number == 0:
                header = dict(value)
            else:
                steps.append(_step(value, len(steps)))
        except (ValueError, TypeError, msgspec.DecodeError) as error:
            if number + 1 < len(lines):
                raise ConfigError(
                    f"The steps of '{path}' were asked for.", f"Line {number + 1} is damaged: {error}.", "Take a copy, or begin again."
                ) from error
            break
        whole += len(line)
    return header, tuple(steps), whole


def _step(value: Any, expected: int) -> StepLog:
    step, learning_rate, seeds, gradients = value
    if step != expected:
        raise ValueError(f"step {step} stands where {expected} belongs")
    return StepLog(step=step, seeds=tuple(seeds), gradients=tuple(map(float, gradients)), learning_rate=learning_rate)
