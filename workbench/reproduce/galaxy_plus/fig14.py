"""Fig. 14: weak scaling of one layer, 96 tokens for each RPi-M, at 1000 Mbit/s, simulated (Galaxy+, section IV-E, 1)."""

from __future__ import annotations

from workbench.plots.export import Captioned
from workbench.reproduce.drawing import line_panels
from workbench.reproduce.galaxy_plus.scaling import EVEN, FOUR, MANY, SCALED, SCHEDULED, series, weak
from workbench.reproduce.galaxy_plus.sensitivity import sensitivity
from workbench.reproduce.galaxy_plus.systems import GALAXY, MEGATRON, OURS, SEQUENCE
from workbench.reproduce.galaxy_plus.testbed import PAPER, Constants, load_constants
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

SYSTEMS = (OURS, SCHEDULED, GALAXY, MEGATRON, SEQUENCE)
SHARE = "share of linear scaling with 4 devices"


def run(settings: Settings) -> Result:
    """Simulate it."""
    constants = load_constants()
    paper = lookup(paper_values(PAPER, "fig14"))
    found = {(model, system): weak(constants, model, system, MANY) for model in SCALED for system in SYSTEMS}
    comparisons = tuple(
        Comparison(
            labels=(model, system),
            paper=paper[model, SHARE] if system == OURS else None,
            ours=100 * found[model, system][4] / 4,
            unit="percent",
            kind="predicted",
            deviation_in="points",
        )
        for model in SCALED
        for system in SYSTEMS
    )
    rows: list[tuple[Number, ...]] = [
        (model, system, *(100 * value / count for count, value in made.items())) for (model, system), made in found.items()
    ]
    ahead = all(
        found[model, OURS][count] >= found[model, system][count] for model in SCALED for system in (MEGATRON, SEQUENCE) for count in EVEN
    )

    def score(changed: Constants) -> tuple[Number, ...]:
        return tuple(100 * weak(changed, model, OURS, (1, 4))[4] / 4 for model in SCALED)

    return Result(
        item="fig14",
        title="Fig. 14: weak scaling, 96 tokens for each RPi-M",
        paper_section="IV-E (1)",
        source="simulated",
        label_columns=("model", "method"),
        comparisons=comparisons,
        tables=(
            Table(
                title="Share of linear scaling (%) by the number of devices",
                columns=("model", "method", *map(str, MANY)),
                rows=tuple(rows),
                note="More devices than heads: some have none.  The paper goes to 4.",
            ),
            sensitivity(constants, ("GPT2-L %", "OPT-L %"), score, trivial=("no communication at all", (100.0, 100.0))),
        ),
        checks=(
            Check(
                claim="Galaxy+ scales at least as well as TP (M-LM) and SP where its heads divide",
                holds=ahead,
                found="with 2 and 4 devices (heads do not divide by 3)",
            ),
            Check(
                claim="Galaxy+ reaches at least 82 % of linear with 4 devices",
                holds=all(found[model, OURS][4] / 4 >= 0.82 for model in SCALED),
                found=", ".join(f"{model} {found[model, OURS][4] / 4:.0%}" for model in SCALED),
            ),
            Check(
                claim="OPT-L scales better than GPT2-L, as in the paper",
                holds=found["OPT-L", OURS][4] > found["GPT2-L", OURS][4],
                found=", ".join(f"{model} {100 * found[model, OURS][4] / 4:.1f} %" for model in SCALED),
            ),
        ),
        explanation=(
            "FLOP/s of the whole system over one device's: a layer's FLOPs grow with the square of the sequence in attention, which is"
            " counted.  One layer is repeated; memory does not limit it, so that Galaxy+ uses scheme 2 throughout.",
            "Nothing is fitted here: the network's constants are those of Table V.",
            "'As this workbench schedules it' waits less between blocks, and its messages take no time of the processor."
            "  So it is what the overlap could give, not what a Raspberry Pi would.",
        ),
        series=series(found),
    )


def draw(result: Result) -> list[Captioned]:
    """Return the curves to 4 devices, which the paper has, and to 64."""
    return draw_scaling(result, "fig14", "FLOP/s over one device's")


def draw_scaling(result: Result, name: str, y_title: str) -> list[Captioned]:
    """Return a figure for the paper's numbers of devices and one for many, each with the straight line."""
    drawn = []
    for suffix, counts in (("", FOUR), ("-64", MANY)):
        most = counts[-1]
        linear = {"linear": ((1.0, 1.0), (float(most), float(most)))}
        panels = {
            model: linear
            | {system: tuple(point for point in result.series[f"{model}, {system}"] if point[0] <= most) for system in SYSTEMS}
            for model in SCALED
        }
        figure = line_panels(
            result,
            panels,
            title=f"{result.title}, to {most} devices",
            subtitle="1000 Mbit/s; one layer, repeated",
            x_title="RPi-M",
            y_title=y_title,
            dashes={"linear": "dot", SCHEDULED: "dash"},
            at=counts,
            logarithmic=most > FOUR[-1],
        )
        drawn.append(Captioned(f"{name}{suffix}", f"{result.title}, to {most} devices.", figure))
    return drawn
