"""Operations on values of four numbers, for schedules of a few operations."""

from __future__ import annotations

import torch

from workbench.core.costs import Spec
from workbench.core.schedule import NONE, Op, Value
from workbench.runtime.executor import Contents

WIDTH = 4


def value(name: str, microbatch: int = NONE) -> Value:
    return Value(name, 0, microbatch)


def op(
    kind: str,
    reads: tuple[Value, ...] = (),
    writes: tuple[Value, ...] = (),
    stream: str = "compute",
    microbatch: int = NONE,
) -> Op:
    return Op(kind, 0, microbatch, NONE, reads, writes, (), stream)


def ones(made: Op, reads: Contents) -> Contents:
    return tuple(torch.ones(WIDTH) for _ in made.writes)


def small(value: Value) -> Spec:
    return Spec((WIDTH,))
