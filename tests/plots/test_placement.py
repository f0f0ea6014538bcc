from __future__ import annotations

import pytest

from tests.plans import staged_plan
from workbench.core.catalogue import load_cluster
from workbench.plots import needs, placement, stacked_bars

CLUSTER = load_cluster("laptop")
PLAN = staged_plan((4, {0: 5, 2: 3}), (2, {1: 8}), method="by hand", micro_batches=4)


def test_a_stage_lies_on_its_devices_over_its_layers() -> None:
    figure = placement(PLAN, CLUSTER)
    first, second = figure.data
    assert (list(first.y), list(first.base), list(first.x)) == ([0, 2], [0, 0], [4, 4])
    assert (list(second.y), list(second.base), list(second.x)) == ([1], [4], [2])
    assert list(first.text) == ["5 of 8", "3 of 8"]
    assert [note.text for note in figure.layout.annotations] == [" holds nothing"] and figure.layout.annotations[
        0
    ].y == 3


@pytest.mark.parametrize(
    ("activations", "said"), [(10**8, "every device is within its budget"), (10**9, "Out of memory: gamma needs")]
)
def test_needs_are_laid_against_the_budgets(activations: int, said: str) -> None:
    figure = needs(
        {0: {"weights": 10**8, "activations": 10**7}, 2: {"weights": 10**8, "activations": activations}}, CLUSTER
    )
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [sum(bar.x[row] for bar in bars) for row in (0, 1)] == pytest.approx(
        [110, (10**8 + activations) / 1e6]
    )  # MB
    assert said in figure.layout.title.subtitle.text
    assert ("budget, exceeded" in {trace.name for trace in figure.data}) == (activations == 10**9)


def test_stacked_bars_keep_order_and_values() -> None:
    figure = stacked_bars(
        ["a", "b"], {"forward": [1.0, 2.0], "backward": [3.0, 0.0]}, title="T", label="measured", x_title="ms"
    )
    assert [list(trace.x) for trace in figure.data] == [[1.0, 2.0], [3.0, 0.0]] and list(figure.data[1].text) == [
        "3",
        "",
    ]
    assert "measured" in figure.layout.title.text
