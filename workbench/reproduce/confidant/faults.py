"""What a device that is lost, or leaves on notice, costs at the paper's size (Confidant, section 5.4, Table 7)."""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.costs import Spec
from workbench.core.plan import Plan, Share, Stage, homes_of, with_backups
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.serial import read_toml
from workbench.methods.training.backups import substitution
from workbench.profiler.analytic import analytic_profile
from workbench.reproduce.confidant.testbed import PAPER, description
from workbench.reproduce.items import Item
from workbench.reproduce.result import Number, Result, Settings, paper_folder, printed
from workbench.runtime.devices import PING_EVERY_S, SILENCE_S
from workbench.schedules import PlanCosts, asynchronous_1f1b, insert_transfers
from workbench.schedules.moves import moves
from workbench.schedules.plan_costs import StashingCosts
from workbench.simulator import simulate

MODEL, TRAINING, QUITTING, IDLE = "BERT-Base", 3, 1, 3
MBIT = 125_000
LATENCY_S = 2e-3
"""One way, over a wireless network."""


class Phones:
    """Three phones that train and two idle ones, all alike.  batch, tokens: of a mini-batch."""

    def __init__(self, *, flops_per_s: float, bytes_per_s: float, batch: int, tokens: int, technique: Any = "full") -> None:
        link = Link(bytes_per_s=bytes_per_s, latency_s=LATENCY_S)
        phones = tuple(Device(name=f"phone {at}", flops_per_s=flops_per_s, memory_bytes=8 * 10**9, link=link) for at in range(5))
        self.cluster, self._batch, self._tokens = Cluster(name="five phones", devices=phones), batch, tokens
        sizes: dict[str, Any] = {"batch_sizes": (batch,), "sequence_lengths": (tokens,)}
        self.profile: Profile = analytic_profile(description(MODEL), self.cluster, technique=technique, **sizes)

    def plan(self, *ranks: int) -> Plan:
        """Return as many blocks for each of some devices."""
        each = self.profile.num_layers // len(ranks)
        shares = [(Share(rank=rank, samples=self._batch),) for rank in ranks]
        stages = tuple(Stage(start=at * each, stop=(at + 1) * each, shares=own) for at, own in enumerate(shares))
        return Plan(method="confidant", stages=stages, micro_batch_size=self._batch, num_micro_batches=1)

    def trained_s(self, plan: Plan, count: int) -> float:
        """Return the seconds of some mini-batches through an empty pipeline."""
        sizes, lengths = (self._batch,) * count, (self._tokens,) * count
        costs = StashingCosts(PlanCosts(self.profile, self.cluster, plan, sizes=sizes, lengths=lengths))
        schedule = insert_transfers(asynchronous_1f1b(plan, count, world_size=self.cluster.world_size))
        return simulate(Program.on(self.cluster, schedule, costs), memory=False).makespan_s

    def moved_s(self, before: Plan, after: Plan, *, lost: int | None = None) -> float:
        """Return the seconds in which the weights come to their new places; of a lost device, from the next one, which keeps a copy."""
        layers = self.profile.layers[0]
        specs = {f"layer {at}": Spec((one.frozen_bytes + one.trainable_bytes,), "uint8") for at, one in enumerate(layers)}
        owners = {name: (at,) for at, name in enumerate(specs)}
        held = with_backups(homes_of(before, owners), sorted(before.busy_ranks)) if lost is not None else homes_of(before, owners)
        held = {name: tuple(rank for rank in ranks if rank != lost) for name, ranks in held.items()}
        return sum(simulate(one.program, memory=False).makespan_s for one in moves(homes_of(after, owners), held, specs, self.cluster))

    def capacity_s(self) -> float:
        """Return the seconds of a computing capacity vector: 1 to L blocks, forward."""
        forward = [one.forward_s(self._batch, self._tokens) for one in self.profile.layers[0]]
        return sum(sum(forward[:count]) for count in range(1, len(forward) + 1))


def table7(item: Item, settings: Settings) -> Result:
    """Predict every part with two constants, which are fitted to one part each."""
    constants, paper = read_toml(paper_folder(PAPER) / "constants.toml")["table7"], printed(PAPER, "table7")
    made = partial(Phones, **constants)
    phones = made()
    before, fewer = phones.plan(0, 1, 2), phones.plan(0, 2)
    after = before.renumbered({0: 0, QUITTING: IDLE, 2: 2})
    in_flight = TRAINING  # mini-batches: the first stage has a version of its weights for each
    passive = {
        "Detection": SILENCE_S + PING_EVERY_S / 2,
        "Weight redistribution": phones.moved_s(before, fewer, lost=QUITTING),
        "Retrain": phones.trained_s(fewer, in_flight),
    }
    proactive = {
        "Search": phones.capacity_s() + 2 * LATENCY_S,
        "Substitution": phones.moved_s(before, after),
        "Retrain": phones.trained_s(after, in_flight),
    }
    seconds = {"passive": passive | {"Recovery": sum(passive.values())}}
    seconds["proactive"] = proactive | {"Recovery": proactive["Retrain"] + 2 * LATENCY_S}  # a notice, and the commit message

    def ours(kind: str, part: str) -> Number:
        return 1e3 * seconds[kind][part]

    pace_s = (phones.trained_s(before, 36) - phones.trained_s(before, 24)) / 12
    rows = []
    for technique in ("full", "lora"):
        for rate in (constants["bytes_per_s"] / MBIT, 100.0, 1000.0):
            world = made(bytes_per_s=rate * MBIT, technique=technique)
            price = substitution(world.cluster, world.profile, before, after)
            rows.append((technique, rate, price.loading_s, price.moving_s, price.loading_s + world.trained_s(before, 32) + price.moving_s))
    stale = proactive["Substitution"] / pace_s
    parts = sum(paper["passive", part] for part in passive)
    return item.result(
        item.compare(ours),
        tables={"exact": rows},
        holds={
            "faster": seconds["proactive"]["Recovery"] < seconds["passive"]["Recovery"],
            "detection": paper["passive", "Detection"] > paper["proactive", "Search"],
            "sum": parts == paper["passive", "Recovery"],
            "alike": abs(passive["Retrain"] / proactive["Retrain"] - 1) < 0.1,
            "exact": stale < 1,
        },
        mbit=constants["bytes_per_s"] / MBIT,
        gflops=constants["flops_per_s"] / 1e9,
        stale=stale,
        pace=pace_s,
        detection=paper["passive", "Detection"],
        search=paper["proactive", "Search"],
        parts=parts,
        whole=paper["passive", "Recovery"],
        ratio=passive["Retrain"] / proactive["Retrain"],
        printed_ratio=paper["passive", "Retrain"] / paper["proactive", "Retrain"],
        ours_passive=seconds["passive"]["Recovery"],
        ours_proactive=seconds["proactive"]["Recovery"],
    )
