"""How long an operation takes and how many bytes a value has: what the simulator asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workbench.core.schedule import Op, Value


class Costs(Protocol):
    """Prices of one schedule."""

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of a compute operation on a rank, of a transfer (asked of its SEND), or of a collective."""
        ...

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value; 0 for a token that only orders operations."""
        ...

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes that stay: weights, gradients, optimizer state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCosts:
    """Costs by operation kind and value name: for closed forms, lessons and tests.

    seconds_by_kind: kind -> seconds, or a function of (rank, op).  bytes_by_name: value name -> bytes.
    """

    seconds_by_kind: Mapping[str, float | Callable[[int, Op], float]]
    bytes_by_name: Mapping[str, int] = field(default_factory=dict)
    resident_by_rank: Mapping[int, int] = field(default_factory=dict)

    def seconds(self, rank: int, op: Op) -> float:
        """Return the table's entry for the kind; 0 if it has none."""
        entry = self.seconds_by_kind.get(op.kind, 0.0)
        return entry(rank, op) if callable(entry) else entry

    def nbytes(self, value: Value) -> int:
        """Return the table's entry for the name; 0 if it has none."""
        return self.bytes_by_name.get(value.name, 0)

    def resident_bytes(self, rank: int) -> int:
        """Return the table's entry for the rank; 0 if it has none."""
        return self.resident_by_rank.get(rank, 0)
