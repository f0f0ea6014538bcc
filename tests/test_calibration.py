"""Which dilation is found for how late a host is."""

from __future__ import annotations

import pytest

from workbench.core.errors import ConfigError
from workbench.runtime.pacing import find_dilation


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_DILATION", raising=False)


def host_that_needs(factor: float) -> tuple[list[float], object]:
    """Return the dilations that are tried, and how late a host is that takes `factor` times as long as the devices."""
    tried: list[float] = []

    def late_share(dilation: float) -> float:
        tried.append(dilation)
        return max(0.0, 1 - dilation / factor)

    return tried, late_share


@pytest.mark.parametrize(
    ("factor", "found"), [(0.7, 1.0), (1.01, 1.0), (1.2, 1.5), (2.2, 3.0), (5.0, 6.0), (15.0, 16.0), (100.0, 16.0)]
)
def test_the_first_dilation_at_which_the_host_keeps_pace_is_found(factor: float, found: float) -> None:
    tried, late_share = host_that_needs(factor)
    assert find_dilation(late_share) == found  # type: ignore[arg-type]
    assert tried[-1] == found
    assert len(tried) <= 4


@pytest.mark.parametrize(
    ("shares", "found", "num_tried"),
    [
        ([0.04, 0.04], 1.0, 2),  # constant, and valid: a larger dilation would only cost time
        ([0.042, 0.037], 1.5, 2),  # it hardly falls
        ([0.04, 0.045], 1.0, 2),
        ([0.1, 0.07, 0.05, 0.02], 3.0, 4),  # the same late seconds at each dilation
        ([0.055, 0.047], 1.5, 2),  # a valid share at last
        ([0.3, 0.28, 0.3, 0.3, 0.3, 0.3], 16.0, 6),  # invalid all the same: the host may become quiet
    ],
)
def test_the_search_ends_where_a_larger_dilation_hardly_lowers_a_valid_share(
    shares: list[float], found: float, num_tried: int
) -> None:
    tried: list[float] = []

    def late_share(dilation: float) -> float:
        tried.append(dilation)
        return shares[len(tried) - 1]

    assert find_dilation(late_share) == found
    assert len(tried) == num_tried == len(shares)


@pytest.mark.parametrize(
    ("share", "most_s", "found", "num_tried"),
    [(0.04, 90.0, 1.0, 1), (0.4, 90.0, 2.0, 1), (0.3, 110.0, 3.0, 2)],
)
def test_no_measurement_is_begun_that_would_end_too_late(
    share: float, most_s: float, found: float, num_tried: int
) -> None:
    """Each takes 40 s times the dilation.  A valid share ends the search; after another the next dilation is taken."""
    tried: list[float] = []

    def late_share(dilation: float) -> float:
        tried.append(dilation)
        return share

    assert find_dilation(late_share, most_s=most_s, clock=lambda: 40.0 * sum(tried)) == found
    assert len(tried) == num_tried


def test_what_the_environment_asks_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, late_share = host_that_needs(5.0)
    monkeypatch.setenv("WORKBENCH_DILATION", "2.5")
    assert find_dilation(late_share) == 2.5 and tried == [2.5]  # type: ignore[arg-type]
    for text in ("0.5", "17", "nan", "fast"):
        monkeypatch.setenv("WORKBENCH_DILATION", text)
        with pytest.raises(ConfigError, match=f"WORKBENCH_DILATION = {text} .* not a number from 1 to 16"):
            find_dilation(late_share)  # type: ignore[arg-type]
