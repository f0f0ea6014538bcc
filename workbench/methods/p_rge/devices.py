"""The devices' processes as the coordinator sees them: which take commands, which have gone, which come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.methods.p_rge.faults import StepFault
from workbench.methods.p_rge.messages import Slow, Stop
from workbench.methods.p_rge.predict import Predictor
from workbench.methods.p_rge.server import ServerSetup, serve_rank
from workbench.methods.p_rge.session import RankJob
from workbench.runtime.engine_service import EngineService


class Generation(NamedTuple):
    """Some steps that the same devices do under the same plan.  members: their ranks in the cluster; plan, job: by their places here."""

    number: int
    members: tuple[int, ...]
    plan: Plan
    job: RankJob
    predictor: Predictor


class Devices:
    """ready: ranks whose job runs and takes commands."""

    def __init__(self, service: EngineService, cluster: Cluster, model: str) -> None:
        self._service, self._cluster, self._model = service, cluster, model
        self.ready: set[int] = set()
        self._known: set[int] = set()
        self._gone: set[int] = set()
        self.awaited: set[int] = set()
        """Ranks that are being started anew."""
        self._factors: dict[int, float] = {}

    @property
    def all_ready(self) -> bool:
        """Return whether every device that has not gone takes commands."""
        return len(self.ready) + len(self._gone) == self._cluster.world_size

    def start(self) -> None:
        """Start the job of every device."""
        for rank in range(self._cluster.world_size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        setup = ServerSetup(model=self._model, address=self._service.address, slow_down=self._factors.get(rank, 1.0))
        self._service.start(rank, serve_rank, setup)

    def came(self, rank: int) -> bool:
        """Note that a device takes commands; return whether it did before."""
        is_back = rank in self._known
        self.ready.add(rank)
        self.awaited.discard(rank)
        self._known.add(rank)
        return is_back

    def lost(self, rank: int) -> None:
        """Note that a device has gone."""
        self.ready.discard(rank)
        self.awaited.discard(rank)
        self._gone.add(rank)

    def restarted(self, rank: int, error: BaseException | None) -> None:
        """Give a device that was started anew its job; one that could not be stays away."""
        if error is None:
            self._gone.discard(rank)
            self._start(rank)
        else:
            self.awaited.discard(rank)

    def command(self, ranks: Iterable[int], content: Any) -> None:
        """Send a command to some devices; those that have gone do not get it."""
        for rank in ranks:
            if rank in self.ready:
                self._service.command(rank, content)

    def inject(self, fault: StepFault) -> None:
        """Let a fault befall a device."""
        if fault.kind == "slow":
            self._factors[fault.rank] = fault.factor
            self.command((fault.rank,), Slow(fault.factor))
        elif fault.kind == "back":
            if fault.rank in self._gone:
                self.awaited.add(fault.rank)
                self._service.restart(fault.rank)
        elif fault.rank in self.ready:
            (self._service.kill if fault.kind == "kill" else self._service.freeze)(fault.rank)

    def stop(self) -> None:
        """Tell all jobs to end."""
        self.command(tuple(self.ready), Stop())
