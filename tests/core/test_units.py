"""Numbers in words: figures, counts, bytes and durations at the borders of their units."""

from __future__ import annotations

import pytest

from workbench.core.units import (
    are_numbers,
    counted,
    duration_words,
    size_words,
    tenths,
    three_figures,
    with_capital,
)


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(999, "999 bytes"), (1000, "1.0 kB"), (99_900, "99.9 kB"), (350e6, "350 MB"), (1.44e9, "1.4 GB")],
)
def test_bytes_have_the_largest_unit_that_they_fill(nbytes: float, words: str) -> None:
    assert size_words(nbytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(90, "90 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (172_800, "2 days")],
)
def test_a_duration_changes_its_unit_from_two_of_the_next_on(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words


@pytest.mark.parametrize(
    ("number", "three", "one_place"),
    [(1320.4, "1,320", "1320.4"), (-12.345, "-12.3", "-12.3"), (0.01234, "0.0123", "0.0123")],
)
def test_a_number_has_three_figures_or_one_place(number: float, three: str, one_place: str) -> None:
    assert (three_figures(number), tenths(number)) == (three, one_place)


def test_one_thing_has_no_plural_and_a_sentence_keeps_its_other_letters() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert (with_capital("a GPU"), with_capital(""), with_capital("r = 8")) == ("A GPU", "", "r = 8")


@pytest.mark.parametrize(
    ("cells", "stands_right"),
    [
        (("1,320", "-12.3", "−4 %", "0.5 ± 0.1", "3e+05 (!)"), True),
        (("7", "", "-"), True),
        (("7", "7 ms"), False),
        (("", ""), False),
    ],
)
def test_a_column_stands_flush_right_if_it_holds_numbers_alone(cells: tuple[str, ...], stands_right: bool) -> None:
    assert are_numbers(cells) == stands_right
