"""Plans and runs of single-shot inference as small tables for a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.inference import InferencePlan
from workbench.plots.style import byte_unit, time_unit
from workbench.widgets.inference_problem import InferenceComparison, InferenceProblem
from workbench.widgets.tables import Table


def split_words(plan: InferencePlan, length: int) -> tuple[str, str, str]:
    """Return what a plan divides, in words: layers by scheme (or by device), heads, tokens."""
    if plan.paradigm == "pipeline":
        return f"layers {', '.join(map(str, plan.layers))}", "all", "all"
    first, second = plan.configuration
    schemes = f"[{first}, {second}]" if plan.paradigm == "hybrid" else {"tensor": "tensor parallel", "sequence": "by tokens"}[plan.paradigm]
    heads = "-".join(map(str, plan.units)) if plan.paradigm != "sequence" else "all"
    tokens = "-".join(map(str, plan.tokens(length))) if plan.paradigm != "tensor" else "all"
    return schemes, heads, tokens


def inference_table(compared: Sequence[InferenceComparison], problem: InferenceProblem, *, title: str = "") -> Table:
    """Return each planner's plan and the simulated latency of a sequence, over that of the first that fits; who lacks what otherwise."""
    names = [device.name for device in problem.cluster.devices]
    fastest = next((one.seconds for one in compared if one.plan is not None), 0.0)
    rows, refused = [], []
    for one in compared:
        if one.plan is None:
            rows.append((one.planner, "out of memory", "", "", "", "", ""))
            refused.append(f"{one.planner}: {one.why.split(' (')[0]}.")
            continue
        schemes, heads, tokens = split_words(one.plan, problem.length)
        devices = ", ".join(names[rank] for rank in one.plan.ranks)
        rows.append(
            (one.planner, schemes, devices, heads, tokens, time_unit(one.seconds).text(one.seconds), f"{one.seconds / fastest:.2f}")
        )
    over = f"over {compared[0].planner}" if compared and compared[0].plan is not None else "over the first"
    return Table(
        ("planner", "[scheme 1, scheme 2]", "ring", "heads", "tokens", "simulated", over),
        rows,
        title=title or f"{problem.profile.model}, {problem.length} tokens on {problem.cluster.name}",
        note=" ".join(refused),
    )


def inference_plan_table(plan: InferencePlan, problem: InferenceProblem) -> Table:
    """Return what each device of a plan gets: heads, columns, tokens, bytes and its budget."""
    needed = problem.need_parts(plan)

    def row(rank: int) -> tuple[str, ...]:
        position = plan.position_of(rank)
        device = problem.cluster.devices[rank]
        if position is None:
            return device.name, "", "", "", "idle", ""
        total = sum(needed[rank].values())
        parts = [str(plan.units[position]) if plan.units else "all", str(plan.columns[position]) if plan.columns else "all"]
        tokens = str(plan.tokens(problem.length)[position]) if plan.shares else "all"
        return device.name, *parts, tokens, byte_unit(total).text(total), byte_unit(device.memory_bytes).text(device.memory_bytes)

    first, second = plan.configuration
    layers = f"{first} layers in scheme 1, {second} in scheme 2" if plan.paradigm == "hybrid" else plan.paradigm
    ways = [words for words, holds in (("overlapped", plan.overlap), ("both ways round", plan.both_ways)) if holds]
    ways += [f"tiles of at most {plan.tile_tokens} tokens"] if plan.tile_tokens else []
    return Table(
        ("device", "heads", "columns", "tokens", "holds", "budget"),
        [row(rank) for rank in range(problem.cluster.world_size)],
        title=f"{layers}{', ' * bool(ways)}{', '.join(ways)}",
        note=" ".join(plan.notes),
    )
