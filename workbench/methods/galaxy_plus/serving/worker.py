"""A device's side of the service: it loads, joins, answers, probes and reports as the portal tells it (runs on an engine)."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from workbench.core.errors import DeviceLostError, RuntimeSetupError, WorkbenchError
from workbench.methods.galaxy_plus.programs import Programs
from workbench.methods.galaxy_plus.requests import Answer
from workbench.methods.galaxy_plus.serving.messages import (
    Abort,
    BlockReport,
    Failed,
    Join,
    Joined,
    Keep,
    Load,
    Loaded,
    Serve,
    Served,
)
from workbench.methods.galaxy_plus.serving.reporting import ReportingPacer
from workbench.methods.galaxy_plus.session import Holding, InferenceSession, SessionSetup
from workbench.models.loading import load_tokenizer
from workbench.models.sharding import ModelShard, ShardSpec, load_shard, model_layout, open_weights, reload_shard
from workbench.runtime.commands import Ping, Pong, Probe, Probed, Ready, Slow, Stop
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import CommandListener
from workbench.runtime.memory import release_free_memory
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import close_group, open_group

_PROBE_ROUNDS = 8  # one of a small model's is too short for a sleep to hit


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a device is told once.  address: of the portal's commands.  timeout_s: for forming a group, and for a message in it.

    report_every_s: between two reports, in the middle of a request too.  storage_bytes_per_s: at which an emulated device reads its disk;
    0: as fast as the host does.
    """

    session: SessionSetup
    address: str
    timeout_s: float = 20.0
    report_every_s: float = 0.5
    storage_bytes_per_s: float = 0.0


def serve_worker(context: RankContext, setup: WorkerSetup) -> None:
    """Do what the portal says until it says stop.  Failures of single requests are told, not raised."""
    with _Worker(context, setup) as worker:
        worker.run()


