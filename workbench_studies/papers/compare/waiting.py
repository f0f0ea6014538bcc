"""What does waiting cost?  Joules of a mini-batch on several boards over those on one, by how busy the boards are.

With equal boards that share the work without loss, n boards that take 1/s of the seconds of one are busy for the share
s/n of the time, their efficiency.  If a board that waits uses the share w of its busy power, then the joules over those
of one board are 1 + w (n/s - 1).  The points are simulated, each with its own transfers, bubbles and repeated updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from workbench.core.catalogue import load_device
from workbench_studies.papers.compare.boards import IN_FLIGHT, NEVER_DRAINED, boards, trainings
from workbench_studies.papers.result import Progress

BOARD = "rpi-4b-l"
MODELS = ("all-MiniLM-L6-v2", "DistilBERT", "BERT-Base", "SmolLM2-135M")
COUNTS = (2, 4, 8)
MBIT_PER_S = (20, 50, 100, 200, 500, 1000)


class Waiting(NamedTuple):
    """A way to train a mini-batch, as a row of the item's table.

    seconds, joules: what it takes; alone_s, alone_j: by the same technique on one board.

    waited_j: the part of the joules that boards use while they do not compute.
    """

    model: str
    boards: float
    mbit_per_s: float
    way: str
    seconds: float
    joules: float
    waited_j: float
    alone_s: float
    alone_j: float

    @property
    def efficiency(self) -> float:
        """Return the speedup over one board, divided by the boards."""
        return self.alone_s / (self.boards * self.seconds)

    @property
    def times(self) -> float:
        """Return the joules over those of one board."""
        return self.joules / self.alone_j


def idle_share() -> float:
    """Return the power of a board that waits over that of one that computes."""
    board = load_device(BOARD)
    return board.watts_idle / board.watts_busy


def times_of(efficiency: float, idle: float) -> float:
    """Return the joules over those of one board for an efficiency (see above).  idle: as idle_share."""
    return 1 + idle * (1 / efficiency - 1)


def ways(notify: Progress, models: tuple[str, ...] = MODELS) -> Iterator[Waiting]:
    """Yield every way on several boards of which one board could do the same."""
    for model in models:
        notify(model)
        alone = {way: figures for way, figures in _simulated(model, 1, MBIT_PER_S[-1])}
        for count in COUNTS:
            for rate in MBIT_PER_S:
                for way, (seconds, joules, waited_j) in _simulated(model, count, rate):
                    technique = way.split(", ")[0]
                    if (one_board := alone.get(f"{technique}, one board")) is not None:
                        spent = (seconds, joules, waited_j, *one_board[:2])
                        yield Waiting(model, float(count), float(rate), way, *spent)


def _simulated(model: str, count: int, mbit_per_s: int) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Yield each way with seconds, joules and joules of waiting of a mini-batch, in the long run if it never drains."""
    cluster = boards(count, mbit_per_s, BOARD)
    for way in trainings(model, cluster):
        seconds, timeline = way.replay(cluster)
        num = IN_FLIGHT if way.name == NEVER_DRAINED else 1
        busy_s = [timeline.busy_s(rank) / num for rank in range(count)]
        if min(busy_s) == 0:
            continue
        waited_j = sum(
            device.watts_idle * (seconds - busy) for device, busy in zip(cluster.devices, busy_s, strict=True)
        )
        busy_j = sum(device.watts_busy * busy for device, busy in zip(cluster.devices, busy_s, strict=True))
        yield way.name, (seconds, busy_j + waited_j, waited_j)
