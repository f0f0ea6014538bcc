"""A ring all-gather as a program: simulated, and executed by emulated devices with real tensors.

Each device begins with its share of the tokens.  The shares go round the ring in tiles, and every device multiplies
tile after tile with its own part of the weights (Galaxy+, section III-D, Fig. 9).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S, TOKEN, Spec, TableCosts
from workbench.core.program import Program
from workbench.core.schedule import Op, Schedule, Value, recv, send
from workbench.core.timeline import Timeline
from workbench.runs.made_up import Contents, ContentsOf, Outputs, execute_with
from workbench.runtime.engine_starter import share_module
from workbench.runtime.engines import EngineCluster
from workbench.simulator import simulate
from workbench_labs.course.verdict import WrongAnswerError
from workbench_labs.exercises.judging import in_virtual_time

share_module(__name__)  # its functions run on devices

Rounds = Sequence[Sequence[Sequence[int]]]
"""For each round its messages: [source, destination, share]; a share is named by the device that had it first."""
Orders = Sequence[Sequence[int]]
"""For each device the shares in the order in which it multiplies them."""
Term = Callable[[Any, Any, Any, int, int], Any]
"""(x, W1, W2, start, stop) -> the term of the columns start to stop: relu(x W1[:, start:stop]) W2[start:stop, :]."""
PRODUCT, READY = "UP", "ENTER"
RUNS = 3
"""The shortest of so many counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """The values that go around the ring, and the computation.  share: rows (tokens) and columns of a device's share,
    float32.

    product_s: time of the product of a whole share, on any device; 0 leaves the products out.  tiles: number of tiles
    of a share, which have equally many rows.
    overlaps: False waits for all tiles before the first product.
    """

    rounds: Rounds
    orders: Orders
    product_s: float
    share: tuple[int, int] = (32, 64)
    tiles: int = 1
    overlaps: bool = True

    @property
    def rows(self) -> int:
        """Return the rows of a tile.  Raises WrongAnswerError if a share cannot be cut into so many."""
        if self.tiles < 1 or self.share[0] % self.tiles:
            raise WrongAnswerError(
                f"A share of {self.share[0]} tokens cannot be cut into {self.tiles} equal tiles. Choose a divisor."
            )
        return self.share[0] // self.tiles

    def numbers(self, share: int) -> range:
        """Return the numbers of a share's tiles."""
        return range(share * self.tiles, (share + 1) * self.tiles)

    def schedule(self) -> Schedule:
        """Return each device's sends, receives and products."""
        size = len(self.orders)
        ops: list[list[Op]] = [[] for _ in range(size)]
        for messages in self.rounds:
            for source, destination, share in messages:
                for number in self.numbers(share):
                    ops[source].append(send(_tile(number), source, destination))
                    ops[destination].append(recv(_tile(number), source, destination))
        everything = tuple(_tile(number) for share in range(size) for number in self.numbers(share))
        ready = () if self.overlaps else (Value("ready"),)
        outputs: list[tuple[Value, ...]] = []
        for rank, order in enumerate(self.orders if self.product_s else [()] * size):
            numbers = [number for share in order for number in self.numbers(share)]
            if ready:
                ops[rank].append(Op(READY, reads=everything, writes=ready))
            ops[rank] += [Op(PRODUCT, part=n, reads=(_tile(n), *ready), writes=(_term(n),)) for n in numbers]
            outputs.append(tuple(map(_term, numbers)) or everything)
        inputs = tuple(tuple(map(_tile, self.numbers(rank))) for rank in range(size))
        return Schedule(ops=tuple(map(tuple, ops)), inputs=inputs, outputs=tuple(outputs))

    def costs(self, **links: Any) -> TableCosts:
        """Return the costs of products and messages.  links: see TableCosts; either a cluster or a SEND's seconds."""
        tile = Spec((self.rows, self.share[1]))
        seconds = {PRODUCT: self.product_s / self.tiles, READY: 0.0} | links.pop("seconds", {})
        return TableCosts(seconds_by_kind=seconds, bytes_by_name={"hid": tile, "prod": tile, "ready": TOKEN}, **links)

    def on(self, cluster: Cluster) -> Program:
        """Return the program on a cluster's devices and links."""
        return Program.on(cluster, self.schedule(), self.costs(cluster=cluster, message_s=MESSAGE_S))

    def timeline(self, transfer_s: float) -> Timeline:
        """Return the timeline with links on which a whole share takes so long, whatever its tiles (simulated)."""
        return in_virtual_time(self.schedule(), self.costs(seconds={"SEND": transfer_s / self.tiles}))

    @property
    def alone(self) -> Gathering:
        """Return the messages alone, with whole shares."""
        return replace(self, product_s=0.0, tiles=1)


