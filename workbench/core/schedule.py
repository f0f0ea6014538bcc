"""A schedule says in what order: for each rank, small immutable operations that read and write named values.

Semantics, the same for the simulator, the executor and the checks:

- An operation runs on one stream of its rank. Operations of one compute stream run in list order; each
  starts when its stream is free and every value it reads is present on its rank.
- SEND on rank a and RECV on rank b with equal `ranks` (a, b) and the same value are one transfer. The
  transfers of one ordered pair of ranks form a channel and happen in list order on both sides.
  Different channels do not wait for each other.  A rank's transfers leave one after another: first the one
  that was ready first; of those ready at the same instant, the simulator takes the one whose SEND comes first in the
  list, and on real devices such a tie is open.  Transfers that reach a rank at the same time from several others share
  its ingress equally.  A sender does not know of it: its egress is free after the transfer's own seconds.
- A collective (ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST) appears once on every rank of `ranks`,
  in the same order, and starts when all have reached it on their streams and hold what they read.
- A value is written once on a rank (by an operation, a RECV, or as an input). It lives there from its
  write to the end of its last read; outputs live to the end; inputs live from the start.  The operations of UPDATES
  (STEP; MERGE and PULL of a parameter server) update in place: the weights that they write take the memory of those
  that they read, unless somebody still needs them.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.core.errors import ScheduleError

Ranks = tuple[int, ...]
"""Devices, by their numbers."""
Place = tuple[int, int]
"""The place of an operation: its rank, and its index in that rank's list."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """Disable the garbage collector inside the block, and enable it afterwards if it was enabled; also a decorator.

    A schedule of 400,000 operations has 2.5 million live tuples without a cycle.  The collector would scan all of them
    repeatedly while more are created; this takes half of the time to build and simulate such a schedule.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


SEND = "SEND"
RECV = "RECV"
ALLREDUCE = "ALLREDUCE"
ALLGATHER = "ALLGATHER"
REDUCESCATTER = "REDUCESCATTER"
BROADCAST = "BROADCAST"
STEP = "STEP"
MERGE = "MERGE"
PULL = "PULL"
UPDATES = frozenset({STEP, MERGE, PULL})
COLLECTIVES = frozenset({ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST})
TRANSFERS = frozenset({SEND, RECV})
COMMUNICATION = COLLECTIVES | TRANSFERS

RING = "ring"
"""The stream for a ring's sums: a short operation on it runs as soon as its inputs are present, in parallel with the
compute stream."""

NONE = -1


class Value(NamedTuple):
    """A tensor or token by name; NONE (-1) where an index does not apply.  part: piece, tile, query, rank, version."""

    name: str
    stage: int = NONE
    microbatch: int = NONE
    part: int = NONE

    def __str__(self) -> str:
        indices = ["_" if index == NONE else str(index) for index in self[1:]]
        while indices and indices[-1] == "_":
            indices.pop()
        return f"{self.name}:{'.'.join(indices)}" if indices else self.name


class Op(NamedTuple):
    """One operation.  ranks: (source, destination) of a transfer, members of a collective, else empty."""

    kind: str
    stage: int = NONE
    microbatch: int = NONE
    part: int = NONE
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    ranks: Ranks = ()
    stream: str = "compute"

    @property
    def label(self) -> str:
        """Return the compact name: stage, kind, micro-batch and part, such as 2F0 or 1SB3.1."""
        stage = "" if self.stage == NONE else str(self.stage)
        microbatch = "" if self.microbatch == NONE else str(self.microbatch)
        part = "" if self.part == NONE else f".{self.part}"
        return f"{stage}{self.kind}{microbatch}{part}"

    def __str__(self) -> str:
        words = [self.label]
        if self.ranks:
            words.append((">" if self.kind in (SEND, RECV) else "+").join(map(str, self.ranks)))
        words += ["(" + " ".join(map(str, self.reads)) + ")", "->", "(" + " ".join(map(str, self.writes)) + ")"]
        if self.stream != "compute":
            words.append(f"@{self.stream}")
        return " ".join(words)

    @property
    def is_communication(self) -> bool:
        """Return whether this operation moves data between ranks."""
        return self.kind in COMMUNICATION


def send(value: Value, source: int, destination: int) -> Op:
    """Return the SEND of a transfer."""
    return Op(SEND, value.stage, value.microbatch, value.part, (value,), (), (source, destination), "send")


def recv(value: Value, source: int, destination: int) -> Op:
    """Return the RECV of a transfer."""
    return Op(RECV, value.stage, value.microbatch, value.part, (), (value,), (source, destination), "recv")


