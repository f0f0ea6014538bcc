"""One rank's part of a program, taken apart once: what each stream runs, what crosses the links, how often each value is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.core.costs import Spec
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import COLLECTIVES, RECV, RING, SEND, Op, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """streams: (index in the rank's list, operation) in order, by stream.  inline: those of stream RING, by each value that they read.

    receives: (operation, what comes) by source.  uses: how many operations read a value here; an output counts as one more.
    """

    streams: Mapping[str, list[tuple[int, Op]]]
    inline: Mapping[Value, list[Op]]
    sends: list[Op]
    receives: Mapping[int, list[tuple[Op, Spec]]]
    uses: Mapping[Value, int]
    sources: Mapping[Value, int]
    carried: Mapping[Value, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, rank: int) -> RankPart:
        """Return a rank's part.  Raises ScheduleError if collectives of the same ranks lie on different streams: their order is open."""
        schedule = program.schedule
        streams: dict[str, list[tuple[int, Op]]] = {}
        inline: dict[Value, list[Op]] = {}
        sends: list[Op] = []
        receives: dict[int, list[tuple[Op, Spec]]] = {}
        stream_of: dict[frozenset[int], str] = {}
        for index, op in enumerate(schedule.ops[rank]):
            if op.kind == SEND:
                sends.append(op)
            elif op.kind == RECV:
                receives.setdefault(op.ranks[0], []).append((op, program.costs.spec(op.writes[0])))
            elif op.stream == RING:
                for value in set(op.reads):
                    inline.setdefault(value, []).append(op)
            else:
                streams.setdefault(op.stream, []).append((index, op))
                if op.kind in COLLECTIVES and stream_of.setdefault(frozenset(op.ranks), op.stream) != op.stream:
                    other = stream_of[frozenset(op.ranks)]
                    raise ScheduleError(
                        f"Collectives of ranks {', '.join(map(str, op.ranks))} were asked for on streams '{other}' and '{op.stream}'.",
                        f"Their order is not determined:\n{schedule.grid((rank, index))}",
                        "Put them on one stream.",
                    )
        carried = dict(schedule.carried[rank])
        uses = Counter(value for op in schedule.ops[rank] for value in op.reads)
        uses.update(value for value in schedule.outputs[rank] if value not in carried)
        sources = {op.writes[0]: source for source, batch in receives.items() for op, _ in batch}
        return cls(streams=streams, inline=inline, sends=sends, receives=receives, uses=uses, sources=sources, carried=carried)
