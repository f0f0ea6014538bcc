"""When a draft pays: what ships is what is simulated, and the line is where both take as long."""

from __future__ import annotations

import pytest

from workbench.methods.galaxy_plus.serving.drafts import tokens_of_pass
from workbench.models.speculation import NUM_GUESSES
from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.drafts import DRAFTS, LATENCIES_MS, round_of
from workbench_studies.papers.result import shipped_result


def test_a_round_ships_as_it_is_simulated_and_pays_from_break_even_on() -> None:
    rows = {(row[0], row[1]): row[2:] for row in shipped_result(COMPARE, "drafts").tables[0].rows}
    assert len(rows) == len(DRAFTS) * len(LATENCIES_MS)
    for (name, choice), latency_ms in zip(DRAFTS.items(), (LATENCIES_MS[0], LATENCIES_MS[-1]), strict=True):
        one = round_of(choice, latency_ms)
        expected = (1e3 * one.token_s, 1e3 * one.guess_s, 1e3 * one.check_s, one.break_even, one.speedup(1.0))
        assert rows[name, latency_ms] == pytest.approx(expected)
        assert one.break_even is not None
        taken_s = [tokens_of_pass(share) * one.token_s for share in (one.break_even - 0.01, one.break_even)]
        assert taken_s[0] < NUM_GUESSES * one.guess_s + one.check_s <= taken_s[1]
    for name in DRAFTS:  # None: no share of right guesses is enough
        least = [rows[name, latency_ms][3] or 1.01 for latency_ms in LATENCIES_MS]
        assert least == sorted(least, reverse=True), "what is said of the latency"
    assert tokens_of_pass(0.0) == 1 and tokens_of_pass(1.0) == NUM_GUESSES + 1


def test_the_picture_has_the_speedups_and_the_line() -> None:
    [drawn] = find_item(COMPARE, "drafts").draw(shipped_result(COMPARE, "drafts"))
    speedups, line = drawn.figure.data
    assert len(speedups.x) == len(line.x) == len(LATENCIES_MS)
    assert speedups.z[-1][0] > 0 > speedups.z[0][0]
