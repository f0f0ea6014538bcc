"""Algorithm 1 against the optimum on random profiles, and the maximum gain from heads over processors (Confidant,
sections 3.3, 5.2).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from statistics import fmean

from workbench.methods.confidant.heads import (
    EPSILON_STEPS,
    EPSILONS,
    HEADS,
    HeadProfile,
    allocate_as_printed,
    best_allocation,
    epsilon_name,
    random_profile,
    without_surplus,
)
from workbench.profiler.descriptions import LayerShape
from workbench_studies.papers.confidant.loading import loading_words
from workbench_studies.papers.confidant.testbed import description, load_constants
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result

PROFILES, SEED = 1000, 0
SMOOTH_PROCESSORS, STARTS = (2, 3, 4), (0.0, 3.0)
SAME = 1e-9
"""Two times count as equal if they differ by no more than this fraction."""


def gaps(profiles: Sequence[HeadProfile], steps: float = EPSILON_STEPS) -> list[tuple[int, float, float] | None]:
    """Return Algorithm 1's surplus heads and its slowdown against the optimum, for each profile; None if it returns
    nothing.

    Slowdown: in per cent, as returned and without the surplus heads.  steps: epsilon over the profile's largest step.
    """
    results: list[tuple[int, float, float] | None] = []
    for profile in profiles:
        counts = allocate_as_printed(profile, epsilon_s=steps * profile.largest_step_s)
        if counts is None:
            results.append(None)
            continue
        least = profile.time_s(best_allocation(profile))
        over = [100 * (profile.time_s(each) / least - 1) for each in (counts, without_surplus(profile, counts))]
        results.append((sum(counts) - profile.num_heads, over[0], over[1]))
    return results


def smooth_profile(draw: random.Random, processors: int, start: float) -> HeadProfile:
    """Return a profile like random_profile's, with equal steps.  start: a processor begins at most so many heads' time
    later.
    """
    heads, rows = draw.choice(HEADS), []
    for _ in range(processors):
        each = 1e-3 * 8 ** draw.random()
        begin = each * draw.uniform(0, start)
        rows.append(tuple(begin + each * count for count in range(1, heads + 1)))
    return HeadProfile(seconds=tuple(rows))


def summary(results: Sequence[tuple[int, float, float] | None]) -> dict[str, float]:
    """Return how often the allocation is correct, and the gaps in per cent."""
    allocated = [result for result in results if result is not None]
    named = {
        "no allocation": float(len(results) - len(allocated)),
        "too many heads": float(sum(surplus > 0 for surplus, _, _ in allocated)),
    }
    for column, how in ((1, "as returned"), (2, "without surplus")):
        over = [float(result[column]) for result in allocated] or [float("nan")]
        named[f"misses the optimum, {how}"] = float(sum(gap > 100 * SAME for gap in over))
        named[f"mean gap, {how}"], named[f"largest gap, {how}"] = fmean(over), max(over)
    return named


def algorithm1(item: Item) -> Result:
    """Compare Algorithm 1 with the optimum."""
    draw = random.Random(SEED)
    profiles = [random_profile(draw) for _ in range(PROFILES)]
    by_epsilon, series = dict[float, dict[str, float]](), {}
    for steps in EPSILONS:
        results = gaps(profiles, steps)
        by_epsilon[steps] = summary(results)
        over = sorted(result[2] for result in results if result is not None)
        series[epsilon_name(steps)] = tuple(
            (float(share), over[round(share / 100 * (len(over) - 1))]) for share in range(0, 101, 2)
        )
    named = by_epsilon[EPSILON_STEPS]
    smooth = []
    for processors, start in product(SMOOTH_PROCESSORS, STARTS):
        statistics = summary(gaps([smooth_profile(draw, processors, start) for _ in range(PROFILES)]))
        values = (
            statistics[f"{quantity}, without surplus"] for quantity in ("misses the optimum", "mean gap", "largest gap")
        )
        smooth.append((processors, "costs time" if start else "costs nothing", *values))
    return item.result(
        [item.cell((name,), None, value) for name, value in named.items()],
        tables={
            "epsilon": [(epsilon_name(steps), *values.values()) for steps, values in by_epsilon.items()],
            "smooth": smooth,
        },
        columns={"epsilon": tuple(named)},
        holds={"optimal": not any(named[f"misses the optimum, {how}"] for how in ("as returned", "without surplus"))},
        series=series,
        profiles=PROFILES,
        missed=named["misses the optimum, without surplus"],
        smooth_missed=smooth[0][2],
        smooth_mean=smooth[0][3],
        smooth_largest=smooth[0][4],
        mean=named["mean gap, without surplus"],
        quarter=by_epsilon[0.25]["too many heads"],
        eighth=by_epsilon[0.125]["too many heads"],
    )


def attention_share(model: str, tokens: int) -> float:
    """Return the share of a block's forward FLOPs that heads over processors divide."""
    return LayerShape(description(model), 0, tokens).attention_share


def bound(share: float, processors: float) -> float:
    """Return Amdahl's bound: a block's time on one processor over its time with the attention divided over so many
    equal ones.
    """
    return 1 / (1 - share + share / processors)


def fig4(item: Item) -> Result:
    """Compare the bounds of heads, and of heads and columns, over two equal processors with the paper's ratios over
    FTPipeHD.
    """
    constants, paper = load_constants(), item.printed
    comparisons = item.compare(lambda model, devices: bound(attention_share(model, constants.tokens), 2))
    rows = []
    for model in dict.fromkeys(model for model, _ in paper):
        for tokens in (128, constants.tokens, 512):
            share = attention_share(model, tokens)
            rows.append((model, tokens, 100 * share, bound(share, 2), bound(share, float("inf")), bound(1.0, 2)))
    most = max(row[-2] for row in rows)
    return item.result(
        comparisons,
        tables={"bounds": rows},
        tokens=constants.tokens,
        two=bound(attention_share("BERT-Base", 128), 2),
        most=most,
        least=min(paper.values()),
        highest=max(paper.values()),
        **loading_words(),
    )