@dataclass(slots=True)
class RankList:
    """One rank's part of a schedule that is being built (see Schedule)."""

    ops: list[Op] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    carried: list[tuple[Value, Value]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """ops[rank]: that rank's operations in order.  inputs[rank], outputs[rank]: values present before and after.

    carried[rank]: pairs (output, input): the output is that input of the next step, so that steps follow without a
    pause.
    """

    ops: tuple[tuple[Op, ...], ...]
    inputs: tuple[tuple[Value, ...], ...] = ()
    outputs: tuple[tuple[Value, ...], ...] = ()
    carried: tuple[tuple[tuple[Value, Value], ...], ...] = ()
    graphs: list[Any] = field(default_factory=list, init=False, compare=False, repr=False)
    """Its dependency graph, after the first use (see core.activities)."""

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "carried"):
            per_rank = getattr(self, name)
            if not per_rank:
                object.__setattr__(self, name, ((),) * len(self.ops))
            elif len(per_rank) != len(self.ops):
                raise ScheduleError(
                    f"A schedule for {len(self.ops)} ranks was asked for.",
                    f"Its {name} name {len(per_rank)}.",
                    "Name one tuple per rank.",
                )
        for rank, pairs in enumerate(self.carried):
            for output, given_as in pairs:
                if output not in self.outputs[rank]:
                    raise ScheduleError(
                        f"Rank {rank} was asked to carry {output} over to the next step as {given_as}.",
                        "The first is not one of its outputs.",
                        "Name it there.",
                    )

    @classmethod
    def of(cls, lists: Sequence[RankList]) -> Schedule:
        """Return the schedule of all ranks' lists."""
        names = "ops", "inputs", "outputs", "carried"
        return cls(**{name: tuple(tuple(getattr(listed, name)) for listed in lists) for name in names})

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.ops)

    def to_text(self) -> str:
        """Return the schedule as text, one operation per line; `from_text` reads it back unchanged."""
        lines: list[str] = []
        for rank, ops in enumerate(self.ops):
            lines += [*self.header(rank), *map(str, ops), *self.footer(rank)]
        return "\n".join(lines) + "\n"

    def header(self, rank: int) -> list[str]:
        """Return the lines of text before a rank's operations."""
        inputs = self.inputs[rank]
        return [f"rank {rank}", *(["in " + " ".join(map(str, inputs))] if inputs else [])]

    def footer(self, rank: int) -> list[str]:
        """Return the lines of text after a rank's operations."""
        outputs, carried = self.outputs[rank], self.carried[rank]
        lines = ["out " + " ".join(map(str, outputs))] if outputs else []
        return [
            *lines,
            *(["carry " + " ".join(f"{output}>{given_as}" for output, given_as in carried)] if carried else []),
        ]

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse the text written by `to_text`; '#' begins a comment.  Raises ScheduleError naming the line."""
        lists: list[RankList] = []
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.split("#")[0].strip()
            if not line:
                continue
            word, _, rest = line.partition(" ")
            if word == "rank":
                if rest.strip() != str(len(lists)):
                    raise _unreadable(number, line, f"rank {len(lists)} comes next")
                lists.append(RankList())
            elif not lists:
                raise _unreadable(number, line, "it comes before 'rank 0'")
            elif word == "in":
                lists[-1].inputs = [_value(token, number) for token in rest.split()]
            elif word == "out":
                lists[-1].outputs = [_value(token, number) for token in rest.split()]
            elif word == "carry":
                pairs = [token.partition(">") for token in rest.split()]
                lists[-1].carried = [
                    (_value(output, number), _value(given_as, number)) for output, _, given_as in pairs
                ]
            else:
                lists[-1].ops.append(_op(line, number))
        return cls.of(lists)

    def grid(self, mark: tuple[int, int] | None = None, *, window: int = 8, kinds: frozenset[str] | None = None) -> str:
        """Return a table of labels, one row per rank, with `mark` (rank, index) in >brackets<.

        With a mark, the rows show at most `window` operations and ranks on each side of it.
        """
        ranks = range(self.world_size)
        if mark is not None:
            ranks = range(max(0, mark[0] - window), min(self.world_size, mark[0] + window + 1))
        rows = []
        for rank in ranks:
            ops = self.ops[rank]
            first, end = (
                (0, len(ops)) if mark is None else (max(0, mark[1] - window), min(len(ops), mark[1] + window + 1))
            )
            cells = ["..."] if first > 0 else []
            for index in range(first, end):
                if kinds is None or ops[index].kind in kinds:
                    cells.append(f">{ops[index].label}<" if (rank, index) == mark else ops[index].label)
            if end < len(ops):
                cells.append("...")
            rows.append((f"rank {rank}", cells))
        num_columns = max((len(cells) for _, cells in rows), default=0)
        widths = [max((len(cells[i]) for _, cells in rows if i < len(cells)), default=0) for i in range(num_columns)]
        return "\n".join(
            f"{name:<9}" + " ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(cells)).rstrip()
            for name, cells in rows
        )


_LABEL = re.compile(r"^(\d{1,9})?([A-Z_]+)(\d{1,9})?(?:\.(\d{1,9}))?$", re.ASCII)
_LINE = re.compile(r"^(\S+)(?: (\d{1,9}(?:[>+]\d{1,9})*))? \(([^)]*)\) -> \(([^)]*)\)(?: @(\S+))?$", re.ASCII)


def _unreadable(number: int, line: str, why: str) -> ScheduleError:
    return ScheduleError(
        f"Line {number} of the schedule was read: '{line}'.", f"It is malformed: {why}.", "See Schedule.to_text."
    )


def _index(text: str | None) -> int:
    return NONE if text in (None, "", "_") else int(text)


def value_from_text(token: str) -> Value:
    """Parse a value written by str().  Raises ValueError or TypeError for anything else."""
    name, _, indices = token.partition(":")
    return Value(name, *map(_index, indices.split(".") if indices else ()))


def _value(token: str, number: int) -> Value:
    try:
        return value_from_text(token)
    except (ValueError, TypeError):
        raise _unreadable(number, token, "a value is written name:stage.microbatch.part") from None


def _op(line: str, number: int) -> Op:
    match = _LINE.match(line)
    label = _LABEL.match(match.group(1)) if match else None
    if match is None or label is None:
        raise _unreadable(number, line, "an operation is written LABEL [ranks] (reads) -> (writes) [@stream]")
    ranks = tuple(int(rank) for rank in re.split(r"[>+]", match.group(2))) if match.group(2) else ()
    return Op(
        label.group(2),
        _index(label.group(1)),
        _index(label.group(3)),
        _index(label.group(4)),
        tuple(_value(token, number) for token in match.group(3).split()),
        tuple(_value(token, number) for token in match.group(4).split()),
        ranks,
        match.group(5) or "compute",
    )
