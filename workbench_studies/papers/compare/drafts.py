"""When does a draft pay?  Seconds of texts without speculative decoding over those with it, by acceptance and latency.

Tensor parallelism needs every link twice in each layer, for one token as for five.  So the longer the latency, the
fewer guesses must be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Any

import plotly.graph_objects as go

from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.costs import analytic_inference
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.galaxy_plus.serving.drafts import DraftPrices, Round, draft_profile
from workbench.models.speculation import DraftChoice
from workbench.plots.style import finish
from workbench.profiler.descriptions import describe
from workbench_studies.papers.compare.boards import boards
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result

MODEL, COUNT = "SmolLM2-135M", 4
LATENCIES_MS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
DRAFTS = {"its first 4 layers": DraftChoice(layers=4), "its first 8 layers": DraftChoice(layers=8)}
ACCEPTANCES = tuple(share / 20 for share in range(21))
LENGTH = 64


def round_of(choice: DraftChoice, latency_ms: float) -> Round:
    """Return a round on boards with 1000 Mbit/s, in which the plan's first board guesses."""
    half_s = latency_ms / 2000  # of the way to the switch
    cluster = boards(COUNT, 1000).with_links(lambda link: replace(link, latency_s=half_s))
    profile = analytic_inference(MODEL, cluster, weight_bytes_per_s=8e9, vocabulary=describe(MODEL).vocab)
    [shape] = profile.stacks
    plan = InferencePlan(
        method="megatron_lm",
        paradigm="tensor",
        ranks=tuple(range(COUNT)),
        units=(1,) * COUNT,
        columns=(shape.columns // COUNT,) * COUNT,
    )
    programs = Programs(cluster, profile.stacks, profile)
    return DraftPrices(programs, draft_profile(choice, profile), profile, (LENGTH,), kept_tokens=LENGTH).round(plan, 0)


def drafts(item: Item) -> Result:
    """Simulate a round with each draft at each latency."""
    rounds = {(name, ms): round_of(choice, ms) for name, choice in DRAFTS.items() for ms in LATENCIES_MS}
    even = {place: draft_round.break_even for place, draft_round in rounds.items()}
    rows = [
        (
            name,
            ms,
            1e3 * draft_round.token_s,
            1e3 * draft_round.guess_s,
            1e3 * draft_round.check_s,
            even[name, ms],
            draft_round.speedup(1.0),
        )
        for (name, ms), draft_round in rounds.items()
    ]
    falls = [[even[name, ms] or 1.01 for ms in LATENCIES_MS] for name in DRAFTS]
    least, most = min(map(min, falls)), max(map(max, falls))
    return item.result(
        tables={"rounds": rows},
        least=100 * least,
        most=100 * most,
    )


NEARLY_BLACK = "#111111"
"""Black itself would turn white on a dark page, where the map below the line stays light."""


def draw_drafts(result: Result) -> go.Figure:
    """Return the speedup by acceptance and latency, with the line of break-even, for the last draft in the table."""
    [table] = result.tables
    name = table.rows[-1][0]
    rows: list[Any] = [row[1:] for row in table.rows if row[0] == name]
    latencies = [str(row[0]) for row in rows]
    speedups = [[_speedup(row, acceptance) for row in rows] for acceptance in ACCEPTANCES]
    bar = {"title": "times as fast", "tickvals": [-2, -1, 0, 1, 2], "ticktext": ["1/4", "1/2", "1", "2", "4"]}
    scale: dict[str, Any] = {"colorscale": "RdBu", "zmin": -2.2, "zmax": 2.2, "colorbar": bar}
    logs = [[log2(speedup) for speedup in row] for row in speedups]
    drawn = go.Figure(go.Heatmap(x=latencies, y=ACCEPTANCES, z=logs, customdata=speedups, **scale))
    drawn.update_traces(hovertemplate="%{x} ms, %{y:.0%} right: %{customdata:.2f} times<extra></extra>")
    line = {"color": NEARLY_BLACK, "width": 2.5}
    drawn.add_trace(
        go.Scatter(x=latencies, y=[row[4] for row in rows], mode="lines+markers", line=line, name="break-even")
    )
    drawn.update_xaxes(title="latency between two boards, ms", type="category")
    drawn.update_yaxes(title="probability that a guess is right", tickformat=".0%", range=[0, 1])
    return finish(
        drawn,
        title="When does a draft pay?",
        label="simulated",
        subtitle=f"{MODEL} by tensor parallelism on four Raspberry Pi 5. The draft is {name}, on the first board, and "
        "guesses 4 tokens. Line: break-even.",
        height=480,
        margin={"t": 130},
    )


def _speedup(row: Sequence[float], acceptance: float) -> float:
    """Return a text's speedup, which is in proportion to the tokens of a pass; row[5] is that of right guesses."""
    return row[5] * sum(acceptance**number for number in range(5)) / 5
