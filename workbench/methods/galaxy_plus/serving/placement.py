"""Which plan's weights are on the devices, and which devices can compute together: both are changed beside the requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workbench.core.errors import RuntimeSetupError
from workbench.core.inference import InferencePlan
from workbench.core.program import require_same
from workbench.methods.galaxy_plus.serving import messages as m
from workbench.models.sharding import ModelLayout, ShardSpec, added_bytes, shard_spec
from workbench.runtime.devices import Fleet


@dataclass(slots=True)
class Loading:
    """A plan whose weights are being read, or are there (left: the devices that have not told yet).  seconds: what it took.

    program: the rank that finished first, and its program's text.
    """

    plan: int
    specs: dict[int, ShardSpec]
    left: set[int]
    since_s: float
    seconds: float = 0.0
    read_bytes: int = 0
    program: tuple[int, str] | None = None


@dataclass(slots=True)
class Group:
    """Devices that compute together.  joined: of those asked to; is_whole: all have, and none was lost since."""

    epoch: int = -1
    members: tuple[int, ...] = ()
    joined: frozenset[int] = frozenset()
    is_whole: bool = False
    is_forming: bool = False


class Placement:
    """lengths: of the sequences to come, in each stack.  room: bytes that each device has for weights; without an entry, enough."""

    def __init__(self, fleet: Fleet, layout: ModelLayout, lengths: tuple[int, ...], room: Mapping[int, int]) -> None:
        self._fleet, self._layout, self._stacks, self._lengths, self._room = fleet, layout, layout.stacks, lengths, room
        self.group = Group()
        self.loading: Loading | None = None
        self._held: dict[int, ShardSpec] = {}
        self._num_groups = 0

    @property
    def loaded(self) -> int:
        """Return the plan whose weights are there beside those of the one that serves, -1 if there is none."""
        return self.loading.plan if self.loading is not None and not self.loading.left else -1

    def _specs(self, plan: InferencePlan) -> dict[int, ShardSpec]:
        held = [self._held.get(rank) for rank in plan.ranks]
        return {rank: shard_spec(plan, position, self._stacks, held=held) for position, rank in enumerate(plan.ranks)}

    def is_tight(self, plan: InferencePlan) -> bool:
        """Return whether some device has no room for this plan's weights beside those that it holds."""
        for rank, spec in self._specs(plan).items():
            held = self._held.get(rank)
            if held is not None and rank in self._room:
                both = added_bytes(self._layout, held, None) + added_bytes(self._layout, spec, held)
                if both > self._room[rank]:
                    return True
        return False

    def is_loading(self, index: int, plan: InferencePlan) -> bool:
        """Return whether a plan's weights are being read or there already, or cannot be read yet: a device is not ready."""
        return (self.loading is not None and self.loading.plan == index) or not self._fleet.ready.issuperset(plan.ranks)

    def load(self, index: int, plan: InferencePlan, *, in_place: bool = False) -> None:
        """Have a plan's weights read, unless it is loading; any other plan is given up.  in_place: see `Load`."""
        if self.is_loading(index, plan):
            return
        specs = self._specs(plan)
        self.loading = Loading(index, specs, set(plan.ranks), time.monotonic())
        self._fleet.command(plan.ranks, m.Load(index, plan, specs, self._lengths, in_place))

    def was_loaded(self, rank: int, told: m.Loaded) -> Loading | None:
        """Take a device's word; return the loading if with it all have finished.

        Raises RuntimeSetupError if a device cannot load the first plan, ScheduleError if two devices have different programs.
        """
        loading = self.loading
        if loading is None or loading.plan != told.plan or rank not in loading.left:
            return None
        if told.error and not self._held:
            raise RuntimeSetupError(
                f"Device '{self._fleet.name(rank)}' was to load its part of plan {told.plan}.",
                told.error,
                "Give it more memory, or leave it out.",
            )
        if told.error:
            self._fleet.end(rank)  # the others go on without it
            return None
        first, text = loading.program = loading.program or (rank, told.program)
        require_same(text, told.program, ranks=(first, rank))
        loading.left.discard(rank)
        loading.read_bytes += told.read_bytes
        loading.seconds = time.monotonic() - loading.since_s
        return None if loading.left else loading

    def switch(self) -> None:
        """Forget all weights but those of the plan that is loaded: it serves from now on."""
        assert self.loading is not None
        self._held = dict(self.loading.specs)
        for rank in self._fleet.ready:
            self._fleet.command((rank,), m.Keep((self.loading.plan,) if rank in self._held else ()))
        self.loading = None

    def form(self, ranks: Iterable[int]) -> None:
        """Let some devices form a group; they leave the one that they are in."""
        members = tuple(sorted(ranks))
        if not self._fleet.ready.issuperset(members):
            return
        self.group = Group(self._num_groups, members, is_forming=True)
        self._num_groups += 1
        self._fleet.command(members, m.Join(self.group.epoch, members))

    def has_joined(self, rank: int, told: m.Joined) -> None:
        """Take a device's word that it is in the group, or could not join: then the group is to be formed again."""
        group = self.group
        if told.epoch != group.epoch:
            return
        if told.error:
            self.group = Group()
            return
        group.joined |= {rank}
        if group.joined == frozenset(group.members):
            group.is_forming, group.is_whole = False, True

    def suits(self, ranks: Iterable[int]) -> bool:
        """Return whether these devices, and no others, are a whole group."""
        return self.group.is_whole and self.group.members == tuple(sorted(ranks))

    def break_up(self) -> None:
        """Let the group's members give up what they compute together, or that they wait for each other."""
        group = self.group
        if group.is_forming:
            self.group = Group()
        elif group.is_whole:
            group.is_whole = False
        else:
            return
        self._fleet.command(self._fleet.ready.intersection(group.members), m.Abort(group.epoch))

    def was_lost(self, rank: int) -> None:
        """Take note that a device has gone, and what it held."""
        self._held.pop(rank, None)
        if rank in self.group.members:
            self.break_up()
            self.group = Group()
        if self.loading is not None and rank in self.loading.specs:
            self.loading = None