class _Worker:
    """commands: what waits for the compute thread.  Slow, Abort and Ping act at once, Load in a thread of its own."""

    def __init__(self, context: RankContext, setup: WorkerSetup) -> None:
        self._context, self._setup = context, setup
        self._layout = model_layout(setup.session.model)
        self._is_paced = setup.session.host is not None and context.fidelity != "real"
        self._slow_down = 1.0
        self._session: InferenceSession | None = None
        self._epoch = self._given_up = -1
        self._holdings: dict[int, Holding] = {}
        self._newest: ModelShard | None = None
        self._source: Any = None
        self._loading = threading.Lock()
        self._wanted = -1
        # They outlive the groups.
        self._programs = Programs(setup.session.cluster, self._layout.stacks, setup.session.host if self._is_paced else None)
        self._fastest_probe_s: float | None = None
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._serving: Serve | None = None
        self._busy_since_s: float | None = None
        self._pacer = ReportingPacer(
            float(self._is_paced),
            is_emulated=self._is_paced,
            every_s=setup.report_every_s,
            tell=self._report,
            dilation=context.dilation,
        )
        self._listener = CommandListener(context, setup.address, self._take)
        context.publish(Ready())

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.close()
        with self._loading:
            if self._source is not None:
                self._source.close()
        self._leave()

    def run(self) -> None:
        while not self._context.should_stop():
            try:
                command = self._commands.get(timeout=0.5)
            except queue.Empty:
                continue
            if isinstance(command, Stop):
                return
            self._busy_since_s = self._context.now_s()
            self._do(command)
            self._busy_since_s = None

    def _do(self, command: Any) -> None:
        match command:
            case Join():
                self._context.publish(self._join(command))
            case Serve():
                self._context.publish(self._serve(command))
            case Probe():
                self._context.publish(self._probe(command))
            case Keep():
                self._keep(command)

    def _take(self, command: Any) -> None:
        """Act on a command at once, or leave it for the compute thread (in the listener's thread)."""
        match command:
            case Slow():
                self._slow_down = command.factor
                if self._session is not None:
                    self._session.slow_down(command.factor)
            case Abort():
                self._given_up = max(self._given_up, command.epoch)
                session = self._session
                if session is not None and self._epoch == command.epoch:
                    session.executor.abort(DeviceLostError("A request was in service.", "A device has gone.", "It is repeated."))
            case Ping():
                since_s = self._busy_since_s
                self._context.publish(Pong(0.0 if since_s is None else self._context.now_s() - since_s))
            case Load():
                self._wanted = command.plan
                threading.Thread(target=self._load, args=(command,), name=f"load plan {command.plan}", daemon=True).start()
            case _:
                if isinstance(command, Join):  # it waits for no older group any more
                    self._given_up = max(self._given_up, command.epoch - 1)
                self._commands.put(command)

    # Weights.

    def _load(self, command: Load) -> None:
        with self._loading:
            if self._wanted == command.plan:  # else another plan is wanted by now
                self._context.publish(self._loaded(command))

    def _loaded(self, command: Load) -> Loaded:
        now_s, begin_s = self._context.now_s, self._context.now_s()
        try:
            if command.in_place:
                self._holdings.clear()
            shard, read_bytes = self._shard(command.specs[self._context.rank], release=command.in_place)
            program = self._programs.sequence(command.made, command.lengths).program.to_text()
        except Exception as error:  # of whatever kind: the portal waits for a word
            return Loaded(command.plan, now_s() - begin_s, 0, 0, f"{type(error).__name__}: {error}")
        if self._is_paced and self._setup.storage_bytes_per_s:
            left_s = begin_s + read_bytes / self._setup.storage_bytes_per_s - now_s()
            time.sleep(max(0.0, left_s) * self._context.dilation)
        self._newest = shard
        self._holdings[command.plan] = Holding(plan=command.made, shard=shard, specs=command.specs)
        return Loaded(command.plan, now_s() - begin_s, read_bytes, shard.held_bytes, program=program)

    def _shard(self, spec: ShardSpec, *, release: bool) -> tuple[ModelShard, int]:
        """Return what a specification asks for, and the bytes that were read for it."""
        if self._source is None:
            self._source = open_weights(self._setup.session.model, layout=self._layout)
        before = self._source.bytes_read
        if self._newest is None:
            shard = load_shard(self._layout, spec, self._source, separator_id=self._separator_id())
        else:
            shard = reload_shard(self._newest, spec, self._source, release=release)
        return shard, self._source.bytes_read - before

    def _separator_id(self) -> int | None:
        return load_tokenizer(self._setup.session.model).separator_id if self._layout.family.has_token_types else None

    def _keep(self, command: Keep) -> None:
        with self._loading:
            for plan in [plan for plan in self._holdings if plan not in command.plans]:
                del self._holdings[plan]
            if not self._holdings:
                self._newest = None
        release_free_memory()

    # Requests.

    def _join(self, command: Join) -> Joined:
        self._leave()
        members = command.members
        context = replace(self._context, rank=members.index(self._context.rank), world_size=len(members))
        try:
            group = open_group(
                context,
                self._setup.timeout_s,
                name=f"epoch-{command.epoch}",
                is_wanted=lambda: command.epoch > self._given_up,
            )
            session = InferenceSession(self._context, self._setup.session, group, devices=members, layout=self._layout, pacer=self._pacer)
        except (RuntimeSetupError, RuntimeError) as error:
            self._leave()
            return Joined(command.epoch, str(error).splitlines()[0])
        session.programs = self._programs
        session.slow_down(self._slow_down)
        self._session, self._epoch = session, command.epoch
        session.slow_down(self._slow_down)  # a change in between is not lost
        return Joined(command.epoch)

    def _leave(self) -> None:
        session, self._session, self._epoch = self._session, None, -1
        if session is not None:
            session.__exit__()
        close_group()

    def _serve(self, command: Serve) -> Served | Failed:
        session, holding = self._session, self._holdings.get(command.plan)

        def failed(error: str, *, is_peers: bool) -> Failed:
            return Failed(command.number, command.attempt, command.epoch, error, is_peers)

        if session is None or self._epoch != command.epoch or holding is None:
            return failed(f"It is in group {self._epoch}, not {command.epoch}, and has plans {sorted(self._holdings)}.", is_peers=True)
        late_s, paced_s = session.pacer.late_s, session.pacer.paced_s
        self._serving = command
        self._pacer.forget()
        try:
            answer: Answer = session.answer(holding, command.request)
        except DeviceLostError as error:
            return failed(str(error), is_peers=True)
        except WorkbenchError as error:
            return failed(str(error), is_peers=False)
        except RuntimeError as error:  # gloo's own
            return failed(str(error), is_peers=True)
        self._pacer.tell()
        return Served(
            command.number,
            command.attempt,
            command.plan,
            None if answer.output is None else answer.output.numpy(),
            sum(answer.busy_s().values()),
            answer.start_s,
            answer.end_s,
            session.pacer.late_s - late_s,
            session.pacer.paced_s - paced_s,
        )

    def _report(self, blocks: dict[int, float]) -> None:
        assert self._serving is not None
        self._context.publish(BlockReport(self._serving.number, self._serving.plan, blocks))

    def _probe(self, command: Probe) -> Probed:
        """Compute a feed-forward block of some tokens, a few times, by itself and without the model's weights."""
        shape = self._layout.stacks[0]
        hidden = torch.rand(command.detail, shape.hidden_size)
        up = torch.rand(shape.hidden_size, shape.columns)
        host = self._setup.session.host
        expected_s = 0.0
        if self._is_paced and host is not None:
            costs = host.costs[0][0].scaled(1 / (self._context.device.host_share or 1.0))
            expected_s = sum(costs.seconds(kind, command.detail, shape.columns) for kind in ("UP", "DOWN"))
        pacer = Pacer(self._slow_down, dilation=self._context.dilation)
        rounds = [pacer.run(lambda: (hidden @ up) @ up.T, expected_s) for _ in range(_PROBE_ROUNDS)]
        seconds = rounds[-1].end_s - rounds[0].start_s
        if expected_s > 0:
            return Probed((seconds - pacer.late_s) / self._context.dilation / (_PROBE_ROUNDS * expected_s))
        self._fastest_probe_s = min(seconds, self._fastest_probe_s or seconds)
        return Probed(seconds / self._fastest_probe_s)
