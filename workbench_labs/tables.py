"""Tables of what planners make of a problem (PAC+, section V-A; Galaxy+, Tables II and IV)."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.core.plan import Plan
from workbench.planners import TrainingProblem, candidates
from workbench.planners.orders import count_orders, device_types
from workbench.plots.style import time_words
from workbench.simulator.steps import step_s
from workbench.widgets.tables import Table
from workbench_labs.inference_problem import SequenceProblem
from workbench_labs.planning import Comparison


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Return each planner's plan and throughput; if a plan does not fit, which device lacks how much memory."""
    rows = [
        (comparison.planner, comparison.plan.partition(), comparison.plan.grouping(), f"{comparison.samples_per_s:.3g}")
        if comparison.plan is not None
        else (comparison.planner, "out of memory", comparison.why.split(" (weights")[0], "")
        for comparison in compared
    ]
    return Table(
        ("planner", "layers", "device groups", "samples/s"), rows, title="What each planner makes of it (simulated)"
    )


def phases_table(plans: Sequence[Plan], simulated_s: Sequence[float]) -> Table:
    """Return the phases of Eq. 5-6 of each plan, next to its simulated step."""
    rows = [
        (
            str(len(plan.stages)),
            plan.partition(),
            plan.grouping(),
            *(f"{plan.predicted_s[phase] * 1e3:.0f}" for phase in ("beginning", "execution", "ending")),
            f"{plan.total_s * 1e3:.0f}",
            f"{seconds * 1e3:.0f}",
        )
        for plan, seconds in zip(plans, simulated_s, strict=True)
    ]
    columns = ("stages", "layers", "device groups", "beginning", "execution", "ending", "sum (Eq. 7)", "simulated")
    return Table(columns, rows, title="The best plan for each number of stages, in ms")


def orders_table(problem: TrainingProblem) -> Table:
    """Return Algorithm 1's best plans in the device orders that it searches, and what the order in which the cluster
    lists them loses.

    Without Eq. 5's error: by PhaseTimes.bottleneck_s, and then by simulation.
    """
    devices = problem.cluster.devices
    steps: dict[tuple[int, ...], tuple[float, Plan]] = {}
    for plan in candidates(problem, order="all", objective="bottleneck"):
        order, seconds = tuple(rank for stage in plan.stages for rank in stage.ranks), step_s(problem, plan)
        if order not in steps or seconds < steps[order][0]:
            steps[order] = seconds, plan
    try:
        listed_s = min(
            step_s(problem, plan) for plan in candidates(problem, order=range(len(devices)), objective="bottleneck")
        )
        best_s = min(listed_s, *(step_s for step_s, _ in steps.values()))
        listed = f"{listed_s * 1e3:.0f} ms, {listed_s / best_s - 1:.0%} more than the best"
    except PlanError:
        listed = "nothing fits"
    rows = [
        (" - ".join(devices[rank].name for rank in order), plan.partition(), plan.grouping(), f"{step_s * 1e3:.0f}")
        for order, (step_s, plan) in sorted(steps.items(), key=lambda one: one[1][0])[:6]
    ]
    return Table(
        ("order", "layers", "device groups", "step, ms"),
        rows,
        title=f"The best of {count_orders(device_types(problem.profile, problem.cluster))} orders",
        note=f"In the order that the cluster lists: {listed}.",
    )


def split_words(plan: InferencePlan, length: int) -> tuple[str, str, str]:
    """Return a plan's division in words: layers by scheme (or by device), heads, tokens."""
    if plan.paradigm == "pipeline":
        return f"layers {', '.join(map(str, plan.layers))}", "all", "all"
    first, second = plan.configuration
    schemes = (
        f"[{first}, {second}]"
        if plan.paradigm == "hybrid"
        else {"tensor": "tensor parallel", "sequence": "by tokens"}[plan.paradigm]
    )
    heads = "-".join(map(str, plan.units)) if plan.paradigm != "sequence" else "all"
    tokens = "-".join(map(str, plan.tokens(length))) if plan.paradigm != "tensor" else "all"
    return schemes, heads, tokens


def inference_table(compared: Sequence[Comparison], problem: SequenceProblem) -> Table:
    """Return each planner's plan, its simulated latency of a sequence and the ratio to the first that fits; else what
    is missing.
    """
    names = problem.cluster.names
    fastest = next((comparison.seconds for comparison in compared if comparison.plan is not None), 0.0)
    rows, refused = [], []
    for comparison in compared:
        if comparison.plan is None:
            rows.append((comparison.planner, "out of memory", "", "", "", "", ""))
            refused.append(f"{comparison.planner}: {comparison.why.split(' (')[0]}.")
            continue
        schemes, heads, tokens = split_words(comparison.plan, problem.sequence_length)
        devices = ", ".join(names[rank] for rank in comparison.plan.ranks)
        rows.append(
            (
                comparison.planner,
                schemes,
                devices,
                heads,
                tokens,
                time_words(comparison.seconds),
                f"{comparison.seconds / fastest:.2f}",
            )
        )
    over = f"over {compared[0].planner}" if compared and compared[0].plan is not None else "over the first"
    return Table(
        ("planner", "[scheme 1, scheme 2]", "ring", "heads", "tokens", "simulated", over),
        rows,
        title=f"{problem.profile.model}, {problem.sequence_length} tokens on {problem.cluster.name}",
        note=" ".join(refused),
    )
