"""Attention heads of a layer over the processors of one device, divided by hand (Confidant, section 3, Algorithm 1)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.core.proportions import proportional_parts
from workbench.core.units import counted
from workbench.methods.confidant.heads import (
    EPSILONS,
    HeadProfile,
    allocate_as_printed,
    best_allocation,
    epsilon_name,
    random_profile,
)
from workbench.plots.style import CYCLE, Unit, finish, time_unit
from workbench.widgets.controls import described, slider
from workbench.widgets.explorer import Explorer


def head_profile(seed: int) -> HeadProfile:
    """Return a random profile of 12 heads on a device with three processors."""
    draw = random.Random(seed)
    drawn = iter(lambda: random_profile(draw), None)
    return next(
        drawn_profile for drawn_profile in drawn if drawn_profile.num_heads == 12 and len(drawn_profile.seconds) == 3
    )


class HeadsLab(Explorer):
    """A slider for each processor's attention heads, and Algorithm 1's epsilon; yours, Algorithm 1's and the optimum
    (computed).
    """

    def __init__(self, profile: HeadProfile) -> None:
        self.profile, most = profile, profile.num_heads
        even = proportional_parts(most, (1,) * len(profile.seconds))
        self.counts = tuple(
            slider(f"Processor {number}", f"Heads on processor {number}", count, 0, most, width="24em")
            for number, count in enumerate(even, start=1)
        )
        tooltip = "Algorithm 1's epsilon, as a share of the profile's largest step"
        options = [(epsilon_name(share), share) for share in EPSILONS]
        self.epsilon = described(widgets.SelectionSlider, "Epsilon", tooltip, value=0.5, options=options)
        super().__init__(
            [widgets.HBox(self.counts, layout=widgets.Layout(flex_flow="row wrap")), self.epsilon],
            [*self.counts, self.epsilon],
            lambda: (tuple(count.value for count in self.counts), self.epsilon.value),
            lambda request: self._time(*request),
        )

    def _time(self, mine: tuple[int, ...], epsilon: float) -> None:
        profile, best = self.profile, best_allocation(self.profile)
        unit, over = time_unit(max(row[-1] for row in profile.seconds)), sum(mine) - profile.num_heads
        printed = allocate_as_printed(profile, epsilon_s=epsilon * profile.largest_step_s)
        allocations = {"yours": mine, "Algorithm 1": printed or (), "optimum": best}
        times = {
            name: unit.text(profile.time_s(counts)) if counts else "nothing" for name, counts in allocations.items()
        }
        lines = (f"{name} {'-'.join(map(str, counts))}: {times[name]}" for name, counts in allocations.items())
        words = f"{profile.time_s(mine) / profile.time_s(best) - 1:+.0%} against the optimum"
        if over:
            words = f"{counted(abs(over), 'head')} too {'many' if over > 0 else 'few'}"
        self.headline.say(words, "; ".join(lines) + " (computed from the profile)")
        self.show(
            lambda: _heads_figure(profile, {name: counts for name, counts in allocations.items() if counts}, unit)
        )


def _heads_figure(profile: HeadProfile, allocations: Mapping[str, Sequence[int]], unit: Unit) -> go.Figure:
    figure, names = go.Figure(), [f"processor {number + 1}" for number in range(len(profile.seconds))]
    for colour, (name, counts) in zip(CYCLE, allocations.items(), strict=False):
        times = [
            row[count - 1] * unit.factor if count else 0.0 for row, count in zip(profile.seconds, counts, strict=True)
        ]
        figure.add_bar(
            x=names, y=times, name=name, marker={"color": colour}, text=[f"{count} heads" for count in counts]
        )
    figure.update_yaxes(title=unit.name)
    title = "A layer's heads, computed at the same time"
    return finish(figure, title=title, label="computed", height=400)
