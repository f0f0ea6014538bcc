"""A quick estimate of a ring's seconds, by which RingAda's planner compares assignments.

A mini-batch with some unfrozen layers takes the longer of two times: the computation of the busiest device, or the
unfrozen part.
Without stale weights its first forward pass waits for the last update.  In that part the micro-batches of a mini-batch
form a pipeline.
A stage waits for the first micro-batch from below and passes all of them there and back.  It is idle while the first is
above it, unless forward passes of the others fill that time.  Then the last micro-batch goes down.
On shared air it also takes no less than all its messages, because no two of them pass at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from workbench.core.costs import on_air_s
from workbench.core.plan import named_layers
from workbench.core.profile import Profile
from workbench.planners.memory import Demand, optimizer_bytes
from workbench.planners.orders import device_types
from workbench.planners.problem import Problem


class RingEstimate:
    """A quick estimate of the simulated seconds of a mini-batch, averaged over a training: within 2 %, by tests.

    depths: number of unfrozen layers -> mini-batches of the run with that number; cached: those that read the frozen
    layers' output from a cache.  rest_bytes: what a device needs in addition to its layers.  has_side: see
    methods.ringada.schedule.ring_round.
    """

    def __init__(
        self,
        problem: Problem[Profile],
        *,
        depths: Mapping[int, int],
        cached: Mapping[int, int] | None = None,
        rest_bytes: int = 0,
        has_side: bool = False,
    ) -> None:
        profile, cluster, sequence_length = problem.profile, problem.cluster, problem.sequence_length
        self.profile, self.cluster, self.micro_batches, self._rest_bytes = (
            profile,
            cluster,
            problem.micro_batches,
            rest_bytes,
        )
        self.micro_batch_size = problem.batch_size // problem.micro_batches
        size, layers = -(-problem.batch_size // problem.micro_batches), profile.num_layers
        self._workspaces = [
            max(layer.workspace_bytes(size, problem.longest) for layer in row) for row in profile.layers
        ]
        self._moments = [(depth, False) for depth in depths] + [(depth, True) for depth in cached or {}]
        firsts = np.array([layers - depth for depth, _ in self._moments])  # the lowest unfrozen layer of each depth
        counts = self.counts(depths, cached or {})
        self._weights = counts / counts.sum()
        is_cached = np.array([caches for _, caches in self._moments])
        index = np.arange(layers)[:, None]
        is_frozen, is_lowest = index < firsts, index == firsts  # (layers, depths)

        def summed(cells: np.ndarray) -> np.ndarray:
            return np.concatenate([np.zeros((1, cells.shape[1])), np.cumsum(cells, axis=0)])

        frozen, forward, unfrozen, steps = [], [], [], []
        for rank in range(profile.world_size):
            seconds = {
                kind: np.array(profile.layer_seconds(rank, kind, size, sequence_length))[:, None]
                for kind in ("LOAD", *"PFBA")
            }
            step = np.array(profile.layer_seconds(rank, "STEP", 1, 1))[:, None]
            there_and_back = seconds["F"] + np.where(is_lowest, seconds["A"], seconds["B"])
            read = np.where(is_lowest & is_cached, seconds["LOAD"], 0.0)
            ahead = np.where(is_frozen & ~is_cached, seconds["P"], read)
            if has_side:
                load_s = np.where(is_frozen, 0.0, seconds["LOAD"]) if is_cached.any() else 0.0
                ahead = np.where(is_cached, load_s, seconds["P"] + np.where(is_frozen, seconds["F"], 0.0))
            frozen.append(summed(ahead))
            forward.append(summed(np.where(is_frozen, 0.0, seconds["F"])))
            unfrozen.append(summed(np.where(is_frozen, 0.0, there_and_back)))
            steps.append(summed(np.where(is_frozen, 0.0, step)))
        # (devices, layers + 1, depths): of the first 0, 1, 2, ... layers.
        self._frozen, self._forward, self._unfrozen, self._step = map(np.stack, (frozen, forward, unfrozen, steps))
        self._firsts = firsts
        nbytes = profile.layers[0][0].output_bytes(size, sequence_length)
        world = range(cluster.world_size)
        self._crossing = np.array(
            [[0.0 if a == b else cluster.link(a, b).transfer_s(nbytes) for b in world] for a in world]
        )
        self._on_air = np.array(
            [[0.0 if a == b else on_air_s(cluster, [(a, b, nbytes)]) for b in world] for a in world]
        )
        self._skips = is_cached & (not has_side)  # whether the frozen layers' hops fall away, by depth
        self._bytes = self._range_bytes(size, problem.longest)
        budgets = zip(cluster.devices, self._workspaces, strict=True)
        self._budgets = np.array([device.memory_bytes - rest_bytes - workspace for device, workspace in budgets])

    @cached_property
    def types(self) -> tuple[int, ...]:
        """Return each rank's type (see orders.device_types)."""
        return device_types(self.profile, self.cluster)

    def demand(self, rank: int, start: int, stop: int) -> Demand:
        """Return the memory for layers [start, stop) on a device, all of them unfrozen, and for all else on it."""
        nbytes = int(self._bytes[rank, start, stop]) + self._rest_bytes + self._workspaces[rank]
        return Demand(rank, f"{named_layers(start, stop)} with embedding and head", nbytes)

    def fits(self, rank: int) -> np.ndarray:
        """Return whether layers [x, y) fit on a device, (layers + 1, layers + 1); none if x >= y."""
        return np.triu(self._bytes[rank] <= self._budgets[rank], 1)

    def counts(self, depths: Mapping[int, int], cached: Mapping[int, int]) -> np.ndarray:
        """Return the mini-batches of some rounds for each depth of the training, (depths,).  depths, cached: see the
        class.
        """
        return np.array([(cached if caches else depths).get(depth, 0) for depth, caches in self._moments])

    def __call__(self, orders: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        """Return the seconds of a mini-batch in each ring, averaged over the training (see total_s)."""
        return self.total_s(orders, cuts, self._weights)

    def total_s(self, orders: np.ndarray, cuts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the seconds of so many mini-batches of each depth (see counts) in rings, (rings,); infinite if a
        device's memory is too small.

        orders: (rings, devices) ranks.  cuts: (rings, devices + 1); device orders[i, s] has layers [cuts[i, s], cuts[i,
        s + 1]).
        """
        starts, stops = cuts[:, :-1], cuts[:, 1:]
        tables = self._frozen, self._forward, self._unfrozen, self._step
        frozen, forward, unfrozen, step = (each[orders, stops] - each[orders, starts] for each in tables)
        count = self.micro_batches  # above: (rings, devices, depths)
        busiest = (count * (frozen + unfrozen) + step).max(axis=1)
        is_open = stops[:, :, None] > self._firsts
        # A hidden state goes from stage to stage and home to the initiator; its gradient goes the same way back.
        senders, receivers = orders[:, :-1], orders[:, 1:]
        between = self._crossing[senders, receivers] + self._crossing[receivers, senders]
        home = (self._crossing + self._crossing.T).mean(axis=1)[orders[:, -1:]]
        passes = unfrozen + np.concatenate([between, home], axis=1)[:, :, None] * is_open
        below = np.cumsum(passes, axis=1) - passes
        above = passes.sum(axis=1, keepdims=True) - below - unfrozen
        least = (below + count * unfrozen + np.maximum(0.0, above - (count - 1) * forward)).max(axis=1)
        most = passes.sum(axis=1) + (count - 1) * unfrozen.max(axis=1)
        once = 0.75 * least + 0.25 * most + step.max(axis=1)
        seconds = np.maximum.reduce([busiest, once, count * self._messages_s(orders, is_open)]) @ counts
        is_over = self._bytes[orders, starts, stops] > self._budgets[orders]
        return np.where(is_over.any(axis=1), np.inf, seconds)

    def _messages_s(self, orders: np.ndarray, is_open: np.ndarray) -> np.ndarray:
        """Return the seconds for which a micro-batch's messages occupy shared air, (rings, depths); 0 on a switch.

        is_open: whether a stage has an unfrozen layer, (rings, devices, depths).
        """
        air = self._on_air
        forward_s, backward_s = air[orders[:, :-1], orders[:, 1:]], air[orders[:, 1:], orders[:, :-1]]
        to_first, from_last = air.mean(axis=0)[orders[:, 0]], air.mean(axis=1)[orders[:, -1]]
        from_home = air.mean(axis=0)[orders[:, -1]]
        passed = is_open[:, :-1]
        forward = np.where(self._skips, passed, True) * forward_s[:, :, None]
        ends = (from_last + from_home)[:, None] + np.where(self._skips, 0.0, to_first[:, None])
        hops: np.ndarray = (forward + passed * backward_s[:, :, None]).sum(axis=1)
        return hops + ends

    def _range_bytes(self, size: int, length: int) -> np.ndarray:
        """Return the bytes of layers [start, stop) on each device, all of them unfrozen, with their contexts, (devices,
        layers + 1, layers + 1).
        """

        def summed(values: list[int]) -> np.ndarray:
            total = np.concatenate([[0], np.cumsum(values)])
            return np.triu(total - total[:, None])

        needs = []
        for row in self.profile.layers:
            contexts = self.micro_batches * summed([layer.context_bytes(size, length) for layer in row])
            trainable = summed([layer.trainable_bytes for layer in row])
            weights = summed([layer.frozen_bytes for layer in row]) + 2 * trainable
            needs.append(weights + optimizer_bytes(self.profile, trainable) + contexts)
        return np.stack(needs)
