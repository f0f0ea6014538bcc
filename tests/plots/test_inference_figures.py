"""Figures of single-shot inference: what they draw is what the plan, the reports and the measurements say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_serving import report

from tests.plans import inference_plan
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.spread import Spread
from workbench.methods.galaxy_plus.serving.figures import serving
from workbench.plots import style
from workbench_labs.plots.layer_cut import Arrow, Matrix, held_bytes, layer_cut, layer_parts, sent_bytes
from workbench_labs.plots.overlapping import OverlapCell, TradePoint, overlap, trade
from workbench_labs.plots.request_latencies import request_latencies

NAMES = ("alpha", "beta", "gamma")
SHAPE = StackShape(
    num_layers=2,
    num_units=6,
    hidden_size=24,
    columns=96,
    unit_bytes=100,
    column_bytes=10,
    layer_bytes=7,
    hidden_bytes=8,
)
PLAN = inference_plan(
    method="galaxy_plus",
    ranks=(2, 0, 1),
    units=(3, 2, 1),
    columns=(48, 32, 16),
    shares=(3.0, 2.0, 1.0),
    schemes=(1, 2),
)
TENSOR, SEQUENCE = (replace(PLAN, paradigm=paradigm, schemes=()) for paradigm in ("tensor", "sequence"))


def trace(figure, name):
    [results] = [one for one in figure.data if one.name == name]
    return results


def texts(figure) -> str:
    return " ".join(annotation.text or "" for annotation in figure.layout.annotations)


def test_scheme_1_divides_the_weights_and_scheme_2_copies_the_feed_forward_network() -> None:
    first, second = held_bytes(PLAN, SHAPE, scheme=1), held_bytes(PLAN, SHAPE, scheme=2)
    assert [one["attention"] for one in first] == [300, 200, 100] == [one["attention"] for one in second]
    assert sum(one["feed-forward"] for one in first) == SHAPE.feed_forward_bytes
    assert [one["feed-forward"] for one in second] == [SHAPE.feed_forward_bytes] * 3
    idle = replace(PLAN, shares=(3.0, 3.0, 0.0))
    assert [one["feed-forward"] for one in held_bytes(idle, SHAPE, scheme=2)] == [960, 960, 160]
    assert [one["attention"] for one in held_bytes(SEQUENCE, SHAPE)] == [SHAPE.attention_bytes] * 3


def test_what_travels_follows_table_2() -> None:
    # A ring of equal tiles: every collective moves (n - 1) tiles from each device; scheme 1 has four, scheme 2 two
    # (Table II: 4 and 2 LSH).
    equal = replace(PLAN, shares=(1.0, 1.0, 1.0))
    one, two = (sum(sent_bytes(equal, SHAPE, length=30, scheme=scheme)) for scheme in (1, 2))
    assert one == 4 * 2 * 30 * SHAPE.hidden_bytes and two == one / 2
    assert sum(sent_bytes(TENSOR, SHAPE, length=30)) == one  # an all-reduce is a reduce-scatter and an all-gather
    assert sum(sent_bytes(replace(SEQUENCE, shares=(1.0,) * 3), SHAPE, length=30)) == 2 * 2 * 30 * SHAPE.hidden_bytes
    # Uneven tiles of 30, 20 and 10 tokens: all-gather leaves out the successor's, reduce-scatter one's own.
    assert sent_bytes(PLAN, SHAPE, length=60, scheme=2) == tuple(
        8 * (60 - after + 60 - own) for own, after in ((30, 20), (20, 10), (10, 30))
    )
    alone = replace(PLAN, ranks=(0,), units=(6,), columns=(96,), shares=(1.0,))
    assert sent_bytes(alone, SHAPE, length=60) == (0,)


@pytest.mark.parametrize(
    ("plan", "scheme", "arrows", "copies"),
    [
        (PLAN, 1, ["AllGather", "ReduceScatter", "AllGather", "ReduceScatter"], 0),
        (PLAN, 2, ["AllGather", "ReduceScatter"], 2),
        (TENSOR, 1, ["AllReduce", "AllReduce"], 2),
        (SEQUENCE, 1, ["AllGather K, V"], 4),
    ],
)
def test_the_drawing_has_the_papers_synchronisations(
    plan: InferencePlan, scheme: int, arrows: list[str], copies: int
) -> None:
    parts = layer_parts(plan, SHAPE, length=60, scheme=scheme)
    assert [part.name for part in parts if isinstance(part, Arrow)] == arrows
    assert sum(isinstance(part, Matrix) and part.cut == "copies" for part in parts) == copies
    figure = layer_cut(plan, SHAPE, NAMES, length=60, scheme=scheme)
    drawn = [box for one in figure.data if one.orientation != "h" for box in one.hovertext]
    strips = sum(sum(count > 0 for count in part.counts) for part in parts if isinstance(part, Matrix))
    assert len(drawn) == strips and "(computed)" in figure.layout.title.text
    assert list(figure.layout.yaxis2.ticktext) == ["gamma ", "alpha ", "beta "]  # by position of the ring


def test_strips_are_as_wide_as_their_share_and_nobodys_is_left_out() -> None:
    figure = layer_cut(replace(PLAN, units=(5, 1, 0)), SHAPE, NAMES, length=60)
    boxes = {
        said: width
        for one in figure.data
        if one.orientation != "h"
        for said, width in zip(one.hovertext, one.width, strict=True)
    }
    heads = {said: width for said, width in boxes.items() if "W<sub>QKV</sub>" in said}
    assert set(heads) == {"gamma: W<sub>QKV</sub>, 5 of 6 heads", "alpha: W<sub>QKV</sub>, 1 of 6 heads"}
    assert heads["gamma: W<sub>QKV</sub>, 5 of 6 heads"] == pytest.approx(
        5 * heads["alpha: W<sub>QKV</sub>, 1 of 6 heads"]
    )


def test_a_decoder_layer_has_a_third_block_and_whole_layers_are_refused() -> None:
    crossed = replace(SHAPE, has_cross_attention=True, cross_unit_bytes=50)
    assert len([part for part in layer_parts(PLAN, crossed, length=60) if isinstance(part, Arrow)]) == 6
    with pytest.raises(ConfigError, match="leaves layers whole"):
        layer_cut(replace(PLAN, paradigm="pipeline", layers=(1, 1, 0)), SHAPE, NAMES, length=60)


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([1.0, 2.0]) == (1.5, 1.25, 1.75) and Spread.of([7.0]) == (7.0, 7.0, 7.0)
    with pytest.raises(ConfigError):
        Spread.of([])


def test_overlap_marks_the_longer_part_and_counts_who_keeps_the_bound() -> None:
    exactly = Spread.exactly
    cells = [
        OverlapCell("slow", exactly(1.0), exactly(2.0), exactly(2.1)),
        OverlapCell("fast", exactly(1.0), exactly(0.5), exactly(1.3)),
    ]
    figure = overlap(cells, title="t", label="emulated")
    assert list(trace(figure, "overlapped").y) == [2.1, 1.3]
    assert list(trace(figure, "the longer of the two").y) == [2, 1] and list(
        trace(figure, "their sum (nothing hidden)").y
    ) == [3, 1.5]
    assert "1 of 2 at most 1.10" in figure.layout.title.subtitle.text and list(trace(figure, "overlapped").text) == [
        "1.05",
        "1.30",
    ]


def test_trade_shows_what_does_not_fit_hollow() -> None:
    figure = trade([TradePoint(2, 1.0, 1.2), TradePoint(0, 1.5, 0.5)], TradePoint(1, 1.2, 0.8))
    latency = trace(figure, "latency")
    assert list(latency.x) == [0, 2] and list(latency.y) == [1500, 1000]
    assert list(latency.marker.symbol) == ["circle", "circle-open"]
    assert [list(one.y) for one in figure.data if one.name == "yours"] == [[1200], [80]]


def test_a_served_stream_shows_throughput_processors_faults_and_events() -> None:
    figure = serving({"with": report(), "without": report(rescheduled=False)})
    with_it, without = trace(figure, "answers per second, with"), trace(figure, "answers per second, without")
    at = {round(x): y for x, y in zip(with_it.x, with_it.y, strict=True)}
    assert at[2] == pytest.approx(10, rel=0.02) and at[7] == pytest.approx(1 / 0.15, rel=0.02)
    assert min(without.y) == pytest.approx(2.5, rel=0.02)
    assert len([one for one in figure.data if one.name == "beta"]) == 2  # a panel for each report
    widths = [next(one.line.width for one in figure.data if one.name == name) for name in ("alpha", "beta", "gamma")]
    assert widths[0] > widths[1] > widths[2]  # so that one does not hide another
    [slow] = {shape.x0 for shape in figure.layout.shapes}
    assert slow == 4.0 and "beta 4 times slower" in texts(figure)
    assert list(trace(figure, "straggler").x) == [4.9] and "beta" in trace(figure, "excluded").hovertext[0]
    assert "none lost" in figure.layout.title.subtitle.text and "emulated, kernel links" in figure.layout.title.text


def test_crowded_faults_are_named_where_there_is_room() -> None:
    [fault] = report().faults
    many = replace(report(), faults=tuple(replace(fault, start=0.2 * n, end=0.2 * n + 0.1) for n in range(50)))
    figure = serving(many)
    assert len(figure.layout.shapes) == 50 * 3 and 1 <= texts(figure).count("times slower") < 12


def test_latency_of_requests_by_plan_and_busy_hosts_note() -> None:
    figure = request_latencies(report(valid=False))
    assert [one.name for one in figure.data] == ["plan 0: alpha, beta, gamma", "plan 1: alpha, gamma"]
    assert "x" in figure.data[0].marker.symbol and "median 100 ms" in figure.layout.title.subtitle.text
    assert (
        "Host too busy: 30%" in figure.layout.title.subtitle.text
        and figure.layout.title.subtitle.font.color == style.VERMILLION
    )
    assert "No request" in texts(request_latencies(replace(report(), requests=())))
    assert "No request" in texts(serving(replace(report(), requests=())))
