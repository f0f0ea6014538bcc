"""What several devices send to one at the same time shares its wire, however late the receiver learns of it."""

from __future__ import annotations

import math
import time

import pytest

from workbench.core.capacity import Ingress
from workbench.runtime.ingress import NUM_LATEST, SharedIngress


@pytest.mark.parametrize(
    ("messages", "ends"),
    [
        ([(1, 0, 4)], [4]),
        # Both get half of the rate: see tests/simulator/test_simulate.py, which has the same messages.
        ([(1, 0, 4), (2, 0, 4)], [8, 8]),
        ([(1, 1, 4), (2, 2, 4)], [8, 9]),
        # The receiver learns of the long one when the short one has come.  It began 50 s before: as if known in time.
        ([(1, 50, 27), (2, 0, 105)], [104, 132]),
        # One that has ended before another begins does not slow it down.
        ([(1, 0, 4), (2, 4, 4), (3, 9, 4)], [4, 8, 13]),
        ([(1, 0, 6), (2, 1, 1), (3, 2, 1)], [8, 3.5, 4.5]),
        # Two sources with two messages each.  A second one has left its source after 8 s, and follows the first.
        ([(1, 0, 4), (2, 0, 4), (1, 4, 4), (2, 4, 4)], [8, 8, 16, 16]),
        ([(1, 0, 4), (1, 4, 4), (2, 0, 4), (2, 4, 4)], [8, 16, 8, 16]),
        # The last one meets the first, which is longer because it has met the one that ended before.
        ([(1, 0, 10), (2, 0, 2), (3, 5, 4)], [16, 4, 13]),
    ],
)
def test_shares_are_computed_from_when_messages_began(
    messages: list[tuple[int, float, float]], ends: list[float]
) -> None:
    """However late the receiver learns of them: here all have been due for long, so none is held back."""
    ingress, began_s = SharedIngress(), time.monotonic() - 1000
    due = [ingress.hold(source, began_s + sent_s, seconds) for source, sent_s, seconds in messages]
    assert [each.end_s - began_s for each in due] == pytest.approx(ends)


def test_a_message_is_not_late_if_one_that_is_learnt_of_later_has_slowed_it_down() -> None:
    ingress, began_s = SharedIngress(), time.monotonic() - 1000
    first = ingress.hold(1, began_s, 4)
    assert first.late_s(began_s + 9) == pytest.approx(5)
    second = ingress.hold(2, began_s, 4)
    assert first.late_s(began_s + 9) == pytest.approx(1)
    assert (first.late_s(began_s + 7), second.late_s(began_s + 8.5)) == (0, pytest.approx(0.5))


def test_an_ingress_that_is_never_idle_forgets_messages_but_not_what_they_take() -> None:
    """Three sources send more than it carries."""
    messages = [(number % 3, number / 2, 1 + number % 5 / 4) for number in range(5 * NUM_LATEST)]
    began_s, ingress, reference = time.monotonic() - 1000, SharedIngress(), Ingress()
    came_s: dict[int, float] = {}
    for number, (source, sent_s, seconds) in enumerate(messages):
        came_s |= reference.advance(sent_s)
        reference.start(number, source, seconds, sent_s)
    came_s |= reference.advance(math.inf)
    assert max(came_s.values()) == pytest.approx(sum(seconds for _, _, seconds in messages))
    dues = [ingress.hold(source, began_s + sent_s, seconds) for source, sent_s, seconds in messages]
    for number in range(4 * NUM_LATEST, 5 * NUM_LATEST):
        assert dues[number].end_s - began_s == pytest.approx(came_s[number])
    assert len(ingress._latest) == NUM_LATEST


def test_a_long_message_slows_down_those_that_begin_long_after_it() -> None:
    """Also when as many others have come since as are computed again."""
    ingress, began_s = SharedIngress(), time.monotonic() - 1000
    ingress.hold(1, began_s, 100)
    for number in range(2 * NUM_LATEST):
        assert ingress.hold(2, began_s + number, 0.25).end_s - began_s == pytest.approx(number + 0.5)
    last_s = 2 * NUM_LATEST + 10
    assert ingress.hold(3, began_s + last_s, 4).end_s - began_s == pytest.approx(last_s + 8)
