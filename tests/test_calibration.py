"""Which dilation is found for how late a host is."""

from __future__ import annotations

import pytest

from workbench.core.errors import ConfigError
from workbench.runtime.pacing import LADDER, find_dilation


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


def test_a_host_that_is_late_to_a_constant_share_is_given_up_at_the_largest() -> None:
    assert find_dilation(lambda dilation: 0.03) == LADDER[-1]


def test_what_the_environment_asks_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, late_share = host_that_needs(5.0)
    monkeypatch.setenv("WORKBENCH_DILATION", "2.5")
    assert find_dilation(late_share) == 2.5 and tried == [2.5]  # type: ignore[arg-type]
    for text in ("0.5", "17", "nan", "fast"):
        monkeypatch.setenv("WORKBENCH_DILATION", text)
        with pytest.raises(ConfigError, match=f"WORKBENCH_DILATION = {text} .* not a number from 1 to 16"):
            find_dilation(late_share)  # type: ignore[arg-type]
