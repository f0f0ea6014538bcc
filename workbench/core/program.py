"""A program: a schedule with its costs and the specs of its values.  Programs of one or several steps are simulated and
executed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import ITEM_BYTES, TOKEN, Costs, Spec, WrittenCosts
from workbench.core.errors import ConfigError, ScheduleError
from workbench.core.medium import Air
from workbench.core.schedule import COLLECTIVES, RECV, Op, RankList, Schedule, Value, value_from_text
from workbench.core.serial import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """devices: the devices' names, one for each rank.

    budget_bytes: the memory limit of each device; empty for no limit.  air: the air that transfers and collectives
    share; None if each device has its own wire.

    Raises ScheduleError if the number of devices or budgets differs from the schedule's number of ranks.
    """

    schedule: Schedule
    costs: Costs
    devices: tuple[str, ...]
    budget_bytes: tuple[int, ...] = ()
    air: Air | None = None
    _seconds: dict[int, list[float | None]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.devices) != self.schedule.world_size:
            raise ScheduleError(
                f"A program of {self.schedule.world_size} ranks on {len(self.devices)} devices was asked for.",
                f"The devices are {', '.join(self.devices) or 'none'}.",
                "Name one device per rank.",
            )
        if len(self.budget_bytes) not in (0, len(self.devices)):
            request, problem = (
                f"A program on {len(self.devices)} devices was asked for.",
                f"{len(self.budget_bytes)} have a memory budget.",
            )
            raise ScheduleError(request, problem, "Give every device a budget_bytes, or none.")
        if self.air is not None and len(self.air.bytes_per_s) != len(self.devices):
            request = f"A program on {len(self.devices)} devices that share the air was asked for."
            problem = f"{len(self.air.bytes_per_s)} have a rate."
            raise ScheduleError(request, problem, "Give every device a rate.")

    @classmethod
    def on(cls, cluster: Cluster, schedule: Schedule, costs: Costs) -> Program:
        """Return the program on a cluster's devices, with their memory as budgets and on their medium."""
        return cls(
            schedule=schedule,
            costs=costs,
            devices=cluster.names,
            budget_bytes=tuple(device.memory_bytes for device in cluster.devices),
            air=cluster.air,
        )

    def seconds(self, rank: int, index: int) -> float:
        """Return the seconds of a rank's operation by its index.  The result is cached, because a program may run many
        times.
        """
        cache = self._seconds.get(rank)
        if cache is None:
            cache = self._seconds[rank] = [None] * len(self.schedule.ops[rank])
        duration_s = cache[index]
        if duration_s is None:
            duration_s = cache[index] = self.costs.seconds(rank, self.schedule.ops[rank][index])
        return duration_s

    def values(self) -> list[Value]:
        """Return every value, ordered by its first occurrence in the ranks' lists."""
        ordered: dict[Value, None] = {}
        for rank, ops in enumerate(self.schedule.ops):
            ordered.update(dict.fromkeys(self.schedule.inputs[rank]))
            for op in ops:
                ordered.update(dict.fromkeys(op.reads))
                ordered.update(dict.fromkeys(op.writes))
        return list(ordered)

    def to_text(self) -> str:
        """Return the program as text: devices, the schedule with its seconds, the values that have bytes.  `from_text`
        reads it.
        """
        lines = []
        for rank, name in enumerate(self.devices):
            device: dict[str, object] = {"name": name, "resident_bytes": self.costs.resident_bytes(rank)}
            if self.budget_bytes:
                device["budget_bytes"] = self.budget_bytes[rank]
            lines.append(f"device {json.dumps(device)}")
        if self.air is not None:
            lines.append(f"air {to_json(self.air, indent=-1)}")
        for rank, ops in enumerate(self.schedule.ops):
            lines += self.schedule.header(rank)
            for op in ops:
                lines.append(f"{op} = {float(self.costs.seconds(rank, op))!r}" if _has_seconds(rank, op) else str(op))
            lines += self.schedule.footer(rank)
        for value in self.values():
            spec = self.costs.spec(value)
            if spec != TOKEN:
                lines.append(f"value {value} = {spec}")
        return "\n".join(lines) + "\n"

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the program's text, which identifies it."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @classmethod
    def from_text(cls, text: str) -> Program:
        """Parse the text written by `to_text`; '#' begins a comment.  Raises ScheduleError naming the line."""
        devices: list[dict] = []
        specs: dict[Value, Spec] = {}
        listed: list[tuple[int, float | None]] = []  # (rank, seconds) of each operation
        schedule_lines: list[str] = []
        air: Air | None = None
        rank = -1
        for number, raw in enumerate(text.splitlines(), start=1):
            line = (
                raw.strip() if raw.startswith("device ") else raw.split("#")[0].strip()
            )  # a device's name may contain '#'
            body, separator, amount = line.rpartition(" = ")
            word = line.partition(" ")[0]
            content = ""
            try:
                if word == "device":
                    devices.append(_device(line.removeprefix("device ")))
                elif word == "air":
                    air = from_json(line.removeprefix("air "), Air, source="the program")
                elif word == "value":
                    specs[value_from_text(body.removeprefix("value "))] = _spec(amount)
                else:
                    content = body if separator else line
                    rank += word == "rank"
                    if line and word not in ("rank", "in", "out", "carry"):
                        listed.append((rank, float(amount) if separator else None))
            except (ConfigError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
                raise ScheduleError(
                    f"Line {number} of the program was read: '{line}'.", f"It is malformed: {error}.", _SEE
                ) from error
            schedule_lines.append(content)
        schedule = Schedule.from_text("\n".join(schedule_lines))
        seconds: dict[tuple[int, Op], float] = {}
        for (of_rank, amount_s), op in zip(listed, (op for ops in schedule.ops for op in ops), strict=True):
            if amount_s is not None:
                seconds[of_rank, op] = amount_s
        resident = tuple(int(device["resident_bytes"]) for device in devices)
        return cls(
            schedule=schedule,
            costs=WrittenCosts(seconds_of=seconds, specs=specs, resident=resident),
            devices=tuple(device["name"] for device in devices),
            budget_bytes=tuple(device["budget_bytes"] for device in devices if "budget_bytes" in device),
            air=air,
        )


def require_same(text: str, other: str, *, ranks: Sequence[int] = (0, 1)) -> None:
    """Raise ScheduleError if two programs' texts differ, naming the rank, the operation's index and both operations.

    ranks: the ranks that built the two programs.
    """
    if text == other:
        return
    mine, theirs = text.splitlines(), other.splitlines()
    line_index = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    sides = [lines[line_index] if line_index < len(lines) else "nothing" for lines in (mine, theirs)]
    begins = [i for i, line in enumerate(mine[:line_index]) if line.startswith("rank ")]
    words = {side.partition(" ")[0] for side in sides}
    if words & {"device", "air"} or not begins:
        place = "In the devices"
    elif words <= {"value", "nothing"}:
        place = "In the values"
    else:
        ops = sum(not line.startswith(("in ", "out ", "carry ")) for line in mine[begins[-1] + 1 : line_index])
        place = f"At rank {mine[begins[-1]].removeprefix('rank ')}, operation {ops},"
    raise ScheduleError(
        f"Ranks {ranks[0]} and {ranks[1]} were to run one program.",
        f"{place} rank {ranks[0]} has '{sides[0]}', rank {ranks[1]} has '{sides[1]}'.",
        "Give every device the same job, plan, profile and version of the workbench.",
    )


def _has_seconds(rank: int, op: Op) -> bool:
    """Return whether the text gives seconds at this operation: a transfer has them at its SEND, a collective at its
    first member.
    """
    return op.kind != RECV and (op.kind not in COLLECTIVES or op.ranks[0] == rank)


_SEE = "See Program.to_text."
_SPEC = re.compile(r"^(\w+)\[([\d,]*)\]$")


def _device(text: str) -> dict:
    settings = json.loads(text)
    if not isinstance(settings, dict) or not isinstance(settings.get("name"), str) or "resident_bytes" not in settings:
        raise ValueError("a device is written as a JSON object with name and resident_bytes")
    return {
        key: settings[key] if key == "name" else int(settings[key])
        for key in ("name", "resident_bytes", "budget_bytes")
        if key in settings
    }


def _spec(text: str) -> Spec:
    match = _SPEC.match(text)
    if match is None or match.group(1) not in ITEM_BYTES:
        raise ValueError("a value is written name = dtype[shape]")
    return Spec(tuple(int(size) for size in match.group(2).split(",") if size), match.group(1))


class Chain(NamedTuple):
    """Schedules of the same devices as one.  origins: for each of its values the step, and the value there."""

    schedule: Schedule
    origins: Mapping[Value, tuple[int, Value]]

    @classmethod
    def of(cls, schedules: Sequence[Schedule]) -> Chain:
        """Return schedules as one, in which steps follow without a pause.

        Value v of step k is named v~k; a carried input is an output of the step before.
        """
        lists = [RankList() for _ in range(schedules[0].world_size)]
        origins: dict[Value, tuple[int, Value]] = {}
        for rank, listed in enumerate(lists):
            arrived: dict[Value, Value] = {}  # by carried input: its name in the whole schedule
            for step, schedule in enumerate(schedules):
                names = dict(arrived)

                def name(value: Value, *, step: int = step, names: dict[Value, Value] = names) -> Value:
                    named = names.get(value)
                    if named is None:
                        named = names[value] = Value(f"{value.name}~{step}", *value[1:])
                        origins.setdefault(named, (step, value))
                    return named

                for op in schedule.ops[rank]:
                    reads, writes = tuple(map(name, op.reads)), tuple(map(name, op.writes))
                    listed.ops.append(Op(*op[:4], reads, writes, *op[6:]))
                listed.inputs += [name(value) for value in schedule.inputs[rank] if value not in arrived]
                handed_on = {output for output, _ in schedule.carried[rank]} if step < len(schedules) - 1 else ()
                listed.outputs += [name(value) for value in schedule.outputs[rank] if value not in handed_on]
                arrived = {given_as: name(output) for output, given_as in schedule.carried[rank]}
        return cls(Schedule.of(lists), origins)


def chained(programs: Sequence[Program], chain: Chain | None = None) -> Program:
    """Return programs of the same devices as one (see Chain).  chain: that of their schedules, if it is known."""
    chain = chain or Chain.of([program.schedule for program in programs])
    seconds: dict[tuple[int, Op], float] = {}
    for rank, ops in enumerate(chain.schedule.ops):
        places = ((program, index) for program in programs for index in range(len(program.schedule.ops[rank])))
        for op, (program, index) in zip(ops, places, strict=True):
            if _has_seconds(rank, op):
                seconds[rank, op] = program.seconds(rank, index)
    costs = WrittenCosts(
        seconds_of=seconds,
        specs={value: programs[step].costs.spec(origin) for value, (step, origin) in chain.origins.items()},
        resident=tuple(map(programs[0].costs.resident_bytes, range(chain.schedule.world_size))),
    )
    return replace(programs[0], schedule=chain.schedule, costs=costs)
