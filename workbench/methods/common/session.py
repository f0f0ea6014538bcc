"""A rank's state during training: its process group, links, pacing and data; and its progress messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist

from workbench.core.cluster import Cluster, Device
from workbench.core.heat import Heat
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.schedule import RECV, SEND, Ranks, Value
from workbench.core.timeline import Span
from workbench.methods.common.rank_results import StepTrace, moved
from workbench.models.configuration import import_family
from workbench.profiler.processors import place_of
from workbench.runtime.commands import MOST_SPANS, Transfer
from workbench.runtime.context import RankContext
from workbench.runtime.executor import Execution, Executor, Handler
from workbench.runtime.memory import MemoryBudget
from workbench.runtime.pacing import Pacer, RankLinks
from workbench.runtime.process_group import Meeting, require_one_program
from workbench.runtime.transport import Transport

LEAST_TRANSFER_S = 0.008
"""Shorter transfers say little of a link: on a busy host their ends come some milliseconds late."""
LOADING, WAITING, IDLE, DONE = "loading", "waiting for the others", "idle", "done"
FIRST_EPOCH, CACHED_EPOCH = "first epoch", "cached epoch"


SPANS_EVERY_S = 0.5
"""A device of a watched run sends the spans of the first step that begins in each such piece of time.  Devices begin a
step together often enough that most of these steps are whole.
"""


class DeviceReporter:
    """Publishes one dict for each phase and each step; records.Progress reads them.

    Every message has the epoch and step, if any, so that the error for a lost device can name them.
    """

    def __init__(self, context: RankContext, budget: MemoryBudget | None = None) -> None:
        self._context, self._budget = context, budget
        self._where: dict[str, int] = {}
        self._phase = ""
        self._last_end_s: float | None = None
        self._turn = -1.0

    def phase(self, name: str, epoch: int | None = None) -> None:
        """Report that a phase begins; if an epoch is given, the phase trains that epoch."""
        self._phase = name
        self._last_end_s = None
        if epoch is not None:
            self._where = {"epoch": epoch}
        self._context.publish(self._where | {"phase": name, "used_bytes": self.used_bytes})

    def step(
        self, trace: StepTrace, num_steps: int, spans: Sequence[Span], *, cached: bool, trains: bool = True
    ) -> None:
        """Report a step that this device has finished.  A step lasts from the end of the step before, so waiting
        counts.

        spans: the step's spans; those of some steps are sent.  trains: False for a step without a loss.
        """
        shown = self.shown_spans(trace.start_s, spans)
        begin_s = trace.start_s if self._last_end_s is None else self._last_end_s
        self._last_end_s = trace.end_s
        self._where = {"epoch": trace.epoch, "step": trace.step}
        message: dict[str, Any] = ({"spans": shown} if shown else {}) | {
            "num_steps": num_steps,
            "cached": cached,
            "samples": trace.samples,
            "phase": self._phase,
            "step_s": trace.end_s - begin_s,
            "busy_s": trace.busy_s,
            "used_bytes": self.used_bytes,
        }
        self._context.publish(self._where | message | ({"loss": trace.loss} if trains else {}))

    def shown_spans(self, begin_s: float, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return the spans of a step that began then, on rank 0's clock; () if they are not to be sent."""
        turn, self._turn = self._turn, begin_s * self._context.dilation // SPANS_EVERY_S
        is_shown = self._context.is_watched and turn != self._turn and len(spans) <= MOST_SPANS
        return tuple(moved(spans, self._context.clock_offset_s)) if is_shown else ()

    @property
    def used_bytes(self) -> int | None:
        """Return the bytes that count against the budget; None if the system does not report them."""
        if self._budget is None or not self._budget.footprint_bytes:
            return None
        return self._budget.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionJob:
    """The description of a run that every rank receives once, for any method; the same on every rank.

    profile: the cost of every layer on every device.  is_paced: whether emulated devices take this long; real ones are
    never slowed down.
    folder: folder shared by all devices.  trace_steps: number of steps of each epoch whose spans are stored.
    timeout_s: how long to wait for a silent peer.
    """

    job: Job
    cluster: Cluster
    plan: Plan
    profile: Profile
    folder: Path = Path()
    trace_steps: int = 3
    timeout_s: float = 20.0
    is_paced: bool = True

    @property
    def begins_at(self) -> tuple[int, int]:
        """Return the epoch and the step at which these devices begin."""
        return 0, 0

    def traced_step(self, epoch: int, num_steps: int) -> int:
        """Return the step of an epoch whose timeline a report shows: in the middle of the steps that these devices do.

        Devices that continue after a change have no spans of the steps before.
        """
        begin = self.begins_at[1] if epoch == self.begins_at[0] else 0
        return begin + (num_steps - begin) // 2

    def streams(self, rank: int) -> Mapping[str, str]:
        """Return the processor of each stream of a real device whose layers several processors share, by name."""
        return {}

    def prepare_imports(self, device: Device) -> None:
        """Import the libraries that the model needs on a device, so that a memory budget that starts afterwards counts
        only the model.
        """
        import_family(self.job.model)


AJob = TypeVar("AJob", bound=SessionJob)