def _tile(number: int) -> Value:
    return Value("hid", part=number)


def _term(number: int) -> Value:
    return Value("prod", part=number)


def hidden_share(together: Timeline, alone: Timeline) -> float:
    """Return the share of the messages' time that products hide.

    together: products and messages.  alone: the same messages alone, with whole shares.
    """
    computing_s = max(together.busy_s(rank) for rank in range(together.world_size))
    return 1 - (together.makespan_s - computing_s) / alone.makespan_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRun:
    """A gathering, simulated and executed.  hidden_*: see hidden_share.

    largest_error: largest difference between the sum of the devices' terms and the whole network on one device, whose
    numbers are about as large as 1.  sent_bytes: what all devices together send in the executed run.  expected_bytes:
    what an all-gather sends by the formula.
    """

    simulated: Timeline
    executed: Timeline
    hidden_simulated: float
    hidden_executed: float
    largest_error: float
    sent_bytes: int
    expected_bytes: int


def run(gathering: Gathering, term: Term, cluster: Cluster, engines: EngineCluster) -> GatherRun:
    """Simulate a gathering, and execute it: every device computes its term of a feed-forward network, tile by tile.

    A device has only its own columns of W1 and rows of W2, and calls `term` with them.  The shortest of RUNS counts.
    """
    size, (rows, hidden) = len(gathering.orders), gathering.share
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(size * rows, hidden, generator=draws)
    w1 = torch.randn(hidden, 2 * hidden, generator=draws) / hidden**0.5
    w2 = torch.randn(2 * hidden, hidden, generator=draws) / (2 * hidden) ** 0.5
    contents = [
        partial(
            _contents,
            tiles={_tile(n): x[n * gathering.rows : (n + 1) * gathering.rows] for n in gathering.numbers(rank)},
            weights=(first.contiguous(), second.contiguous()),
            term=term,
        )
        for rank, (first, second) in enumerate(zip(w1.chunk(size, 1), w2.chunk(size), strict=True))
    ]
    alone, _ = _shortest(gathering.alone.on(cluster), engines, [None] * size)
    executed, outputs = _shortest(gathering.on(cluster), engines, contents)
    numbers = [number for share in range(size) for number in gathering.numbers(share)]
    total = sum(torch.cat([values[_term(number)] for number in numbers]) for values in outputs)
    expected = simulate(gathering.on(cluster))
    return GatherRun(
        simulated=expected,
        executed=executed,
        hidden_simulated=hidden_share(expected, simulate(gathering.alone.on(cluster))),
        hidden_executed=hidden_share(executed, alone),
        largest_error=float((total - torch.relu(x @ w1) @ w2).abs().max()),
        sent_bytes=executed.all_sent_bytes,
        expected_bytes=(size - 1) * x.nbytes,
    )


def _shortest(
    program: Program, engines: EngineCluster, contents: Sequence[ContentsOf | None]
) -> tuple[Timeline, tuple[Outputs, ...]]:
    """Execute a program a few times, and return the shortest run: a computer does other things, too."""
    return min(
        (execute_with(program, engines, contents) for _ in range(RUNS)), key=lambda execution: execution[0].makespan_s
    )


def _contents(program: Program, *, tiles: dict[Value, Any], weights: tuple[Any, Any], term: Term) -> Contents:
    """Return a device's tiles, and the handlers that call the term on its own weights."""
    torch.set_num_threads(1)
    first, second = (matrix.tolist() for matrix in weights)

    def multiply(op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        product = term(reads[0].tolist(), first, second, 0, len(second))
        return (torch.as_tensor(product, dtype=torch.float32),)

    return Contents(tiles, {PRODUCT: multiply, READY: lambda op, reads: (None,)})
