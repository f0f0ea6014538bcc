"""Grids from a few timed sizes: what a layer costs at all others, and what a layer at an end costs more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.clock import Clock
from workbench.profiler.grids import MOST_TOKENS, sizes_to_time, time_grids
from workbench.profiler.layers import Span, Stacks

pytestmark = pytest.mark.usefixtures("_whole")
BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64)


@pytest.fixture
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)


class CostClock(Clock):
    """A clock that calls move forward by made-up costs."""

    def maker(self, kind: str, seconds: Callable[[int, int], float]) -> Callable[[int, int], Callable[[], None]]:
        return lambda *size: self.call((kind, size), lambda: seconds(*size))

    def timed(self, kind: str) -> set[tuple[int, int]]:
        """Return the sizes of the calls of a kind so far."""
        return {size for name, size in self.order if name == kind}


def layer(batch: int, length: int) -> float:
    """Small products are slower, and attention grows with a sample's tokens squared."""
    tokens = batch * length
    return 1e-3 + 2e-5 * min(tokens, 64) + 1e-5 * tokens + 2e-7 * batch * length**2


def with_embedding(batch: int, length: int) -> float:
    return layer(batch, length) - 3e-6 * batch * length + 1e-4 * batch  # no gradient of its input, but a head's cost


def by_sample(batch: int, length: int) -> float:
    return 1e-3 + 1e-4 * batch


@pytest.mark.parametrize("lengths", [LENGTHS, (8, 16, 32, 64, 512), (197,)])
def test_a_few_sizes_show_the_seconds_of_all(lengths: tuple[int, ...]) -> None:
    clock = CostClock()
    costs = {"middle": layer, "first": with_embedding, "head": by_sample}
    makers = {kind: clock.maker(kind, cost) for kind, cost in costs.items()}
    grids = time_grids(makers, BATCHES, lengths, like={"first": "middle"}, budget_s=1e9, clock=clock)
    for kind, cost in costs.items():
        for batch in BATCHES:
            for length in lengths:
                assert grids[kind](batch, length) == pytest.approx(cost(batch, length), rel=0.06), (kind, batch, length)
    assert len(clock.timed("first")) < len(clock.timed("middle")) <= 12
    assert (
        sum(batch * length <= MOST_TOKENS for batch, length in clock.timed("middle")) >= len(clock.timed("middle")) - 1
    )


def test_no_larger_call_is_timed_after_a_long_one() -> None:
    clock = CostClock()
    grids = time_grids({"F": clock.maker("F", lambda *size: 40 * layer(*size))}, BATCHES, LENGTHS, clock=clock)
    assert max(batch * length for batch, length in clock.timed("F")) == 256
    assert grids["F"](16, 64) == pytest.approx(40 * layer(16, 64), rel=0.1)


def test_costs_rise_with_the_size_whatever_the_noise() -> None:
    noise = torch.Generator().manual_seed(3)
    clock = CostClock()
    noisy = clock.maker("F", lambda *size: layer(*size) * (1 + 0.5 * torch.rand(1, generator=noise).item()))
    cells = time_grids({"F": noisy, "first": noisy}, BATCHES, LENGTHS, like={"first": "F"}, clock=clock)
    for grid in cells.values():
        for row in (*grid.seconds, *zip(*grid.seconds, strict=True)):
            assert list(row) == sorted(row)


def test_a_single_size_is_one_cell() -> None:
    clock = CostClock()
    assert time_grids({"STEP": clock.maker("STEP", lambda *_: 2.0)}, (1,), (1,), clock=clock)["STEP"](1, 1) == 2.0
    assert sizes_to_time((1, 4), (32,)) == ((1, 32), (4, 32))


def test_the_smallest_settings_time_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    assert sizes_to_time(BATCHES, LENGTHS) == ((1, 8), (8, 8), (1, 64), (32, 8))


def test_one_layer_stands_for_its_equals() -> None:
    stacks = Stacks(12, 6)
    assert stacks.spans == tuple(Span(layer, layer + 1) for layer in (0, 1, 5, 6, 7, 11))
    assert [stacks.span_of(layer).start for layer in range(12)] == [0, 1, 1, 1, 1, 5, 6, 7, 7, 7, 7, 11]
    assert [stacks.inner(span).start for span in stacks.spans] == [1, 1, 1, 7, 7, 7]
    assert [Stacks(count, None).inner(Span(count - 1, count)).start for count in (1, 2, 3)] == [0, 0, 1]