class DeviceSession:
    """A device's open process group with its transport, pacer and executor, for any method; use it as a context
    manager.

    devices[i]: the cluster's number of the group's rank i (None: the same number).  is_paced: whether an emulated
    device is slowed down.
    pacer: pacer of this device (None: one that slows an emulated device down).  heat: the emulated device's (None: it
    keeps its speed).
    """

    def __init__(
        self,
        context: RankContext,
        cluster: Cluster,
        group: dist.ProcessGroup,
        *,
        timeout_s: float,
        is_paced: bool,
        devices: Sequence[int] | None = None,
        pacer: Pacer | None = None,
        heat: Heat | None = None,
    ) -> None:
        self.context, self.group, self.rank = context, group, context.rank
        self.devices = tuple(range(context.world_size)) if devices is None else tuple(devices)
        self._peers = {device: number for number, device in enumerate(self.devices)}
        self.timeout_s = timeout_s * context.dilation
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {self.devices: group}
        # Parts of unequal size take unequal time to load: the others must not time out meanwhile.
        self._meeting = Meeting(
            [cluster.devices[device].name for device in self.devices], lambda: self.executor.aborted
        )
        self.slows_down = is_paced and context.fidelity != "real"
        self.pacer = pacer or Pacer(float(self.slows_down), dilation=context.dilation, heat=heat)
        fidelity = context.fidelity if self.slows_down else "real"
        links = RankLinks(cluster=cluster, rank=self.rank, fidelity=fidelity, dilation=context.dilation)
        transport = Transport(
            group,
            self.rank,
            subgroup=self._subgroup,
            links=links,
            timeout_s=self.timeout_s,
            peers=self._peers,
        )
        self.executor = Executor(self.rank, transport, self.pacer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.executor.close()

    def run(
        self, program: Program, handlers: dict[str, Handler], inputs: Mapping[Value, Any] | None = None
    ) -> Execution:
        """Run this rank's part of a program; return its spans in the device's seconds.  Missing inputs are tokens."""
        contents = {value: None for value in program.schedule.inputs[self.rank]} | dict(inputs or {})
        return self.executor.begin(program, handlers, contents).finish().in_device_time(self.context.dilation)

    def barrier(self, program: Program | None = None) -> None:
        """Wait for all ranks (see Meeting).

        program: the next step's program; raises ScheduleError if the ranks' programs differ.
        """
        text = None if program is None else program.to_text()  # while the others are on their way
        self.sum(torch.zeros(1))
        if text is not None:
            require_one_program(self.group, text)
        self.executor.idle()

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place, outside any schedule, once all ranks have arrived."""
        self._meeting.sum(tensor)

    def _subgroup(self, ranks: Ranks, *, by_all: bool = False) -> dist.ProcessGroup:
        # Its members create it at the first use.  by_all: every device takes part, as torch requires where groups
        # overlap.
        members = tuple(sorted(ranks))
        if members not in self._subgroups:
            numbers, timeout = [self._peers[rank] for rank in members], timedelta(seconds=self.timeout_s)
            self._subgroups[members] = dist.new_group(
                numbers, backend="gloo", timeout=timeout, use_local_synchronization=not by_all
            )
        return self._subgroups[members]


class RankSession(DeviceSession, Generic[AJob]):
    """A DeviceSession of a job.  budget: memory budget, shown in the live progress."""

    def __init__(
        self,
        context: RankContext,
        rank_job: AJob,
        group: dist.ProcessGroup,
        budget: MemoryBudget | None = None,
        heat: Heat | None = None,
    ) -> None:
        super().__init__(
            context, rank_job.cluster, group, timeout_s=rank_job.timeout_s, is_paced=rank_job.is_paced, heat=heat
        )
        self.rank_job, self.progress = rank_job, DeviceReporter(context, budget)
        self._exchanges = 0
        plan = rank_job.plan
        groups = {tuple(sorted(stage.ranks)) for stage in (*plan.stages, *([plan.cached] if plan.cached else []))}
        for ranks in sorted(groups):
            if len(ranks) > 1:
                self._subgroup(ranks, by_all=True)
        if context.fidelity == "real":
            named = rank_job.streams(self.rank)
            self.executor.place({stream: place_of(name, context.device.name) for stream, name in named.items()})

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank passes True; waits for all ranks (see Meeting)."""
        total = torch.tensor([float(flag)])
        self.executor.flush()
        self.sum(total)
        self.executor.idle()
        return bool(total)

    def exchange(self, text: str) -> list[str]:
        """Return every rank's value, by rank, once all have arrived."""
        assert dist.group.WORLD is not None
        store = dist.PrefixStore(f"exchange {self._exchanges}", dist.group.WORLD.get_group_store())
        self._exchanges += 1
        store.set(str(self.rank), text)
        self.barrier()
        return [store.get(str(rank)).decode() for rank in range(self.context.world_size)]

    def every_rank(self, mine: bool) -> bool:
        """Return whether every rank passes True."""
        return not self.any_rank(not mine)


def transfers_of(cluster: Cluster, spans: Iterable[Span], offset_s: float = 0.0) -> tuple[Transfer, ...]:
    """Return a rank's ends of the messages that should take at least LEAST_TRANSFER_S.

    offset_s: offset of its clock from rank 0's.  Empty on shared air, where a slow message says nothing about a link:
    others may have been sending.
    """
    if cluster.medium == "wifi":
        return ()
    transfers = []
    for span in spans:
        if span.op.kind in (SEND, RECV):
            expected_s = cluster.link(*span.op.ranks).transfer_s(span.nbytes)
            time_s = offset_s + (span.start_s if span.op.kind == SEND else span.end_s)
            if expected_s >= LEAST_TRANSFER_S:
                pair = ">".join(cluster.devices[rank].name for rank in span.op.ranks)
                transfers.append(Transfer(pair, str((span.op.reads or span.op.writes)[0]), time_s, expected_s))
    return tuple(transfers)
