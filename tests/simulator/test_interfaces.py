"""Network interfaces hand themselves out exactly as a search through everything that waits would."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.activities import Way
from workbench.simulator.interfaces import Interfaces

pairs = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda pair: pair[0] != pair[1])


@settings(deadline=None)
@given(st.lists(st.lists(pairs, max_size=4), min_size=1, max_size=12), st.data())
def test_first_ready_first_served(rounds: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    """In each round some transfers end and some become ready; then the waiting ones are tried by time, sender and list
    position."""
    interfaces = Interfaces(5)
    ends: list[tuple[int, int]] = []
    waiting: list[tuple[int, int, int, int]] = []  # (round, sender, position, transfer)
    running: list[int] = []
    for number, asked in enumerate([*rounds, *[[]] * sum(map(len, rounds))]):
        ended = data.draw(st.lists(st.sampled_from(running), unique=True)) if running and asked else list(running)
        for transfer in ended:
            running.remove(transfer)
            interfaces.release(*ends[transfer])
        places = data.draw(st.permutations(range(len(asked))))
        for pair, index in zip(asked, places, strict=True):
            waiting.append((number, pair[0], index, len(ends)))
            interfaces.ask(len(ends), Way(pair[0], index, pair[1]), ready_s=number)
            ends.append(pair)
        expected = []
        for place in sorted(waiting):
            transfer = place[-1]
            busy = {("out", ends[other][0]) for other in running} | {("in", ends[other][1]) for other in running}
            if ("out", ends[transfer][0]) not in busy and ("in", ends[transfer][1]) not in busy:
                waiting.remove(place)
                running.append(transfer)
                expected.append(transfer)
        assert interfaces.grant() == expected
    assert not waiting
