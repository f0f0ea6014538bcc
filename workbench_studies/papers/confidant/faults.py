"""The cost of a lost device, or of one that leaves on notice, at the paper's size (Confidant, section 5.4, Table 7)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link
from workbench.core.costs import Spec
from workbench.core.plan import Plan, homes_of, one_device_stages, with_neighbours
from workbench.methods.training.state_costs import Substitution, substitution
from workbench.runtime.watch import PING_EVERY_S, SILENCE_S
from workbench.schedules.moves import moves
from workbench.simulator import makespan_s
from workbench_studies.papers.confidant.testbed import PAPER, mini_batches_s, pace_s, profile_of
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Number, Result, read_constants

MODEL, TRAINING, QUITTING, IDLE = "BERT-Base", 3, 1, 3
LATENCY_S = 2e-3
"""One way, over a wireless network."""


class Phones:
    """Three phones that train and two idle ones, all identical.  batch, tokens: a mini-batch's samples and their
    tokens.
    """

    def __init__(
        self, *, flops_per_s: float, bytes_per_s: float, batch: int, tokens: int, technique: Any = "full"
    ) -> None:
        link = Link(bytes_per_s=bytes_per_s, latency_s=LATENCY_S)
        phones = tuple(
            Device(name=f"phone {number}", flops_per_s=flops_per_s, memory_bytes=8 * 10**9, link=link)
            for number in range(5)
        )
        self.cluster, self._batch, self._tokens = Cluster(name="five phones", devices=phones), batch, tokens
        self.profile = profile_of(MODEL, self.cluster, batch=batch, tokens=tokens, technique=technique)

    def plan(self, *ranks: int) -> Plan:
        """Return a plan with equal blocks for some devices."""
        cuts = range(0, self.profile.num_layers + 1, self.profile.num_layers // len(ranks))
        stages = one_device_stages(ranks, cuts, self._batch)
        return Plan(method="confidant", stages=stages, micro_batch_size=self._batch, num_micro_batches=1)

    def trained_s(self, plan: Plan, count: int) -> float:
        """Return the seconds of some mini-batches through an empty pipeline."""
        return mini_batches_s(self.profile, self.cluster, plan, tokens=self._tokens, count=count)

    def pace_s(self, plan: Plan) -> float:
        """Return the seconds of a mini-batch in the long run."""
        return pace_s(self.profile, self.cluster, plan, tokens=self._tokens, first=24, count=12)

    def moved_s(self, before: Plan, after: Plan, *, lost: int | None = None) -> float:
        """Return the seconds to move the weights to their new places; a lost device's come from the next one, which has
        a copy.
        """
        layers = self.profile.layers[0]
        specs = {
            f"layer {index}": Spec((layer.frozen_bytes + layer.trainable_bytes,), "uint8")
            for index, layer in enumerate(layers)
        }
        owners = {name: (index,) for index, name in enumerate(specs)}
        homes = (
            with_neighbours(homes_of(before, owners), sorted(before.busy_ranks))
            if lost is not None
            else homes_of(before, owners)
        )
        homes = {name: tuple(rank for rank in ranks if rank != lost) for name, ranks in homes.items()}
        return sum(makespan_s(move.program) for move in moves(homes_of(after, owners), homes, specs, self.cluster))

    def capacity_s(self) -> float:
        """Return the seconds of a computing capacity vector: 1 to L blocks, forward."""
        forward = [layer.forward_s(self._batch, self._tokens) for layer in self.profile.layers[0]]
        return sum(sum(forward[:count]) for count in range(1, len(forward) + 1))


def table7(item: Item) -> Result:
    """Predict every part with two constants, each fitted to one part."""
    constants, paper = read_constants(PAPER, dict[str, Any], "table7"), item.printed
    phones_of = partial(Phones, **constants)
    phones = phones_of()
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
    seconds["proactive"] = proactive | {
        "Recovery": proactive["Retrain"] + 2 * LATENCY_S
    }  # a notice, and the commit message

    def ours(kind: str, part: str) -> Number:
        return 1e3 * seconds[kind][part]

    each_s = phones.pace_s(before)
    rows = []
    for technique in ("full", "lora"):
        for rate in (constants["bytes_per_s"] / MEGABIT_BYTES, 100.0, 1000.0):
            world = phones_of(bytes_per_s=rate * MEGABIT_BYTES, technique=technique)
            price = substitution(world.cluster, world.profile, before, after)
            rows.append(
                (
                    technique,
                    rate,
                    price.loading_s,
                    price.still_s,
                    price.loading_s + world.trained_s(before, 32) + price.still_s,
                )
            )
    stale = proactive["Substitution"] / each_s
    parts = sum(paper["passive", part] for part in passive)
    return item.result(
        item.compare(ours),
        tables={"exact": rows},
        mbit=constants["bytes_per_s"] / MEGABIT_BYTES,
        gflops=constants["flops_per_s"] / 1e9,
        stale=stale,
        pace=each_s,
        detection=paper["passive", "Detection"],
        search=paper["proactive", "Search"],
        parts=parts,
        whole=paper["passive", "Recovery"],
        ratio=passive["Retrain"] / proactive["Retrain"],
        printed_ratio=paper["passive", "Retrain"] / paper["proactive", "Retrain"],
        ours_passive=seconds["passive"]["Recovery"],
        ours_proactive=seconds["proactive"]["Recovery"],
    )


STEPS, DEVICES, SEEDS = 10_000, 1_000, range(5)
STAYS_MIN = (2, 5, 10, 30, 60, 180, 600)
BACKUP_EVERY, EPOCH = 10, 1_000
DAY_S, SWING, BEGINS_S = 86_400.0, 0.9, 28_800.0
"""In a diurnal trace departures are most frequent at noon and returns at midnight, by this share of the mean; runs
begin at eight."""
GIVE_UP = 20.0
"""A run is stopped when it has taken this multiple of an undisturbed run's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """All in seconds.  step_s: a mini-batch.  backup_s: what backups add to it.  loss_s: a loss without the repeated
    steps.
    """

    step_s: float
    backup_s: float
    loss_s: float
    substitution: Substitution

    @property
    def alpha_s(self) -> float:
        """Return how long in advance a leaving device must give notice."""
        return self.substitution.loading_s + self.step_s + self.substitution.still_s


class Crowd:
    """Devices that come and go: the times present and absent are exponential with the same mean.

    swing: how far the rates rise and fall in a day, as a share of their mean; 0: they are constant.
    """

    def __init__(self, mean_s: float, seed: int, swing: float = 0.0) -> None:
        self._draw, self._mean_s, self._swing = random.Random(seed), mean_s, swing
        self._is_there = [self._draw.random() < 0.5 for _ in range(DEVICES)]
        self.until_s = [self._until_s(0.0, is_there) for is_there in self._is_there]

    def _until_s(self, now_s: float, is_there: bool) -> float:
        """Return when a device changes next, by thinning a process of the highest rate."""
        while True:
            now_s += self._draw.expovariate((1 + self._swing) / self._mean_s)
            noon = -math.cos(2 * math.pi * (now_s + BEGINS_S) / DAY_S)
            rate = 1 + self._swing * (noon if is_there else -noon)
            if not self._swing or self._draw.random() * (1 + self._swing) <= rate:
                return now_s

    def another(self, now_s: float, members: Sequence[int]) -> int:
        """Return a device that is present now and not a member."""
        while True:
            device = self._draw.randrange(DEVICES)
            while self.until_s[device] <= now_s:
                self._is_there[device] = not self._is_there[device]
                self.until_s[device] = self._until_s(self.until_s[device], self._is_there[device])
            if self._is_there[device] and device not in members:
                return device

    def gives_notice(self, share: float) -> bool:
        """Return whether a departure is one of those with a notice."""
        return self._draw.random() < share


def goodput_of(prices: Prices, mean_s: float, seed: int, *, keeps: bool, noticed: float, swing: float = 0.0) -> float:
    """Return an undisturbed run's seconds over those of a run on three of the devices, any of which may leave.

    keeps: whether devices back each other up; otherwise a loss costs the steps since the last epoch.  noticed: the
    share of departures on notice, for which idle devices step in.  swing: see Crowd.
    """
    crowd, members = Crowd(mean_s, seed, swing), list[int]()
    for _ in range(TRAINING):
        members.append(crowd.another(0.0, members))
    now_s, step, each_s = 0.0, 0, prices.step_s + (prices.backup_s if keeps else 0.0)
    recovered_s, lost = -1.0, -1  # when the last loss was repaired, and the place at which it occurred
    while now_s < GIVE_UP * STEPS * prices.step_s:
        place = min(range(TRAINING), key=lambda place: crowd.until_s[members[place]])
        leaves_s = crowd.until_s[members[place]]
        if now_s + (STEPS - step) * each_s <= leaves_s:
            return STEPS * prices.step_s / (now_s + (STEPS - step) * each_s)
        if leaves_s - now_s >= prices.alpha_s and crowd.gives_notice(noticed):
            step += int((leaves_s - now_s - prices.substitution.still_s) / each_s)
            now_s = leaves_s
        else:
            step += max(0, int((leaves_s - now_s) / each_s))
            both = leaves_s < recovered_s and (place - lost) % TRAINING != 0  # any two of three devices are neighbours
            step -= step % (BACKUP_EVERY if keeps and not both else EPOCH)
            now_s = recovered_s = max(now_s, leaves_s) + prices.loss_s
            lost = place
        members[place] = crowd.another(now_s, members)
    return step * prices.step_s / now_s


def goodput(item: Item) -> Result:
    """Simulate runs on devices that come and go, by the mean time that they stay."""
    constants = read_constants(PAPER, dict[str, Any], "table7")
    phones = Phones(**constants | {"bytes_per_s": 100 * MEGABIT_BYTES, "technique": "lora"})
    before = phones.plan(0, 1, 2)
    price = substitution(phones.cluster, phones.profile, before, before.renumbered({0: 0, QUITTING: IDLE, 2: 2}))
    step_s = phones.pace_s(before)
    loss_s = SILENCE_S + PING_EVERY_S / 2 + price.loading_s + price.moving_s + phones.trained_s(before, 1) - step_s
    prices = Prices(step_s=step_s, backup_s=price.keeping_s / BACKUP_EVERY, loss_s=loss_s, substitution=price)
    ways: dict[str, dict[str, Any]] = {
        "proactive: all on notice": {"keeps": True, "noticed": 1.0},
        "proactive: half on notice": {"keeps": True, "noticed": 0.5},
        "passive": {"keeps": True, "noticed": 0.0},
        "none": {"keeps": False, "noticed": 0.0},
    }

    traces = {"constant": 0.0, "diurnal": SWING}
    goodputs = {
        (way, trace, stay): 100 * fmean(goodput_of(prices, 60.0 * stay, seed, swing=swing, **how) for seed in SEEDS)
        for way, how in ways.items()
        for trace, swing in traces.items()
        for stay in STAYS_MIN
    }
    names = ("proactive: all on notice", "passive", "none")
    proactive, passive, no_replacement = (
        {stay: goodputs[way, "constant", stay] for stay in STAYS_MIN} for way in names
    )
    by_day = {way: goodputs[way, "diurnal", STAYS_MIN[0]] for way in ways}
    return item.result(
        [item.cell((way, trace, f"{stay}"), None, value) for (way, trace, stay), value in goodputs.items()],
        series={
            f"{way}, {trace}": tuple((float(stay), goodputs[way, trace, stay]) for stay in STAYS_MIN)
            for way in ways
            for trace in traces
        },
        steps=STEPS,
        devices=DEVICES,
        every=BACKUP_EVERY,
        epoch=EPOCH,
        step=step_s,
        loss=loss_s,
        moving=price.still_s,
        backup=price.keeping_s,
        alpha=prices.alpha_s,
        least=STAYS_MIN[0],
        most=STAYS_MIN[-1],
        passive=passive[STAYS_MIN[0]],
        proactive=proactive[STAYS_MIN[0]],
        day_proactive=by_day[names[0]],
        day_passive=by_day["passive"],
        passive_most=passive[STAYS_MIN[-1]],
        none_most=no_replacement[STAYS_MIN[-1]],
    )
